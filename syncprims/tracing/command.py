"""``syncprims trace``: what a traced run has to say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncprims.errors import ConfigurationError

if TYPE_CHECKING:
    import argparse

    from .waits import Analysis


def add_parser(commands: Any) -> None:
    """Add the command to those of a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "trace",
        help="say who made whom wait in a run with SYNCPRIMS_TRACE",
        description="Read what a run with SYNCPRIMS_TRACE=DIR has recorded: who made whom wait, "
        "where and for how long. Writes DIR/trace.json, for Perfetto (ui.perfetto.dev) and "
        "chrome://tracing.",
        epilog="exit code: 0 if there was a trace to read, 2 if not.",
    )
    parser.add_argument("dir", type=Path, help="the directory that SYNCPRIMS_TRACE named")
    parser.add_argument(
        "--run", dest="name", metavar="NAME", help="which run in it (default: the latest)"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the timeline as a picture")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="draw it as a page for a browser, to zoom into"
    )
    parser.add_argument("--all", action="store_true", help="show every row of the first table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Do what the options say, and return the exit code."""
    from . import table
    from .reading import find_runs, read_run
    from .waits import analyse

    directory: Path = options.dir
    folders = find_runs(directory)
    folder = _chosen(folders, options.name, directory)
    found = read_run(folder)
    analysis = analyse(found)
    code, written = _write_files(analysis, options)  # first: a reader who goes away loses none
    _say(f"{found.title}{_others(folders, folder)}\n")
    table.write(analysis, sys.stdout, every_row=options.all)
    for complaint in (*found.complaints, *_doubts(analysis)):
        print(f"syncprims: {complaint}", file=sys.stderr)  # noqa: T201
    for line in written:
        _say(line)
    return code


def _say(text: str) -> None:
    print(text)  # noqa: T201


def _chosen(folders: list[Path], name: str | None, directory: Path) -> Path:
    if name is None:
        return folders[-1]
    for folder in folders:
        if folder.name == name:
            return folder
    names = ", ".join(folder.name for folder in folders)
    raise ConfigurationError(f"--run {name}: {directory} has no such run; it has {names}")


def _others(folders: list[Path], folder: Path) -> str:
    if len(folders) == 1:
        return ""
    names = [other.name for other in folders if other != folder]
    shown = ", ".join(names[-3:]) + (f" and {len(names) - 3} before" if len(names) > 3 else "")
    which = "the latest of several" if folder == folders[-1] else "one of several"
    return f" ({which}; --run shows {shown})"


def _doubts(analysis: Analysis) -> list[str]:
    """Return what a reader should know before believing the figures."""
    doubts: list[str] = []
    alignment = analysis.alignment
    if alignment.guessed:
        doubts.append(
            f"the clocks of {', '.join(alignment.guessed)} were set by the calendar, since they "
            f"share no round with the others: waits between them may be wrong"
        )
    elif alignment.hosts:
        doubts.append(
            f"the clocks of {len(alignment.hosts) + 1} hosts were aligned by their rounds, to "
            f"within {alignment.error * 1e3:.3g} ms"
        )
    short = [rank.rank for rank in analysis.run.ranks if rank.dropped]
    if short:
        doubts.append(
            f"ranks {short} have recorded more rounds than SYNCPRIMS_TRACE_LIMIT holds: the "
            f"oldest are gone"
        )
    return doubts


def _write_files(analysis: Analysis, options: argparse.Namespace) -> tuple[int, list[str]]:
    """Write what was asked for; return the exit code, and a line for each file that is there."""
    from . import chrome

    code, written = 0, list[str]()
    tasks: list[tuple[Path, str]] = [(options.dir / "trace.json", "json")]
    tasks += [(path, kind) for path, kind in ((options.png, "png"), (options.html, "html")) if path]
    for path, kind in tasks:
        try:
            if kind == "json":
                left_out = chrome.write(analysis, path)
                rest = f" (without the {left_out} shortest waits)" if left_out else ""
                what = f"for ui.perfetto.dev or chrome://tracing{rest}"
            elif kind == "png":
                from . import picture

                picture.draw(analysis, path)
                what = "the timeline"
            else:
                from . import page

                page.draw(analysis, path)
                what = "the timeline, for a browser"
        except OSError as error:
            print(f"syncprims: cannot write {path}: {error}", file=sys.stderr)  # noqa: T201
            code = 1
        else:
            written.append(f"{path}: {what}")
    return code, written
