"""Start a Python script on several ranks of this machine, and prefix their output.

When one fails, end the others and show which failed first. With --nodes, torchrun starts the ranks.

examples:
  syncprims run -n 4 train.py --lr 0.1          four ranks, no torch needed
  syncprims run -n 4 -m package.train           a module
  syncprims run --gpus 0,1 train.py             a rank for each device, by NCCL
  syncprims run --config run.yaml -n 8          flags as keys of a file, on 8 ranks
  syncprims run -n 8 --nodes 2 --node-rank 0 --rendezvous node0:29500 train.py

Everything after the script belongs to the script. Flags override the file.

exit code: 0 if all ranks succeeded, else that of the rank that failed first; 75 if SIGTERM stopped
the run and all ranks ended with 0; 128 + n if signal n killed a rank or stopped the run; 2 if the
command line or the environment is wrong, or the system refuses the start; if all ranks succeeded
and their output was lost, 1 for a full disk, 141 for a closed pipe.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import stat
import sys
import traceback
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from syncprims._system.host import count_processors, find_visible_gpus
from syncprims._world.registry import BY_TORCH, load_backend
from syncprims._world.settings import read_settings
from syncprims.errors import BackendUnavailable, ConfigurationError, SyncError, install
from syncprims.interface import Topology

from .console import CommandParser
from .options import LaunchPlan, Options, add_options, flag_of, read_file, values_of
from .output import OutputLost

_UNSET = "drop the flag, or unset that variable, which comes from the environment"


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of the command."""
    parser.usage = "syncprims run -n RANKS [flags] [-m] SCRIPT [ARGS...]"
    add_options(parser)


def run(options: argparse.Namespace) -> int:
    """Start the ranks and return the exit code, or replace this process by torchrun.

    :raises ConfigurationError: if the system refuses what a start needs, among other reasons.
    """
    try:
        return _run(options)
    except (SyncError, OutputLost):  # some of ours are an OSError, too
        raise
    except OSError as error:
        # Without the name of a file, the line of the call says what was tried.
        call = traceback.extract_tb(error.__traceback__)[-1]
        tried = f"`{call.line}` in {call.filename}:{call.lineno}"
        tried = tried if error.filename is None else repr(str(error.filename))
        cure = "see that it is there, and that its disk and limits (ulimit -a) have room"
        if isinstance(error, PermissionError):
            cure = f"let user {os.geteuid()} do this, unless a sandbox refuses it (seccomp)"
        what = f"the ranks cannot be started: {error.strerror}: {tried}"
        raise ConfigurationError(f"{what}; {cure}") from error


def _run(options: argparse.Namespace) -> int:
    flags = values_of(options)
    file = read_file(options.config) if options.config else {}
    environ: Mapping[str, str] = options.environ
    gpus = find_visible_gpus(environ)
    devices = None if gpus is None else len(gpus)
    plan = plan_launch(merge(flags, file), environ, count_processors(), devices)
    _check_script(plan.options, plan.ranks > 1 or bool(plan.torchrun))
    if plan.torchrun:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(plan.torchrun[0], plan.torchrun, plan.environment(environ))
    from .launcher import launch

    return launch(plan, environ)


def _check_script(options: Options, shared: bool) -> None:
    """Raise if the script does not exist, for one rank or several: once, and not on every rank.

    Or if no rank can find the package of a module; nothing of it is imported here.
    """
    script = str(options.script)
    if options.module:
        package = script.partition(".")[0]
        if PathFinder.find_spec(package, [os.curdir]) is None and find_spec(package) is None:
            raise ConfigurationError(f"there is no module {script!r} here, nor in {sys.prefix}")
        return
    if script in ("-", "/dev/stdin") and shared:
        what = f"{script} is the standard input, which only rank 0 reads"
        raise ConfigurationError(f"{what}: write the script to a file, or start one rank")
    if re.fullmatch(r"python[\d.]*t?", Path(script).name):
        what = f"{script} is no script: name the script without Python, which starts it in any case"
        raise ConfigurationError(what)
    if script == "-":
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if stat.S_ISREG(Path(script).stat().st_mode):  # else a directory, or a pipe to read once
            Path(script).open("rb").close()
        return
    hint = f"; is it a module, -m {script}?"
    if script.endswith(".py"):
        hint = ""
        with contextlib.suppress(FileNotFoundError):  # the directory has been removed
            hint = f" in {Path.cwd()}"
    raise ConfigurationError(f"there is no file {script}{hint}")


