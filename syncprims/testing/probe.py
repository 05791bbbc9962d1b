"""The probe: it stands between the library and a backend, records calls and injects faults.

Objects of a backend get a class of their own that is derived from theirs, so that threads,
processes and a third party's backend are observed in the same way.
"""

# The base of a probed class is that of the object, which no type checker knows.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

from syncprims._protocol.threads import threads_that_may_call
from syncprims._world.world import open_board
from syncprims.interface import (
    NOTHING,
    Awaited,
    Backend,
    Board,
    Label,
    Note,
    Topic,
    Topology,
    WaitView,
)

from .errors import Killed
from .faults import Fault, apply_fault, current_target, is_due
from .meetings import RecordedCall, find_path
from .outcomes import RankOutcome

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

    def record_wait(self, call: RecordedCall | str | None) -> None:
        """Record that this thread waits in `call`, or that its wait is over."""
        # Not by `get_ident`: a new thread may have that of one that has ended in a call.
        self.outcome.take("wait", (threading.get_native_id(), call, False))

    def journal_wait(self, call: RecordedCall | str | None, only_notes: bool) -> None:
        """Record a wait for the test, and whether nothing but a note ends it."""
        self.journal("wait", (threading.get_native_id(), call, only_notes))

    def check_alive(self) -> None:
        """Raise `Killed` if this rank has been killed."""
        if self.outcome.end == "killed":
            raise Killed


def probe_backend(backend: Backend, probe: Probe) -> Backend:
    """Return `backend`, whose calls are recorded and struck by faults from now on."""
    _derive(_probed_backend, backend, probe)
    return backend


def unprobe(board: Any) -> Board:
    """Return `board`, whose calls are no longer recorded."""
    if hasattr(board, "probe"):
        board.__class__ = type(board).__base__
        del board.probe
    return cast("Board", board)


def _derive(make_class: Callable[..., type[Any]], target: Any, probe: Probe) -> None:
    """Give `target` a class that is derived from its own."""
    target.__class__ = make_class(type(target))
    target.probe = probe


@functools.cache
def _probed_backend(cls: Any) -> type[Any]:
    """Return a class of backends whose boards are probed."""

    class ProbedBackend(cls):  # type: ignore[misc]
        probe: Probe

        def board(self, members: Sequence[int], name: str = "") -> Any:
            self.probe.check_alive()
            board: Any = open_board(cast("Backend", super()), members, name)
            if not hasattr(board, "probe"):
                _derive(_probed_board, board, self.probe)
                board.begin(self)
            return board

        def wait(self, ready: Callable[[], bool], until: float, awaited: Awaited = NOTHING) -> bool:
            """Wait beside the rounds; a rank that is killed meanwhile ends."""
            probe, call, boards = self.probe, awaited.call, awaited.boards
            probe.check_alive()
            if call:
                probe.record_wait(call)
            if call and boards:
                probe.journal_wait(call, until == math.inf)
            try:
                came: bool = super().wait(ready, until, awaited)
            finally:
                if call and boards:
                    probe.journal_wait(None, False)
            probe.check_alive()
            if call and (came or not boards) and not any(board.verdict() for board in boards):
                probe.record_wait(None)
            return came

        # The steps of a `reform`.

        def _record(self, step: str) -> None:
            self.probe.check_alive()
            label = Label("reform", step)
            self.probe.record_call(RecordedCall((self.process,), label, f"epoch {self.epoch}"))

        def publish(self, topic: Topic, value: bytes) -> None:
            if topic == "reform":
                self._record("call")
            super().publish(topic, value)

        def decide(self, name: str, value: str = "") -> Any:
            if value:
                self._record("decide")
            return super().decide(name, value)

        def enter(self, epoch: int, members: Sequence[int], topology: Topology) -> None:
            self._record("enter")
            super().enter(epoch, members, topology)

    return ProbedBackend


@functools.cache
def _probed_board(cls: Any) -> type[Any]:
    """Return a class of boards whose rounds are recorded."""

    class ProbedBoard(cls):  # type: ignore[misc]
        probe: Probe
        observed = True

        def begin(self, backend: Backend) -> None:
            """Record rounds from now on, by the ranks that the members had at the start."""
            self.__ranks: tuple[int, ...] = self.members
            self.__name = self.name
            world: tuple[int, ...] = tuple(backend.members) if backend.epoch else ()
            self.__world = world
            if world:
                self.__ranks = tuple(world[rank] for rank in self.members)
                self.__name = f"{self.name} epoch {backend.epoch}".strip()
            self.__last: RecordedCall | str | None = None  # the call of the last round
            self.__recorded = 0  # the last round whose call is recorded

        def post(self, note: Note) -> None:
            probe = self.probe
            probe.check_alive()
            if note.label.kind == JOIN:
                self.__last = str(note.label)
                super().post(note)
                return
            call = RecordedCall(self.__ranks, note.label, self.__name, find_path(), self.__world)
            self.__last = call
            if self.__recorded <= self.posted:  # else a second try: the first note was refused
                self.__recorded = self.posted + 1
                probe.record_call(call)
            super().post(note)
            probe.on_post(probe.outcome.rank, call)

        def collect(self, timeout: float | None = None) -> Any:
            probe = self.probe
            probe.check_alive()
            probe.record_wait(self.__last)
            notes = super().collect(timeout)
            if notes is not None:
                probe.record_wait(None)
            return notes

        def publish_wait(self, wait: WaitView) -> None:
            super().publish_wait(wait)
            waits = bool(wait.number)
            only_notes = waits and wait.deadline == math.inf and not threads_that_may_call()
            self.probe.journal_wait(self.__last if waits else None, only_notes)

        def abort(self, verdict: bytes) -> None:
            self.probe.check_alive()
            super().abort(verdict)

        def verdict(self) -> Any:
            verdict = super().verdict()
            if verdict is not None:
                self.probe.outcome.torn = True
            return verdict

    return ProbedBoard
