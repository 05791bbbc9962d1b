"""Measure the time from the kill of a rank until all others compute again.

    python bench/survivors.py [--kills N]

The time starts just before the signal is sent, and ends when the slowest survivor has completed
the first all_reduce of the new world. Both are read from the monotonic clock of the host. Each kill
uses a new world. Beside it are launchers that start all ranks of the same job again.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalogue import OURS
from death import percentile
from table import Seen, head, row, short, span

import syncprims as sp
from syncprims.testing import Kill, run_world

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scale import Scale

RANKS = (4, 8)
STEPS = 20  # before the kill
OPERATION = "all compute again"
RESTARTS = {"torchrun, all start again": "torchrun", "syncprims run, all start again": "run"}


def job(folder: Path, *, goes_on: bool) -> None:
    """Reduce a number again and again; one rank kills itself, and the others write when they go on.

    If they do not go on by themselves, a launcher starts this again.
    """
    said = folder / "killed"
    rank, again = sp.get_rank(), said.exists()
    for step in range(10**9):
        try:
            sp.all_reduce(1.0)
        except sp.PeerLost:
            if not goes_on:
                raise
            sp.reform()
            rank, again = sp.get_rank(), True
            continue
        if again:
            (folder / f"{rank}.{time.monotonic_ns()}").touch()
            sp.barrier()
            return
        if step == STEPS and rank == 1:
            said.write_text(str(time.monotonic_ns()))
            os.kill(os.getpid(), signal.SIGKILL)


def killed(folder: Path) -> float:
    """Return the milliseconds from the kill until the slowest rank has gone on."""
    times = [int(path.name.partition(".")[2]) for path in folder.glob("[0-9]*.*")]
    return (max(times) - int((folder / "killed").read_text())) / 1e6


def by_launcher(how: str, ranks: int) -> float:
    """Return the time of one kill, of a job that a launcher runs."""
    with tempfile.TemporaryDirectory() as name:
        run = [sys.executable, "-m", "syncprims", "run"]
        command = {
            "elastic": [*run, "--elastic", f"1:{ranks}"],
            "run": [*run, "-n", str(ranks), "--max-restarts", "1"],
            "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone",
                         "--nproc-per-node", str(ranks), "--max-restarts", "1"],
        }[how]  # fmt: skip
        words = [*command, __file__, "--job", how, name]
        subprocess.run(words, check=True, capture_output=True, timeout=300)
        return killed(Path(name))


def in_threads(ranks: int) -> float:
    """Return the time of one kill in a world of threads."""
    times: list[float] = []

    def program() -> None:
        try:
            for step in range(STEPS):
                sp.all_reduce(1.0, name=f"step {step}")
                times[:] = [time.perf_counter()]
        except sp.PeerLost:
            sp.reform()
            sp.all_reduce(1.0)
            times.append(time.perf_counter())

    run_world(program, ranks, faults=[Kill(rank=1, at=f"step {STEPS - 1}")])
    return (times[-1] - times[0]) * 1e3


def measure(scale: Scale) -> dict[str, Any]:
    """Return the figures of all libraries."""
    seen = Seen()
    for ranks in RANKS:
        for library, how, kills in (
            (f"{OURS}, reform()", "elastic", scale.kills),
            *((name, how, max(2, scale.kills // 10)) for name, how in RESTARTS.items()),
        ):
            print(f"survivors: {library} at {ranks} ranks", file=sys.stderr, flush=True)
            if how == "torchrun" and not find_spec("torch"):
                seen.lack(ranks, library, (OPERATION,), "not installed: torch")
                continue
            times = [by_launcher(how, ranks) for _ in range(kills)]
            seen.add(ranks, library, {OPERATION: times, "p99": [percentile(times, 0.99)]})
        times = [in_threads(ranks) for _ in range(scale.kills)]
        figures = {OPERATION: times, "p99": [percentile(times, 0.99)]}
        seen.add(ranks, f"{OURS}, a world of threads", figures)
    return {**seen.stored(), "kills": scale.kills}


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the section of the results page."""
    seen, kills = Seen.restored(data), data["kills"]
    found = [
        "",
        "## From a kill until all others compute again, milliseconds",
        "",
        f"The slowest survivor has completed the first `all_reduce` after the loss. {kills} kills,",
        f"{max(2, kills // 10)} of those who start all ranks again.",
        *head("by", "ranks", "median", "p99", "range"),
    ]
    for ranks, library, operation in seen.names():
        if operation == OPERATION:
            p99 = seen.median(ranks, library, "p99")
            median = seen.median(ranks, library, operation)
            times = seen.figures(ranks, library, operation)
            found.append(row(library, ranks, short(median or 0), short(p99 or 0), span(times)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how soon survivors go on.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        how, folder = options.job[0], Path(options.job[1])
        job(folder, goes_on=how == "elastic")
        return
    for ranks in RANKS:
        print(
            row(ranks, *map(short, (by_launcher("elastic", ranks) for _ in range(options.kills))))
        )


if __name__ == "__main__":
    main()
