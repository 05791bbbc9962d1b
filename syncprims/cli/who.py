"""Show what every rank of a running job does, and who waits for whom.

Read the worlds that run on this host from outside. Nothing has to be switched on in the job, and it
does not become slower.

examples:
  syncprims who                       the worlds of this host
  syncprims who 4711                  of this process: a rank, or the launcher
  syncprims who my-run --watch 2      of this run id, again every 2 s
  syncprims who --json --stuck-after 600   for a watchdog

Several hosts: it shows the ranks of this one, and what they know of the others; with --all-hosts,
all ranks. Run it as the user of the job, or as root.

exit code: 0 if all ranks move, or if no world runs here and none was named; 2 if there is no world
of that name, or it cannot be read; 3 if a rank has waited for --stuck-after seconds, in a call of
this library or in a collective of torch. If ranks are in collectives of torch, the command takes so
many seconds, to see whether they go on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from syncprims.errors import SyncError, format_ranks, install
from syncprims.who.finding import Finding
from syncprims.who.observation import Observation, RankReport, WorldReport, explain_refused, who
from syncprims.who.processes import find_py_spy

from .console import CommandParser, Style, table
from .options import SECONDS

_MARGIN = 10.0  # seconds that the looks take
_COLOURS = {"moving": "green", "waiting": "yellow", "torch": "yellow", "ended": "bold"}


def add_world(parser: CommandParser) -> None:
    """Add the argument that chooses a world."""
    parser.add_argument(
        "which", nargs="?", metavar="RUN|DIR|PID",
        help="a run id, a directory in which ranks meet, or a process; by default all worlds here",
    )  # fmt: skip


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of the command."""
    add_world(parser)
    parser.add_argument(
        "--watch", type=SECONDS, metavar="SECONDS", help="look again and again, with this pause"
    )
    parser.add_argument(
        "--all-hosts", action="store_true", help="also the ranks of other hosts, from the store"
    )
    parser.add_argument("--json", action="store_true", help="for programs: a line for each world")
    parser.add_argument(
        "--stuck-after", type=SECONDS, default=30.0, metavar="S",
        help="how long a rank may wait until the exit code is 3 (default: 30)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Print what the ranks do, once or repeatedly, and return the exit code."""
    style = Style(sys.stdout, options.environ)
    watched = options.watch is not None
    code, shown = 0, None  # the number of worlds that were shown last
    with (
        contextlib.closing(
            Observation(options.which, options.stuck_after, options.all_hosts)
        ) as observation,
        contextlib.suppress(KeyboardInterrupt) if watched else contextlib.nullcontext(),
    ):
        observation.look()
        time.sleep(observation.pause)
        patience = time.monotonic() + options.stuck_after + _MARGIN
        while (reports := observation.look()) or not (watched and (shown or options.which)):
            findings = [report.finding for report in reports]
            in_torch = any(one.kind == "torch" and not one.stuck for one in findings)
            if not watched and in_torch and time.monotonic() < patience:
                time.sleep(observation.pause)  # nothing says since when: so it is watched
                continue
            code = _code(findings)
            text = "\n".join(_text(reports, observation.refused, style))
            if options.json:
                text = "\n".join(json.dumps(as_dict(report)) for report in reports)
            if watched and not options.json:  # on a terminal in place of the text before
                text = "\033[H\033[2J" + text if style.is_terminal else text + "\n"
            if text and (reports or shown is None):
                print(text, flush=True)  # noqa: T201
            if not watched:
                break
            shown = len(reports)
            time.sleep(max(observation.pause, options.watch))
    return code


def describe_run(which: str) -> list[str]:
    """Return the lines of the table of a run, or why there is none; never raises `SyncError`."""
    try:
        return _text(who(which), (), Style(sys.stderr, {"NO_COLOR": "1"}))
    except SyncError as error:
        return [f"syncprims who: {error}"]


def _code(findings: Sequence[Finding]) -> int:
    if any(finding.stuck for finding in findings):
        return 3
    return 2 if {finding.kind for finding in findings} == {"unreadable"} else 0


def as_dict(report: WorldReport) -> dict[str, Any]:
    """Return a report as it is printed for programs."""
    return {
        **report._asdict(),
        "ranks": [rank._asdict() for rank in report.ranks],
        "finding": report.finding._asdict(),
    }


# -- for people -------------------------------------------------------------------------------


def _text(reports: Sequence[WorldReport], refused: Sequence[str], style: Style) -> list[str]:
    lines: list[str] = []
    for report in reports:
        lines += ["", *_world(report, style)] if lines else _world(report, style)
    if not reports:
        lines.append("no world runs on this host, as far as this user can see")
    if refused:
        lines.append(explain_refused(refused))
    return lines


def _world(report: WorldReport, style: Style) -> list[str]:
    count = report.world_size
    ranks = f"{count} rank{'s' * (count != 1)}, backend {report.backend}"
    finding = report.finding
    colour = "red" if finding.stuck else _COLOURS.get(finding.kind, "red")
    lines = [f"{style('bold', _plain(report.run_id))}: {ranks}, in {_plain(report.path)}"]
    if report.ranks:
        lines += table(_rows(report.ranks), numbers=(0, 1, 5, 6))
    lines += [style(colour, _plain(line)) for line in finding.text.splitlines()]
    if report.last_barrier is not None and finding.kind != "moving":
        lines.append(f"all ranks have passed {_plain(report.last_barrier)}")
    alone = [rank for rank in report.ranks if rank.doing and rank.state == "running"]
    if alone and find_py_spy() is None:
        lines.append(f"to see the lines of running ranks: {install('who')}")
    return lines


def _rows(ranks: Sequence[RankReport]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("rank", "pid", "state", "call", "group", "waits", "behind", "doing")
    ]
    for one in ranks:
        call = "" if one.call is None else one.call
        if one.name is not None:
            call += f" {one.name!r}"
        if one.site is not None:
            call += f" ({one.site})"
        waits = "" if one.waiting_s is None else f"{one.waiting_s:.1f} s"
        group = "" if one.group is None else f"[{format_ranks(one.group)}]"
        busy = "" if one.processor is None else f"{one.processor:.0%}"
        known = one.pid is not None or one.state in ("absent", "elsewhere", "finished", "lost")
        pid = str(one.pid or "") if known else "unknown"
        behind = str(one.behind or "")
        doing = one.doing or busy
        cells = (str(one.rank), pid, one.state, call, group, waits, behind, doing)
        rows.append(tuple(_plain(cell) for cell in cells))
    return rows


def _plain(text: str) -> str:
    """Return `text` without characters that control a terminal: names come from another process."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
