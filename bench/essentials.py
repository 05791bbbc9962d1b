"""Measure what everybody pays, with no other rank in sight: importing, and a world of one."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import timeit

from table import head, row

import syncprims as sp


def import_cost(runs: int) -> tuple[float, float]:
    """Return the milliseconds of a bare interpreter, and those that `import syncprims` adds."""
    times: dict[str, list[float]] = {"pass": [], "import syncprims": []}
    for _ in range(runs):  # in turn, so that a slower minute slows both
        for code, seen in times.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            seen.append((time.perf_counter() - begin) * 1e3)
    bare, full = (statistics.median(seen) for seen in times.values())
    return bare, full - bare


def lone_barrier(runs: int) -> float:
    """Return the microseconds of a barrier in a world of one."""
    os.environ.pop("SYNCPRIMS_BACKEND", None)
    sp.barrier()
    number = 200_000
    times = timeit.repeat(sp.barrier, number=number, repeat=runs)
    sp.shutdown()  # what is measured next forks worlds of its own
    return statistics.median(times) / number * 1e6


def section(runs: int) -> list[str]:
    """Return both as a table."""
    bare, added = import_cost(4 * runs + 1)
    return [
        "",
        "## Alone",
        *head("what", "median"),
        row("a bare interpreter", f"{bare:.1f} ms"),
        row("`import syncprims` on top of it", f"{added:.1f} ms"),
        row("`barrier()` in a world of one", f"{lone_barrier(runs):.2f} us"),
    ]
