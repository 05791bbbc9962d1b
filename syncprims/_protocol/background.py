"""The waits of one rank beside its rounds, and the transfers that go on in every wait.

A send whose data does not fit at once needs this rank again, and so does a receive of such data.
The other rank may wait for that while this one waits in another call: a collective, another
transfer, a store. So every wait of a world goes on with all of them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Protocol

from syncprims.errors import SyncError
from syncprims.interface import Awaited, Backend

from .deadlock import DeadlockDetector, search_after

_SEARCH_EVERY = 0.25  # seconds between two searches for a deadlock


class Task(Protocol):
    """Something that is not over, and takes its steps without waiting."""

    def can_move(self) -> bool:
        """Return whether there is a step to take now. Any thread may ask."""
        ...

    def move(self) -> bool:
        """Take all steps that need no waiting, and return whether there were any."""
        ...


class Background:
    """The tasks of one rank in one epoch of its world, and its waits."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.deadlocks: DeadlockDetector = DeadlockDetector(backend)
        self.tasks: dict[Task, None] = {}  #: empty nearly always
        #: Held while a task takes a step: several threads of this rank may wait.
        self.lock: threading.RLock = threading.RLock()

    def add(self, task: Task) -> None:
        """Continue `task` in later waits."""
        self.tasks[task] = None

    def drop(self, task: Task) -> None:
        """Continue `task` no more."""
        self.tasks.pop(task, None)

    def move(self) -> bool:
        """Take all steps that need no waiting, and return whether there were any.

        A task that fails is given up here; the call that waits for it raises the error.
        """
        moved = False
        # Another thread may add one. Without Python's global lock, `tuple` raises then, not `list`.
        for task in list(self.tasks):
            try:
                moved = task.move() or moved
            except SyncError:
                self.drop(task)
        return moved

    def wait(self, ready: Callable[[], bool], until: float, awaited: Awaited) -> bool:
        """Return as :meth:`Backend.wait`, and go on with all tasks meanwhile.

        If a call is named, and there is no time limit, a deadlock of this rank breaks the boards.
        """
        now = awaited.boards[0].now
        searches = awaited.call and until == math.inf and not awaited.boards[0].virtual_time
        first = search_after(awaited.boards[0])
        search_at = now() + first if searches else math.inf
        is_stuck = False

        def is_over() -> bool:
            nonlocal search_at, is_stuck
            if ready() or any(task.can_move() for task in list(self.tasks)):
                return True
            if now() >= search_at:
                search_at = now() + min(first, _SEARCH_EVERY)
                is_stuck = self.deadlocks.breaks(awaited)
            return is_stuck

        try:
            if not self.tasks:
                return self.backend.wait(is_over, until, awaited) and not is_stuck
            while not ready():
                late = now() >= until
                moves = self.backend.wait(is_over, until, awaited) and not is_stuck
                if not (self.move() or ready()) and (late or not moves):
                    return False  # the time is up, or a board is broken
            return True
        finally:
            if searches:
                self.deadlocks.end_wait()
