"""Measure what `syncprims who --watch 0.2` costs a loop of barriers that it looks at.

    python bench/measure.py --only watched

Jobs take turns, each in new processes: alone, watched, and beside a program that uses as much
processor time as the watching, in the same rhythm, and reads nothing of the job. The watching must
cost no more than that program.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from table import Seen, head, row, short, span

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scale import Scale

EVERY = 0.2  # seconds between two looks
_START = 0.6  # seconds for the start of what runs beside the job
_SHARE = 1.2  # seconds in which its processor time is measured; the job runs longer than both
_FIRST_LOOK = 0.005  # seconds of processor time, until a look was measured

_RANK = """
import sys, time
import syncprims as sp

sp.barrier("start")
if sp.is_main():
    print("ready", flush=True)
begin, count = time.perf_counter(), 0
while not sp.any_rank(time.perf_counter() - begin > 3.0):
    for _ in range(500):
        sp.barrier()
    count += 500
if sp.is_main():
    print((time.perf_counter() - begin) / count * 1e6, flush=True)
"""

_BURN = """
import sys, time
every, used = float(sys.argv[1]), float(sys.argv[2])
while True:
    end = time.process_time() + used
    while time.process_time() < end:
        pass
    time.sleep(every)
"""

ALONE, WATCHED, BESIDE = "alone", "watched", "beside as much other work"


def measure(scale: Scale) -> dict[str, Any]:
    """Return the microseconds of a barrier in each case, and the processor time of a look."""
    seen, (ranks, turns) = Seen(), scale.watched
    each = _FIRST_LOOK
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "rank.py"
        script.write_text(_RANK)
        for _ in range(turns):
            alone = 0.0
            for case in (ALONE, WATCHED, BESIDE):
                print(f"barrier, {ranks} ranks: {case}", file=sys.stderr, flush=True)
                try:
                    figure, used = _measured(ranks, script, case, each)
                except ValueError as error:  # the job has printed no figure
                    seen.lack(ranks, case, ("barrier", "ratio"), str(error))
                    continue
                alone = figure if case == ALONE else alone
                seen.add(ranks, case, {"barrier": [figure]})
                if alone:
                    seen.add(ranks, case, {"ratio": [figure / alone]})
                if case == WATCHED:
                    each = used
                    seen.add(ranks, case, {"look": [used * 1e3]})
    return {**seen.stored(), "turns": turns}


def _measured(ranks: int, script: Path, case: str, each: float) -> tuple[float, float]:
    """Return the microseconds of a barrier, and the processor time of one look in seconds."""
    command = [sys.executable, "-m", "syncprims", "run", "-n", str(ranks), str(script)]
    beside: subprocess.Popen[bytes] | None = None
    used = 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        try:
            job.stdout.readline()  # it is under way
            if case == WATCHED:
                who = [sys.executable, "-m", "syncprims", "who", str(job.pid), "--json"]
                beside = subprocess.Popen([*who, "--watch", str(EVERY)], stdout=subprocess.DEVNULL)
            if case == BESIDE:
                beside = subprocess.Popen([sys.executable, "-c", _BURN, str(EVERY), str(each)])
            if beside is not None:
                time.sleep(_START)
                begin, before = time.monotonic(), _used_by(beside.pid)
                time.sleep(_SHARE)
                used = (_used_by(beside.pid) - before) / (time.monotonic() - begin) * EVERY
            out = job.stdout.read()
        finally:
            if beside is not None:
                beside.kill()
                beside.wait()
    return float(out.rpartition("] ")[2]), used


def _used_by(pid: int) -> float:
    """Return the seconds of processor time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the section of the results page."""
    seen = Seen.restored(data)
    found: list[str] = []
    for ranks in seen.ranks():
        used = seen.median(ranks, WATCHED, "look")
        look = "" if used is None else f" A look takes {short(used)} ms."
        found += [
            "",
            f"## Barriers beside `syncprims who --watch {EVERY}` at {ranks} ranks",
            "",
            f"Microseconds, median and range of {data['turns']} turns. The other work takes as",
            f"much processor time as the looks, in the same rhythm, and reads nothing.{look}",
            *head("a barrier", "median", "range", "of alone in the same turn"),
        ]
        for case in (ALONE, WATCHED, BESIDE):
            times, ratios = (seen.figures(ranks, case, what) for what in ("barrier", "ratio"))
            if not times:
                found.append(row(case, seen.why_not(ranks, case, "barrier"), "", ""))
                continue
            of_alone = f"{short(statistics.median(ratios))} ({span(ratios)})" if ratios else ""
            found.append(row(case, short(statistics.median(times)), span(times), of_alone))
    return found
