"""Who waits for whom in a world that is read from outside, and which rank is at fault.

Pure functions of what was read. The words are those of the library's own errors and warnings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from syncprims._protocol.deadlock import Wait, deadlock_error, find_cycle, find_stuck
from syncprims._protocol.diagnosis import Snapshot
from syncprims.errors import name_ranks
from syncprims.interface import State

from .view import BoardView, WorldView

#: Seconds of waiting from which on a verdict names who waits: less is part of any program.
NOTABLE = 0.5
_MOST_NAMED = 8  # ranks whose activity is described

Kind = Literal["moving", "waiting", "deadlock", "lost", "failed", "finished", "ended", "unreadable"]


class Verdict(NamedTuple):
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


def own_rounds(view: WorldView, board: BoardView) -> int:
    """Return how many of a board's first rounds are the library's own."""
    return int(len(board.members) == view.world_size)


def judge(
    view: WorldView, waits: Mapping[int, RankWait], doing: Mapping[int, str], stuck_after: float
) -> Verdict:
    """Return the verdict on a world; `doing` says what ranks outside of calls do, where known."""
    if view.problem:
        return Verdict("unreadable", [], view.problem)
    gone = {
        state: [rank for rank, status in view.states.items() if status.state == state]
        for state in ("lost", "failed", "finished")
    }
    alive = [rank for rank, status in view.states.items() if status.state == "alive"]
    if not alive:
        return Verdict("ended", [], _ended(view, gone["lost"] + gone["failed"]))
    long = {rank: wait for rank, wait in waits.items() if wait.seconds >= min(NOTABLE, stuck_after)}
    waited = max((wait.seconds for wait in long.values()), default=0.0)
    stuck = waited >= stuck_after
    if error := _first_absence(view, waits):
        rank, state, text = error
        return Verdict(state, [rank], text, waited, stuck)
    if gone["lost"] or gone["failed"]:
        rank = (gone["lost"] or gone["failed"])[0]
        kind: Kind = "lost" if gone["lost"] else "failed"
        return Verdict(kind, [], _end_of(view, rank), waited, stuck)
    lacking = {rank: wait for rank, wait in long.items() if wait.missing}
    calls = {
        rank: [Wait(_call(rank, wait), _name(wait), wait.missing)] for rank, wait in lacking.items()
    }
    held = find_stuck(calls)
    cycle = next(filter(None, (find_cycle(rank, calls, held) for rank in sorted(held))), None)
    if cycle:
        shown = {rank: calls[rank] for rank in cycle}
        return Verdict(
            "deadlock", sorted(cycle), str(deadlock_error(shown, cycle[0])), waited, stuck
        )
    if lacking:
        faults, text = _absent(view, lacking, doing)
        return Verdict("waiting", faults, text, waited, stuck)
    if long:
        rank, wait = max(long.items(), key=lambda item: item[1].seconds)
        text = Snapshot(wait.board.statuses, rank, wait.number, wait.seconds, 0).warning
        others = [other for other in wait.board.members if other in doing and other not in long]
        activity = "".join(f"; rank {other} {doing[other]}" for other in others[:_MOST_NAMED])
        return Verdict("waiting", others, text + activity, waited, stuck)
    return Verdict("moving", [], "all is moving")


def _call(rank: int, wait: RankWait) -> str:
    return str(wait.board.statuses[rank].label or "its first call")


def _name(wait: RankWait) -> str:
    return name_ranks(wait.board.members)


def _first_absence(
    view: WorldView, waits: Mapping[int, RankWait]
) -> tuple[int, Literal["lost", "failed", "finished"], str] | None:
    """Return why the round of the longest wait will never complete, if it will not."""
    seen: set[tuple[tuple[int, ...], int]] = set()
    for rank, wait in sorted(waits.items(), key=lambda item: -item[1].seconds):
        place = wait.board.members, wait.number
        if place in seen:
            continue
        seen.add(place)
        own = own_rounds(view, wait.board)
        error = Snapshot(wait.board.statuses, rank, wait.number, wait.seconds, own).absence()
        if error is not None and error.rank is not None:
            state: State = wait.board.statuses[error.rank].state
            if state in ("lost", "failed", "finished"):
                return error.rank, state, str(error).partition("\n")[0]
    return None


def _ended(view: WorldView, gone: Sequence[int]) -> str:
    if not gone:
        return "no rank lives any more" if view.states else "no rank has joined yet"
    return f"no rank lives any more: {_end_of(view, gone[0])}"


def _end_of(view: WorldView, rank: int) -> str:
    status = view.states[rank]
    if status.state == "lost":
        return f"rank {rank} was lost: {status.detail}"
    return str(Snapshot({rank: status}, rank, 1, 0.0, 0).absence()).partition(",")[0]


def _absent(
    view: WorldView, waits: Mapping[int, RankWait], doing: Mapping[int, str]
) -> tuple[list[int], str]:
    """Return the ranks that others wait for and that wait for none, and a description of each."""
    at_fault: dict[tuple[tuple[int, ...], int], list[int]] = {}
    waiting: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for rank, wait in waits.items():
        place = wait.board.members, wait.number
        waiting.setdefault(place, []).append(rank)
        found = at_fault.setdefault(place, [])
        found += [r for r in wait.missing if r not in waits and r not in found]
    lines: list[str] = []
    for place, faults in at_fault.items():
        first = waits[waiting[place][0]]
        those = sorted(waiting[place])
        seconds = max(waits[rank].seconds for rank in those)
        call = _call(those[0], first)
        if len(first.board.members) < view.world_size:
            call += f" in group {_name(first)}"
        missing = faults or list(first.missing)
        lines.append(
            f"{_subject(missing)} not come to {call}, where {_subject(those)} waited for "
            f"{seconds:.1f} s"
        )
        snapshot = Snapshot(first.board.statuses, those[0], first.number, seconds, 0)
        for rank in faults[:_MOST_NAMED]:
            line = snapshot.last_seen(rank)
            if str(first.board.statuses[rank].label) == _call(those[0], first):
                line = f"rank {rank} is inside of this call"
            lines.append(f"  {line}" + (f"; it {doing[rank]}" if rank in doing else ""))
    ranks = sorted({rank for faults in at_fault.values() for rank in faults})
    return ranks, "\n".join(lines)


def _subject(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {list(ranks)} have"
