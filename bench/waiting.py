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
            for _ in range(scale.waiting_runs):
                with busy(neighbours):
                    _measure_all(seen, ranks, place, scale.seconds)
    return {**seen.stored(), "runs": scale.waiting_runs, "processors": os.cpu_count()}


def _measure_all(seen: Seen, ranks: int, place: str, seconds: float) -> None:
    plans = {name: {"way": way, "sessions": own} for name, (way, own) in WAYS.items()}
    for name, kind in (*((name, "bare barrier") for name in plans), *_WHOLE.items()):
        print(f"barrier {place}, {ranks} ranks: {name}", file=sys.stderr, flush=True)
        plan: dict[str, object] = {**plans.get(name, {}), "seconds": seconds}
        if kind == "syncprims":
            plan |= {"what": "barrier"}
        try:
            found = jobs.start(kind, ranks, plan)
        except jobs.NoFigures as error:
            seen.lack(ranks, name, (place,), str(error))
            continue
        seen.add(ranks, name, {place: found["barrier"]})


#: Beside these: whole libraries, as they are started.
_WHOLE = {"syncprims run": "syncprims", "pthread, in C": "pthread"}


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the section of the results page."""
    seen = Seen.restored(data)
    columns = [f"{place}, {ranks} ranks" for ranks in seen.ranks() for place in PLACES]
    found = [
        "",
        "## Ways of waiting in a barrier",
        "",
        f"Microseconds, {data['processors']} processors, median and range of {data['runs']} runs.",
        "The first rows are bare loops in Python: a store, a look, and the wait. Linux schedules",
        "each session as a group (sched_autogroup), and a yield does not pass the processor on to",
        "a rank of another group.",
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
