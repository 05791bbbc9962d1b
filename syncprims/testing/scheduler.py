"""One rank at a time, in an order that a seed decides.

A rank gives up its turn where it waits for a round, or completes one. There the schedule decides
who is next: the thread wakes that rank and sleeps, which is one thread switch per change of ranks;
there is no thread above the ranks. As only one rank runs, nothing here needs a lock, and passing
the turn orders the memory accesses of both threads, also without a global interpreter lock.

Time is virtual: it stands still while any rank can continue, and else jumps to the next deadline.
If there is no deadline either, no rank can ever continue, for certain.

Equal seeds give equal schedules, on every Python and platform. PCT is from Burckhardt, Kothari,
Musuvathi and Nagarakatte, "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs"
(ASPLOS 2010): every rank has a random priority, the highest that can run does, and at `depth - 1`
random steps the priority of the running rank becomes the lowest. A bug that needs `depth` orderings
to occur is found by one schedule with a probability of at least
``1 / (ranks * steps ** (depth - 1))``.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .errors import WorldAborted


class RandomSchedule:
    """Picks any rank that can continue, each with equal probability."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def pick(self, able: Sequence[int], current: int | None) -> int:
        """Return one of `able`; called at every step, where a rank gives up its turn."""
        return able[int(self._random() * len(able))]


class PCTSchedule:
    """Picks the rank of the highest priority; priorities change at a few random steps."""

    def __init__(self, seed: int, ranks: int, steps: int, depth: int) -> None:
        source = random.Random(seed)
        order = list(range(ranks))
        source.shuffle(order)
        self._priority = [depth + place for place in order]
        changes = [1 + int(source.random() * steps) for _ in range(depth - 1)]
        self._changes = {step: depth - 1 - i for i, step in enumerate(changes)}
        self._step = 0

    def pick(self, able: Sequence[int], current: int | None) -> int:
        """Return the one of `able` with the highest priority.

        :param current: the rank that had the turn, or None if it cannot continue.
        """
        self._step += 1
        lower = self._changes.get(self._step)
        if lower is not None:
            highest = max(able, key=self._priority.__getitem__)
            self._priority[highest if current is None else current] = lower
        return max(able, key=self._priority.__getitem__)


class Seed(NamedTuple):
    """What determines a schedule; as text, it fits on a command line."""

    number: int
    depth: int = 0  #: of PCT; 0 is a random schedule
    steps: int = 0  #: of PCT: about how many the program has

    def __str__(self) -> str:
        return f"pct{self.depth}-{self.steps}-{self.number}" if self.depth else str(self.number)

    @classmethod
    def read(cls, text: int | str) -> Seed:
        """Return the seed that `text` stands for.

        :raises ValueError: if it is neither a number nor a seed that a report has printed.
        """
        found = re.fullmatch(r"(?:pct([1-9]\d{0,3})-(\d{1,12})-)?(\d{1,20})", str(text).strip())
        if found is None:
            raise ValueError(f"seed={text!r}: a seed is a number, or pct<depth>-<steps>-<number>")
        depth, steps, number = found.groups()
        return cls(int(number), int(depth or 0), int(steps or 0))

    def schedule(self, ranks: int) -> RandomSchedule | PCTSchedule:
        """Return the schedule of this seed."""
        if self.depth:
            return PCTSchedule(self.number, ranks, max(1, self.steps), self.depth)
        return RandomSchedule(self.number)


class _RankTurn:
    """What the scheduler knows of one rank."""

    __slots__ = ("done", "lock", "ready", "until")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()  # released when the rank gets the turn
        self.ready: Callable[[], bool] | None = None
        self.until = math.inf
        self.done = False

    def able(self, now: float) -> bool:
        if self.done:
            return False
        return self.ready is None or self.until <= now or self.ready()


class Scheduler:
    """Passes the turn among `ranks`.

    `break_standstill` is called when no rank can continue and there is no deadline to wait for. It
    returns whether it has enabled a rank to continue; otherwise the world is aborted.
    """

    def __init__(
        self,
        ranks: int,
        schedule: RandomSchedule | PCTSchedule,
        break_standstill: Callable[[], bool],
    ) -> None:
        self.steps = 0  #: decisions made
        self.turn = 0  #: the rank that runs
        self.aborted = False
        self.finished = threading.Event()
        self._turns = [_RankTurn() for _ in range(ranks)]
        self._schedule = schedule
        self._break_standstill = break_standstill
        self._now = 0.0

    # -- called by boards ---------------------------------------------------------------------

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def step(self, rank: int) -> None:
        """Give the turn to the rank that the schedule picks, and return when it is back."""
        if self.aborted:
            raise WorldAborted
        chosen = self._choose(rank)
        if chosen != rank:
            self._wake(chosen)
            self.enter(rank)

    def wait(self, rank: int, ready: Callable[[], bool], until: float) -> None:
        """Return when ``ready()`` is true or the virtual time is `until`; other ranks run."""
        turn = self._turns[rank]
        turn.ready, turn.until = ready, until
        try:
            self.step(rank)
        finally:
            turn.ready, turn.until = None, math.inf

    def sleep(self, rank: int, seconds: float) -> None:
        """Return after so many seconds of virtual time; other ranks run meanwhile."""
        self.wait(rank, lambda: False, self._now + seconds)

    # -- called by the threads of a world -------------------------------------------------------

    def begin(self) -> None:
        """Give the first turn to a rank; called from outside the world."""
        self._wake(self._choose(None))

    def enter(self, rank: int) -> None:
        """Return when `rank` has the turn."""
        self._turns[rank].lock.acquire()
        if self.aborted:
            raise WorldAborted

    def leave(self, rank: int) -> None:
        """End the turns of `rank`."""
        self._turns[rank].done = True
        with contextlib.suppress(WorldAborted):
            if not self.aborted:
                self._wake(self._choose(None))

    def abort(self) -> None:
        """Raise `WorldAborted` on every rank, now or at its next call of the scheduler."""
        self.aborted = True
        for rank in range(len(self._turns)):
            self._wake(rank)
        self.finished.set()

    # -- passing the turn -----------------------------------------------------------------------

    def _wake(self, rank: int | None) -> None:
        if rank is None:
            self.finished.set()
            return
        with contextlib.suppress(RuntimeError):  # it is awake already: the world is given up
            self._turns[rank].lock.release()

    def _choose(self, current: int | None) -> int | None:
        """Return the rank that has the turn now, or None when all are done."""
        while True:
            now = self._now
            able = [rank for rank, turn in enumerate(self._turns) if turn.able(now)]
            if able:
                self.steps += 1
                self.turn = self._schedule.pick(able, current if current in able else None)
                return self.turn
            live = [turn for turn in self._turns if not turn.done]
            if not live:
                return None
            self._now = max(now, min(turn.until for turn in live))
            if self._now == math.inf:
                self._now = now
                if not self._break_standstill():
                    self.abort()
                    raise WorldAborted
