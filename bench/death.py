"""Measure the time from the kill of a rank until all waiting ranks raise.

    python bench/death.py [--kills N]

The time starts just before the signal is sent, and ends when `except PeerLost` starts on the
slowest waiting rank. Both are read from the monotonic clock of the host. Each kill uses a new world
of three ranks on the file backend.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from catalogue import OURS
from table import Seen, head, row, short, span

import syncprims as sp
from syncprims._world.registry import load_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from scale import Scale

RANKS = 3
VICTIM = 1
BATCH = 25  # worlds at a time
LONG = 2.5  # seconds of waiting, after which the sleeps have their full length
PATIENCE = 60.0


class Started(NamedTuple):
    """A world of forked ranks, and the pipe into which they write lines."""

    pids: list[int]
    pipe: int


def measure(kills: int) -> dict[str, list[float]]:
    """Return, for each case, the milliseconds until the slowest rank raised, for every kill."""
    load_backend("file"), sp.version()  # imported once here, not in every rank
    with hogs(os.cpu_count() or 1):
        loaded = _kill_many(kills)
    return {
        "quiet": _kill_many(kills),
        "every processor busy": loaded,
        "a forked child lives on": _kill_many(kills, prepare=_leave_a_child),
        "after a long wait": _kill_many(kills, wait=LONG),
    }


@contextlib.contextmanager
def hogs(count: int) -> Generator[None]:
    """Keep that many processors busy."""
    pids = [_fork(_burn) for _ in range(count)]
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _burn() -> None:
    parent = os.getppid()
    while os.getppid() == parent:  # ends with its parent, however that ends
        sum(range(100_000))


def _kill_many(
    kills: int, *, wait: float = 0.0, prepare: Callable[[int], None] | None = None
) -> list[float]:
    times: list[float] = []
    while len(times) < kills:
        times += _kill_batch(min(BATCH, kills - len(times)), wait, prepare)
    return times


def _kill_batch(count: int, wait: float, prepare: Callable[[int], None] | None) -> Iterator[float]:
    dice = random.Random(count)
    leash, end = os.pipe()  # a reader of `leash` ends when `end` is closed
    worlds: list[Started] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for _ in range(count):
                worlds.append(_start(folder, leash, end, prepare))
                _read_lines(worlds[-1].pipe, RANKS)  # all of them are about to wait
            time.sleep(max(wait, 0.02))
            for world in worlds:
                time.sleep(dice.uniform(0.0, 0.02))
                begin = time.monotonic_ns()
                os.kill(world.pids[VICTIM], signal.SIGKILL)
                yield (max(_read_lines(world.pipe, RANKS - 1)) - begin) / 1e6
        finally:
            os.close(end)
            os.close(leash)
            for world in worlds:
                for pid in world.pids:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                os.close(world.pipe)


def _start(folder: str, leash: int, end: int, prepare: Callable[[int], None] | None) -> Started:
    run_id = uuid.uuid4().hex
    reader, writer = os.pipe()

    def work(rank: int) -> None:
        os.close(end)
        os.environ.update(
            SYNCPRIMS_BACKEND="file",
            SYNCPRIMS_RANK=str(rank),
            SYNCPRIMS_WORLD_SIZE=str(RANKS),
            SYNCPRIMS_RUN_ID=run_id,
            SYNCPRIMS_DIR=folder,
        )
        with sp.init():
            sp.barrier()
            if rank == VICTIM and prepare is not None:
                prepare(leash)
            os.write(writer, b"0\n")
            if rank == VICTIM:
                time.sleep(PATIENCE)
            try:
                sp.barrier("in vain")
            except sp.PeerLost:
                os.write(writer, b"%d\n" % time.monotonic_ns())

    pids = [_fork(lambda rank=rank: work(rank)) for rank in range(RANKS)]  # type: ignore[misc]
    os.close(writer)
    return Started(pids, reader)


def _leave_a_child(leash: int) -> None:
    """Fork without the hooks of Python, as C code does. The child lives until the batch ends."""
    if ctypes.CDLL(None).fork() == 0:
        os.read(leash, 1)
        os._exit(0)


def _fork(body: Callable[[], None]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    try:
        body()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _read_lines(pipe: int, count: int) -> list[int]:
    """Return that many numbers from `pipe`, to which ranks write whole lines."""
    data = b""
    while data.count(b"\n") < count:
        ready, _, _ = select.select([pipe], [], [], PATIENCE)
        chunk = os.read(pipe, 4096) if ready else b""
        if not chunk:
            raise RuntimeError("a rank did not write its number")
        data += chunk
    return [int(line) for line in data.split()]


def section(scale: Scale) -> dict[str, Any]:
    """Return the figures of all cases, and of Gloo for the first case."""
    seen = Seen()
    print("kills: ours", file=sys.stderr, flush=True)
    for case, times in measure(scale.kills).items():
        seen.add(RANKS, OURS, {case: times, f"{case}, p99": [percentile(times, 0.99)]})
    print("kills: Gloo", file=sys.stderr, flush=True)
    peer = Path(__file__).with_name("peer_gloo_death.py")
    # A world of Gloo starts slowly, and fewer kills are enough.
    command = [sys.executable, str(peer), str(max(3, scale.kills // 3))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        reason = f"failed: {last}" if find_spec("torch") else "not installed: torch"
        seen.lack(RANKS, "Gloo", ("quiet", "quiet, p99"), reason)
    else:
        times = json.loads(done.stdout)["quiet"]
        seen.add(RANKS, "Gloo", {"quiet": times, "quiet, p99": [percentile(times, 0.99)]})
    return {**seen.stored(), "kills": scale.kills}


def percentile(times: Sequence[float], share: float) -> float:
    """Return the time that this share of `times` does not exceed."""
    return sorted(times)[math.ceil(share * len(times)) - 1]


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the section of the results page."""
    seen, kills = Seen.restored(data), data["kills"]
    found = [
        "",
        "## From a kill to the error on the last rank, milliseconds",
        "",
        f"The slowest of the waiting ranks. {kills} kills in each case,",
        f"{max(3, kills // 3)} of Gloo. Our error names the rank and the signal. Gloo says that",
        "a connection was closed.",
        *head("by", "case", "median", "p99", "range"),
    ]
    for _, library, case in seen.names():
        if not case.endswith(", p99"):
            median, p99 = (seen.median(RANKS, library, f"{case}{end}") for end in ("", ", p99"))
            times = seen.figures(RANKS, library, case)
            found.append(row(library, case, short(median or 0), short(p99 or 0), span(times)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how soon a killed rank is reported.")
    parser.add_argument("--kills", type=int, default=50, help="in each case")
    seen = measure(parser.parse_args().kills)
    seen["all"] = [one for times in seen.values() for one in times]
    print("\n".join(head("milliseconds from a kill to the error", "kills", "median", "p99", "max")))
    for case, times in seen.items():
        shown = (statistics.median(times), percentile(times, 0.99), max(times))
        print(row(case, len(times), *map(short, shown)))


if __name__ == "__main__":
    main()
