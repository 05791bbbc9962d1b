"""The probe: it stands between the library and a backend, records calls and injects faults.

It wraps backends and boards of any kind, so that threads, processes and a third party's backend are
observed in the same way. What it does not change it delegates, whatever the contract contains.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from inspect import get_annotations
from operator import attrgetter
from typing import Any

from syncprims._protocol.threads import threads_that_may_call
from syncprims._world.world import open_board
from syncprims.interface import Backend, Board, Label, Note, Slots, Status, Topology, WaitView

from .errors import Killed
from .faults import Fault, apply_fault, current_target, is_due
from .outcomes import RankOutcome, RecordedCall

JOIN = "init"  # the round in which a world starts; rounds are counted after it


class Probe:
    """Records in `outcome` what the rank that makes it does, and applies faults to that rank.

    ``journal(event, fact)`` is called with each event that the test must know of a killed rank, and
    ``on_post(rank, call)`` when a note is up.
    """

    def __init__(
        self,
        outcome: RankOutcome,
        faults: Sequence[Fault],
        journal: Callable[[str, Any], None] = lambda event, fact: None,
        on_post: Callable[[int, RecordedCall], None] = lambda rank, call: None,
    ) -> None:
        self.outcome = outcome
        self.journal = journal
        self.on_post = on_post
        self._faults = faults
        self._target = current_target.get()

    def record_call(self, call: RecordedCall) -> None:
        """Record a call of this rank, and apply the faults that are due at it."""
        outcome = self.outcome
        outcome.take("call", call)
        self.journal("call", call)
        for number, fault in enumerate(self._faults):
            is_own = fault.rank == outcome.rank and fault not in outcome.struck
            if is_own and is_due(fault, len(outcome.calls), call.label):
                outcome.take("fault", fault)
                self.journal("fault", number)
                apply_fault(fault, self._target)

    def check_alive(self) -> None:
        """Raise `Killed` if this rank has been killed."""
        if self.outcome.end == "killed":
            raise Killed


def _delegate_rest(cls: type, contract: type, *instance_attributes: str) -> None:
    """Make what `cls` does not define of `contract` come from `inner`, and go there."""

    def delegate(name: str) -> property:
        def set_(probed: Any, value: object) -> None:
            setattr(probed.inner, name, value)

        return property(attrgetter(f"inner.{name}"), set_)

    names = {*vars(contract), *get_annotations(contract), *instance_attributes}
    for name in names - vars(cls).keys() - {"slots"}:
        if not name.startswith("_"):
            setattr(cls, name, delegate(name))
    abc.update_abstractmethods(cls)


class ProbedBackend(Backend):
    """A backend whose boards are probed."""

    def __init__(self, inner: Backend, probe: Probe) -> None:
        self.inner = inner  # the base is not initialised: all it keeps is read from `inner`
        self._probe = probe
        self.slots = None if inner.slots is None else _probe_slots(inner.slots, probe)

    def board(self, members: Sequence[int], name: str = "") -> Board:
        """Return the board of `members`, probed."""
        self._probe.check_alive()
        return ProbedBoard(open_board(self.inner, members, name), self._probe, self.inner.slots)

    def close_board(self, board: Board) -> bool:
        """Release a board that this backend has returned."""
        assert isinstance(board, ProbedBoard)
        return self.inner.close_board(board.inner)

    def wait_any(
        self,
        boards: Sequence[Board],
        ready: Callable[[], bool],
        timeout: float | None = None,
        call: str = "",
    ) -> bool:
        """Wait for the first of several notes; a rank that is killed meanwhile ends."""
        probe, outcome = self._probe, self._probe.outcome
        probe.check_alive()
        inner = [board.inner if isinstance(board, ProbedBoard) else board for board in boards]
        if call:
            outcome.waits = call
            probe.journal("wait", (call, timeout is None))
        try:
            came = self.inner.wait_any(inner, ready, timeout, call)
        finally:
            if call:
                probe.journal("wait", (None, False))
        probe.check_alive()
        if came and call and not any(board.verdict() for board in inner):
            outcome.waits = None
        return came

    def close(self, failure: bytes | None = None) -> None:
        """Leave the world."""
        self.inner.close(failure)


class ProbedSlots(Slots):
    """Slots where the steps of a `reform` are recorded, and faults strike."""

    def __init__(self, inner: Slots, probe: Probe) -> None:
        self.inner = inner  # the base is not initialised: all it keeps is read from `inner`
        self._probe = probe

    def _record(self, step: str) -> None:
        self._probe.check_alive()
        label = Label("reform", step)
        self._probe.record_call(RecordedCall((self.own,), label, f"epoch {self.epoch}"))

    def publish_call(self, call: bytes) -> None:
        """Publish the call of `reform`, unless a fault prevents it."""
        self._record("call")
        self.inner.publish_call(call)

    def decide(self, name: str, word: str) -> str:
        """Decide, unless a fault prevents it."""
        self._record("decide")
        return self.inner.decide(name, word)

    def enter(self, epoch: int, topology: Topology) -> None:
        """Begin an epoch, unless a fault prevents it."""
        self._record("enter")
        self.inner.enter(epoch, topology)

    def wait(self, ready: Callable[[], bool], timeout: float, waits_for: Sequence[int]) -> None:
        """Wait, and record that."""
        self._probe.check_alive()
        self._probe.outcome.waits = "reform"
        self.inner.wait(ready, timeout, waits_for)
        self._probe.check_alive()
        self._probe.outcome.waits = None


def _probe_slots(inner: Slots, probe: Probe) -> Slots:
    make: Any = ProbedSlots  # which gets the rest of its methods below
    slots: Slots = make(inner, probe)
    return slots


class ProbedBoard(Board):
    """A board whose rounds are recorded, by the ranks that the members had at the start."""

    observed = True

    def __init__(self, inner: Board, probe: Probe, slots: Slots | None = None) -> None:
        self.inner = inner  # the base is not initialised: all it keeps is read from `inner`
        self._ranks, self._name = inner.members, inner.name
        if slots is not None and slots.epoch:
            self._ranks = tuple(slots.members[rank] for rank in inner.members)
            self._name = f"{inner.name} epoch {slots.epoch}".strip()
        self._probe = probe
        self._last: RecordedCall | str | None = None  # the call of the last round
        self._recorded = 0  # the last round whose call is recorded

    def post(self, note: Note) -> None:
        """Post, unless a fault prevents it."""
        probe, inner = self._probe, self.inner
        probe.check_alive()
        if note.label.kind == JOIN:
            self._last = str(note.label)
            inner.post(note)
            return
        call = self._last = RecordedCall(self._ranks, note.label, self._name)
        if self._recorded <= inner.posted:  # else a second try: the first note was refused
            self._recorded = inner.posted + 1
            probe.record_call(call)
        inner.post(note)
        probe.on_post(probe.outcome.rank, call)

    def collect(self, timeout: float | None = None) -> Sequence[Note] | None:
        """Collect, and record where the rank waits until then."""
        probe = self._probe
        probe.check_alive()
        probe.outcome.waits = self._last
        notes = self.inner.collect(timeout)
        if notes is not None:
            probe.outcome.waits = None
        return notes

    def publish_wait(self, wait: WaitView) -> None:
        """Record where the rank waits, also for the test."""
        self.inner.publish_wait(wait)
        if not wait.number:
            self._probe.journal("wait", (None, False))
            return
        only_notes = wait.deadline == math.inf and not threads_that_may_call()
        self._probe.journal("wait", (self._last, only_notes))

    def status(self, rank: int) -> Status:
        """Return what is known of `rank`."""
        return self.inner.status(rank)

    def abort(self, verdict: bytes) -> None:
        """Break the board."""
        self._probe.check_alive()
        self.inner.abort(verdict)

    def verdict(self) -> bytes | None:
        """Return the verdict on this rank's oldest uncollected round."""
        verdict = self.inner.verdict()
        if verdict is not None:
            self._probe.outcome.torn = True
        return verdict


_delegate_rest(ProbedBackend, Backend, "topology", "settings")
_delegate_rest(ProbedBoard, Board, "members", "name", "posted", "collected")
_delegate_rest(ProbedSlots, Slots)
