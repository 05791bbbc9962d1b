"""Measure what ``SYNCPRIMS_TRACE`` adds to a round, and the cost for a world without a trace.

    python bench/tracing.py [--before CHECKOUT] [--turns 9] [--ranks 1 2]

Worlds with and without a trace take turns, each in new processes. The added time is the median of
the differences within a turn. With one rank, processor time is measured. With more ranks it is wall
time, because ranks wait for each other. `--before` names a checkout without tracing, whose worlds
also take turns. The comparison shows what tracing costs a world that does not use it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from table import head, row

HERE = Path(__file__).parent.parent

RANK = """
import json, time
import syncprims as sp

sp.init()
alone = sp.get_world_size() == 1
clock = time.process_time if alone else time.perf_counter
count = 2000 if alone else 300
calls = {
    "barrier": sp.barrier,
    "named barrier": lambda: sp.barrier("epoch end"),
    "flag": lambda: sp.any_rank(False),
    "all_reduce of a float": lambda: sp.all_reduce(1.0),
}
figures = {}
for name, call in calls.items():
    blocks = []
    for _ in range(12):
        sp.barrier()
        begin = clock()
        for _ in range(count):
            call()
        blocks.append((clock() - begin) / count * 1e6)
    figures[name] = sorted(blocks)[2]  # other programs only add time
if sp.is_main():
    print(json.dumps(figures), flush=True)
"""


def measured(ranks: int, trace: str | None, checkout: Path) -> dict[str, float]:
    """Return the microseconds of each call in a new world."""
    clean = {name: value for name, value in os.environ.items() if "SYNCPRIMS" not in name}
    environ = {**clean, "PYTHONPATH": str(checkout)}
    if trace is not None:
        environ["SYNCPRIMS_TRACE"] = trace
    command = [sys.executable, "-c", RANK]
    if ranks > 1:
        script = Path(tempfile.gettempdir()) / f"bench-tracing-{os.getpid()}.py"
        script.write_text(RANK)
        command = [sys.executable, "-m", "syncprims", "run", "-n", str(ranks), str(script)]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=True, cwd=checkout
    )
    if ranks > 1:
        script.unlink()
    figures: dict[str, float] = json.loads(done.stdout.split("] ", 1)[-1])
    return figures


def table(ranks: int, turns: int, before: Path | None) -> list[str]:
    """Return the figures of a world with this number of ranks."""
    seen: dict[str, list[dict[str, float]]] = {"off": [], "on": [], "before": []}
    for _ in range(turns):
        with tempfile.TemporaryDirectory() as folder:
            if before is not None:
                seen["before"].append(measured(ranks, None, before))
            seen["off"].append(measured(ranks, None, HERE))
            seen["on"].append(measured(ranks, folder, HERE))
    titles = ["no trace, us", "with a trace, us", "added, us"]
    if before is not None:
        titles += ["before tracing existed, us", "no trace / before"]
    world = "a world of one" if ranks == 1 else f"{ranks} ranks, file backend"
    lines = head(world, *titles)
    for name in seen["off"][0]:
        off, on = ([turn[name] for turn in seen[what]] for what in ("off", "on"))
        added = statistics.median(b - a for a, b in zip(off, on, strict=True))
        cells = [statistics.median(off), statistics.median(on), added]
        if before is not None:
            earlier = [turn[name] for turn in seen["before"]]
            ratio = statistics.median(a / b for a, b in zip(off, earlier, strict=True))
            cells += [statistics.median(earlier), ratio]
        lines.append(row(name, *(f"{cell:.2f}" for cell in cells)))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="a checkout from before tracing existed")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    for ranks in options.ranks:
        print("\n".join(table(ranks, options.turns, options.before)), flush=True)


if __name__ == "__main__":
    main()
