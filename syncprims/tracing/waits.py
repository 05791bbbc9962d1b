"""Who made whom wait.

In a round nobody goes on before the last has come. So the time from a rank's arrival to the last
one's is laid on the rank that came last; what comes after that is the price of the round itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncprims._protocol.trace_file import ROUND

from .clocks import align

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .clocks import Alignment
    from .reading import Call, RankTrace, Run

START_KIND = "init"  # of the round in which a world starts: who is late there started late
_LATEST = np.iinfo(np.int64).max
_HARDLY = 0.01  # of the time: less waiting than that is not worth a word


@dataclass
class Meetings:
    """The rounds of one group, a row per round and a column per member."""

    group: int
    members: tuple[int, ...]
    number: NDArray[Any]
    posted: NDArray[Any]  #: ns; NaN where the member has no such round
    since: NDArray[Any]
    done: NDArray[Any]  #: NaN also where it was never over
    call: NDArray[Any]  #: of the late member, where it was there
    first: NDArray[Any]  #: a round that is the first of its call
    late: NDArray[Any]  #: index of the member that came last; -1 where nobody waited
    held: NDArray[Any]  #: ns that each member waited for that one
    last: NDArray[Any]  #: when it came


class Row(NamedTuple):
    """One rank that made others wait at one call."""

    late: int
    call: Call
    times: int
    waited: float  #: seconds, of all who waited together
    longest: float  #: seconds, of one rank at one time
    waiting: list[int]  #: ranks, those that waited longest first


class Summary(NamedTuple):
    """One rank over the whole run."""

    rank: int
    host: str
    rounds: int
    span: float  #: seconds from the start of the world to its end
    waiting: float  #: seconds in rounds, of these
    waited_for: float  #: seconds that others waited for it
    end: str


@dataclass
class Analysis:
    """All that can be said of a run."""

    run: Run
    alignment: Alignment
    groups: list[Meetings]
    rows: list[Row]
    summaries: list[Summary]
    start: float  #: ns: of the first arrival
    stop: float  #: and of the last thing seen
    verdict: str
    stragglers: list[int]


def analyse(run: Run) -> Analysis:
    """Return who made whom wait in `run`; its times are brought to one clock."""
    alignment = align(run)
    groups = [
        _meetings(run, number, members)
        for number, members in enumerate(run.names.groups)
        if len(members) > 1
    ]
    begins = [float(rank.rounds["posted"].min()) for rank in run.ranks if len(rank.rounds)]
    ends = [_end(rank) for rank in run.ranks]
    rows = sorted(_rows(run, groups), key=lambda row: -row.waited)
    summaries = [_summary(run, rank, groups) for rank in run.ranks]
    verdict, stragglers = _verdict(run, rows, summaries)
    start = min(begins, default=0.0)
    stop = max(ends, default=start)
    return Analysis(run, alignment, groups, rows, summaries, start, stop, verdict, stragglers)


def _end(rank: RankTrace) -> float:
    times = [rank.rounds["done"].max(), rank.rounds["posted"].max()] if len(rank.rounds) else [0]
    return float(max(*times, rank.left[0] if rank.left else 0, 0))


def _meetings(run: Run, group: int, members: tuple[int, ...]) -> Meetings:
    column = {member: index for index, member in enumerate(members)}
    found = [
        (column[rank.rank], rank.rounds[rank.rounds["group"] == group])
        for rank in run.ranks
        if rank.rank in column
    ]
    number = np.unique(np.concatenate([rounds["number"] for _, rounds in found]))
    shape = len(number), len(members)
    times = {name: np.full(shape, np.nan) for name in ("posted", "since", "done")}
    call = np.full(shape, -1)
    failed = np.zeros(len(number), bool)
    first = np.zeros(len(number), bool)
    gone = np.zeros(shape, bool)  # the member's record goes on for no longer
    for index, rounds in found:
        at = np.searchsorted(number, rounds["number"])
        over = rounds["kind"] == ROUND
        for name in ("posted", "since"):
            times[name][at, index] = rounds[name]
        times["done"][at[over], index] = rounds["done"][over]
        call[at, index] = rounds["call"]
        first[at] |= ~rounds["further"]
        failed[at[rounds["outcome"] > 0]] = True
        last = rounds["number"].max() if len(rounds) else 0
        gone[:, index] = number > last
    late, held, last_at = _held(times, failed, gone)
    rows = np.arange(len(number))
    known = call[rows, np.maximum(late, 0)]
    call = np.where(known >= 0, known, call.max(axis=1, initial=-1))
    return Meetings(group, members, number, times["posted"], times["since"], times["done"],
                    call, first, late, held, last_at)  # fmt: skip


def _held(
    times: dict[str, NDArray[Any]], failed: NDArray[Any], gone: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return who came last, how long each waited for that one, and when it came."""
    posted, since, done = times["posted"], times["since"], times["done"]
    arrival = np.where(np.isnan(posted), -np.inf, posted)
    late: NDArray[Any] = arrival.argmax(axis=1)
    last: NDArray[Any] = arrival.max(axis=1)
    # Where a round failed and one never came to it, all waited for that one until the end.
    absent = failed[:, None] & gone
    never = absent.any(axis=1)
    late = np.where(never, absent.argmax(axis=1), late)
    ended: NDArray[Any] = np.where(np.isnan(done), -np.inf, done).max(axis=1)
    last = np.where(never, ended, last)
    held = np.fmax(np.fmin(done, last[:, None]) - since, 0.0)
    held = np.where(np.isnan(done), 0.0, held)
    held[np.arange(len(late)), late] = 0.0
    return np.where(held.sum(axis=1) > 0, late, -1), held, last


