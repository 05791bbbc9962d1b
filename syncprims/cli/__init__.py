"""The ``syncprims`` command: which commands there are, and how they end."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from syncprims._world.version import version
from syncprims.errors import SyncError
from syncprims.tracing import command as trace

from . import completion, config, doctor, env, run, streams
from .parser import CommandParser

if TYPE_CHECKING:
    from collections.abc import Sequence

#: In the order in which ``--help`` shows them. A new command is a module with `add_parser`.
COMMANDS = (run, config, env, doctor, trace, completion)

EPILOG = """\
`syncprims COMMAND --help` says more about each. Also: python -m syncprims.

environment: SYNCPRIMS_BACKEND, SYNCPRIMS_TIMEOUT, ... as `syncprims env` shows them; NO_COLOR."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    2 is a wrong command line or environment, 130 an interrupt, 141 a pipe that nobody reads, 1 an
    output that cannot be written; `run` returns what its ranks do.
    """
    streams.open_closed()
    streams.escape_unwritable()
    try:
        options = parser().parse_args(argv)
        options.environ = os.environ
        code = int(options.run(options))
        sys.stdout.flush()
    except SyncError as error:
        print(f"syncprims: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        print("syncprims: interrupted", file=sys.stderr)  # noqa: T201
        return 130
    except OSError as error:  # nobody reads any more, or the disk is full
        streams.drop_unwritable()
        if isinstance(error, BrokenPipeError):
            return 141
        print(f"syncprims: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return code


def parser() -> CommandParser:
    """Return the parser of all commands."""
    whole = CommandParser(
        prog="syncprims",
        description="Synchronization primitives for distributed training scripts.",
        epilog=EPILOG,
    )
    whole.add_argument("--version", action="version", version=f"syncprims {version()}")
    commands = whole.add_subparsers(metavar="COMMAND", title="commands", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return whole
