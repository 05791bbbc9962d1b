"""Ranks that are threads of one process, for tests: one runs at a time, and time is virtual.

A *scheduler* decides which rank runs next, and switches at rounds only. So nothing needs a lock,
and whether a rank can ever continue is known and not guessed. Small values have slots in shared
memory; there is no window and no engine, so arrays travel in the notes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal, NoReturn, Protocol

from syncprims.errors import ConfigurationError, load
from syncprims.interface import (
    NOTHING,
    Awaited,
    Backend,
    Board,
    Label,
    Note,
    Settings,
    State,
    Status,
    Topic,
    Topology,
    Window,
    ends_round,
)

_ENDS, _JOINS = "ends", "joins"  # what ranks access
_BoardKey = tuple[int, tuple[int, ...], str]  # epoch, members, name
_SMALL_SLOT = 1024  # bytes for the small values of a member in each of two rounds


class RankScheduler(Protocol):
    """Decides which rank runs."""

    exact: bool  #: all orders are explored: it has to know what ranks access

    def now(self) -> float:
        """Return the virtual time in seconds."""
        ...

    def step(self, rank: int) -> None:
        """Run another rank first, or not."""

    def access(
        self, rank: int, thing: Hashable, mode: Literal["read", "write", "post", "collect"]
    ) -> None:
        """Record that `rank` accesses something that ranks share: orders of that may differ."""

    def inside(self, rank: int) -> AbstractContextManager[object]:
        """Return a context that keeps other threads out of boards, except where this one waits."""
        ...

    def wait(self, rank: int, ready: Callable[[], bool], until: float) -> None:
        """Run other ranks until ``ready()``, or until the time is `until`."""


class SharedWorld:
    """The state that the processes of one world share: threads, by the number of each."""

    def __init__(self, scheduler: RankScheduler, members: Sequence[int]) -> None:
        self.scheduler = scheduler
        self.members = tuple(members)  #: by rank, in the newest epoch
        self.boards: dict[_BoardKey, _SharedBoard] = {}
        #: Where a thread waits; with the call if it waits for the first of several notes.
        self.waiting: dict[ThreadBoard | _OtherWait, str] = {}
        #: of each process: the state, how it ended, and the failure it left
        self.states: dict[int, tuple[State, str, bytes]] = {}
        self.ended: set[int] = set()  #: processes
        self.published: dict[tuple[Topic, int], bytes] = {}
        self.decisions: dict[str, str] = {}

    def state(self, process: int) -> tuple[State, str, bytes]:
        """Return the state of a process."""
        return self.states.get(process, ("unknown", "", b""))

    def lose(self, process: int, detail: str) -> None:
        """Show a rank to the others as dead from now on, whatever it still does."""
        self.scheduler.access(process, _ENDS, "post")
        self.states[process] = "lost", detail, b""
        self.ended.add(process)

    def leave(self, process: int, failure: bytes | None) -> None:
        """Show to the others how a rank has ended."""
        if self.states[process][0] == "alive":
            self.scheduler.access(process, _ENDS, "post")
            self.states[process] = "finished" if failure is None else "failed", "", failure or b""
            self.ended.add(process)


class _SharedBoard:
    """The state that the members of one board share."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.posted = dict.fromkeys(members, 0)
        self.last: dict[int, Label] = {}  # of the last note of each member
        self.rounds: dict[int, dict[int, Note]] = {}  # number -> rank -> note
        self.readers: dict[int, int] = {}  # number -> how many have collected it
        self.left = 0  # members that make no more calls here
        #: The first round that no member passes, and the verdict. One store, which is whole or not.
        self.broken: tuple[int, bytes] | None = None
        memory = memoryview(bytearray(2 * len(members) * _SMALL_SLOT))
        self.small_window = Window(memory, lambda: None)


