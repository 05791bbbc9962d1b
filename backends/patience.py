"""Whether to give the processor away, or to sleep: what a short wait does first.

Giving it away is by far the quickest where only ranks want it: each goes on as soon as the one
before it is done. Where somebody else wants it, who never gives it back by himself, that costs a
whole slice of his time, for this rank or for those that wait for it; and where ranks have work of
their own between the rounds, it gains nothing. Then sleeping until one is woken is better. Which it
is shows in how long the last waits took; now and then the other way is tried again.
"""

from __future__ import annotations

_LONG = 0.001  # seconds: ranks among themselves take microseconds
_SHORTEST, _LONGEST = 16, 256  # waits without trying it again


class Patience:
    """What the last waits of one rank at one board have taught it."""

    def __init__(self) -> None:
        self.waits = 0  #: that should sleep at once
        self._next = _SHORTEST

    def count(self) -> None:
        """Count a wait that took more than a few looks."""
        if self.waits:
            self.waits -= 1

    def learn(self, waited: float) -> None:
        """Learn from a wait of so many seconds."""
        if waited > _LONG:
            self.waits, self._next = max(self.waits, self._next), min(4 * self._next, _LONGEST)
        elif not self.waits:
            self._next = max(self._next // 2, _SHORTEST)
