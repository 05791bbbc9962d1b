"""Barriers of forked processes that do nothing else, by several ways of waiting.

Usage: bare_barriers.py RANKS PLAN. Each rank stores its count, looks at all counts, and waits
between two looks. So the figures are those of the waits, and the floor of any barrier in Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import platform
import resource
import select
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_FUTEX = {"x86_64": 202, "aarch64": 98}  # the number of the system call
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYONE = 0, 1, 2**31 - 1
_FIRST = 32  # looks with a yield after each, before a wait that yields first


class Barrier:
    """A barrier of forked ranks in shared memory. Each rank has a line, and a count in it."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.rank, self.count = ranks, 0, 0
        self.memory = mmap.mmap(-1, 64 * (ranks + 1))
        self.counts = memoryview(self.memory).cast("i")
        self.word = ctypes.c_int.from_buffer(self.memory, 64 * ranks)  # the last complete round
        self.pipes = [os.pipe2(os.O_NONBLOCK) for _ in range(ranks)]
        self.system = ctypes.CDLL(None).syscall

    def arrive(self) -> None:
        """Store this rank's count."""
        self.count += 1
        self.counts[16 * self.rank] = self.count

    def is_full(self) -> bool:
        """Return whether all ranks have arrived; a rank may be one barrier ahead."""
        least = self.count
        return all(count >= least for count in self.counts[: 16 * self.ranks].tolist()[::16])

    def by_yield(self) -> None:
        """Yield the processor until all have arrived."""
        self.arrive()
        while not self.is_full():
            os.sched_yield()

    def by_futex(self, looks: int = 0) -> None:
        """Sleep in a futex, after some looks; the last rank wakes all at once."""
        self.arrive()
        number = self.count
        if self.is_full():
            self.word.value = number
            self._futex(_FUTEX_WAKE, _EVERYONE)
        for _ in range(looks):
            if self.word.value >= number:
                return
            os.sched_yield()
        while (seen := self.word.value) < number:
            if self.is_full():  # the last two came at one time
                self.word.value = number
            else:
                self._futex(_FUTEX_WAIT, seen)

    def by_yield_then_futex(self) -> None:
        """Yield some times, then sleep in a futex."""
        self.by_futex(_FIRST)

    def by_pipe(self) -> None:
        """Sleep at a pipe of this rank; the last rank writes to those of all others."""
        self.arrive()
        if self.is_full():
            for rank, (_, end) in enumerate(self.pipes):
                if rank != self.rank:
                    with contextlib.suppress(BlockingIOError):  # full: it wakes the rank anyway
                        os.write(end, b"x")
            return
        end = self.pipes[self.rank][0]
        while not self.is_full():
            select.select([end], [], [], 0.05)
            with contextlib.suppress(BlockingIOError):
                os.read(end, 64)

    def _futex(self, operation: int, value: int) -> None:
        number = _FUTEX[platform.machine()]
        self.system(number, ctypes.byref(self.word), operation, value, None, None, 0)


def run(ranks: int, way: str, seconds: float, *, sessions: bool) -> dict[str, float]:
    """Return the microseconds and the switches of a barrier, of rank 0.

    With `sessions` each rank is in a session of its own, as most launchers start it. Linux then
    schedules it in a group of its own (sched_autogroup), and a yield does not pass the processor on
    to a rank of another group.
    """
    barrier = Barrier(ranks)
    children: list[int] = []
    for rank in range(1, ranks):
        pid = os.fork()
        if not pid:
            barrier.rank = rank
            break
        children.append(pid)
    if sessions and os.getsid(0) != os.getpid():
        os.setsid()
    wait: Callable[[], None] = getattr(barrier, f"by_{way}")
    rounds = 20
    barrier.by_pipe()  # all have started
    figures: dict[str, float] = {}
    while True:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        begin = time.perf_counter()
        for _ in range(rounds):
            wait()
        spent = time.perf_counter() - begin
        after = resource.getrusage(resource.RUSAGE_SELF)
        figures = {
            "barrier": spent / rounds * 1e6,
            "voluntary": (after.ru_nvcsw - usage.ru_nvcsw) / rounds,
            "involuntary": (after.ru_nivcsw - usage.ru_nivcsw) / rounds,
        }
        if barrier.rank == 0:
            more = int(1.2 * rounds * seconds / spent) if spent < seconds else 0
            barrier.counts[16 * ranks + 1] = min(100_000, max(2 * rounds, more)) if more else 0
        barrier.by_pipe()
        following = barrier.counts[16 * ranks + 1]
        barrier.by_pipe()
        if not following or rounds == following:
            break
        rounds = following
    if barrier.rank:
        os._exit(0)
    for pid in children:
        os.waitpid(pid, 0)
    return figures


def main() -> None:
    plan = json.loads(sys.argv[2])
    print(json.dumps({k: [v] for k, v in run(int(sys.argv[1]), **plan).items()}))


if __name__ == "__main__":
    main()
