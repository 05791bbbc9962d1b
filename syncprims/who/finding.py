"""What is read of a world from outside, and who waits for whom in it: which rank is at fault.

Pure functions of what was read. The words are those of the library's own errors and warnings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from syncprims import errors
from syncprims._protocol.deadlock import (
    Wait,
    deadlock_error,
    describe_group,
    find_cycle,
    find_stuck,
)
from syncprims._protocol.diagnosis import Snapshot
from syncprims._protocol.threads import BACKGROUND_SAVES
from syncprims.interface import Label, Status, WaitView

#: Seconds of waiting from which on a finding names who waits: less is part of any program.
NOTABLE = 0.5
MOST_NAMED = 8  # ranks whose activity is described

Kind = Literal[
    "moving", "waiting", "torch", "deadlock", "lost", "failed", "finished", "ended", "unreadable"
]


class BoardView(NamedTuple):
    """What a process outside of the run reads of a board, while its members go on."""

    members: tuple[int, ...]  #: world ranks, ascending
    statuses: Mapping[int, Status]  #: of each member
    waits: Mapping[int, WaitView]  #: of members that wait; short waits are not seen
    last_barrier: Label | None = None  #: with a name, that all have passed; if not too long ago
    name: str = ""  #: beside the group's own, boards of the same members have one

    @property
    def at(self) -> tuple[tuple[int, ...], str]:
        """What distinguishes it from the other boards."""
        return self.members, self.name

    @property
    def group(self) -> str:
        """The group that meets there, as messages show it."""
        return describe_group(*self.at)


class WorldView(NamedTuple):
    """What a process outside of the run reads of a world, or of its part on this host."""

    run_id: str
    backend: str
    world_size: int
    boards: Sequence[BoardView]
    hosts: Mapping[int, str]  #: the name of each rank's host, if there are several
    #: Of those whose process the reader can see: they have joined, or one launcher started them.
    pids: Mapping[int, int]
    states: Mapping[int, Status]  #: of the ranks of this host
    problem: str = ""  #: why the rest cannot be read, if it cannot
    store: Sequence[Any] = ()  #: where ranks of other hosts describe themselves, if there are any
    others: Mapping[int, Any] = {}  #: the :class:`RankDescription` of those that were read there

    def begins_at(self, board: BoardView) -> bool:
        """Return whether the world's start is the first round of this board."""
        return len(board.members) == self.world_size and not board.name


class Finding(NamedTuple):
    """What a world waits for, in words and for programs."""

    kind: Kind
    waiting_for: list[int]  #: ranks that others wait for, and that wait for no other
    text: str
    waited_s: float = 0.0  #: the longest wait that counts
    stuck: bool = False  #: it is at least as long as the limit


class RankWait(NamedTuple):
    """A wait of one rank that two looks have seen: for absent ranks, or else for data."""

    board: BoardView
    number: int  #: of the round
    seconds: float
    missing: Sequence[int]  #: members whose note for the round is not up

    @property
    def in_background(self) -> bool:
        """Whether the rank may go on in another thread meanwhile."""
        return self.board.name.startswith(BACKGROUND_SAVES)

    def snapshot(self, rank: int, own: int = 0) -> Snapshot:
        """Return the state of the board, as the waiting `rank` sees it."""
        return Snapshot(self.board.statuses, rank, self.number, self.seconds, own)

    def call(self, rank: int) -> str:
        """Return the call in which `rank` waits."""
        return self.snapshot(rank).call


