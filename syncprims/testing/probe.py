"""A rank of a test world, seen from inside: what it does is recorded, and faults strike it.

The probe stands between the library and a board of any backend, so that threads, processes and a
third party's backend are all seen the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncprims.interface import Backend, Board

from .errors import Killed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncprims.interface import Label, Note, Status, Window

    from .faults import Fault, Victim

JOIN = "init"  # the round in which a world starts; what users count begins after it


class Seen(NamedTuple):
    """One round that a rank posted to."""

    members: tuple[int, ...]
    label: Label


class Probe:
    """What one rank has done so far."""

    def __init__(
        self,
        rank: int,
        faults: Sequence[Fault],
        victim: Victim,
        tell: Callable[[Probe], None] = lambda probe: None,
    ) -> None:
        self.rank = rank
        self.calls: list[Seen] = []  #: rounds it came to, that of the start left out
        self.waits: Seen | None = None  #: the last one, while it waits there
        self.dead = False
        self.torn = False  #: a board has broken
        self.struck: list[Fault] = []
        self.backend: Backend | None = None
        self.boards: list[ProbedBoard] = []
        self._faults = [fault for fault in faults if fault.rank == rank]
        self._victim = victim
        self.tell = tell  #: called at every change

    def probe(self, backend: Backend) -> Backend:
        """Return `backend`, looked at from now on."""
        self.backend = backend
        return ProbedBackend(backend, self)

    def arrive(self, members: tuple[int, ...], label: Label) -> None:
        """Record a call; what a fault does to it happens now."""
        if label.kind == JOIN:
            return
        self.calls.append(Seen(members, label))
        for fault in self._faults:
            if fault not in self.struck and fault.strikes(self.rank, len(self.calls), label):
                self.struck.append(fault)
                fault.do(self._victim)

    def check_alive(self) -> None:
        """Raise if this rank has been killed."""
        if self.dead:
            raise Killed


class ProbedBackend(Backend):
    """A backend whose boards are looked at."""

    def __init__(self, inner: Backend, probe: Probe) -> None:
        super().__init__(inner.topology, inner.settings)
        self.detects_death = inner.detects_death  # type: ignore[misc]
        self._inner = inner
        self._probe = probe

    def board(self, members: Sequence[int]) -> Board:
        """Return the board of `members`."""
        self._probe.check_alive()
        board = ProbedBoard(self._inner.board(members), self._probe)
        self._probe.boards.append(board)
        return board

    def close(self, failure: bytes | None = None) -> None:
        """Leave."""
        self._inner.close(failure)

    @property
    def meeting_place(self) -> str:
        """Where ranks find each other."""
        return self._inner.meeting_place

    def publish(self, word: bytes) -> None:
        """Let others read `word`."""
        self._inner.publish(word)

    def published(self, rank: int) -> bytes:
        """Return the latest word of `rank`."""
        return self._inner.published(rank)

    def abandon(self) -> None:
        """Let go of everything."""
        self._inner.abandon()


class ProbedBoard(Board):
    """A board that is looked at."""

    def __init__(self, inner: Board, probe: Probe) -> None:
        self.inner = inner  # not the base's: what it counts is counted by `inner`
        self.members = inner.members
        self.depth = inner.depth
        self.virtual_time = inner.virtual_time
        self._probe = probe
        self._last: Seen | None = None

    @property
    def posted(self) -> int:  # type: ignore[override]
        """How many rounds this rank has posted to."""
        return self.inner.posted

    @property
    def collected(self) -> int:  # type: ignore[override]
        """How many it has collected."""
        return self.inner.collected

    @property
    def waiting_since(self) -> float:  # type: ignore[override]
        """When a wait began."""
        return self.inner.waiting_since

    def post(self, note: Note) -> None:
        """Post, unless a fault is in the way."""
        probe = self._probe
        probe.check_alive()
        probe.arrive(self.members, note.label)
        self._last = Seen(self.members, note.label)
        self.inner.post(note)
        probe.tell(probe)

    def collect(self, timeout: float | None = None) -> Sequence[Note] | None:
        """Collect, and let it be known that this rank waits."""
        probe = self._probe
        probe.check_alive()
        probe.waits = self._last
        notes = self.inner.collect(timeout)
        if notes is not None:
            probe.waits = None
        return notes

    def status(self, rank: int) -> Status:
        """Tell what is known of `rank`."""
        return self.inner.status(rank)

    def abort(self, verdict: bytes) -> None:
        """Break the board."""
        self._probe.check_alive()
        self.inner.abort(verdict)

    def verdict(self) -> bytes | None:
        """Return the verdict."""
        verdict = self.inner.verdict()
        if verdict is not None:
            self._probe.torn = True
        return verdict

    def window(self) -> Window | None:
        """Return the memory that all members share."""
        return self.inner.window()

    def now(self) -> float:
        """Return the board's time."""
        return self.inner.now()
