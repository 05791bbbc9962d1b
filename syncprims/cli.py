"""The ``syncprims`` command."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from .errors import SyncError
from .launcher import Launch, launch
from .tracing.command import add_parser as add_trace_parser
from .version import version

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except SyncError as error:
        print(f"syncprims: {error}", file=sys.stderr)  # noqa: T201
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="syncprims", description="Synchronization primitives for distributed training scripts."
    )
    parser.add_argument("--version", action="version", version=f"syncprims {version()}")
    commands = parser.add_subparsers(metavar="command", required=True)

    run = commands.add_parser(
        "run",
        help="start a script on several local ranks",
        description="Start a Python script on several ranks of this machine, prefix their output, "
        "and when one fails end the others and say which failed first.",
    )
    run.add_argument("-n", "--ranks", type=_count, required=True, help="how many ranks to start")
    run.add_argument(
        "--backend", help="where the ranks meet (default: $SYNCPRIMS_BACKEND, else file)"
    )
    run.add_argument(
        "-m", dest="module", action="store_true", help="the script is a module, as in python -m"
    )
    run.add_argument("script", help="the script to run; all that follows belongs to it")
    run.add_argument("args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    run.set_defaults(run=_run)
    add_trace_parser(commands)
    return parser


def _run(options: argparse.Namespace) -> int:
    module = ["-m"] if options.module else []
    return launch(
        Launch(
            command=[sys.executable, "-u", *module, options.script, *options.args],
            ranks=options.ranks,
            backend=options.backend,
        ),
        os.environ,
    )


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks from 1 up")
    return count
