"""A rank of a test world, seen from inside: what it does is recorded, and faults strike it.

The probe stands between the library and a board of any backend, so that threads, processes and a
third party's backend are all seen the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncprims.interface import Backend, Board

from .errors import Killed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncprims.interface import Label, Note, Status, Window

    from .faults import Fault, Victim

_LOOK = 0.02  # seconds between two questions to the witness
JOIN = "init"  # the round in which a world starts; what users count begins after it


class Seen(NamedTuple):
    """One round that a rank posted to."""

    members: tuple[int, ...]
    label: Label


class Witness:
    """Is told what a rank does, as it does it. Here, nothing comes of that."""

    def came(self, rank: int, seen: Seen) -> None:
        """Hear that `rank` has come to a call."""

    def posted(self, rank: int, seen: Seen, number: int) -> None:
        """Hear that it has posted to this round of the board."""

    def struck(self, rank: int, fault: Fault) -> None:
        """Hear that a fault is about to strike it."""

    def waits(self, rank: int, seen: Seen, number: int, until: float) -> bytes | None:
        """Hear that it waits for this round, until then; return a verdict if it had better not."""
        return None

    def goes_on(self, rank: int) -> None:
        """Hear that it does not wait any more."""


class Probe:
    """What one rank has done so far."""

    def __init__(
        self, rank: int, faults: Sequence[Fault], victim: Victim, witness: Witness
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
        self.witness = witness

    def probe(self, backend: Backend) -> Backend:
        """Return `backend`, looked at from now on."""
        self.backend = backend
        return ProbedBackend(backend, self)

    def arrive(self, members: tuple[int, ...], label: Label) -> None:
        """Record a call; what a fault does to it happens now."""
        if label.kind == JOIN:
            return
        self.calls.append(Seen(members, label))
        self.witness.came(self.rank, self.calls[-1])
        for fault in self._faults:
            if fault not in self.struck and fault.strikes(self.rank, len(self.calls), label):
                self.struck.append(fault)
                self.witness.struck(self.rank, fault)
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

    posts_alone = True

    def __init__(self, inner: Board, probe: Probe) -> None:
        self.inner = inner  # not the base's: what it counts is counted by `inner`
        self.members = inner.members
        self.depth = inner.depth
        self.virtual_time = inner.virtual_time
        self._probe = probe
        self._last: Seen | None = None
        self._came = 0  # for this round
        self._until: float | None = None

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
        if self._came <= self.inner.posted:  # else once more, since its first note could not go up
            self._came = self.inner.posted + 1
            probe.arrive(self.members, note.label)
        self._last = Seen(self.members, note.label)
        self.inner.post(note)
        probe.witness.posted(probe.rank, self._last, self.inner.posted)

    def collect(self, timeout: float | None = None) -> Sequence[Note] | None:
        """Collect, and let it be known that this rank waits."""
        probe = self._probe
        probe.check_alive()
        probe.waits = self._last
        if self._until is None or self.virtual_time:
            notes = self.inner.collect(timeout)
        else:
            notes = self._collect_slowly(timeout, self._until)
        if notes is not None:
            probe.waits = None
        return notes

    def _collect_slowly(self, timeout: float | None, until: float) -> Sequence[Note] | None:
        """Collect, with a witness who may know that it is in vain."""
        self._ask_witness(until)
        return self.inner.collect(_LOOK if timeout is None else min(timeout, _LOOK))

    def _ask_witness(self, until: float) -> None:
        assert self._last is not None
        rank, number = self._probe.rank, self.inner.collected + 1
        verdict = self._probe.witness.waits(rank, self._last, number, until)
        if verdict is not None:
            self.inner.abort(verdict)

    @property
    def waits_until(self) -> float | None:
        """Until when the core will ask again."""
        return self._until

    @waits_until.setter
    def waits_until(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, until: float | None
    ) -> None:
        self._until = until
        if until is None:
            self._probe.witness.goes_on(self._probe.rank)

    def status(self, rank: int) -> Status:
        """Tell what is known of `rank`."""
        return self.inner.status(rank)

    def abort(self, verdict: bytes) -> None:
        """Break the board."""
        self._probe.check_alive()
        self.inner.abort(verdict)

    def verdict(self) -> bytes | None:
        """Return the verdict."""
        if self._until is not None:
            self._ask_witness(self._until)  # before it is seen how others took it
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