# -- from the options to a plan ------------------------------------------------------------------


def merge(flags: Mapping[str, Any], file: Mapping[str, Any]) -> Options:
    """Return the options of a run; flags override the file, and ``--cpu`` the file's ``gpus``."""
    hidden: set[str] = {"cpu", "gpus"} if {"cpu", "gpus"} & flags.keys() else set()
    if "script" in flags:
        hidden |= {"args", "module"}  # they belong to the file's script
    return Options(**{**{k: v for k, v in file.items() if k not in hidden}, **flags})


def plan_launch(
    options: Options, environ: Mapping[str, str], processors: int, devices: int | None
) -> LaunchPlan:
    """Return what to start on a machine with so many processors and CUDA devices (None: unknown).

    :raises ConfigurationError: if options and `environ` contradict each other, or are not enough.
    :raises BackendUnavailable: if the backend needs torch, and it is not installed.
    """
    if options.script is None:
        what = "nothing to run: name a script, or -m and a module"
        raise ConfigurationError(f"{what}, as in `syncprims run -n 4 train.py`")
    gpus = options.gpus
    if gpus == ("all",) and devices == 0:
        what = "--gpus all: no CUDA device is visible on this machine"
        raise ConfigurationError(f"{what}; see its driver and CUDA_VISIBLE_DEVICES, or drop --gpus")
    ranks, nodes = _count_ranks(options), options.nodes
    variables = _settings(options, environ)
    if options.elastic:
        variables["SYNCPRIMS_ELASTIC"] = "1"
    variables["SYNCPRIMS_BACKEND"] = _backend(options, environ, ranks, nodes)
    if options.cpu:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    if gpus is not None:
        variables |= _devices(
            gpus, options.cpu, environ.get("CUDA_VISIBLE_DEVICES"), ranks, devices
        )
    if options.threads is not None:
        variables["OMP_NUM_THREADS"] = str(options.threads)
    elif ranks > 1 and not environ.get("OMP_NUM_THREADS"):
        # Otherwise the math library of every rank starts a thread per processor.
        variables["OMP_NUM_THREADS"] = str(max(1, processors // ranks))
    script = [*(["-m"] if options.module else []), options.script, *options.args]
    torchrun = [*_torchrun(options, ranks, nodes, environ), *script] if nodes > 1 else []
    if nodes == 1 and (options.node_rank or options.rendezvous):
        what = "--node-rank and --rendezvous are for several nodes"
        raise ConfigurationError(f"{what}; say how many with --nodes")
    command = [sys.executable, "-u", *script]
    for key in ("grace", "log_dir", "restart_window", "json") if torchrun else ():
        if getattr(options, key) != getattr(Options, key):
            what = f"{flag_of(key)} is for one node"
            raise ConfigurationError(f"{what}; see the flags of torchrun, which starts several")
    return LaunchPlan(options, ranks, command, variables, torchrun)


# -- one decision each -------------------------------------------------------------------------


def _count_ranks(options: Options) -> int:
    """Return the number of ranks on each node."""
    ranks = options.ranks
    if options.elastic:
        flag = "--elastic {}:{}".format(*options.elastic)
        if options.nodes > 1:
            what = f"{flag} works on one machine, and torchrun ends all ranks when one is lost"
            raise ConfigurationError(f"{what}; use --max-restarts with --nodes")
        if ranks not in (None, options.elastic[1]):
            raise _contradiction(f"--ranks {ranks}", flag)
        ranks = options.elastic[1]
    if ranks is None and options.gpus not in (None, ("all",)):
        ranks = len(options.gpus or ())
    if ranks is None:
        what = "the number of ranks is missing: give -n before the script"
        raise ConfigurationError(f"{what}, as in `syncprims run -n 4 train.py`")
    return ranks


def _settings(options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """Return our variables that the options set; `environ` must not contradict them."""
    variables: dict[str, str] = {}
    for key in ("backend", "mixed_precision", "timeout", "trace", "serve_torch"):
        value, name = getattr(options, key), f"SYNCPRIMS_{key.upper()}"
        if value in (None, False):
            continue
        text = "1" if value is True else f"{value:g}" if key == "timeout" else str(value)
        if environ.get(name) not in (None, "", text):
            flag = flag_of(key) + ("" if value is True else f" {text}")
            raise _contradiction(flag, f"{name}={environ[name]}", _UNSET)
        variables[name] = text
    autoload = environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    if options.serve_torch and autoload != "1":  # by this, torch loads our backend
        raise _contradiction("--serve-torch", f"TORCH_DEVICE_BACKEND_AUTOLOAD={autoload}", _UNSET)
    return variables


def _contradiction(
    this: str, that: str, cure: str = "drop one of these flags"
) -> ConfigurationError:
    return ConfigurationError(f"{this} contradicts {that}; {cure}")


def _devices(
    gpus: tuple[str, ...], cpu: bool, visible: str | None, ranks: int, devices: int | None
) -> dict[str, str]:
    """Return the variable that shows these CUDA devices to the ranks; each rank needs one."""
    flag = f"--gpus {','.join(gpus)}"
    if cpu:
        raise _contradiction("--cpu", flag)
    if gpus != ("all",):
        devices = len(gpus)
        allowed = gpus if visible is None else [part.strip() for part in visible.split(",")]
        if hidden := [gpu for gpu in gpus if gpu not in allowed]:
            lacking = f"CUDA_VISIBLE_DEVICES={visible}, which does not have {', '.join(hidden)}"
            raise _contradiction(flag, lacking, "name some of those, or unset it")
    if devices is not None and devices < ranks:
        what = f"{ranks} ranks on {devices} CUDA device{'s' * (devices != 1)}"
        raise ConfigurationError(f"{what}: start fewer, or name one for each rank with --gpus")
    return {} if gpus == ("all",) else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def _backend(options: Options, environ: Mapping[str, str], ranks: int, nodes: int) -> str:
    default = "file" if nodes == 1 else "torch"
    if options.gpus is not None:
        default = "nccl"  # backend torch would silently work without devices
    name = options.backend or environ.get("SYNCPRIMS_BACKEND") or default
    # Checked here, so that the error comes once and not from every rank.
    if name != "auto" and (name in BY_TORCH or nodes > 1) and find_spec("torch") is None:
        why = f"backend {name!r} needs torch" if nodes == 1 else "several nodes need torchrun"
        cure = f"{install('torch')}, or run on one machine with --backend file"
        raise BackendUnavailable(f"{why}, and torch is not installed: {cure}")
    if name == "auto" or name in BY_TORCH:
        return name
    cls = load_backend(name)
    if nodes > 1 and not cls.spans_hosts:
        what = f"backend {name!r} joins the ranks of one host, and --nodes says {nodes}"
        raise ConfigurationError(f"{what}; choose one that spans hosts, as torch does")
    launcher = "syncprims run" if nodes == 1 else "torchrun"
    topology = Topology(0, ranks * nodes, 0, ranks, 0, nodes, launcher, run_id="to be named")
    cls.check(topology, read_settings(environ))
    return name


def _torchrun(options: Options, ranks: int, nodes: int, environ: Mapping[str, str]) -> list[str]:
    """Return the command that starts torchrun, up to the script."""
    if options.rendezvous is None:
        what = f"{nodes} nodes have to meet: say where with --rendezvous HOST:PORT"
        raise ConfigurationError(f"{what}, an address of node 0, the same on every node")
    host, port = options.rendezvous
    line = [sys.executable, "-m", "torch.distributed.run"]
    line += ["--nnodes", str(nodes), "--nproc-per-node", str(ranks)]
    if options.max_restarts:
        line += ["--max-restarts", str(options.max_restarts)]
    if options.node_rank is not None:
        if options.node_rank >= nodes:
            what = f"--node-rank {options.node_rank} with --nodes {nodes}"
            raise ConfigurationError(f"{what}: it is from 0 to {nodes - 1}")
        line += ["--node-rank", str(options.node_rank)]
        return [*line, "--master-addr", host, "--master-port", str(port)]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    name = environ.get("SYNCPRIMS_RUN_ID") or "syncprims"
    return [*line, "--rdzv-backend", "c10d", "--rdzv-endpoint", address, "--rdzv-id", name]
