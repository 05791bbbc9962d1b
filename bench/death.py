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
from syncprims._world.backends import load_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from scale import Scale

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
    load_backend("file"), sp.version()  # imported once, and not by every rank
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


def section(scale: Scale) -> dict[str, Any]:
    """Return the figures of all cases, and Gloo's of the first."""
    seen = Seen()
    print("kills: ours", file=sys.stderr, flush=True)
    for case, times in measure(scale.kills).items():
        seen.add(RANKS, OURS, {case: times, f"{case}, p99": [percentile(times, 0.99)]})
    print("kills: Gloo", file=sys.stderr, flush=True)
    peer = Path(__file__).with_name("peer_gloo_death.py")
    # A world of Gloo takes a while to begin, and less will do.
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
    """Return the time that this share of all is not above."""
    return sorted(times)[math.ceil(share * len(times)) - 1]


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the figures as a section of the results."""
    seen, kills = Seen.restored(data), data["kills"]
    found = [
        "",
        "## From a kill to the news, milliseconds",
        "",
        f"The slowest of the waiting ranks; {kills} kills in each case, of Gloo's ranks",
        f"{max(3, kills // 3)}. Ours are told which rank it was, and by which signal; Gloo's that",
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
    parser = argparse.ArgumentParser(description="Measure how soon a death is told.")
    parser.add_argument("--kills", type=int, default=50, help="in each case")
    seen = measure(parser.parse_args().kills)
    seen["all"] = [one for times in seen.values() for one in times]
    print("\n".join(head("milliseconds from a kill to the news", "kills", "median", "p99", "max")))
    for case, times in seen.items():
        shown = (statistics.median(times), percentile(times, 0.99), max(times))
        print(row(case, len(times), *map(short, shown)))


if __name__ == "__main__":
    main()
