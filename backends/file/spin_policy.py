"""Whether to give the processor away, or to sleep: what a short wait does first.

Giving it away is by far the quickest where only ranks want it: each goes on as soon as the one
before it is done. Where somebody else wants it, who never gives it back by himself, that costs a
whole slice of his time, for this rank or for those that wait for it. Then sleeping until one is
woken is better. It shows in long waits that come again and again, and not in one now and then, as
where ranks have work of their own between some rounds. After a while the other way is tried again.
"""

from __future__ import annotations

_LONG = 0.001  # seconds: ranks among themselves take microseconds
_WEIGHT, _ENOUGH = 3, 12  # a long wait weighs as much as so many short ones; so much is enough
_SHORTEST, _LONGEST = 16, 256  # waits without trying it again


class Patience:
    """What the last waits of one rank at one board have taught it."""

    def __init__(self) -> None:
        self.waits = 0  #: that should sleep at once
        self._next = _SHORTEST
        self._score = 0

    def count(self) -> None:
        """Count a wait that took more than a few looks."""
        if self.waits:
            self.waits -= 1

    def learn(self, waited: float, standing_for: int = 1) -> None:
        """Learn from a wait of so many seconds, one of several if only some are told."""
        if waited > _LONG:
            self._score += _WEIGHT
            if self._score >= _ENOUGH:
                self.waits, self._next = self._next, min(4 * self._next, _LONGEST)
                self._score -= _WEIGHT
        else:
            self._score = max(0, self._score - standing_for)
            if not self.waits:
                self._next = max(self._next // 2, _SHORTEST)
