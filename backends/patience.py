"""Whether to give the processor away, or to sleep: what a short wait does first.

Giving it away is by far the quickest where only ranks want it: each goes on as soon as the one
before it is done. Where somebody else wants it, who never gives it back by himself, that costs a
whole slice of his time, and sleeping until one is woken is quicker. Which it is shows in what it
took the last time; now and then it is tried again.
"""

from __future__ import annotations

import time

#: A wait is dear if it took more than a slice, and so much for each time: ranks among themselves
#: take a few microseconds.
_SLICE, _EACH = 0.001, 0.00005  # seconds
_SHORTEST, _LONGEST = 16, 4096  # waits without trying it again


class Patience:
    """What the last waits of one rank at one board have taught it."""

    def __init__(self) -> None:
        self.waits = 0  #: that should sleep at once
        self._next = _SHORTEST

    def count(self) -> None:
        """Count a wait that took more than a few looks."""
        if self.waits:
            self.waits -= 1

    def weigh(self, looks: int, begin: float) -> None:
        """Learn from a wait that has given the processor away so many times since `begin`."""
        if time.monotonic() - begin > _SLICE + looks * _EACH:
            self.waits, self._next = self._next, min(4 * self._next, _LONGEST)
        else:
            self._next = max(self._next // 2, _SHORTEST)
