"""Measure how soon waiting ranks are told that one of them was killed.

    python bench/death.py [--kills N]

The time is from just before the signal is sent to the moment at which the slowest waiter's
`except PeerLost` starts, on the one monotonic clock of the host. Each kill is in a world of its
own, of three ranks of the file backend.
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
import tempfile
import time
import traceback
import uuid
import warnings
from typing import TYPE_CHECKING, NamedTuple

import syncprims as sp
from syncprims.registry import backend_class

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

RANKS = 3
VICTIM = 1
BATCH = 25  # worlds at a time
LONG = 2.5  # seconds of waiting, after which the naps have their full length
PATIENCE = 60.0


class Started(NamedTuple):
    """A world of forked ranks, and the pipe in which they speak, a line at a time."""

    pids: list[int]
    pipe: int


def measure(kills: int) -> dict[str, list[float]]:
    """Return, for each case, the milliseconds to the slowest waiter's news of every kill."""
    backend_class("file"), sp.version()  # imported once, and not by every rank
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
    """Keep as many processors busy."""
    pids = [_fork(_burn) for _ in range(count)]
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _burn() -> None:
    parent = os.getppid()
    while os.getppid() == parent:  # whatever happens to it, nobody burns on
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
    leash, end = os.pipe()  # whoever reads the one ends with the other
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
    """Fork as C code would, so that no hook of Python runs; the child lives to the batch's end."""
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
    """Return that many numbers from `pipe`, which ranks write a whole line at a time."""
    data = b""
    while data.count(b"\n") < count:
        ready, _, _ = select.select([pipe], [], [], PATIENCE)
        chunk = os.read(pipe, 4096) if ready else b""
        if not chunk:
            raise RuntimeError("a rank did not say what it should")
        data += chunk
    return [int(line) for line in data.split()]


def summary(times: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the longest of `times`."""
    ranked = sorted(times)
    return {
        "kills": len(ranked),
        "median": round(statistics.median(ranked), 2),
        "p99": round(ranked[math.ceil(0.99 * len(ranked)) - 1], 2),
        "max": round(ranked[-1], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how soon a death is told.")
    parser.add_argument("--kills", type=int, default=50, help="in each case")
    seen = measure(parser.parse_args().kills)
    figures = {case: summary(times) for case, times in seen.items()}
    figures["all"] = summary([one for times in seen.values() for one in times])
    print(json.dumps(figures))
    print("\n| milliseconds from a kill to the news | kills | median | p99 | max |")
    print("|---|---|---|---|---|")
    for case, figure in figures.items():
        print(f"| {case} | " + " | ".join(str(number) for number in figure.values()) + " |")


if __name__ == "__main__":
    main()
