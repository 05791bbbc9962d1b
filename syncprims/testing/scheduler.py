"""One rank at a time: whoever has the turn passes it on, at rounds, as the schedule says.

Nobody stands above the ranks. The thread that gives up its turn decides who has it next, wakes that
one and sleeps: one change of threads for each change of ranks. As only one runs, nothing here needs
a lock; passing the turn orders what both do, also where there is no global interpreter lock.

Time is virtual: it stands still while anybody can go on, and else jumps to the next deadline. If
there is none, nobody ever goes on: that is a deadlock, for certain.
"""

from __future__ import annotations

import contextlib
import math
import threading
from typing import TYPE_CHECKING

from .errors import WorldAborted

if TYPE_CHECKING:
    from collections.abc import Callable

    from .schedules import Schedule


class _Turn:
    """One rank's place among the others."""

    __slots__ = ("done", "lock", "ready", "until")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()  # released once for every turn
        self.ready: Callable[[], bool] | None = None
        self.until = math.inf
        self.done = False

    def able(self, now: float) -> bool:
        if self.done:
            return False
        return self.ready is None or self.until <= now or self.ready()


def _never() -> bool:
    return False


class Scheduler:
    """Passes the turn among `ranks`. `on_stuck` may set somebody free when nobody can go on."""

    def __init__(self, ranks: int, schedule: Schedule, on_stuck: Callable[[], bool]) -> None:
        self.steps = 0  #: decisions made
        self.turn = 0  #: whose it is
        self.aborted = False
        self.stuck = False  #: it has come to a deadlock
        self.finished = threading.Event()
        self._turns = [_Turn() for _ in range(ranks)]
        self._schedule = schedule
        self._on_stuck = on_stuck
        self._now = 0.0

    # -- for boards ---------------------------------------------------------------------------

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def step(self, rank: int) -> None:
        """Let another rank go first, if the schedule says so."""
        if self.aborted:
            raise WorldAborted
        self._pass_on(rank)

    def wait(self, rank: int, ready: Callable[[], bool], until: float) -> None:
        """Let others go on until ``ready()``, or until the time has come."""
        if self.aborted:
            raise WorldAborted
        turn = self._turns[rank]
        turn.ready, turn.until = ready, until
        try:
            self._pass_on(rank)
        finally:
            turn.ready, turn.until = None, math.inf

    def sleep(self, rank: int, seconds: float) -> None:
        """Let others go on until so much virtual time has passed."""
        self.wait(rank, _never, self._now + seconds)

    def stop(self, rank: int) -> None:
        """Never let `rank` go on."""
        self.wait(rank, _never, math.inf)

    # -- for the threads ------------------------------------------------------------------------

    def begin(self) -> None:
        """Give the first turn; from outside of the world."""
        self._wake(self._choose(None))

    def enter(self, rank: int) -> None:
        """Wait for the first turn."""
        self._turns[rank].lock.acquire()
        if self.aborted:
            raise WorldAborted

    def leave(self, rank: int) -> None:
        """Take no more turns."""
        self._turns[rank].done = True
        with contextlib.suppress(WorldAborted):
            if not self.aborted:
                self._wake(self._choose(None))

    def abort(self) -> None:
        """Let every rank end at once with `WorldAborted`, when it next comes here."""
        self.aborted = True
        for rank in range(len(self._turns)):
            self._wake(rank)
        self.finished.set()

    # -- who is next ----------------------------------------------------------------------------

    def _pass_on(self, rank: int) -> None:
        chosen = self._choose(rank)
        if chosen != rank:
            self._wake(chosen)
            self._turns[rank].lock.acquire()
        if self.aborted:
            raise WorldAborted

    def _wake(self, rank: int | None) -> None:
        if rank is None:
            self.finished.set()
            return
        with contextlib.suppress(RuntimeError):  # it is awake, since the world has been given up
            self._turns[rank].lock.release()

    def _choose(self, current: int | None) -> int | None:
        """Return whose turn it is, or None when all are done."""
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
                self._now, self.stuck = now, True
                if not self._on_stuck():
                    self.abort()
                    raise WorldAborted
