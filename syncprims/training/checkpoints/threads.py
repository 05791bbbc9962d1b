"""Work in many small parts, shared out among threads. It has to leave the interpreter's lock alone.

As many threads as there are processors for each rank of this machine.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from syncprims import get_local_world_size

if TYPE_CHECKING:
    from collections.abc import Callable

_ALONE = 4  # parts up to which starting threads is not worth it
_MOST = 8  # threads: more would only wait for memory


def share(work: Callable[[int], int], count: int, tell: Callable[[int], object]) -> None:
    """Return when ``work(number)`` is done for all numbers below `count`.

    It returns how many bytes that were, which this thread tells to `tell`. What it raises is raised
    here, and then the numbers that are left are not begun.
    """
    parts = _Parts(work, count)
    # This thread takes part: one besides it is one less.
    helpers = min((os.cpu_count() or 1) // max(1, get_local_world_size()), _MOST) - 1
    if count <= _ALONE or helpers < 1:
        parts.run(tell)
        return
    with ThreadPoolExecutor(helpers, thread_name_prefix="syncprims-load") as pool:
        helping = [pool.submit(parts.run) for _ in range(helpers)]
        try:
            parts.run(tell)
        finally:
            parts.stop()  # also after an interrupt
        for helper in helping:
            helper.result()
    parts.say(tell)


class _Parts:
    """What is left to do, and what has been done."""

    def __init__(self, work: Callable[[int], int], count: int) -> None:
        self._work = work
        self._count = count
        self._next = 0
        self._done = self._told = 0
        self._lock = threading.Lock()

    def run(self, tell: Callable[[int], object] | None = None) -> None:
        """Do what nobody else does, until nothing is left."""
        while True:
            with self._lock:
                number = self._next
                if number >= self._count:
                    return
                self._next += 1
            try:
                done = self._work(number)
            except BaseException:
                self.stop()
                raise
            with self._lock:
                self._done += done
            if tell is not None:
                self.say(tell)

    def say(self, tell: Callable[[int], object]) -> None:
        """Tell what has been done since the last time."""
        with self._lock:
            new, self._told = self._done - self._told, self._done
        if new:
            tell(new)

    def stop(self) -> None:
        """Begin with nothing more."""
        with self._lock:
            self._next = self._count