def judge(
    view: WorldView, waits: Mapping[int, RankWait], doing: Mapping[int, str], stuck_after: float
) -> Finding:
    """Return the finding on a world; `doing` says what ranks outside of calls do, where known."""
    if view.problem:
        return Finding("unreadable", [], view.problem)
    alive = any(status.state == "alive" for status in view.states.values())
    long = {rank: wait for rank, wait in waits.items() if wait.seconds >= min(NOTABLE, stuck_after)}
    waited = max((wait.seconds for wait in long.values()), default=0.0)
    stuck = waited >= stuck_after
    if ended := _ended_rank(view, waits if alive else {}):
        rank, status = ended
        text = _describe_end(rank, status)
        if not alive:
            return Finding("ended", [], f"no rank lives any more: {text}")
        kind: Any = status.state
        return Finding(kind, [rank] if waits else [], text, waited, stuck)
    if not alive:
        text = "no rank lives any more" if view.states else "no rank has joined yet"
        return Finding("ended", [], text)
    lacking = {rank: wait for rank, wait in long.items() if wait.missing}
    calls = {
        rank: [Wait(wait.call(rank), wait.board.group, wait.missing)]
        for rank, wait in lacking.items()
        if not wait.in_background
    }
    held = find_stuck(calls)
    cycle = next(filter(None, (find_cycle(rank, calls, held) for rank in sorted(held))), None)
    if cycle:
        error = deadlock_error({rank: calls[rank] for rank in cycle}, cycle[0])
        return Finding("deadlock", sorted(cycle), str(error), waited, stuck)
    if lacking:
        faults, text = _describe_absence(view, lacking, doing)
        return Finding("waiting", faults, text, waited, stuck)
    if long:
        rank, wait = max(long.items(), key=lambda item: item[1].seconds)
        others = [other for other in wait.board.members if other in doing and other not in long]
        activity = "".join(f"; rank {other} {doing[other]}" for other in others[:MOST_NAMED])
        return Finding("waiting", others, wait.snapshot(rank).warning + activity, waited, stuck)
    return Finding("moving", [], "all is moving")


def _ended_rank(view: WorldView, waits: Mapping[int, RankWait]) -> tuple[int, Status] | None:
    """Return the rank that has ended and that others wait for, or else that has not ended well."""
    for rank, wait in sorted(waits.items(), key=lambda item: -item[1].seconds):
        error = wait.snapshot(rank, int(view.begins_at(wait.board))).absence()
        if error is not None and error.rank is not None:
            return error.rank, wait.board.statuses[error.rank]
    for state in ("lost", "failed"):
        for rank, status in view.states.items():
            if status.state == state:
                return rank, status
    return None


def _describe_end(rank: int, status: Status) -> str:
    """Return how a rank has ended."""
    if status.state == "finished":
        seen = "without a call" if status.label is None else f"after {status.label}"
        return f"rank {rank} finished {seen}, and others wait for it"
    if status.state == "lost":
        return f"rank {rank} was lost" + (f": {status.detail}" if status.detail else "")
    failures = errors.load(status.failure).failures.values() if status.failure else ()
    return f"rank {rank} failed" + "".join(f": {failure.headline}" for failure in failures)


def _describe_absence(
    view: WorldView, waits: Mapping[int, RankWait], doing: Mapping[int, str]
) -> tuple[list[int], str]:
    """Return the ranks that others wait for and that wait for none, and a description of each."""
    rounds: dict[tuple[object, int], list[int]] = {}
    for rank in sorted(waits):
        rounds.setdefault((waits[rank].board.at, waits[rank].number), []).append(rank)
    ranks: set[int] = set()
    lines: list[str] = []
    for waiting in rounds.values():
        first = waits[waiting[0]]
        missing = sorted({rank for other in waiting for rank in waits[other].missing})
        faults = [rank for rank in missing if rank not in waits or waits[rank].in_background]
        ranks.update(faults)
        call = first.call(waiting[0])
        if not view.begins_at(first.board):
            call += f" in group {first.board.group}"
        seconds = max(waits[rank].seconds for rank in waiting)
        others = f"{subject(waiting)} waited for {seconds:.1f} s"
        lines.append(f"{subject(faults or missing)} not come to {call}, where {others}")
        snapshot = first.snapshot(waiting[0])
        for rank in faults[:MOST_NAMED]:
            activity = f"; it {doing[rank]}" if rank in doing else ""
            status = first.board.statuses[rank]
            behind = first.number - status.rounds
            # Of a loop, the call is the same in every round.
            if status.label is not None and status.label == first.board.statuses[waiting[0]].label:
                activity = f", {behind} round{'s' * (behind > 1)} before this one{activity}"
            lines.append(f"  {snapshot.last_seen(rank)}{activity}")
    return sorted(ranks), "\n".join(lines)


def subject(ranks: Sequence[int]) -> str:
    """Return the ranks as the subject of a sentence, with the word "has" or "have"."""
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {list(ranks)} have"
