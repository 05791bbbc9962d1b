"""How a waiting rank spends its time: it yields the processor or sleeps, and others wake it.

A rank that has waited for a while sleeps until another rank wakes it or a process ends. Its
doorbell is a named pipe. Correctness does not depend on it: a sleeping rank checks now and then.
"""

from __future__ import annotations

import contextlib
import os
import select
from typing import TYPE_CHECKING

from syncprims.errors import ConfigurationError

if TYPE_CHECKING:
    from .private_dir import PrivateDirectory

_LONG = 0.001  # seconds; among themselves, ranks wait for microseconds
_LONG_WEIGHT, _LIMIT = 3, 12  # a long wait counts as much as three short ones; when to sleep
_FEWEST, _MOST = 16, 256  # waits that sleep before yielding is tried again


class Doorbell:
    """The doorbell of `rank` in this directory, and the connections to those of other ranks."""

    def __init__(self, directory: PrivateDirectory, rank: int) -> None:
        """Create the pipe of this rank.

        :raises OSError: if there is no space for it.
        """
        self._directory = directory
        self._own = directory.open_pipe(_name(rank), create=True)
        self._fds = {rank: self._own}
        self._poll = select.poll()
        self._poll.register(self._own, select.POLLIN)

    def connect(self, rank: int) -> None:
        """Open the doorbell of `rank`; if that fails, this rank never wakes it."""
        if rank not in self._fds:
            with contextlib.suppress(OSError, ConfigurationError):
                self._fds[rank] = self._directory.open_pipe(_name(rank))

    def also_wake_for(self, fd: int) -> None:
        """End a sleep also when `fd` becomes readable; once."""
        self._poll.register(fd, select.POLLIN)

    def sleep(self, seconds: float) -> None:
        """Return when another rank wakes this one, a watched process ends, or the time is up."""
        for fd, _ in self._poll.poll(seconds * 1000):
            if fd == self._own:
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 4096)
            else:
                self._poll.unregister(fd)

    def wake(self, rank: int) -> None:
        """Wake `rank` if it sleeps. A thread may wake its own rank."""
        fd = self._fds.get(rank)
        if fd is not None:
            with contextlib.suppress(OSError):  # the pipe is full, so it wakes anyway
                os.write(fd, b"!")

    def close(self) -> None:
        """Close all pipes."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def _name(rank: int) -> str:
    return f"doorbell-{rank}"


class SpinPolicy:
    """Chooses between ``sched_yield`` and sleeping, from the last waits of a rank at one board.

    Yielding is by far the fastest if only ranks want the processor: each continues as soon as the
    one before it is done. If another CPU-bound process competes, each yield costs a whole time
    slice, for this rank or for those that wait for it. Then sleeping is better. Competition shows
    in long waits that come again and again, and not in single ones, as between rounds where ranks
    do work of their own. After some waits, yielding is tried again.
    """

    def __init__(self) -> None:
        self.sleeps = 0  #: so many of the next waits should sleep at once
        self._next = _FEWEST
        self._score = 0

    def count_wait(self) -> None:
        """Count a wait that was not over after a few looks."""
        if self.sleeps:
            self.sleeps -= 1

    def record(self, waited: float, weight: int = 1) -> None:
        """Record a wait of so many seconds, which stands for `weight` waits."""
        if waited > _LONG:
            self._score += _LONG_WEIGHT
            if self._score >= _LIMIT:
                self.sleeps, self._next = self._next, min(4 * self._next, _MOST)
                self._score -= _LONG_WEIGHT
        else:
            self._score = max(0, self._score - weight)
            if not self.sleeps:
                self._next = max(self._next // 2, _FEWEST)
