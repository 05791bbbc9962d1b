"""Transfers that still need notes of a rank, and that it continues in each of its waits.

A send whose data does not fit at once needs this rank again, and so does a receive of such data.
The other rank may wait for that while this one waits in another call: a collective, another
transfer, a store. So every wait of a world goes on with all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from syncprims.errors import SyncError
from syncprims.interface import Awaited, Backend, Board, Note, ends_round


class Task(Protocol):
    """Something that is not over, and takes its steps without waiting."""

    def can_move(self) -> bool:
        """Return whether there is a step to take now. Any thread may ask."""
        ...

    def move(self) -> bool:
        """Take all steps that need no waiting, and return whether there were any."""
        ...


class Background:
    """The tasks of one rank in one world."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.tasks: dict[Task, None] = {}  #: empty nearly always
        #: Held while a task takes a step: several threads of this rank may wait.
        self.lock: threading.RLock = threading.RLock()

    def keep(self, task: Task, *, unfinished: bool) -> None:
        """Continue `task` in later waits, or stop it."""
        if unfinished:
            self.tasks[task] = None
        else:
            self.tasks.pop(task, None)

    def move(self) -> bool:
        """Take all steps that need no waiting, and return whether there were any.

        A task that fails is given up here; the call that waits for it raises the error.
        """
        moved = False
        for task in tuple(self.tasks):
            try:
                moved = task.move() or moved
            except SyncError:
                self.keep(task, unfinished=False)
        return moved

    def collect(self, board: Board, limit: float) -> Sequence[Note] | None:
        """Return as ``board.collect(limit)``, and go on with all tasks meanwhile."""
        notes = board.collect(0.0)
        if notes is None:
            until = board.now() + limit
            if not self.wait(lambda: _is_settled(board), until, Awaited(boards=[board])):
                return None
            notes = board.collect(0.0)
        return notes

    def wait(self, ready: Callable[[], bool], until: float, awaited: Awaited) -> bool:
        """Return as :meth:`Backend.wait`, and go on with all tasks meanwhile."""
        if not self.tasks:
            return self._backend.wait(ready, until, awaited)

        def can_move() -> bool:
            return any(task.can_move() for task in tuple(self.tasks))

        now = awaited.boards[0].now
        while not ready():
            late = now() >= until
            moves = self._backend.wait(lambda: ready() or can_move(), until, awaited)
            if not (self.move() or ready()) and (late or not moves):
                return False  # the time is up, or a board is broken
        return True


def _is_settled(board: Board) -> bool:
    """Return whether the oldest uncollected round is complete, or never will be."""
    if board.verdict() is not None:
        return True
    seen = [board.status(member) for member in board.members]
    missing = [status.rounds <= board.collected for status in seen]
    ended = any(ends_round(s.state, absent) for s, absent in zip(seen, missing, strict=True))
    return ended or not any(missing)
