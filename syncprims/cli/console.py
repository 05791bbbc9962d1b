"""What all commands use: the parser of a command line, colours and tables."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TextIO

_CODES = {"bold": "1", "red": "31", "green": "32", "yellow": "33"}


class CommandParser(argparse.ArgumentParser):
    """A parser that takes whole flags only, so that a new flag never changes an old line's meaning.

    A command whose defaults have `explain_flag` gets the error for an unknown flag from there.
    """

    def __init__(self, **options: Any) -> None:
        formatter: Any = partial(argparse.RawDescriptionHelpFormatter, max_help_position=30)
        super().__init__(formatter_class=formatter, allow_abbrev=False, **options)

    def parse_args(  # type: ignore[override] # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """Parse a command line; nothing in it may be unknown."""
        options: argparse.Namespace
        options, unknown = self.parse_known_args(args, namespace)
        if unknown and hasattr(options, "explain_flag"):
            raise options.explain_flag(unknown[0])
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options

    def _print_message(self, message: str, file: object = None) -> None:
        say(message, file or sys.stderr)

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where the help is, and exit with code 2."""
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        near = difflib.get_close_matches(wrong[1], re.findall(r"\w+", wrong[2]), 1) if wrong else []
        message += f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` says more\n")


def say(text: str, stream: Any = None) -> None:
    """Write a last word to the error stream, which may be full or closed, or to `stream`.

    What cannot be written is dropped: Python would try again when it ends, and exit with 120.

    :raises OSError: if it is standard output that cannot be written.
    """
    stream = sys.stderr if stream is None else stream
    try:
        if text:  # even nothing cannot be written to a full device
            stream.write(text)
        stream.flush()
    except OSError:
        with open(os.devnull, "wb") as null:  # noqa: PTH123
            os.dup2(null.fileno(), stream.fileno())
        if stream is sys.stdout:
            raise


class Style:
    """Colours text if the stream is a terminal and ``NO_COLOR`` is not set."""

    def __init__(self, stream: TextIO, environ: Mapping[str, str]) -> None:
        self.is_terminal: bool = stream.isatty()
        plain = environ.get("NO_COLOR") or environ.get("TERM") == "dumb"
        self.on: bool = self.is_terminal and not plain

    def __call__(self, kind: str, text: str) -> str:
        """Return `text` in this style: bold, red, green or yellow."""
        return f"\033[{_CODES[kind]}m{text}\033[0m" if self.on else text


def table(
    rows: Sequence[Sequence[str]], indent: str = "  ", numbers: Sequence[int] = ()
) -> list[str]:
    """Return the lines of a table; nothing is cut off. The columns in `numbers` align right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines
