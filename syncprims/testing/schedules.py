"""Whose turn it is, decided by a seed.

A schedule is asked at every *step*, which is where a rank is about to post to a round, or waits.
Equal seeds give equal answers, on every Python and platform.

PCT is from Burckhardt, Kothari, Musuvathi and Nagarakatte, "A Randomized Scheduler with
Probabilistic Guarantees of Finding Bugs" (ASPLOS 2010): every rank has a random priority, the
highest that can run does, and at `depth - 1` random steps the running rank's becomes the lowest. A
bug that needs `depth` orderings to be right is found by one schedule with a probability of at least
``1 / (ranks * steps ** (depth - 1))``.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Schedule(Protocol):
    """Decides who goes on."""

    def pick(self, able: Sequence[int], current: int | None) -> int:
        """Return one of `able`, ascending; `current` is whose turn it was, if it can go on."""
        ...


class RandomSchedule:
    """Any rank that can go on, each as likely."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def pick(self, able: Sequence[int], current: int | None) -> int:
        """Return one of `able`."""
        return able[int(self._random() * len(able))]


class PCTSchedule:
    """The rank of the highest priority, which changes at few, random steps."""

    def __init__(self, seed: int, ranks: int, steps: int, depth: int) -> None:
        dice = random.Random(seed)
        order = list(range(ranks))
        dice.shuffle(order)
        self._priority = [depth + place for place in order]
        changes = [1 + int(dice.random() * steps) for _ in range(depth - 1)]
        self._changes = {step: depth - 1 - i for i, step in enumerate(changes)}
        self._step = 0

    def pick(self, able: Sequence[int], current: int | None) -> int:
        """Return the one of `able` with the highest priority."""
        self._step += 1
        lower = self._changes.get(self._step)
        if lower is not None:
            highest = max(able, key=self._priority.__getitem__)
            self._priority[highest if current is None else current] = lower
        return max(able, key=self._priority.__getitem__)


class Seed(NamedTuple):
    """What a schedule is made from; as text, it fits on a command line."""

    number: int
    depth: int = 0  #: of PCT; 0 is a random schedule
    steps: int = 0  #: of PCT: how many the program has, about

    def __str__(self) -> str:
        return f"pct{self.depth}-{self.steps}-{self.number}" if self.depth else str(self.number)

    @classmethod
    def read(cls, text: int | str) -> Seed:
        """Return what `text` says.

        :raises ValueError: if it is neither a number nor what a report has printed.
        """
        found = re.fullmatch(r"(?:pct([1-9]\d{0,3})-(\d{1,12})-)?(\d{1,20})", str(text).strip())
        if found is None:
            raise ValueError(f"seed={text!r}: a seed is a number, or pct<depth>-<steps>-<number>")
        depth, steps, number = found.groups()
        return cls(int(number), int(depth or 0), int(steps or 0))

    @classmethod
    def fresh(cls) -> Seed:
        """Return one that nobody has chosen."""
        return cls(random.SystemRandom().randrange(2**32))

    def plus(self, count: int) -> Seed:
        """Return the seed of a later schedule of the same kind."""
        return self._replace(number=self.number + count)

    def schedule(self, ranks: int) -> Schedule:
        """Return the schedule that this seed makes."""
        if self.depth:
            return PCTSchedule(self.number, ranks, max(1, self.steps), self.depth)
        return RandomSchedule(self.number)
