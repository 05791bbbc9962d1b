"""Why a round does not complete, in words: who is missing, since when, and what to do."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from syncprims import errors
from syncprims.errors import (
    CollectiveMismatch,
    ConcurrentCall,
    Failure,
    PeerFailed,
    PeerLost,
    SyncTimeout,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncprims.errors import SyncError
    from syncprims.interface import Board, Label, Note, Status

_CURE_MISMATCH = (
    "Every rank must make the same calls in the same order: look for a branch, an early return or "
    "a loop count that differs between ranks."
)


class Diagnosis:
    """What one rank can say about the rounds of one board.

    Rounds are counted from the user's first: the `own` ones before it are the library's.
    """

    def __init__(self, board: Board, rank: int, own: int = 0) -> None:
        self._board = board
        self._rank = rank
        self._own = own

    def here(self) -> str:
        """Return the call this rank is in, with its call site."""
        label = self._board.status(self._rank).label
        return str(label) if label is not None else "its first call"

    def look(self, number: int, waited: float) -> Look:
        """Return how things stand for round `number`, after a wait of so many seconds."""
        seen = {rank: self._board.status(rank) for rank in self._board.members}
        return Look(self._rank, number, waited, seen, self._own)

    def mismatch(self, number: int, notes: Sequence[Note]) -> CollectiveMismatch:
        """Return the error of ranks that met in different calls, a line for each."""
        members = self._board.members
        calls = {r: str(note.label) for r, note in zip(members, notes, strict=True)}
        return _mismatch(self._rank, number - self._own, calls)

    def two_at_once(self, label: Label | None, threads: Iterable[int]) -> ConcurrentCall:
        """Return the error of a call that comes while another is under way."""
        if len(set(threads)) > 1:
            who = f"thread {threading.current_thread().name!r} comes with"
            what = "two threads call"
            cure = "make these calls from one thread; another may call a group of other members"
        else:
            who, what = "a signal handler of the same thread comes with", "a signal handler calls"
            cure = "let the handler set a flag, as Trigger.set_on_signal does"
        return ConcurrentCall(
            f"{what} primitives of one group at once: one is in {self.here()}, and {who} "
            f"{label or 'another call'}. Rounds have one order: {cure}",
            rank=self._rank,
            call=str(label),
        )


class Look:
    """One look at all members of a board that this rank waits at."""

    def __init__(
        self, rank: int, number: int, waited: float, seen: dict[int, Status], own: int
    ) -> None:
        self._rank = rank
        self._own = own
        self._number = number
        self._waited = waited
        self._seen = seen
        label = seen[rank].label
        self._here = str(label) if label is not None else "its first call"
        self.missing = [rank for rank, status in seen.items() if status.rounds < number]

    @property
    def warning(self) -> str:
        """What a long wait says of itself."""
        if not self.missing:
            return (
                f"still at {self._here} after {self._waited:.0f} s: all ranks {list(self._seen)} "
                f"have come, and the data is under way"
            )
        last = "; ".join(self._last_seen(rank) for rank in self.missing[:8])
        return (
            f"still waiting for ranks {self.missing} at {self._here} for {self._waited:.0f} s; "
            f"{last}"
        )

    def absence(self) -> SyncError | None:
        """Return why the round will not complete, the likeliest root cause first; or None.

        A rank that is lost or failed breaks a round even if its note is up: nobody should wait
        for the others, only to hear of it in the next one.
        """
        consequence: SyncError | None = None
        for rank, status in self._seen.items():
            if status.state == "failed":
                error = self._failed(rank, status)
                if not error.failures[rank].consequence:
                    return error
                consequence = consequence or error
        for state in ("lost", "finished"):
            for rank, status in self._seen.items():
                if status.state == state and (state == "lost" or rank in self.missing):
                    return self._lost(rank, status)
        return consequence

    def early_mismatch(self) -> CollectiveMismatch | None:
        """Return the mismatch of the notes that are up already, if they differ."""
        up = {r: s.label for r, s in self._seen.items() if s.rounds == self._number}
        labels = [label for label in up.values() if label is not None]
        if self._rank not in up or all(label == labels[0] for label in labels):
            return None
        absent = dict.fromkeys(self.missing, "not here yet")
        calls = {rank: absent.get(rank) or str(up.get(rank) or "?") for rank in self._seen}
        return _mismatch(self._rank, self._number - self._own, calls)

    def timeout(self) -> SyncTimeout:
        """Return the error of a wait that has run out of time."""
        arrived = [rank for rank in self._seen if rank not in self.missing]
        if not self.missing:
            return SyncTimeout(
                f"{self._here} timed out after {self._waited:.1f} s: all ranks {arrived} have "
                f"come, and the data has not arrived. Look at the network between their hosts. If "
                f"it is only slow, allow more: timeout=, or SYNCPRIMS_TIMEOUT.",
                rank=self._rank,
                call=self._here,
                arrived=arrived,
                waited=self._waited,
            )
        lines = "\n".join(f"  {self._last_seen(rank)}" for rank in self.missing)
        return SyncTimeout(
            f"{self._here} timed out after {self._waited:.1f} s: ranks {self.missing} did not "
            f"come, ranks {arrived} did\n{lines}\n"
            f"See what keeps ranks {self.missing}. If they are only slow, allow more: timeout=, "
            f"or SYNCPRIMS_TIMEOUT (SYNCPRIMS_JOIN_TIMEOUT for the start).",
            rank=self._rank,
            call=self._here,
            missing=self.missing,
            arrived=arrived,
            waited=self._waited,
        )

    def _last_seen(self, rank: int) -> str:
        status = self._seen[rank]
        if status.label is not None and status.label.kind == "init":
            return f"rank {rank} has made no call since it joined"
        if status.label is not None:
            return f"rank {rank} was last seen at {status.label}"
        if status.state == "unknown":
            return f"rank {rank} never joined"
        return f"rank {rank} has made no call in this group"

    def _failed(self, rank: int, status: Status) -> PeerFailed:
        left = errors.load(status.failure).failures if status.failure else {}
        unknown = Failure(rank, "an exception", "its words were lost", "")
        # Whose words these are, the board knows: a seat is counted from zero on every host.
        failure = next(iter(left.values()), unknown)._replace(rank=rank)
        error = PeerFailed.from_failure(failure, waiting=self._here)
        error.missing, error.arrived = self._gone_and_arrived()
        error.waited = self._waited
        return error

    def _lost(self, rank: int, status: Status) -> PeerLost:
        if status.state == "finished":
            count = status.rounds - self._own
            after = f"after round {count}" if count > 0 else "without a call"
            what = f"rank {rank} finished {after} while others wait in"
            cure = f"Rank {rank} made fewer calls than the others. {_CURE_MISMATCH}"
        else:
            how = f": {status.detail}" if status.detail else ""
            what = f"rank {rank} was lost{how}, while others wait in"
            cure = (
                f"Look at the output of rank {rank} and the system log (out of memory?), "
                f"then restart the run."
            )
        gone, arrived = self._gone_and_arrived()
        return PeerLost(
            f"{what} {self._here}\n  {self._last_seen(rank)}\n{cure}",
            rank=rank,
            call=self._here,
            missing=gone,
            arrived=arrived,
            waited=self._waited,
        )

    def _gone_and_arrived(self) -> tuple[list[int], list[int]]:
        """Return the ranks that will never come (again), and those that are here."""
        gone = [
            rank
            for rank, status in self._seen.items()
            if status.state in ("lost", "failed")
            or (status.state == "finished" and rank in self.missing)
        ]
        here = [r for r in self._seen if r not in gone and r not in self.missing]
        return gone, here


def _mismatch(rank: int, number: int, calls: dict[int, str]) -> CollectiveMismatch:
    lines = "\n".join(f"  rank {rank}: {call}" for rank, call in calls.items())
    return CollectiveMismatch(
        f"ranks met in different calls (round {number}):\n{lines}\n{_CURE_MISMATCH}",
        rank=rank,
        call=calls[rank],
        arrived=[rank for rank, call in calls.items() if call != "not here yet"],
    )
