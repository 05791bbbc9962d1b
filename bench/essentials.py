"""Measure what everybody pays: importing, a world of one, and rounds between processes.

    python bench/essentials.py [--write]

Peers run in the same call, so that their ratios hold on any machine. Every figure is the median of
several runs; `--write` puts them into RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import timeit
from pathlib import Path

import peers

import syncprims as sp

HERE = Path(__file__).parent


def clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if "SYNCPRIMS" not in k and k != "PYTHONPATH"}


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
    return statistics.median(times) / number * 1e6


def our_rounds(ranks: int, rounds: int) -> dict[str, float]:
    job = str(HERE / "rounds_job.py")
    command = [sys.executable, "-m", "syncprims", "run", "-n", str(ranks), job, str(rounds)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=clean())
    figures: dict[str, float] = json.loads(done.stdout.removeprefix("[rank 0] "))
    return figures


def between_processes(ranks: int, runs: int) -> dict[str, list[float]]:
    """Return several runs of each figure, ours and the peers' in turn."""
    seen: dict[str, list[float]] = {}
    for _ in range(runs):
        for name, figure in our_rounds(ranks, 5000).items():
            seen.setdefault(f"syncprims {name}", []).append(figure)
        others = {
            "pthread barrier, in C": peers.pthread(ranks, 5000),
            "multiprocessing.Barrier": peers.multiprocessing_barrier(ranks, 1000),
            "torch.distributed.barrier, Gloo": peers.gloo(ranks, 300),
        }
        for name, peer in others.items():
            if peer is not None:
                seen.setdefault(name, []).append(peer)
    return seen


def report(runs: int) -> str:
    bare, added = import_cost(4 * runs + 1)
    lines = [
        "# Results",
        "",
        (
            f"Made by `make bench` with syncprims {sp.version()}, Python "
            f"{platform.python_version()}, {os.cpu_count()} processors, {platform.system()} "
            f"{platform.machine()}. Medians; for rounds, of {runs} runs, with their range."
        ),
        "",
        "Trust the ratios: the peers ran in the same minutes on the same machine.",
        "",
        "| what | median |",
        "|---|---|",
        f"| a bare interpreter | {bare:.1f} ms |",
        f"| `import syncprims` on top of it | {added:.1f} ms |",
        f"| `barrier()` in a world of one | {lone_barrier(runs):.2f} us |",
    ]
    for ranks in (2, 4, 8):
        seen = between_processes(ranks, runs)
        ours = statistics.median(seen["syncprims barrier"])
        lines += [
            "",
            f"## {ranks} ranks",
            "",
            "| microseconds per call | median | range | of our barrier |",
            "|---|---|---|---|",
        ]
        for name, figures in seen.items():
            median = statistics.median(figures)
            span = f"{min(figures):.1f} - {max(figures):.1f}"
            lines.append(f"| {name} | {median:.1f} | {span} | {median / ours:.2f} x |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the essentials.")
    parser.add_argument("--write", action="store_true", help="also write RESULTS.md")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    text = report(options.runs)
    print(text)
    if options.write:
        (HERE / "RESULTS.md").write_text(text)


if __name__ == "__main__":
    main()
