"""The probe: it stands between the library and a backend, records calls and injects faults.

It wraps backends and boards of any kind, so that threads, processes and a third party's backend are
observed in the same way. What it does not change it delegates, whatever the contract contains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import get_annotations
from operator import attrgetter

from syncprims._world.world import open_board
from syncprims.interface import Backend, Board, Note, Status

from .errors import Killed
from .faults import Fault, apply_fault, current_target, is_due
from .outcomes import RankOutcome, RecordedCall

_ASK_EVERY = 0.02  # seconds between two questions to the observer
JOIN = "init"  # the round in which a world starts; rounds are counted after it


class Observer:
    """Is notified of what ranks do, as they do it; here, every notification is ignored."""

    def on_call(self, rank: int, call: RecordedCall) -> None:
        """Notice that `rank` is about to post."""

    def on_post(self, rank: int, call: RecordedCall) -> None:
        """Notice that `rank` has posted a note."""

    def on_rounds(self, rank: int, members: Sequence[int], board: str, number: int) -> None:
        """Notice that `rank` has posted to round `number` of the board, or will without a call."""

    def on_fault(self, rank: int, fault: Fault) -> None:
        """Notice that a fault is about to strike `rank`."""

    def on_wait(self, rank: int, call: RecordedCall, number: int, until: float) -> bytes | None:
        """Notice that `rank` waits for that round until that time; a verdict returned aborts it."""
        return None

    def on_wait_any(self, rank: int, call: str, members: Sequence[int]) -> bytes | None:
        """Notice that `rank` still waits for the first of several notes, of any of `members`.

        Called each time when it has looked and found none; a verdict returned aborts the wait.
        """
        return None

    def on_wait_end(self, rank: int) -> None:
        """Notice that `rank` does not wait any more."""


class Probe:
    """Records in `outcome` what the rank that makes it does, and applies faults to that rank."""

    def __init__(self, outcome: RankOutcome, faults: Sequence[Fault], observer: Observer) -> None:
        self.outcome = outcome
        self.observer = observer
        self.rank = outcome.rank
        self._faults = [fault for fault in faults if fault.rank == outcome.rank]
        self._target = current_target.get()

    def record_call(self, call: RecordedCall) -> None:
        """Record a call of this rank, and apply the faults that are due at it."""
        if call.label.kind == JOIN:
            return
        calls, struck = self.outcome.calls, self.outcome.struck
        calls.append(call)
        self.observer.on_call(self.rank, call)
        for fault in self._faults:
            if fault not in struck and is_due(fault, len(calls), call.label):
                struck.append(fault)
                self.observer.on_fault(self.rank, fault)
                apply_fault(fault, self._target)

    def check_alive(self) -> None:
        """Raise `Killed` if this rank has been killed."""
        if self.outcome.end == "killed":
            raise Killed


def _delegate_rest(cls: type, contract: type, *instance_attributes: str) -> None:
    """Make what `cls` does not define of `contract` come from `inner`."""
    names = {*vars(contract), *get_annotations(contract), *instance_attributes}
    for name in names - vars(cls).keys():
        if not name.startswith("_"):
            setattr(cls, name, property(attrgetter(f"inner.{name}")))


class ProbedBackend(Backend):
    """A backend whose boards are probed."""

    def __init__(self, inner: Backend, probe: Probe) -> None:
        self.inner = inner  # the base is not initialised: all it keeps is read from `inner`
        self._probe = probe
        # Rounds at closed boards, by members and name.
        self._closed: dict[tuple[tuple[int, ...], str], int] = {}

    def board(self, members: Sequence[int], name: str = "") -> Board:
        """Return the board of `members`, probed."""
        self._probe.check_alive()
        earlier = self._closed.get((tuple(members), name), 0)
        return ProbedBoard(open_board(self.inner, members, name), self._probe, earlier)

    def close_board(self, board: Board) -> bool:
        """Release a board that this backend has returned."""
        assert isinstance(board, ProbedBoard)
        closed = self.inner.close_board(board.inner)
        if closed:
            self._closed[board.members, board.name] = board.earlier + board.posted
        return closed

    def wait_any(
        self, boards: Sequence[Board], ready: Callable[[], bool], timeout: float | None = None
    ) -> bool:
        """Wait for the first of several notes; a rank that is killed meanwhile ends."""
        probe, outcome = self._probe, self._probe.outcome
        probe.check_alive()
        inner = [board.inner if isinstance(board, ProbedBoard) else board for board in boards]
        members = sorted({rank for board in boards for rank in board.members} - {probe.rank})
        outcome.waits_any = boards[0].waits_any if boards else ""

        def settled() -> bool:
            if ready() or any(board.verdict() is not None for board in inner):
                return True
            if timeout is not None:
                return False
            verdict = probe.observer.on_wait_any(probe.rank, outcome.waits_any, members)
            if verdict is None:
                return False
            for board in inner:
                board.abort(verdict)
            return True

        try:
            self.inner.wait_any(inner, settled, timeout)
        finally:
            probe.observer.on_wait_end(probe.rank)
        probe.check_alive()
        found = ready()
        if found:
            outcome.waits_any = ""
        return found

    def close(self, failure: bytes | None = None) -> None:
        """Leave the world."""
        self.inner.close(failure)


class ProbedBoard(Board):
    """A board whose rounds are recorded."""

    posts_alone = True

    def __init__(self, inner: Board, probe: Probe, earlier: int = 0) -> None:
        self.inner = inner  # the base is not initialised: all it keeps is read from `inner`
        self.earlier = earlier  # rounds that the observer knows of, at closed boards
        self._members = inner.members
        self._virtual_time = inner.virtual_time
        self._probe = probe
        self._last: RecordedCall | None = None
        self._recorded = 0  # the last round whose call is recorded
        self._until: float | None = None

    def post(self, note: Note) -> None:
        """Post, unless a fault prevents it."""
        probe, inner = self._probe, self.inner
        probe.check_alive()
        self._last = RecordedCall(self._members, note.label, inner.name)
        if self._recorded <= inner.posted:  # else a second try: the first note was refused
            self._recorded = inner.posted + 1
            probe.record_call(self._last)
        inner.post(note)
        probe.observer.on_post(probe.rank, self._last)
        self._report_rounds()

    def _report_rounds(self) -> None:
        inner, probe = self.inner, self._probe
        number = self.earlier + inner.posted + inner.promised
        probe.observer.on_rounds(probe.rank, self._members, inner.name, number)

    def collect(self, timeout: float | None = None) -> Sequence[Note] | None:
        """Collect; the observer is asked meanwhile whether the round can never complete."""
        probe = self._probe
        probe.check_alive()
        probe.outcome.waits = self._last
        if self._until is not None and not self._virtual_time:
            self._ask_observer(self._until)
            timeout = _ASK_EVERY if timeout is None else min(timeout, _ASK_EVERY)
        notes = self.inner.collect(timeout)
        if notes is not None:
            probe.outcome.waits = None
        return notes

    def repeat(self, note: Note) -> None:
        """Return None: every round is recorded."""

    def _ask_observer(self, until: float) -> None:
        assert self._last is not None
        rank, number = self._probe.rank, self.earlier + self.inner.collected + 1
        verdict = self._probe.observer.on_wait(rank, self._last, number, until)
        if verdict is not None:
            self.inner.abort(verdict)

    @property
    def waits_until(self) -> float | None:
        """The time until which the core waits."""
        return self._until

    @waits_until.setter
    def waits_until(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, until: float | None
    ) -> None:
        self._until = until
        if until is None:
            self._probe.observer.on_wait_end(self._probe.rank)

    @property
    def waits_any(self) -> str:
        """The call that waits for the first of several notes."""
        return self.inner.waits_any

    @waits_any.setter
    def waits_any(self, call: str) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.inner.waits_any = call

    @property
    def promised(self) -> int:
        """How many more rounds this rank will post without another call."""
        return self.inner.promised

    @promised.setter
    def promised(self, count: int) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        more = count > self.inner.promised
        self.inner.promised = count
        if more:
            self._report_rounds()

    def status(self, rank: int) -> Status:
        """Return what is known of `rank`."""
        return self.inner.status(rank)

    def abort(self, verdict: bytes) -> None:
        """Break the board."""
        self._probe.check_alive()
        self.inner.abort(verdict)

    def verdict(self) -> bytes | None:
        """Return the verdict on this rank's oldest uncollected round."""
        if self._until is not None:
            self._ask_observer(self._until)  # before the others' reaction to it is seen
        verdict = self.inner.verdict()
        if verdict is not None:
            self._probe.outcome.torn = True
        return verdict


_delegate_rest(ProbedBackend, Backend, "topology", "settings")
_delegate_rest(ProbedBoard, Board, "members", "name", "posted", "collected")
