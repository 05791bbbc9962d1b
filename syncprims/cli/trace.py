"""``syncprims trace``: print which rank made others wait in a traced run, and draw it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from syncprims.errors import ConfigurationError, format_ranks

from .console import Style, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from syncprims.tracing.analysis import Analysis, LateArrivals

    from .console import CommandParser

HELP = "show which rank made others wait in a run with SYNCPRIMS_TRACE"
DESCRIPTION = """\
Read what a run with SYNCPRIMS_TRACE=DIR has recorded: which rank made others wait, where and for
how long. Writes DIR/trace.json, for Perfetto (ui.perfetto.dev) and chrome://tracing."""
EPILOG = "exit code: 0 if there was a trace to read, 1 if a file cannot be written, else 2."
_MOST_ROWS = 20  # of the first table


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "dir", type=Path, metavar="DIR", help="the directory that SYNCPRIMS_TRACE named"
    )
    parser.add_argument(
        "--run", dest="name", metavar="NAME", help="which run in it (default: the latest)"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the timeline as an image")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="draw it as a page for a browser, to zoom into"
    )
    parser.add_argument("--all", action="store_true", help="show every row of the first table")


def run(options: argparse.Namespace) -> int:
    """Analyse the run, write the files, print the tables, and return the exit code."""
    from syncprims.tracing.analysis import analyse
    from syncprims.tracing.reading import find_runs, read_run

    folders = find_runs(options.dir)
    folder = _choose(folders, options.name, options.dir)
    traced = read_run(folder)
    analysis = analyse(traced)
    code, written = _write_files(analysis, options)  # before the output, whose pipe may be closed
    print(f"{traced.title}{_other_runs(folders, folder)}\n")  # noqa: T201
    write_tables(analysis, sys.stdout, options.environ, every_row=options.all)
    for complaint in (*traced.complaints, *_caveats(analysis)):
        print(f"syncprims: {complaint}", file=sys.stderr)  # noqa: T201
    for line in written:
        print(line)  # noqa: T201
    return code


def _choose(folders: list[Path], name: str | None, directory: Path) -> Path:
    if name is None:
        return folders[-1]
    for folder in folders:
        if folder.name == name:
            return folder
    names = ", ".join(folder.name for folder in folders)
    raise ConfigurationError(f"--run {name}: {directory} has no such run; it has {names}")


def _other_runs(folders: list[Path], folder: Path) -> str:
    if len(folders) == 1:
        return ""
    names = [other.name for other in folders if other != folder]
    shown = ", ".join(names[-3:]) + (f" and {len(names) - 3} before" if len(names) > 3 else "")
    which = "the latest of several" if folder == folders[-1] else "one of several"
    return f" ({which}; --run shows {shown})"


def _caveats(analysis: Analysis) -> list[str]:
    """Return what makes the figures less certain."""
    caveats: list[str] = []
    alignment = analysis.alignment
    if alignment.guessed:
        caveats.append(
            f"the clocks of {', '.join(alignment.guessed)} were set by the calendar, since they "
            f"share no round with the others: waits between them may be wrong"
        )
    elif alignment.hosts:
        caveats.append(
            f"the clocks of {len(alignment.hosts) + 1} hosts were aligned by their rounds, to "
            f"within {alignment.error * 1e3:.3g} ms"
        )
    dropped = [rank.rank for rank in analysis.run.ranks if rank.dropped]
    if dropped:
        caveats.append(
            f"ranks {dropped} have recorded more rounds than SYNCPRIMS_TRACE_LIMIT holds: the "
            f"oldest are gone"
        )
    return caveats


def _write_files(analysis: Analysis, options: argparse.Namespace) -> tuple[int, list[str]]:
    """Write the trace and the pictures; return the exit code and a line for each file."""
    from syncprims.tracing import chrome, pictures

    code, written = 0, list[str]()

    def write_trace(analysis: Analysis, path: Path) -> str:
        left_out = chrome.write_chrome_trace(analysis, path)
        return f" (without the {left_out} shortest waits)" if left_out else ""

    for path, write, what in (
        (options.dir / "trace.json", write_trace, "for ui.perfetto.dev or chrome://tracing"),
        (options.png, pictures.draw_image, "the timeline"),
        (options.html, pictures.draw_page, "the timeline, for a browser"),
    ):
        if path is None:
            continue
        try:
            written.append(f"{path}: {what}{write(analysis, path) or ''}")
        except OSError as error:
            print(f"syncprims: cannot write {path}: {error}", file=sys.stderr)  # noqa: T201
            code = 1
    return code, written


# -- tables ------------------------------------------------------------------------------------


def write_tables(
    analysis: Analysis, out: TextIO, environ: Mapping[str, str], *, every_row: bool
) -> None:
    """Write the late arrivals, the ranks, and the conclusion."""
    from syncprims.tracing.analysis import seconds_text

    style = Style(out, environ)
    shown = analysis.late_arrivals[: None if every_row else _MOST_ROWS]
    if shown:
        _write_table(
            out,
            style,
            "Who made whom wait, worst first",
            ("late", "made wait", "at", "where", "times", "waited in all", "longest"),
            [_cells(one, analysis) for one in shown],
            numbers=(4, 5, 6),
        )
    if rest := analysis.late_arrivals[len(shown) :]:
        waited = seconds_text(sum(one.waited for one in rest))
        out.write(f"{len(rest)} more rows, {waited} together: --all shows them\n\n")
    _write_table(
        out,
        style,
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
    out.write(f"{style('bold', analysis.conclusion)}\n\n")


def _cells(one: LateArrivals, analysis: Analysis) -> Sequence[str]:
    from syncprims.tracing.analysis import seconds_text

    others = analysis.run.world_size - 1
    waiting = format_ranks(sorted(one.waiting)).replace(",", ", ")
    if others > 1 and len(one.waiting) == others:
        waiting = "all others"
    times = str(one.times), seconds_text(one.waited), seconds_text(one.longest)
    return (f"rank {one.late}", waiting, str(one.call), one.call.site, *times)


def _write_table(
    out: TextIO,
    style: Style,
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[int],
    marked: Sequence[int] = (),
) -> None:
    """Write a table, with rich to a terminal if it is installed, else in plain columns.

    The columns in `numbers` align right. With rich, the rows of ranks in `marked` are red.
    """
    if not out.isatty() or find_spec("rich") is None:
        lines = table([head, *rows], indent="", numbers=numbers)
        out.write("\n".join([title, *lines, "", ""]))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rich_table = Table(title=title, title_justify="left", title_style="bold")
    for i, name in enumerate(head):
        rich_table.add_column(name, justify="right" if i in numbers else "left", overflow="fold")
    for row in rows:
        colour = "bold red" if row[0].isdecimal() and int(row[0]) in marked else ""
        rich_table.add_row(*(Text(cell, style=colour) for cell in row))
    # With NO_COLOR, rich would still write bold.
    console = Console(file=out, highlight=False, color_system="auto" if style.on else None)
    console.print(rich_table)