def _rows(run: Run, groups: list[Meetings]) -> list[Row]:
    """Return one row for every rank that came late to a call, over all groups."""
    found: dict[tuple[int, int], list[Any]] = {}
    for meetings in groups:
        calls_begun = np.cumsum(meetings.first)
        chosen = np.flatnonzero(meetings.late >= 0)
        keys = np.stack([meetings.late[chosen], meetings.call[chosen]])
        pairs, which = np.unique(keys, axis=1, return_inverse=True)
        for number, (late, call) in enumerate(pairs.T):
            at = chosen[which.ravel() == number]
            held = meetings.held[at]
            sums = np.zeros(run.world_size)
            sums[list(meetings.members)] = held.sum(axis=0)
            times = len(np.unique(calls_begun[at]))
            entry = found.setdefault(
                (meetings.members[int(late)], int(call)), [0, np.zeros(run.world_size), 0.0]
            )
            entry[0] += times
            entry[1] += sums
            entry[2] = max(entry[2], float(held.max()))
    rows: list[Row] = []
    for (late, call), (times, sums, longest) in found.items():
        order = [int(rank) for rank in np.argsort(-sums, kind="stable") if sums[rank] > 0]
        rows.append(
            Row(late, run.names.calls[call], times, float(sums.sum()) / 1e9, longest / 1e9, order)
        )
    return rows


def _summary(run: Run, rank: RankTrace, groups: list[Meetings]) -> Summary:
    rounds = rank.rounds
    starts = _start_calls(run)
    joined = rounds[np.isin(rounds["call"], starts) & (rounds["done"] > 0)]
    later = rounds[~np.isin(rounds["call"], starts)]
    began = joined["done"].max() if len(joined) else rounds["posted"].min(initial=_LATEST)
    begin = float(began)
    span = max(_end(rank) - begin, 0.0)
    over = later[later["kind"] == ROUND]
    waiting = float((over["done"] - over["since"]).sum())
    waited_for = 0.0
    for meetings in groups:
        if rank.rank in meetings.members:
            mine = meetings.late == meetings.members.index(rank.rank)
            waited_for += float(meetings.held[mine & ~np.isin(meetings.call, starts)].sum())
    return Summary(
        rank.rank, rank.host, len(rounds), span / 1e9, min(waiting, span) / 1e9,
        waited_for / 1e9, _how_it_ended(run, rank),
    )  # fmt: skip


def _start_calls(run: Run) -> list[int]:
    return [number for number, call in enumerate(run.names.calls) if call.kind == START_KIND]


def _how_it_ended(run: Run, rank: RankTrace) -> str:
    if rank.left is not None:
        return f"with {rank.left[1]}" if rank.left[1] else "well"
    open_rounds = rank.rounds[rank.rounds["kind"] != ROUND]
    if len(open_rounds):
        last = open_rounds[open_rounds["posted"].argmax()]
        if not len(rank.rounds) or last["posted"] >= rank.rounds["done"].max():
            call = run.names.calls[int(last["call"])]
            return f"killed, or still running: waits at {call} ({call.site})"
    return "killed, or still running"


def _verdict(run: Run, rows: list[Row], summaries: list[Summary]) -> tuple[str, list[int]]:
    """Return the whole matter in a sentence, and who the stragglers are, if anybody."""
    if run.world_size == 1:
        return "A world of one: nobody waits for anybody.", []
    never = sorted({row.late for row in rows} - {one.rank for one in summaries})
    if never:
        return f"{_named(never)} never came, and left no trace: the others waited.", never
    total = sum(one.waited_for for one in summaries)
    spent = sum(one.span for one in summaries)
    if not spent or total < _HARDLY * spent:
        share = total / spent if spent else 0.0
        return f"No rank makes others wait: that takes {share:.1%} of the ranks' time.", []
    worst = sorted(summaries, key=lambda one: -one.waited_for)
    found: list[int] = []
    share = 0.0
    for one in worst[: max(1, min(3, (run.world_size - 1) // 2))]:
        found.append(one.rank)
        share += one.waited_for / total
        if share >= (0.5 + 0.4 / run.world_size if len(found) == 1 else 0.8):
            break
    else:
        return (
            f"No rank is the straggler: ranks waited {seconds_text(total)} for each other in all, "
            f"{total / spent:.0%} of their time, {worst[0].waited_for / total:.0%} of it for rank "
            f"{worst[0].rank}, mostly at {_mostly(rows, worst[0].rank)}."
        ), []
    waited = seconds_text(share * total)
    is_one = "is the straggler" if len(found) == 1 else "are the stragglers"
    return (
        f"{_named(found)} {is_one}: the others waited {waited} for {_it(found)} in all, "
        f"{share:.0%} of all waiting for a rank, mostly at {_mostly(rows, *found)}."
    ), found


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    return f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _it(ranks: list[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


def _mostly(rows: list[Row], *ranks: int) -> str:
    """Return the calls to which each of these ranks came late for longest."""
    places: list[str] = []
    for rank in ranks:
        mine = [row for row in rows if row.late == rank and row.call.kind != START_KIND]
        if mine and (place := f"{mine[0].call} ({mine[0].call.site})") not in places:
            places.append(place)
    return " and ".join(places)


def seconds_text(seconds: float) -> str:
    """Return a time with its unit, in three figures."""
    if seconds >= 999.5:
        return f"{seconds:.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return "0 s" if seconds <= 0 else f"{seconds * 1e9:.0f} ns"
