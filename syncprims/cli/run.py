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
command line or the environment is wrong; if all ranks succeeded and their output was lost, 1 for a
full disk, 141 for a closed pipe.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from syncprims._system.host import count_processors, find_visible_gpus
from syncprims.errors import ConfigurationError

from .console import CommandParser
from .options import add_options, read_file, values_of
from .plan import launch_environment, merge, plan_launch


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of the command."""
    parser.usage = "syncprims run -n RANKS [flags] [-m] SCRIPT [ARGS...]"
    add_options(parser)


def run(options: argparse.Namespace) -> int:
    """Start the ranks and return the exit code, or replace this process by torchrun."""
    flags = values_of(options)
    file = read_file(options.config) if options.config else {}
    environ: Mapping[str, str] = options.environ
    gpus = find_visible_gpus(environ)
    devices = None if gpus is None else len(gpus)
    plan = plan_launch(merge(flags, file), environ, count_processors(), devices)
    _check_script(plan.command[2], plan.ranks > 1 or bool(plan.torchrun))
    if plan.command[2] == "-m":
        _check_module(plan.command[3])
    if plan.torchrun:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(plan.torchrun[0], plan.torchrun, launch_environment(plan, environ))
    from .launcher import launch

    return launch(plan, environ)


def _check_module(module: str) -> None:
    """Raise if no rank can find the package of the module; nothing of it is imported here."""
    package = module.partition(".")[0]
    if PathFinder.find_spec(package, [os.curdir]) is None and find_spec(package) is None:
        raise ConfigurationError(f"there is no module {module!r} here, nor in {sys.prefix}")


def _check_script(script: str, shared: bool) -> None:
    """Raise if the script does not exist, for one rank or several: once, and not on every rank."""
    if script in ("-", "/dev/stdin") and shared:
        what = f"{script} is the standard input, which only rank 0 reads"
        raise ConfigurationError(f"{what}: write the script to a file, or start one rank")
    if script in ("-m", "-") or Path(script).exists():
        return
    hint = f"; is it a module, -m {script}?"
    if script.startswith("python"):
        hint = ": name the script without Python, which starts it in any case"
    elif script.endswith(".py"):
        hint = ""
        with contextlib.suppress(FileNotFoundError):  # the directory has been removed
            hint = f" in {Path.cwd()}"
    raise ConfigurationError(f"there is no file {script}{hint}")
