"""Ranks that are threads of one process, for tests: one runs at a time, and time is virtual.

Who runs next is not decided here: a *referee* passes the turn on, at rounds only. So nothing needs
a lock, and whether a rank can ever go on is known and not guessed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from syncprims import errors
from syncprims.errors import CollectiveMismatch, ConfigurationError
from syncprims.interface import Backend, Board, Note, Settings, Status, Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncprims.interface import State


class Referee(Protocol):
    """Who decides whose turn it is."""

    def now(self) -> float:
        """Return the virtual time in seconds."""
        ...

    def step(self, rank: int) -> None:
        """Let another rank go first, if it likes."""
        ...

    def wait(self, rank: int, ready: Callable[[], bool], until: float) -> None:
        """Let others go on until ``ready()``, or until the time has come."""
        ...


class Room:
    """Where the ranks of one world meet."""

    def __init__(self, referee: Referee, world_size: int) -> None:
        self.referee = referee
        self.boards: dict[tuple[int, ...], Shared] = {}
        self.waiting: dict[int, ThreadBoard] = {}  #: ranks that wait, and where
        self.states: list[State] = ["unknown"] * world_size
        self.departed = False  #: is any rank gone?
        self._details = [""] * world_size
        self._failures = [b""] * world_size
        self._words = [b""] * world_size

    def backend(self, topology: Topology, settings: Settings) -> ThreadBackend:
        """Return the seat of one rank."""
        return ThreadBackend(topology, settings, self)

    def lose(self, rank: int, detail: str) -> None:
        """Let the others see `rank` as dead from now on, whatever it still does."""
        self.states[rank], self._details[rank] = "lost", detail
        self.departed = True

    def ended(self, rank: int) -> tuple[State, str, bytes]:
        """Return the state of `rank`, how it ended, and the failure it left."""
        return self.states[rank], self._details[rank], self._failures[rank]

    def break_deadlock(self) -> bool:
        """Tell ranks that wait for each other at different boards, as production would.

        Returns False if there are none: they wait for somebody who is not here.
        """
        stuck: dict[int, ThreadBoard] = {}
        found = self.waiting
        while found != stuck:  # until only those are left whose way leads into a circle
            stuck, found = found, {r: b for r, b in found.items() if b.missing() & found.keys()}
        if not stuck:
            return False
        lines = "\n".join(
            f"  rank {rank}: {board.status(rank).label} in group {list(board.members)}"
            for rank, board in sorted(stuck.items())
        )
        rank = min(stuck)
        error = CollectiveMismatch(
            f"ranks wait for each other in different groups, and none can go on:\n{lines}\n"
            f"Every rank must make the calls of different groups in the same order.",
            rank=rank,
            call=str(stuck[rank].status(rank).label),
        )
        for board in stuck.values():
            board.abort(errors.dump(error))
        return True

    def leave(self, rank: int, failure: bytes | None) -> None:
        """Let the others see how `rank` has ended."""
        if self.states[rank] == "alive":
            self.states[rank] = "finished" if failure is None else "failed"
            self._failures[rank] = failure or b""
            self.departed = True

    def say(self, rank: int, word: bytes) -> None:
        """Keep the latest word of `rank`."""
        self._words[rank] = word

    def heard(self, rank: int) -> bytes:
        """Return it."""
        return self._words[rank]


class Shared:
    """What the members of one board have in common."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.posted = dict.fromkeys(members, 0)
        self.last: dict[int, Note] = {}
        self.rounds: dict[int, dict[int, Note]] = {}  # number -> rank -> note
        self.readers: dict[int, int] = {}  # number -> how many have collected it
        self.aborted_at = math.inf
        self.verdict: bytes | None = None


def _for_tests() -> ConfigurationError:
    return ConfigurationError(
        "backend 'threads' is for tests, where ranks are threads of one process: "
        "syncprims.testing.run_world starts them. For real ranks choose 'file' or 'torch'"
    )


