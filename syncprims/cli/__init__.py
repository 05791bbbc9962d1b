"""The ``syncprims`` command: its parser, its exit codes and its standard streams."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from typing import Any

from syncprims._world.world import version
from syncprims.errors import SyncError

from . import env, run, trace, who
from .console import CommandParser, say

#: In the order of ``--help``. A command is a module with `add_arguments` and `run`. Its docstring
#: is its help: a summary, a paragraph, and what comes after the flags.
COMMANDS = (run, who, env, trace)
_NO_HELP = "There is no help under python -OO.\n\n\n\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    `run` returns the code of its ranks. 2 is a wrong command line or environment, 130 an interrupt,
    141 a closed pipe, and 1 an output that cannot be written.
    """
    _open_closed_streams()
    words = sys.argv[1:] if argv is None else argv
    name = "syncprims run" if words and words[0] == "run" else "syncprims"
    stdout: Any = sys.stdout
    with contextlib.suppress(AttributeError):  # a replacement of it has no encoding
        stdout.reconfigure(errors="backslashreplace")  # what its encoding lacks, as stderr does
    try:
        try:
            options = parser().parse_args(argv)
            options.environ = os.environ
            return int(options.run(options))
        finally:
            say("", sys.stdout)  # so that what cannot be written is known here
    except SyncError as error:
        say(f"{name}: {error}\n")
        return 2
    except KeyboardInterrupt:
        say(f"{name}: interrupted\n")
        return 130
    except OSError as error:  # a full disk
        if error.errno == errno.EPIPE:
            return 141
        say(f"{name}: {error}\n")
        return 1
    finally:
        say("")


def parser() -> CommandParser:
    """Return the parser of all commands."""
    root = CommandParser(
        prog="syncprims",
        description="Synchronization primitives for distributed training scripts.",
        epilog="`syncprims COMMAND --help` says more about each. Also: python -m syncprims.\n"
        "`syncprims env` shows the variables that are read; NO_COLOR turns colours off.",
    )
    root.add_argument("--version", action="version", version=f"syncprims {version()}")
    commands = root.add_subparsers(metavar="COMMAND", title="commands", required=True)
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        summary, about, epilog = (module.__doc__ or _NO_HELP).split("\n\n", 2)
        command = commands.add_parser(
            name,
            help=summary[0].lower() + summary[1:].rstrip("."),
            description=f"{summary}\n{about}",
            epilog=epilog,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return root


def _open_closed_streams() -> None:
    """Open the null device for each standard stream that was closed, as daemons do by ``>&-``.

    Python has None for such a stream, and the next file that is opened would take its number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # descriptors 0, 1, 2
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115, PTH123 - it stays open
            os.set_inheritable(stream.fileno(), True)  # as a standard stream is
            setattr(sys, name, stream)
