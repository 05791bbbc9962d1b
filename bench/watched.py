"""Measure what ``syncprims who --watch 0.2`` costs a loop of barriers that it looks at.

    python bench/watched.py [--turns 9] [--ranks 4]

Worlds take turns, each in new processes: alone; watched; and beside a program that uses as much
processor time as the watching does, in the same rhythm, and reads nothing of the job. The watching
must cost no more than that.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import head, row

EVERY = 0.2  # seconds between two looks

RANK = """
import sys, time
import syncprims as sp

sp.barrier("start")
begin, count = time.perf_counter(), 0
while not sp.any_rank(time.perf_counter() - begin > 3.0):
    for _ in range(500):
        sp.barrier()
    count += 500
if sp.is_main():
    print((time.perf_counter() - begin) / count * 1e6, flush=True)
"""

BURN = """
import sys, time
every, used = float(sys.argv[1]), float(sys.argv[2])
while True:
    end = time.process_time() + used
    while time.process_time() < end:
        pass
    time.sleep(every)
"""

ALONE, WATCHED, BESIDE = "alone", "watched", "beside as much other work"


def used_by(pid: int) -> float:
    """Return the seconds of processor time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(ranks: int, script: Path, mode: str, each: float) -> tuple[float, float]:
    """Return the microseconds of a barrier, and the processor time of one look."""
    command = [sys.executable, "-m", "syncprims", "run", "-n", str(ranks), str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        time.sleep(1.0)  # until it is under way
        beside: subprocess.Popen[bytes] | None = None
        if mode == WATCHED:
            who = [sys.executable, "-m", "syncprims", "who", str(job.pid), "--json"]
            beside = subprocess.Popen([*who, "--watch", str(EVERY)], stdout=subprocess.DEVNULL)
        if mode == BESIDE:
            beside = subprocess.Popen([sys.executable, "-c", BURN, str(EVERY), str(each)])
        begin, used = 0.0, 0.0
        if beside is not None:
            time.sleep(0.6)  # without its start
            begin, used = time.monotonic(), used_by(beside.pid)
            time.sleep(1.2)
            used = (used_by(beside.pid) - used) / (time.monotonic() - begin) * EVERY
        out, _ = job.communicate()
        if beside is not None:
            beside.kill()
            beside.wait()
    return float(out.rpartition("] ")[2]), used


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    seen: dict[str, list[float]] = {ALONE: [], WATCHED: [], BESIDE: []}
    each = 0.005
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "rank.py"
        script.write_text(RANK)
        for _ in range(options.turns):
            for mode in seen:
                figure, used = measured(options.ranks, script, mode, each)
                seen[mode].append(figure)
                if mode == WATCHED:
                    each = used
    title = f"barrier(), {options.ranks} ranks"
    print(*head(title, "median, us", "range", "of alone"), sep="\n")
    for mode, figures in seen.items():
        ratio = statistics.median(a / b for a, b in zip(figures, seen[ALONE], strict=True))
        span = f"{min(figures):.1f} to {max(figures):.1f}"
        print(row(mode, f"{statistics.median(figures):.1f}", span, f"{ratio:.2f}"))
    print(f"one look takes {each * 1e3:.1f} ms of processor time")


if __name__ == "__main__":
    main()