class ThreadBackend(Backend):
    """A rank that is a thread."""

    name = "threads"
    spans_hosts = True  # as far as a test pretends
    detects_death = True

    def __init__(self, topology: Topology, settings: Settings, room: Room | None = None) -> None:
        if room is None:
            raise _for_tests()
        super().__init__(topology, settings)
        self._room = room
        room.states[topology.rank] = "alive"

    @classmethod
    def check(cls, topology: Topology, settings: Settings) -> None:
        """Refuse: only a test has a room for it."""
        raise _for_tests()

    @classmethod
    def room(cls, referee: Referee, world_size: int) -> Room:
        """Return the room of a new world."""
        return Room(referee, world_size)

    def board(self, members: Sequence[int]) -> ThreadBoard:
        """Return the board of `members`."""
        return ThreadBoard(members, self.topology.rank, self._room)

    def close(self, failure: bytes | None = None) -> None:
        """Say how this rank ends."""
        self._room.leave(self.topology.rank, failure)

    def publish(self, word: bytes) -> None:
        """Let others read `word`."""
        self._room.say(self.topology.rank, word)

    def published(self, rank: int) -> bytes:
        """Return the latest word of `rank`."""
        return self._room.heard(rank)


class ThreadBoard(Board):
    """The board of `members`, seen from `rank`."""

    virtual_time = True

    def __init__(self, members: Sequence[int], rank: int, room: Room) -> None:
        super().__init__(members)
        self._rank = rank
        self._room = room
        self._referee = room.referee
        self._shared = room.boards.setdefault(self.members, Shared(self.members))

    def post(self, note: Note) -> None:
        """Pin up the note."""
        if self.posted > self.collected:
            self._referee.step(self._rank)  # it goes on without waiting: others may be faster
        shared = self._shared
        self.posted += 1
        notes = shared.rounds.setdefault(self.posted, {})
        notes[self._rank] = note
        shared.posted[self._rank] = self.posted
        shared.last[self._rank] = note

    def collect(self, timeout: float | None = None) -> Sequence[Note] | None:
        """Return the oldest uncollected round's notes, others going on meanwhile."""
        if self._complete():
            self._referee.step(self._rank)  # the last to come need not be the first to go on
        elif not self._in_vain():
            self.waiting_since = self._referee.now()
            until = self.waiting_since + (math.inf if timeout is None else timeout)
            self._room.waiting[self._rank] = self
            try:
                self._referee.wait(self._rank, self._settled, until)
            finally:
                self._room.waiting.pop(self._rank, None)
        if not self._complete():
            return None
        self.collected += 1
        return self._take(self.collected)

    def _take(self, number: int) -> tuple[Note, ...]:
        shared = self._shared
        notes = shared.rounds[number]
        readers = shared.readers[number] = shared.readers.get(number, 0) + 1
        if readers == len(self.members):
            del shared.rounds[number], shared.readers[number]
        return tuple(notes[member] for member in self.members)

    def _complete(self) -> bool:
        """Tell whether the oldest uncollected round may be collected."""
        number, shared = self.collected + 1, self._shared
        notes = shared.rounds.get(number)
        return notes is not None and len(notes) == len(self.members) and number < shared.aborted_at

    def _in_vain(self) -> bool:
        """Tell whether it never will be."""
        if self.verdict() is not None:
            return True
        if not self._room.departed:
            return False
        states, missing = self._room.states, self.missing()
        return any(
            states[member] in ("lost", "failed")
            or (states[member] == "finished" and member in missing)
            for member in self.members
        )

    def _settled(self) -> bool:
        return self._complete() or self._in_vain()

    def missing(self) -> set[int]:
        """Return the members whose notes the oldest uncollected round lacks."""
        number = self.collected + 1
        return {rank for rank, posted in self._shared.posted.items() if posted < number}

    def status(self, rank: int) -> Status:
        """Tell what is known of `rank`."""
        last = self._shared.last.get(rank)
        label = last.label if last is not None else None
        return Status(self._shared.posted[rank], label, *self._room.ended(rank))

    def abort(self, verdict: bytes) -> None:
        """Break the board at the oldest uncollected round, unless it is complete."""
        shared = self._shared
        if shared.verdict is None and self.missing():
            shared.aborted_at, shared.verdict = self.collected + 1, verdict

    def verdict(self) -> bytes | None:
        """Return the verdict that bars the oldest uncollected round, if there is one."""
        return self._shared.verdict if self._shared.aborted_at <= self.collected + 1 else None

    def now(self) -> float:
        """Return the virtual time."""
        return self._referee.now()
