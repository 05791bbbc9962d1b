"""Show which rank made others wait in a run with SYNCPRIMS_TRACE=DIR: where, for how long.

Write DIR/trace.json, for Perfetto (ui.perfetto.dev) and chrome://tracing.

exit code: 0 if there was a trace to read, 1 if a file cannot be written, else 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from syncprims.errors import BackendUnavailable, ConfigurationError, format_ranks, install

from .console import CommandParser, Style, say, table

if TYPE_CHECKING:
    from syncprims.tracing.analysis import Analysis

_MOST_ROWS = 20  # of the first table, on a terminal


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "dir", type=Path, metavar="DIR", help="the directory that SYNCPRIMS_TRACE named"
    )
    parser.add_argument(
        "--run", dest="name", metavar="NAME", help="which run in it (default: the latest)"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the timeline as an image")


def run(options: argparse.Namespace) -> int:
    """Analyse the run, write the files, print the tables, and return the exit code."""
    try:
        from syncprims.tracing.analysis import analyse
        from syncprims.tracing.reading import find_runs, read_run
    except ImportError as error:
        what = "reading traces needs numpy, which is not installed here"
        raise BackendUnavailable(f"{what}: {install('trace')}") from error

    folders = {folder.name: folder for folder in find_runs(options.dir)}
    chosen = options.name or [*folders][-1]
    if chosen not in folders:
        what = f"--run {chosen}: {options.dir} has no such run"
        raise ConfigurationError(f"{what}; it has {', '.join(folders)}")
    traced = read_run(folders[chosen])
    analysis = analyse(traced)
    code, written = _write_files(analysis, options)  # before the output, whose pipe may be closed
    others = [name for name in folders if name != chosen]
    more = f" (--run shows another one: {', '.join(others[-3:])})" if others else ""
    size, epochs = len(traced.members), len(traced.epochs)
    what = f"{size} rank{'s' * (size > 1)}"
    if epochs > 1:
        what = f"{size} processes in {epochs} epochs; a rank in a call is one of its epoch"
    print(f"Run {traced.name}, {what}{more}\n")  # noqa: T201
    print("\n".join(report(analysis, Style(sys.stdout, options.environ))))  # noqa: T201
    for complaint in (*traced.complaints, *_caveats(analysis)):
        say(f"syncprims: {complaint}\n")
    for line in written:
        print(line)  # noqa: T201
    return code


def _caveats(analysis: Analysis) -> Iterator[str]:
    """Return what makes the figures less certain."""
    alignment = analysis.alignment
    if alignment.guessed:
        what = f"the clocks of {', '.join(alignment.guessed)} share no round with the first rank"
        yield f"{what}: aligned by the calendar, so waits between them may be wrong"
    elif alignment.hosts:
        error = f"{alignment.error * 1e3:.3g} ms"
        yield f"the clocks of {len(alignment.hosts) + 1} hosts agree by their rounds to {error}"
    if dropped := [rank.rank for rank in analysis.run.ranks if rank.dropped]:
        yield f"{analysis.run.names(dropped)}: old rounds are deleted, by SYNCPRIMS_TRACE_LIMIT"


def _write_files(analysis: Analysis, options: argparse.Namespace) -> tuple[int, list[str]]:
    """Write the trace and the image; return the exit code and a line for each file."""
    from syncprims.tracing import pictures

    code, written = 0, list[str]()
    path: Path = options.dir / "trace.json"
    try:
        left_out = pictures.write_chrome_trace(analysis, path)
        less = f" (without the {left_out} shortest waits)" if left_out else ""
        written.append(f"{path}: for ui.perfetto.dev or chrome://tracing{less}")
        if path := options.png:
            pictures.draw_image(analysis, path)
            written.append(f"{path}: the timeline")
    except OSError as error:
        say(f"syncprims: cannot write {path}: {error}\n")
        code = 1
    return code, written


# -- the report --------------------------------------------------------------------------------


def report(analysis: Analysis, style: Style) -> list[str]:
    """Return the lines of the report: the late arrivals, the ranks, and the conclusion.

    On a terminal, long tables are cut off.
    """
    from syncprims.tracing.analysis import seconds_text

    noun = analysis.run.noun
    rows: list[tuple[str, ...]] = [
        ("late", "made wait", "at", "where", "times", "waited in all", "longest")
    ]
    everyone = len(analysis.run.members) - 1
    for row in analysis.late_arrivals:
        waiting = format_ranks(sorted(row.waiting)).replace(",", ", ")
        if len(row.waiting) == everyone > 1:
            waiting = "all others"
        times = str(row.times), seconds_text(row.waited), seconds_text(row.longest)
        rows.append((f"{noun} {row.late}", waiting, row.call.call, row.call.site, *times))
    shown = table(rows, indent="", numbers=(4, 5, 6))
    if style.is_terminal and (rest := len(shown) - 1 - _MOST_ROWS) > 0:
        shown[-rest:] = [f"{rest} more rows: `| cat` shows them"]
    title = style("bold", "Who made whom wait, worst first")
    lines = [title, *shown, ""] if len(rows) > 1 else []
    rows = [(noun, "host", "rounds", "time", "in rounds", "others waited for it", "ended")]
    for rank in analysis.summaries:
        share = f"{rank.waiting_share:.0%}" if rank.span else ""
        times = seconds_text(rank.span), share, seconds_text(rank.waited_for)
        rows.append((str(rank.rank), rank.host, str(rank.rounds), *times, rank.end))
    head, *ranks = table(rows, indent="", numbers=(0, 2, 3, 4, 5))
    lines += [style("bold", "Ranks" if noun == "rank" else "Processes"), head]
    for rank, line in zip(analysis.summaries, ranks, strict=True):
        lines.append(style("red", line) if rank.rank in analysis.stragglers else line)
    for mark in analysis.marks:
        lines.append(f"process {mark.rank}, after {seconds_text(mark.at)}: {mark.text}")
    return [*lines, "", style("bold", analysis.conclusion), ""]