class ThreadBackend(Backend):
    """A rank that is a thread."""

    name = "threads"
    spans_hosts = True  # as far as a test pretends
    detects_death = True
    can_reform = True

    def __init__(
        self,
        topology: Topology,
        settings: Settings,
        world: SharedWorld | None = None,
        process: int = 0,
    ) -> None:
        if world is None:
            self.check(topology, settings)
        super().__init__(topology, settings)
        self._world = world
        self.host = str(topology.node_rank)  # that a test pretends
        self.process = process
        self.members = world.members
        self._access = partial(world.scheduler.access, process)
        self._until = math.inf  # of the last wait for what is published
        world.states[process] = "alive", "", b""
        self._access(_JOINS, "post")

    @classmethod
    def check(cls, topology: Topology, settings: Settings) -> NoReturn:
        """Refuse: only a test starts such ranks."""
        raise ConfigurationError(
            "backend 'threads' is for tests, where ranks are threads of one process: "
            "syncprims.testing.run_world starts them. For real ranks choose 'file' or 'torch'"
        )

    @classmethod
    def shared_world(cls, scheduler: RankScheduler, members: Sequence[int]) -> SharedWorld:
        """Return what the ranks of a new world share; `members` are their threads, by rank."""
        return SharedWorld(scheduler, members)

    def board(self, members: Sequence[int], name: str = "") -> ThreadBoard:
        """Return the board `name` of `members`."""
        key = self.epoch, tuple(members), name
        return ThreadBoard(key, self.topology.rank, self._world, self.members)

    def close_board(self, board: Board) -> None:
        """Leave the board; it ends with its last member."""
        key = self.epoch, board.members, board.name
        shared = self._world.boards.get(key)  # None: others are in a new epoch
        if shared is not None:
            shared.left += 1
            if shared.left == len(board.members):
                del self._world.boards[key]

    def decide(self, name: str, value: str = "") -> str:
        """Return the decision; another rank may be faster."""
        decisions = self._world.decisions
        if not value:
            self._access(("decision", name), "read")
            return decisions.get(name, "")
        with self._world.scheduler.inside(self.process):
            self._world.scheduler.step(self.process)
            self._access(("decision", name), "write")
            return decisions.setdefault(name, value)

    def publish(self, topic: Topic, value: bytes) -> None:
        """Make `value` readable for others; of a call of `reform`, another may be faster."""
        place = topic, self.process
        if topic != "reform":
            self._world.published[place] = value
            return
        with self._world.scheduler.inside(self.process):
            self._world.scheduler.step(self.process)
            self._access(place, "post")
            self._world.published[place] = value

    def published(self, topic: Topic, process: int) -> bytes:
        """Return the latest value of `process`."""
        place: tuple[Topic, int] = (topic, process)
        published = self._world.published
        if topic == "reform":
            awaited = place in published and self._world.scheduler.now() < self._until
            self._access(place, "collect" if awaited else "read")
        return published.get(place, b"")

    def wait(self, ready: Callable[[], bool], until: float, awaited: Awaited = NOTHING) -> bool:
        """Run other ranks until ``ready()``, one of the boards is broken, or the time is up.

        :raises SyncError: if all wait for each other, and this one at no board.
        """
        scheduler, waiting = self._world.scheduler, self._world.waiting
        own = [board for board in awaited.boards if isinstance(board, ThreadBoard)]
        other = _OtherWait(self, awaited)
        waits: dict[ThreadBoard | _OtherWait, str] = {other: ""}
        if own:
            waits = dict.fromkeys(own, awaited.call)
        else:
            self._until = until

        def settled() -> bool:
            return ready() or any(wait.verdict() is not None for wait in waits)

        with scheduler.inside(self.process):
            if until == math.inf or not awaited.call:  # else its time ends it, and it goes on
                waiting.update(waits)
            try:
                scheduler.wait(self.process, settled, until)
            finally:
                for wait in waits:
                    waiting.pop(wait, None)
            # Which of them is the first makes an order, and so does whether any is in time.
            for board in own if len(own) > 1 or scheduler.now() >= until else ():
                self._access(board.key, "read")
        verdict = other.verdict()
        if verdict is not None:
            raise load(verdict)
        return ready()

    def state(self, process: int) -> State:
        """Return the state of `process`."""
        self._access(_ENDS, "read")
        return self._world.state(process)[0]

    def arrived(self) -> list[int]:
        """Return the processes whose threads wait to join."""
        self._access(_JOINS, "read")
        living = (
            process for process in sorted(self._world.states) if self.state(process) == "alive"
        )
        return [process for process in living if process not in self.members]

    def enter(self, epoch: int, members: Sequence[int], topology: Topology) -> None:
        """Use the boards of this epoch from now on."""
        super().enter(epoch, members, topology)
        for key in [key for key in self._world.boards if key[0] < epoch]:
            del self._world.boards[key]
        self._world.members = self.members
        self.publish("waits", b"")

    def close(self, failure: bytes | None = None) -> None:
        """Publish how this rank ends."""
        self._world.leave(self.process, failure)


class _OtherWait:
    """A wait at no board, as a search for deadlocks sees it: like one at a board."""

    name = ""

    def __init__(self, backend: ThreadBackend, awaited: Awaited) -> None:
        self._processes, self._awaited = backend.members, awaited
        own = backend.process
        self.rank = self._processes.index(own) if own in self._processes else own
        self.members = tuple(range(len(self._processes)))
        self._verdict: bytes | None = None

    def missing(self) -> set[int]:
        return {self._processes.index(process) for process in self._awaited.missing()}

    def status(self, rank: int) -> Status:
        return Status(label=Label(self._awaited.call))

    def abort(self, verdict: bytes) -> None:
        self._verdict = verdict

    def verdict(self) -> bytes | None:
        return self._verdict


