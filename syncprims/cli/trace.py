"""The command that shows which rank made others wait."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from syncprims.errors import ConfigurationError, format_ranks

from .console import CommandParser, Style, table

if TYPE_CHECKING:
    from syncprims.tracing.analysis import Analysis, LateArrivals

HELP = """Show which rank made others wait in a run with SYNCPRIMS_TRACE=DIR: where, for how long.
Write DIR/trace.json, for Perfetto (ui.perfetto.dev) and chrome://tracing.

exit code: 0 if there was a trace to read, 1 if a file cannot be written, else 2."""

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
    parser.add_argument("--all", action="store_true", help="show every row of the first table")


def run(options: argparse.Namespace) -> int:
    """Analyse the run, write the files, print the tables, and return the exit code."""
    from syncprims.tracing.analysis import analyse
    from syncprims.tracing.reading import find_runs, read_run

    folders = find_runs(options.dir)
    chosen = [one for one in folders if options.name in (None, one.name)]
    if not chosen:
        names = ", ".join(one.name for one in folders)
        raise ConfigurationError(
            f"--run {options.name}: {options.dir} has no such run; it has {names}"
        )
    folder = chosen[-1]
    traced = read_run(folder)
    analysis = analyse(traced)
    code, written = _write_files(analysis, options)  # before the output, whose pipe may be closed
    print(f"{traced.title}{_other_runs(folders, folder)}\n")  # noqa: T201
    style = Style(sys.stdout, options.environ)
    print("\n".join(report(analysis, style, every_row=options.all)))  # noqa: T201
    for complaint in (*traced.complaints, *_caveats(analysis)):
        print(f"syncprims: {complaint}", file=sys.stderr)  # noqa: T201
    for line in written:
        print(line)  # noqa: T201
    return code


def _other_runs(folders: list[Path], folder: Path) -> str:
    if len(folders) == 1:
        return ""
    names = [other.name for other in folders if other != folder]
    shown = ", ".join(names[-3:]) + (f" and {len(names) - 3} before" if len(names) > 3 else "")
    which = "the latest of several" if folder == folders[-1] else "one of several"
    return f" ({which}; --run shows {shown})"


def _caveats(analysis: Analysis) -> Iterator[str]:
    """Return what makes the figures less certain."""
    alignment = analysis.alignment
    if alignment.guessed:
        yield (
            f"the clocks of {', '.join(alignment.guessed)} were set by the calendar, since they "
            f"share no round with the others: waits between them may be wrong"
        )
    elif alignment.hosts:
        yield (
            f"the clocks of {len(alignment.hosts) + 1} hosts were aligned by their rounds, to "
            f"within {alignment.error * 1e3:.3g} ms"
        )
    dropped = [rank.rank for rank in analysis.run.ranks if rank.dropped]
    if dropped:
        yield (
            f"ranks {dropped} have recorded more rounds than SYNCPRIMS_TRACE_LIMIT holds: the "
            f"oldest are gone"
        )


def _write_files(analysis: Analysis, options: argparse.Namespace) -> tuple[int, list[str]]:
    """Write the trace and the pictures; return the exit code and a line for each file."""
    from syncprims.tracing import pictures

    code, written = 0, list[str]()

    for path, write, what in (
        (
            options.dir / "trace.json",
            pictures.write_chrome_trace,
            "for ui.perfetto.dev or chrome://tracing",
        ),
        (options.png, pictures.draw_image, "the timeline"),
    ):
        if path is None:
            continue
        try:
            left_out = write(analysis, path)
            less = f" (without the {left_out} shortest waits)" if left_out else ""
            written.append(f"{path}: {what}{less}")
        except OSError as error:
            print(f"syncprims: cannot write {path}: {error}", file=sys.stderr)  # noqa: T201
            code = 1
    return code, written


# -- the report --------------------------------------------------------------------------------


def report(analysis: Analysis, style: Style, *, every_row: bool) -> list[str]:
    """Return the lines of the report: the late arrivals, the ranks, and the conclusion."""
    from syncprims.tracing.analysis import seconds_text

    lines: list[str] = []
    shown = analysis.late_arrivals[: None if every_row else _MOST_ROWS]
    rows: list[tuple[str, ...]] = [
        ("late", "made wait", "at", "where", "times", "waited in all", "longest")
    ]
    for one in shown:
        times = str(one.times), seconds_text(one.waited), seconds_text(one.longest)
        rows.append(
            (f"rank {one.late}", _waiting(one, analysis), str(one.call), one.call.site, *times)
        )
    if shown:
        lines += [style("bold", "Who made whom wait, worst first")]
        lines += [*table(rows, indent="", numbers=(4, 5, 6)), ""]
    if rest := analysis.late_arrivals[len(shown) :]:
        waited = seconds_text(sum(one.waited for one in rest))
        lines += [f"{len(rest)} more rows, {waited} together: --all shows them", ""]
    rows = [("rank", "host", "rounds", "time", "waiting", "others waited for it", "ended")]
    for rank in analysis.summaries:
        share = f"{rank.waiting / rank.span:.0%}" if rank.span else ""
        times = seconds_text(rank.span), share, seconds_text(rank.waited_for)
        rows.append((str(rank.rank), rank.host, str(rank.rounds), *times, rank.end))
    head, *ranks = table(rows, indent="", numbers=(0, 2, 3, 4, 5))
    lines += [style("bold", "Ranks"), head]
    for rank, line in zip(analysis.summaries, ranks, strict=True):
        lines.append(style("red", line) if rank.rank in analysis.stragglers else line)
    return [*lines, "", style("bold", analysis.conclusion), ""]


def _waiting(one: LateArrivals, analysis: Analysis) -> str:
    others = analysis.run.world_size - 1
    if len(one.waiting) == others > 1:
        return "all others"
    return format_ranks(sorted(one.waiting)).replace(",", ", ")
