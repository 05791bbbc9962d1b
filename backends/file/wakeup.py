"""A bell per rank: how a rank that sleeps is woken at once by whom it waits for.

A rank that has waited for a while sleeps until somebody rings, or until somebody dies. A bell is a
named pipe. Nothing depends on it being heard: who sleeps wakes up now and then to look.
"""

from __future__ import annotations

import contextlib
import os
import select
from typing import TYPE_CHECKING

from syncprims.errors import ConfigurationError

if TYPE_CHECKING:
    from .private_dir import PrivateDirectory


class Bells:
    """The bells of a table, as `rank` hears and rings them."""

    def __init__(self, directory: PrivateDirectory, rank: int) -> None:
        """Hang up one's own bell.

        :raises OSError: if there is no room for it.
        """
        self._directory = directory
        self._others: dict[int, int] = {}
        self._rank = rank
        self._own = directory.open_pipe(_name(rank), make=True)
        self._poll = select.poll()
        self._poll.register(self._own, select.POLLIN)

    def find(self, rank: int) -> None:
        """Get hold of the bell of `rank`; where that fails, it is not rung."""
        if rank not in self._others and rank != self._rank:
            with contextlib.suppress(OSError, ConfigurationError):
                self._others[rank] = self._directory.open_pipe(_name(rank))

    def wake_for(self, fd: int) -> None:
        """End a sleep also when `fd` becomes readable; once."""
        self._poll.register(fd, select.POLLIN)

    def sleep(self, seconds: float) -> None:
        """Return when this rank's bell is rung, when a watched process ends, or when time is up."""
        for fd, _ in self._poll.poll(seconds * 1000):
            if fd == self._own:
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 4096)
            else:
                self._poll.unregister(fd)

    def ring(self, rank: int) -> None:
        """Wake `rank`, if it sleeps; a thread of this rank may ring its own bell."""
        fd = self._own if rank == self._rank else self._others.get(rank)
        if fd is not None:
            with contextlib.suppress(OSError):  # full: it has been rung often enough
                os.write(fd, b"!")

    def close(self) -> None:
        """Let go of all bells."""
        for fd in (self._own, *self._others.values()):
            os.close(fd)
        self._others.clear()


def _name(rank: int) -> str:
    return f"bell-{rank}"
