"""Why a round does not complete, in words: who is missing, since when, and what to do."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from . import errors
from .errors import CollectiveMismatch, ConcurrentCall, Failure, PeerFailed, PeerLost, SyncTimeout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .errors import SyncError
    from .interface import Board, Label, Note, Status

_CURE_MISMATCH = (
    "Every rank must make the same calls in the same order: look for a branch, an early return or "
    "a loop count that differs between ranks."
)


class Diagnosis:
    """What one rank can say about the rounds of one board."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board = board
        self._rank = rank

    def here(self) -> str:
        """Return the call this rank is in, with its call site."""
        label = self._board.status(self._rank).label
        return str(label) if label is not None else "its first call"

    def missing(self, number: int) -> list[int]:
        """Return the ranks that have not posted round `number`."""
        return [r for r in self._board.members if self._board.status(r).rounds < number]

    def warning(self, missing: list[int], waited: float) -> str:
        """Return what a long wait says of itself."""
        seen = "; ".join(self._seen(rank) for rank in missing[:8])
        return f"still waiting for ranks {missing} at {self.here()} for {waited:.0f} s; {seen}"

    def absence(self, number: int, missing: list[int], waited: float) -> SyncError | None:
        """Return why a missing rank will never come, the likeliest root cause first; or None."""
        statuses = {rank: self._board.status(rank) for rank in missing}
        # Its note may have come while we looked around.
        statuses = {rank: status for rank, status in statuses.items() if status.rounds < number}
        consequence: SyncError | None = None
        for rank, status in statuses.items():
            if status.state == "failed":
                error = self._failed(number, rank, status, waited)
                if not error.failures[rank].consequence:
                    return error
                consequence = consequence or error
        for state in ("lost", "finished"):
            for rank, status in statuses.items():
                if status.state == state:
                    return self._lost(number, rank, status, waited)
        return consequence

    def timeout(self, missing: list[int], waited: float) -> SyncTimeout:
        """Return the error of a wait that has run out of time."""
        call = self.here()
        arrived = [rank for rank in self._board.members if rank not in missing]
        lines = "\n".join(f"  {self._seen(rank)}" for rank in missing)
        return SyncTimeout(
            f"{call} timed out after {waited:.1f} s: ranks {missing} did not come, "
            f"ranks {arrived} did\n{lines}\n"
            f"See what keeps ranks {missing}. If they are only slow, allow more: timeout=, "
            f"or SYNCPRIMS_TIMEOUT (SYNCPRIMS_JOIN_TIMEOUT for the start).",
            rank=self._rank,
            call=call,
            missing=missing,
            arrived=arrived,
            waited=waited,
        )

    def mismatch(self, number: int, notes: Sequence[Note]) -> CollectiveMismatch:
        """Return the error of ranks that met in different calls, a line for each."""
        members = self._board.members
        lines = "\n".join(
            f"  rank {rank}: {note.label}" for rank, note in zip(members, notes, strict=True)
        )
        return CollectiveMismatch(
            f"ranks met in different calls (round {number}):\n{lines}\n{_CURE_MISMATCH}",
            rank=self._rank,
            call=str(notes[members.index(self._rank)].label),
            arrived=list(members),
        )

    def two_at_once(self, label: Label | None) -> ConcurrentCall:
        """Return the error of a thread that comes while another is in a call."""
        return ConcurrentCall(
            f"two threads call primitives of the same group at once: one is in {self.here()}, and "
            f"thread {threading.current_thread().name!r} comes with {label or 'another call'}. "
            f"Rounds have one order: call from one thread, or give the other a group of its own",
            rank=self._rank,
            call=str(label),
        )

    def _seen(self, rank: int) -> str:
        status = self._board.status(rank)
        if status.label is not None:
            return f"rank {rank} was last seen at {status.label}"
        if status.state == "unknown":
            return f"rank {rank} never joined"
        return f"rank {rank} has made no call in this group"

    def _failed(self, number: int, rank: int, status: Status, waited: float) -> PeerFailed:
        left = errors.load(status.failure).failures if status.failure else {}
        unknown = Failure(rank, "an exception", "its words were lost", "")
        error = PeerFailed.from_failure(left.get(rank, unknown), waiting=self.here())
        error.missing, error.arrived = self._gone_and_arrived(number)
        error.waited = waited
        return error

    def _lost(self, number: int, rank: int, status: Status, waited: float) -> PeerLost:
        call = self.here()
        if status.state == "finished":
            what = f"rank {rank} finished after round {status.rounds} while others wait in {call}"
            cure = f"Rank {rank} made fewer calls than the others. {_CURE_MISMATCH}"
        else:
            how = f": {status.detail}" if status.detail else ""
            what = f"rank {rank} was lost{how}, while others wait in {call}"
            cure = (
                f"Look at the output of rank {rank} and the system log (out of memory?), "
                f"then restart the run."
            )
        gone, arrived = self._gone_and_arrived(number)
        return PeerLost(
            f"{what}\n  {self._seen(rank)}\n{cure}",
            rank=rank,
            call=call,
            missing=gone,
            arrived=arrived,
            waited=waited,
        )

    def _gone_and_arrived(self, number: int) -> tuple[list[int], list[int]]:
        """Return the ranks that will never come, and those that have; others are on their way."""
        missing = self.missing(number)
        states = {rank: self._board.status(rank).state for rank in missing}
        gone = [rank for rank in missing if states[rank] not in ("alive", "unknown")]
        return gone, [rank for rank in self._board.members if rank not in missing]
