"""Why a round does not complete, in words: who is missing, since when, and what to do."""

from __future__ import annotations

from collections.abc import Mapping

from syncprims import errors
from syncprims.errors import CollectiveMismatch, SyncError
from syncprims.interface import Label, Status, ends_round

CURE_MISMATCH = (
    "Every rank must make the same calls in the same order: look for a branch, an early return or "
    "a loop count that differs between ranks."
)
_CURE_SITES = (
    "The calls are alike, have no name, and are on different lines: SYNCPRIMS_STRICT=1 refuses "
    "that. If they belong together, put them on one line, or give them one name= (a call of "
    "torch.distributed takes none). Otherwise make them in the same order on all ranks."
)


def mismatch_error(
    rank: int, number: int, calls: dict[int, str], cure: str = CURE_MISMATCH
) -> CollectiveMismatch:
    """Return the error of ranks that met in different calls, a line for each."""
    lines = "\n".join(f"  rank {member}: {call}" for member, call in calls.items())
    return CollectiveMismatch(
        f"ranks met in different calls (round {number}):\n{lines}\n{cure}",
        rank=rank,
        call=calls[rank],
        arrived=[rank for rank, call in calls.items() if call != "not here yet"],
    )


def compare_sites(rank: int, number: int, labels: dict[int, Label]) -> CollectiveMismatch | None:
    """Return the error of calls on different lines that no name makes one call; None if they agree.

    Without folders: ranks may have different working directories. A site with a word before its
    line, ``send at train.py:8``, is of a call that the other ranks make from lines of their own.
    """
    sites = [label.site for label in labels.values()]
    if len({site.rpartition("/")[2] for site in sites if " at " not in site}) < 2:
        return None
    calls = {member: str(label) for member, label in labels.items()}
    return mismatch_error(rank, number, calls, _CURE_SITES)


class Snapshot:
    """The state of all members of a board, `seen` while `rank` waits there for round `number`.

    Messages count rounds from the user's first: the `library_rounds` are before it. In these,
    `first_call` is the user's call that waits.
    """

    def __init__(
        self,
        seen: Mapping[int, Status],
        rank: int,
        number: int,
        waited: float,
        library_rounds: int,
        first_call: str | None = None,
    ) -> None:
        self._rank = rank
        self._number = number
        self._library_rounds = library_rounds
        self._seen = seen
        self._first_call = first_call
        self.missing: list[int] = [r for r, status in self._seen.items() if status.rounds < number]
        self._waited = waited

    @property
    def call(self) -> str:
        """The call that this rank waits in."""
        return self._first_call or str(self._seen[self._rank].label or "its first call")

    @property
    def warning(self) -> str:
        """The reason of a long wait, in one line."""
        if not self.missing:
            return (
                f"still at {self.call} after {self._waited:.0f} s: all ranks {list(self._seen)} "
                f"have come, and the data is under way"
            )
        last = "; ".join(self.last_seen(rank) for rank in self.missing[:8])
        return (
            f"still waiting for ranks {self.missing} at {self.call} for {self._waited:.0f} s; "
            f"{last}"
        )

    def absence(self) -> SyncError | None:
        """Return why the round will not complete; None if it may.

        A rank that is lost or failed breaks a round even if its note is up: the others should not
        wait for each other first, and find that out in the next round.
        """
        error = self._likeliest_cause()
        if error is not None:
            error.waited = self._waited
            error.missing = [  # will never come (again)
                rank
                for rank, status in self._seen.items()
                if ends_round(status.state, rank in self.missing)
            ]
            gone = {*error.missing, *self.missing}
            error.arrived = [rank for rank in self._seen if rank not in gone]
        return error

    def _likeliest_cause(self) -> SyncError | None:
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
        if self._rank not in up or len(up) < 2 or len(set(up.values()) - {None}) < 2:
            return None
        absent = dict.fromkeys(self.missing, "not here yet")
        calls = {rank: absent.get(rank) or str(up.get(rank) or "?") for rank in self._seen}
        return mismatch_error(self._rank, self._number - self._library_rounds, calls)

    def timeout(self) -> errors.SyncTimeout:
        """Return the error of a wait that has run out of time."""
        arrived, missing = [r for r in self._seen if r not in self.missing], self.missing
        lines = "\n".join(f"  {self.last_seen(rank)}" for rank in missing)
        why = f"ranks {missing} did not come, ranks {arrived} did\n{lines}\n"
        cure = f"See what keeps ranks {missing}. If they are only slow, allow more: timeout=, or "
        cure += "SYNCPRIMS_TIMEOUT (SYNCPRIMS_JOIN_TIMEOUT for the start)."
        if not missing:
            why = f"all ranks {arrived} have come, and the data has not arrived. "
            cure = "Look at the network between their hosts. If it is only slow, allow more: "
            cure += "timeout=, or SYNCPRIMS_TIMEOUT."
        return errors.SyncTimeout(
            f"{self.call} timed out after {self._waited:.1f} s: {why}{cure}",
            rank=self._rank,
            call=self.call,
            missing=missing,
            arrived=arrived,
            waited=self._waited,
        )

    def last_seen(self, rank: int) -> str:
        """Return where a member was seen last, as messages show it."""
        status = self._seen[rank]
        if status.label is None:
            last = "never joined" if status.state == "unknown" else "has made no call in this group"
        elif status.label.kind == "init":
            last = "has made no call since it joined"
        else:
            last = f"was last seen at {status.label}"
        doing = f"; {status.detail}" if status.state == "alive" and status.detail else ""
        return f"rank {rank} {last}{doing}"

    def _failed(self, rank: int, status: Status) -> errors.PeerFailed:
        left = errors.load(status.failure).failures if status.failure else {}
        unknown = errors.Failure(rank, "an exception", "its text was lost", "")
        # The board knows which rank failed: the failure itself counts ranks from 0 on every host.
        failure = next(iter(left.values()), unknown)._replace(rank=rank)
        return errors.PeerFailed.from_failure(failure, waiting=self.call)

    def _lost(self, rank: int, status: Status) -> errors.PeerLost:
        if self._first_call is not None and status.rounds < self._number:
            joined = status.state == "finished"
            return errors.PeerLost.before_start(
                rank, status.detail, joined, waiting=self._rank, call=self.call
            )
        if status.state == "finished":
            count = status.rounds - self._library_rounds
            after = f"after round {count}" if count > 0 else "without a call"
            what = f"rank {rank} finished {after} while others wait in"
            cure = f"Rank {rank} made fewer calls than the others. {CURE_MISMATCH}"
        else:
            how = f": {status.detail}" if status.detail else ""
            what = f"rank {rank} was lost{how}, while others wait in"
            cure = (
                f"Look at the output of rank {rank} and the system log (out of memory?), "
                f"then restart the run."
            )
        text = f"{what} {self.call}\n  {self.last_seen(rank)}\n{cure}"
        return errors.PeerLost(text, rank=rank, call=self.call)
