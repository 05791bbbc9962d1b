"""What a terminal shows and a pipe does not: colour."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


class Style:
    """Puts text in colour where the stream is a terminal and nobody has asked for none."""

    def __init__(self, stream: TextIO, environ: Mapping[str, str]) -> None:
        self._on = stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"

    def __call__(self, kind: str, text: str) -> str:
        """Return `text` in this kind of colour: bold, dim, red, green or yellow."""
        return f"\033[{_CODES[kind]}m{text}\033[0m" if self._on else text


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Return lines with the cells below each other; nothing is cut off."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        indent + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
