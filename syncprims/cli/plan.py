"""From the options to the commands and variables of a launch; nothing is started here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from syncprims._world.launchers import list_rank_variables
from syncprims._world.registry import BY_TORCH, load_backend
from syncprims._world.settings import read_settings
from syncprims.errors import BackendUnavailable, ConfigurationError
from syncprims.interface import Topology

from .options import BY_KEY, Options, plain_value

_DEFAULT_PORT = 29500  # torchrun's own
_MANY, _MANY_PER_PROCESSOR = 64, 4  # ranks: more than both is most likely a mistake
#: Where the math libraries read their number of threads; nearly all read the first.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
#: Keys of which one, set by a flag, hides the others in the file.
_EXCLUSIVE = (
    {"ranks", "num_processes"},
    {"cpu", "gpus", "multi_gpu"},
    {"rendezvous", "main_process_ip"},
    {"rendezvous", "main_process_port"},
)


class LaunchPlan(NamedTuple):
    """What to start on this machine."""

    command: list[str]  #: of one rank
    ranks: int  #: on this machine
    variables: dict[str, str]  #: to set for all ranks
    torchrun: list[str]  #: the command that starts torchrun instead; empty on one node
    max_restarts: int = 0  #: of all ranks on this machine, after one has failed


def merge(flags: Mapping[str, Any], file: Mapping[str, Any]) -> Options:
    """Return the options of a run; flags override the file.

    So do other names of the same thing: ``--num-processes`` overrides the file's ``ranks``.
    """
    hidden = set[str]().union(*(keys for keys in _EXCLUSIVE if keys & flags.keys()))
    if "script" in flags:
        hidden |= {"args", "module"}  # they belong to the file's script
    kept = {key: value for key, value in file.items() if key not in hidden}
    return Options(**{**kept, **flags})


def plan_launch(
    options: Options, environ: Mapping[str, str], processors: int, devices: int | None
) -> LaunchPlan:
    """Return what to start on a machine with so many processors and CUDA devices (None: unknown).

    :raises ConfigurationError: if options and `environ` contradict each other, or are not enough.
    :raises BackendUnavailable: if the backend needs torch, and it is not installed.
    """
    if options.script is None:
        raise ConfigurationError(
            "nothing to run: name a script, as in `syncprims run -n 4 train.py`, or -m and a module"
        )
    gpus = _gpus(options, environ)
    if gpus == ("all",) and devices == 0:
        raise ConfigurationError(
            "--gpus all: no CUDA device is visible on this machine; install its driver, correct "
            "CUDA_VISIBLE_DEVICES, or start the ranks without --gpus"
        )
    ranks, nodes = _size(options, gpus)
    most = max(_MANY, _MANY_PER_PROCESSOR * processors)
    if ranks > most and not options.oversubscribe:
        raise ConfigurationError(
            f"{ranks} ranks on {processors} processor{'s' * (processors != 1)}: they would hardly "
            f"run. Start at most {most}, or say --oversubscribe if that is what you want"
        )
    variables = _variables(options, environ, ranks, nodes, gpus, devices)
    if options.threads is not None:
        variables |= dict.fromkeys(THREAD_VARIABLES, str(options.threads))
    elif ranks > 1 and not environ.get("OMP_NUM_THREADS"):
        # Otherwise the math library of every rank starts a thread per processor.
        variables["OMP_NUM_THREADS"] = str(max(1, processors // ranks))
    script = [*(["-m"] if options.module else []), options.script, *options.args]
    torchrun: list[str] = []
    if nodes > 1:
        torchrun = [*_torchrun(options, ranks, nodes, environ), *script]
    elif options.node_rank:
        raise ConfigurationError(
            f"--node-rank {options.node_rank} means several nodes; say how many with --nodes"
        )
    command = [sys.executable, "-u", *script]
    return LaunchPlan(command, ranks, variables, torchrun, options.max_restarts or 0)


def _variables(
    options: Options,
    environ: Mapping[str, str],
    ranks: int,
    nodes: int,
    gpus: tuple[str, ...] | None,
    devices: int | None,
) -> dict[str, str]:
    """Return the variables that the options set for all ranks.

    :raises ConfigurationError: if `environ` contradicts them, or there are not enough devices.
    """
    variables: dict[str, str] = {}
    for key in ("backend", "mixed_precision", "timeout", "trace"):
        if (value := getattr(options, key)) is None:
            continue
        text = str(value).removesuffix(".0") if key == "timeout" else value
        name = f"SYNCPRIMS_{key.upper()}"
        variables[name] = text
        if environ.get(name) not in (None, "", text):
            raise ConfigurationError(
                f"{BY_KEY[key].flag} {text} contradicts {name}={environ[name]}; drop one of them"
            )
    variables["SYNCPRIMS_BACKEND"] = _backend(options, environ, ranks, nodes, gpus)
    if options.serve_torch:
        variables["SYNCPRIMS_SERVE_TORCH"] = _serve_torch(environ)
    if options.cpu:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    elif gpus is not None:
        count = devices if gpus == ("all",) else len(gpus)
        if count is not None and count < ranks:
            raise ConfigurationError(
                f"{ranks} ranks on {count} CUDA device{'s' * (count != 1)}: every rank needs one "
                f"of its own; start fewer ranks, or name more devices with --gpus"
            )
        if gpus != ("all",):
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return variables


def launch_environment(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of torchrun, and what the ranks' environments have in common.

    An outer launcher's variables describe this process, not the ranks.
    """
    outer = list_rank_variables() - {"SYNCPRIMS_RUN_ID"}
    return {**{k: v for k, v in environ.items() if k not in outer}, **plan.variables}


# -- one decision each -------------------------------------------------------------------------