class ThreadBoard(Board):
    """The board of `members`, seen from `rank`."""

    virtual_time = True

    def __init__(
        self, key: _BoardKey, rank: int, world: SharedWorld, processes: Sequence[int]
    ) -> None:
        _, members, name = key
        super().__init__(members, name)
        self.rank = rank  #: whose view of the board this is
        self._processes = processes  # by rank
        self._own = processes[rank]
        self._world = world
        self._scheduler = world.scheduler
        self.key = key
        self._access = partial(self._scheduler.access, self._own)
        self._exact = self._scheduler.exact
        self._shared = world.boards.setdefault(key, _SharedBoard(self.members))
        self.small_window = self._shared.small_window

    def post(self, note: Note) -> None:
        """Publish the note."""
        with self._scheduler.inside(self._own):
            if self.posted > self.collected:
                # It continues without waiting: others may be faster.
                self._scheduler.step(self._own)
            elif self._exact:
                self._scheduler.step(self._own)
            shared = self._shared
            self.posted += 1
            if self._exact:
                self._access(self.key, "post")
                self._access((self.key, self.posted), "post")
                self._access((self.key, "verdict"), "read")
            notes = shared.rounds.setdefault(self.posted, {})
            notes[self.rank] = note
            shared.posted[self.rank] = self.posted
            shared.last[self.rank] = note.label

    def collect(self, timeout: float | None = None) -> Sequence[Note] | None:
        """Return the notes of the oldest uncollected round; other ranks run meanwhile."""
        with self._scheduler.inside(self._own):
            self.waiting_since = self._scheduler.now()
            until = self.waiting_since + (math.inf if timeout is None else timeout)
            if self._is_complete():
                # The last to come need not be the first to continue.
                self._scheduler.step(self._own)
            elif not self._is_in_vain():
                self._world.waiting[self] = ""
                try:
                    self._scheduler.wait(self._own, self._settled, until)
                finally:
                    self._world.waiting.pop(self, None)
            is_complete = self._is_complete()
            if self._exact:
                # Notes that end the wait come before its end. Those of its last instant need not.
                in_time = is_complete and self._scheduler.now() < until
                self._access((self.key, self.collected + 1), "collect" if in_time else "read")
                self._access((self.key, "verdict"), "read")
                if not is_complete:
                    self._access(_ENDS, "read")
            if not is_complete:
                return None
            number = self.collected = self.collected + 1
            shared = self._shared
            notes = shared.rounds[number]
            readers = shared.readers[number] = shared.readers.get(number, 0) + 1
            if readers == len(self.members):
                del shared.rounds[number], shared.readers[number]
            return tuple(notes[member] for member in self.members)

    def _is_complete(self) -> bool:
        """Return whether the oldest uncollected round may be collected."""
        notes = self._shared.rounds.get(self.collected + 1)
        return notes is not None and len(notes) == len(self.members) and self.verdict() is None

    def _is_in_vain(self) -> bool:
        """Return whether it never will be complete."""
        if self.verdict() is not None:
            return True
        ended, processes = self._world.ended, self._processes
        return bool(ended) and any(
            ends_round(self._world.state(processes[member])[0], member in self.missing())
            for member in self.members
            if processes[member] in ended
        )

    def _settled(self) -> bool:
        return self._is_complete() or self._is_in_vain()

    def missing(self) -> set[int]:
        """Return the members whose notes the oldest uncollected round lacks."""
        number = self.collected + 1
        return {rank for rank, posted in self._shared.posted.items() if posted < number}

    def status(self, rank: int) -> Status:
        """Return what is known of `rank`."""
        self._access(self.key, "read")
        self._access(_ENDS, "read")
        shared = self._shared
        return Status(
            shared.posted[rank], shared.last.get(rank), *self._world.state(self._processes[rank])
        )

    def abort(self, verdict: bytes) -> None:
        """Break the board at the oldest uncollected round, unless it is complete."""
        shared = self._shared
        self._access((self.key, "verdict"), "write")
        if shared.broken is None and self.missing():
            shared.broken = self.collected + 1, verdict

    def verdict(self) -> bytes | None:
        """Return the verdict that covers the oldest uncollected round, if there is one."""
        broken = self._shared.broken
        return broken[1] if broken is not None and broken[0] <= self.collected + 1 else None

    def now(self) -> float:
        """Return the virtual time."""
        return self._scheduler.now()
