"""What a person reads of an analysis in a terminal, or in a file: the same words in both."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO

from .reading import ranks_text
from .waits import seconds_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .waits import Analysis, Row

_MOST = 20  # rows of the first table


def write(analysis: Analysis, out: TextIO, *, every_row: bool) -> None:
    """Write the tables of `analysis` and what they come to."""
    writer = _Writer(out)
    rows = analysis.rows if every_row else analysis.rows[:_MOST]
    if rows:
        head = ("late", "made wait", "at", "where", "times", "waited in all", "longest")
        writer.table(
            "Who made whom wait, worst first",
            head,
            [_cells(row, analysis) for row in rows],
            numbers=(4, 5, 6),
        )
    if len(rows) < len(analysis.rows):
        rest = analysis.rows[len(rows) :]
        waited = seconds_text(sum(row.waited for row in rest))
        writer.line(f"{len(rest)} more rows, {waited} together: --all shows them")
    writer.table(
        "Ranks",
        ("rank", "host", "rounds", "time", "waiting", "others waited for it", "ended"),
        [
            (
                str(one.rank),
                one.host,
                str(one.rounds),
                seconds_text(one.span),
                f"{one.waiting / one.span:.0%}" if one.span else "",
                seconds_text(one.waited_for),
                one.end,
            )
            for one in analysis.summaries
        ],
        numbers=(0, 2, 3, 4, 5),
        marked=analysis.stragglers,
    )
    writer.line(analysis.verdict, strong=True)


def _cells(row: Row, analysis: Analysis) -> Sequence[str]:
    others = set(range(analysis.run.world_size)) - {row.late}
    most = max(len(row.waiting), 1)
    if len(others) > 1 and set(row.waiting) == others:
        waiting = "all others"
    else:
        waiting = ranks_text(row.waiting[:most])
    return (
        f"rank {row.late}",
        waiting,
        str(row.call),
        row.call.site,
        str(row.times),
        seconds_text(row.waited),
        seconds_text(row.longest),
    )


class _Writer:
    """Tables by rich where there is a terminal and rich, else in plain columns, never cut off."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._console: Any = None
        if out.isatty() and find_spec("rich") is not None:
            from rich.console import Console

            self._console = Console(file=out, highlight=False)
            if self._console.no_color:  # NO_COLOR: rich would still write bold
                self._console = Console(file=out, highlight=False, color_system=None)

    def line(self, text: str, *, strong: bool = False) -> None:
        """Write one line, and an empty one behind it."""
        if self._console is not None:
            from rich.text import Text

            self._console.print(Text(text, style="bold" if strong else ""))
            self._console.print()
        else:
            self._out.write(f"{text}\n\n")

    def table(
        self,
        title: str,
        head: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        numbers: Sequence[int],
        marked: Sequence[int] = (),
    ) -> None:
        """Write a table; the columns in `numbers` are set to the right."""
        if self._console is not None:
            self._rich(title, head, rows, numbers, marked)
            return
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        self._out.write(f"{title}\n")
        for row in (head, *rows):
            cells = [
                cell.rjust(width) if i in numbers else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            self._out.write("  ".join(cells).rstrip() + "\n")
        self._out.write("\n")

    def _rich(
        self,
        title: str,
        head: Sequence[str],
        rows: Sequence[Sequence[str]],
        numbers: Sequence[int],
        marked: Sequence[int],
    ) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_justify="left", title_style="bold")
        for i, name in enumerate(head):
            table.add_column(name, justify="right" if i in numbers else "left", overflow="fold")
        for row in rows:
            style = "bold red" if row[0].isdecimal() and int(row[0]) in marked else ""
            table.add_row(*(Text(cell, style=style) for cell in row))
        self._console.print(table)