def _gpus(options: Options, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    gpus = options.gpus or (("all",) if options.multi_gpu else None)
    if options.cpu and gpus is not None:
        raise ConfigurationError("--cpu contradicts --gpus (or --multi_gpu); drop one of them")
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if gpus is not None and gpus != ("all",) and visible is not None:
        allowed = [part.strip() for part in visible.split(",")]
        hidden = [gpu for gpu in gpus if gpu not in allowed]
        if hidden:
            raise ConfigurationError(
                f"--gpus {','.join(gpus)} contradicts CUDA_VISIBLE_DEVICES={visible}, which does "
                f"not have {', '.join(hidden)}; name some of those, or unset it"
            )
    return gpus


def _serve_torch(environ: Mapping[str, str]) -> str:
    """Return the value that lets torch load our backend, which it does by an entry point.

    :raises ConfigurationError: if torch would not.
    """
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    if (ours := environ.get("SYNCPRIMS_SERVE_TORCH") or "1") != "1":
        raise ConfigurationError(
            f"--serve-torch contradicts SYNCPRIMS_SERVE_TORCH={ours}; drop one of them"
        )
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        raise ConfigurationError(
            "--serve-torch contradicts TORCH_DEVICE_BACKEND_AUTOLOAD="
            f"{environ['TORCH_DEVICE_BACKEND_AUTOLOAD']}, with which torch loads no backend; drop "
            f"one of them"
        )
    if not entry_points(group="torch.backends", name="syncprims"):
        raise ConfigurationError(
            "--serve-torch: torch finds the backend by an entry point of the installed package, "
            "and this installation has none; install syncprims again"
        )
    return "1"


def _size(options: Options, gpus: tuple[str, ...] | None) -> tuple[int, int]:
    """Return the number of ranks on each node, and the number of nodes."""
    nodes = options.nodes or 1
    ranks = options.ranks
    if options.num_processes is not None:
        each, rest = divmod(options.num_processes, nodes)
        if rest:
            raise ConfigurationError(
                f"--num_processes {options.num_processes} counts the ranks of all nodes, and "
                f"cannot be shared out evenly to {nodes}; --ranks N counts those of each node"
            )
        if ranks not in (None, each):
            raise ConfigurationError(
                f"--ranks {ranks} (on each node) contradicts --num_processes "
                f"{options.num_processes} (on all {nodes}); drop one of them"
            )
        ranks = each
    if ranks is None and gpus is not None and gpus != ("all",):
        ranks = len(gpus)
    if ranks is None:
        raise ConfigurationError("how many ranks? say it with -n, as in `syncprims run -n 4 ...`")
    return ranks, nodes


def _backend(
    options: Options,
    environ: Mapping[str, str],
    ranks: int,
    nodes: int,
    gpus: tuple[str, ...] | None,
) -> str:
    default = "file" if nodes == 1 else "torch"
    if gpus is not None:
        default = "nccl"  # backend torch would silently work without devices
    name = options.backend or environ.get("SYNCPRIMS_BACKEND") or default
    if name == "auto":
        return name
    # Checked here, so that the error comes once and not from every rank.
    if name in BY_TORCH or nodes > 1:
        if find_spec("torch") is None:
            why = f"backend {name!r} needs torch" if nodes == 1 else "several nodes need torchrun"
            raise BackendUnavailable(
                f"{why}, and torch is not installed: pip install 'syncprims[torch]', or run on one "
                f"machine with --backend file"
            )
        if name in BY_TORCH:
            return name
    cls = load_backend(name)
    if nodes > 1 and not cls.spans_hosts:
        raise ConfigurationError(
            f"backend {name!r} joins the ranks of one host, and --nodes says {nodes}; choose one "
            f"that spans hosts, as torch does"
        )
    launcher = "syncprims run" if nodes == 1 else "torchrun"
    topology = Topology(0, ranks * nodes, 0, ranks, 0, nodes, launcher, run_id="to be named")
    cls.check(topology, read_settings(environ))
    return name


def _torchrun(options: Options, ranks: int, nodes: int, environ: Mapping[str, str]) -> list[str]:
    if options.rendezvous is not None:
        host, port = options.rendezvous
        if options.main_process_ip not in (None, host):
            raise ConfigurationError(
                f"--rendezvous {host}:{port} contradicts --main_process_ip "
                f"{options.main_process_ip}; drop one of them"
            )
    elif options.main_process_ip is not None:
        host, port = options.main_process_ip, options.main_process_port or _DEFAULT_PORT
    else:
        raise ConfigurationError(
            f"{nodes} nodes have to meet: say where with --rendezvous HOST:PORT, an address of "
            f"node 0 and a free port there, the same on every node"
        )
    line = [sys.executable, "-m", "torch.distributed.run"]
    line += ["--nnodes", str(nodes), "--nproc-per-node", str(ranks)]
    if options.max_restarts:
        line += ["--max-restarts", str(options.max_restarts)]
    if options.node_rank is not None and options.rdzv_backend != "c10d":
        if options.node_rank >= nodes:
            raise ConfigurationError(
                f"--node-rank {options.node_rank} with --nodes {nodes}: it is from 0 to {nodes - 1}"
            )
        line += ["--node-rank", str(options.node_rank)]
        line += ["--master-addr", host, "--master-port", str(port)]
    elif options.rdzv_backend == "static":
        raise ConfigurationError("--rdzv_backend static needs --node-rank on every node")
    else:
        address = plain_value("rendezvous", (host, port))
        name = environ.get("SYNCPRIMS_RUN_ID") or "syncprims"
        line += ["--rdzv-backend", "c10d", "--rdzv-endpoint", address, "--rdzv-id", name]
    return line
