"""``syncprims run``: start a script on several ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncprims._world.host import count_processors, find_visible_gpus
from syncprims.errors import ConfigurationError

from . import accelerate_config, config_file
from .options import BY_KEY, OPTIONS
from .parser import CommandParser, checked
from .plan import Plan, environment, merged, planned

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

_NODES_ONLY = ("rendezvous", "main_process_ip", "main_process_port", "rdzv_backend")

DESCRIPTION = """\
Start a Python script on several ranks of this machine, prefix their output, and when one fails end
the others and say which failed first. With --nodes it is handed over to torchrun."""

EXAMPLES = """\
examples:
  syncprims run -n 4 train.py --lr 0.1          four ranks, no torch needed
  syncprims run -n 4 -m package.train           a module
  syncprims run --gpus 0,1 train.py             a rank for each device, by NCCL
  syncprims run --config run.yaml -n 8          what `syncprims config` has written, on 8 ranks
  syncprims run -n 8 --nodes 2 --node-rank 0 --rendezvous node0:29500 train.py

Everything after the script belongs to the script. Flags override the file. Flags of `accelerate
launch` are understood, with - or with _, or answered with what to do instead.

exit code: 0 if all ranks ended well; that of the rank that failed first; 128 + n if it was killed
by signal n, or the run was stopped by it; 2 if the command line or the environment is wrong; if all
ended well and what they wrote was lost, 1 for a full disk, 141 for a pipe that nobody reads."""


def add_parser(commands: argparse._SubParsersAction[CommandParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Describe the command."""
    parser = commands.add_parser(
        "run",
        help="start a script on several ranks",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        usage="syncprims run -n RANKS [flags] [-m] SCRIPT [ARGS...]",
    )
    parser.rewrite = accelerate_config.translate
    add_options(parser)
    parser.set_defaults(run=run)


def add_options(parser: CommandParser) -> None:
    """Describe all that a run may be told, and the script at the end."""
    import argparse

    parser.add_argument(
        "--config", metavar="FILE", help="read what follows from a file: *.yaml, *.toml, *.json"
    )
    groups: dict[str, Any] = {}
    for option in OPTIONS:
        if option.key in ("script", "args"):
            continue
        if option.section not in groups:
            groups[option.section] = parser.add_argument_group(option.section)
        names = [*([option.short] if option.short else []), option.flag]
        about: dict[str, Any] = {"dest": option.key, "default": argparse.SUPPRESS}
        about["help"] = option.help.replace("%", "%%")
        if option.metavar is None:
            about["action"] = "store_true"
        else:
            about |= {"metavar": option.metavar, "type": checked(option.read)}
            about["choices"] = option.choices or None
        groups[option.section].add_argument(*names, **about)
    parser.add_argument(
        "line",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT [ARGS...]",
        help="the script to run; all that follows belongs to it",
    )


def said(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the flags say, by key; only those that were given."""
    values = {key: value for key, value in vars(options).items() if key in BY_KEY}
    line = options.line[1:] if options.line[:1] == ["--"] else options.line
    if line:
        values["script"], values["args"] = line[0], tuple(line[1:])
    return values


def run(options: argparse.Namespace) -> int:
    """Start the ranks and return the exit code, or become torchrun."""
    flags = said(options)
    file = config_file.read(options.config) if options.config else {}
    environ: Mapping[str, str] = options.environ
    for note in accelerate_config.notes(flags):  # of accelerate's file, many are there by default
        print(f"syncprims run: {note}", file=sys.stderr)  # noqa: T201
    gpus = find_visible_gpus(environ)
    plan = planned(
        merged(flags, file), environ, count_processors(), None if gpus is None else len(gpus)
    )
    lost = [key for key in _NODES_ONLY if key in flags]
    if lost and not plan.handed_over:
        named = ", ".join(BY_KEY[key].flag for key in lost)
        print(  # noqa: T201
            f"syncprims run: {named} changes nothing on one machine: a free port is taken",
            file=sys.stderr,
        )
    _look_for(plan.command)
    return start(plan, environ)


def _look_for(command: list[str]) -> None:
    """Tell once, and not on every rank, that the script is not there."""
    script = command[2]
    if script in ("-m", "-") or Path(script).exists():
        return
    hint = f"; is it a module, -m {script}?"
    if script.startswith("python"):
        hint = ": name the script without Python, which starts it in any case"
    elif Path(script).suffix == ".py":
        hint = f" in {Path.cwd()}"
    raise ConfigurationError(f"there is no file {script}{hint}")


def start(plan: Plan, environ: Mapping[str, str]) -> int:
    """Start what was planned."""
    if plan.handed_over:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(plan.handed_over[0], plan.handed_over, environment(plan, environ))
    from .launcher import Launch, launch

    return launch(Launch(plan.command, plan.ranks, plan.variables), environ)
