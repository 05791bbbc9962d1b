"""Measure barriers by the way of waiting, alone and beside a busy process.

python bench/measure.py --only waiting
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import jobs
from table import Seen, head, row, short, span

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from scale import Scale

#: Name in the table -> way of waiting, and whether each rank has a session of its own.
WAYS = {
    f"{way.replace('_', ' ')}, {where}": (way, where != "one session")
    for way in ("yield", "yield_then_futex", "futex", "pipe")
    for where in ("one session", "own sessions")
}
PLACES = {"alone": 0, "beside a busy process": 1}


@contextlib.contextmanager
def busy(count: int) -> Generator[None]:
    """Run so many processes that never wait."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def measure(scale: Scale) -> dict[str, Any]:
    """Return the microseconds of a barrier in each run."""
    seen = Seen()
    for place, neighbours in PLACES.items():
        for ranks in scale.waiting:
            for run in range(max(scale.waiting_runs)):
                bare, whole = (run < runs for runs in scale.waiting_runs)
                names = [*(WAYS if bare else ()), *(_WHOLE if whole else ())]
                with busy(neighbours):
                    for name in names:
                        _measure_one(seen, ranks, place, name, scale.seconds)
    return {**seen.stored(), "runs": scale.waiting_runs, "processors": os.cpu_count()}


def _measure_one(seen: Seen, ranks: int, place: str, name: str, seconds: float) -> None:
    print(f"barrier {place}, {ranks} ranks: {name}", file=sys.stderr, flush=True)
    plan: dict[str, object] = {"seconds": seconds}
    if name in WAYS:
        kind, (plan["way"], plan["sessions"]) = "bare barrier", WAYS[name]
    elif (kind := _WHOLE[name]) == "syncprims":
        plan["what"] = "barrier"
    try:
        found = jobs.start(kind, ranks, plan)
    except jobs.NoFigures as error:
        seen.lack(ranks, name, (place,), str(error))
        return
    seen.add(ranks, name, {place: found["barrier"]})


#: Beside these: whole libraries, as they are started.
_WHOLE = {"syncprims run": "syncprims", "pthread, in C": "pthread"}


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the section of the results page."""
    seen = Seen.restored(data)
    bare, whole = data["runs"]
    columns = [f"{place}, {ranks} ranks" for ranks in seen.ranks() for place in PLACES]
    found = [
        "",
        "## Ways of waiting in a barrier",
        "",
        f"Microseconds, {data['processors']} processors, median and range. The first rows are bare",
        f"loops in Python, {bare} runs: a store, a look, and the wait. The last two are whole",
        f"libraries, {whole} runs. Linux schedules each session as a group (sched_autogroup), and",
        "a yield does not pass the processor on to a rank of another group.",
        *head("by", *columns),
    ]
    for name in (*WAYS, *_WHOLE):
        cells: list[str] = []
        for ranks in seen.ranks():
            for place in PLACES:
                times = seen.figures(ranks, name, place)
                text = f"{short(statistics.median(times))} ({span(times)})" if times else ""
                cells.append(text or seen.why_not(ranks, name, place))
        found.append(row(name, *cells))
    return found
