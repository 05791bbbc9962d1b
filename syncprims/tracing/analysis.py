"""Which rank made others wait, at which call, and for how long.

In a round no rank goes on before the last has arrived. So the time from a rank's arrival to that of
the last one is attributed to the last one; the time after it is the cost of the round itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from syncprims._protocol.trace_file import ROUND, WAITING
from syncprims.errors import parse_ranks

from .reading import RankTrace, TracedCall, TraceRun

_WINDOWS = 200  # of which each has its own alignment of clocks, at most
_PER_WINDOW = 20  # rounds in each, at least
START_KIND = "init"  # of the round in which a world starts: a rank that is late there started late
_NEGLIGIBLE = 0.01  # share of the time: less waiting than that is not reported
_AT_THE_END = 1e9  # ns before the last event: who was seen waiting then waits at the end


class Alignment(NamedTuple):
    """How the clocks of a run were aligned."""

    hosts: list[str]  #: with another clock than that of the first rank
    error: float  #: seconds, of the worst of them
    guessed: list[str]  #: hosts that shared no round with the others: aligned by the calendar


@dataclass
class GroupRounds:
    """The rounds of one group, with a row per round and a column per member; times in ns."""

    group: int
    members: tuple[int, ...]
    number: NDArray[Any]  #: of the round, at its group's board
    posted: NDArray[Any]  #: NaN where the member has no such round
    since: NDArray[Any]
    done: NDArray[Any]  #: NaN also where it never ended
    call: NDArray[Any]  #: number of the late member's call, or of another's if it has none
    first: NDArray[Any]  #: whether the round is the first of its call
    late: NDArray[Any]  #: column of the member that arrived last; -1 where no member waited
    waited: NDArray[Any]  #: how long each member waited for that one
    last: NDArray[Any]  #: when that one arrived


class LateArrivals(NamedTuple):
    """One rank that made others wait at one call."""

    late: int
    call: TracedCall
    times: int
    waited: float  #: seconds, the sum over all ranks that waited
    longest: float  #: seconds, of one rank in one round
    waiting: list[int]  #: ranks, those that waited longest first


class OpenRound(NamedTuple):
    """A round that some members have not come to when the trace ends, while others wait."""

    call: TracedCall
    missing: list[int]
    waiting: list[int]
    waited: float  #: seconds, the sum over all ranks that wait
    longest: float  #: seconds, of one rank


class RankSummary(NamedTuple):
    """One rank over the whole run."""

    rank: int
    host: str
    rounds: int
    span: float  #: seconds from the start of the world to its end
    waiting: float  #: seconds of these in rounds
    waited_for: float  #: seconds that others waited for it
    end: str


@dataclass
class Analysis:
    """The result of `analyse`."""

    run: TraceRun
    alignment: Alignment
    groups: list[GroupRounds]
    late_arrivals: list[LateArrivals]  #: worst first
    summaries: list[RankSummary]
    start: float  #: ns, of the first arrival
    stop: float  #: ns, of the last event
    conclusion: str
    stragglers: list[int]


def analyse(run: TraceRun) -> Analysis:
    """Return which ranks made others wait in `run`, and change its times to one clock."""
    alignment = _align(run)
    groups = [
        _group_rounds(run, number, members)
        for number, members in enumerate(run.names.groups)
        if len(members) > 1
    ]
    start = min((float(rank.rounds["posted"].min()) for rank in run.ranks if len(rank.rounds)),
                default=0.0)  # fmt: skip
    stop = max(start, *map(_last_event, run.ranks))
    late_arrivals = sorted(_late_arrivals(run, groups), key=lambda one: -one.waited)
    summaries = [_summary(run, rank, groups) for rank in run.ranks]
    conclusion, stragglers = _conclusion(run, late_arrivals, summaries)
    open_rounds = _open_rounds(run, groups, stop)
    if open_rounds:
        history = conclusion
        conclusion, stragglers = _hang(open_rounds)
        if sum(one.waited for one in late_arrivals) > 2 * sum(one.waited for one in open_rounds):
            conclusion = f"{conclusion} In all: {history}"
    return Analysis(
        run, alignment, groups, late_arrivals, summaries, start, stop, conclusion, stragglers
    )


# -- one clock for all hosts -------------------------------------------------------------------


def _align(run: TraceRun) -> Alignment:
    """Change the times of all ranks to the clock of the first, by the rounds themselves.

    No rank leaves a round before the last has arrived. So if clock B is ahead of clock A by `d`,
    every round in which both took part bounds it: from below, since A's release is after B's
    arrival (d >= arrival_B - release_A), and from above, since B's release is after A's arrival
    (d <= release_B - arrival_A). All bounds together leave an interval: its middle is taken, and
    half its width is the error. Clocks drift, so this is done for windows of the run, with straight
    lines between their middles. The method is that of Duda, Harrus, Haddad and Bernard, "Estimating
    Global Time in Distributed Systems", ICDCS 1987, which bounds clocks by messages; a round is a
    message in both directions.
    """
    clocks: dict[str, list[RankTrace]] = {}
    for rank in run.ranks:
        clocks.setdefault(rank.clock, []).append(rank)
    first, *left = clocks
    aligned = list(clocks[first])
    error = 0.0
    hosts: list[str] = []
    guessed: list[str] = []
    while left:
        # First the clock that shares most rounds with those that are aligned already.
        bounds = {clock: _bounds(aligned, clocks[clock]) for clock in left}
        clock = max(left, key=lambda clock: len(bounds[clock]))
        ranks = clocks[clock]
        hosts.append(ranks[0].host)
        if len(bounds[clock]):
            error = max(error, _align_clock(ranks, bounds[clock]))
        else:
            guessed.append(ranks[0].host)
            ahead = ranks[0].monotonic - ranks[0].wall - (aligned[0].monotonic - aligned[0].wall)
            _shift(ranks, [0.0], [float(ahead)])
        left.remove(clock)
        aligned += ranks
    return Alignment(hosts, error / 1e9, guessed)


def _edges(ranks: list[RankTrace]) -> dict[int, dict[int, tuple[int, int]]]:
    """Return by group and round the last arrival and the first release among `ranks`."""
    found: dict[int, dict[int, tuple[int, int]]] = {}
    for rank in ranks:
        rounds = rank.rounds[(rank.rounds["kind"] == ROUND) & (rank.rounds["outcome"] == 0)]
        columns = (rounds[name].tolist() for name in ("number", "group", "posted", "done"))
        for number, group, posted, done in zip(*columns, strict=True):
            seen = found.setdefault(group, {})
            before = seen.get(number)
            if before is not None:
                posted, done = max(posted, before[0]), min(done, before[1])
            seen[number] = posted, done
    return found


def _bounds(aligned: list[RankTrace], others: list[RankTrace]) -> NDArray[Any]:
    """Return a row for each round in which both took part: when, the lower and the upper bound."""
    ours, theirs = _edges(aligned), _edges(others)
    rows: list[tuple[int, int, int]] = []
    for group, rounds in theirs.items():
        mine = ours.get(group, {})
        for number in rounds.keys() & mine.keys():
            arrived_b, released_b = rounds[number]
            arrived_a, released_a = mine[number]
            rows.append((released_b, arrived_b - released_a, released_b - arrived_a))
    return np.array(sorted(rows), dtype=np.int64).reshape(len(rows), 3)


def _align_clock(ranks: list[RankTrace], bounds: NDArray[Any]) -> float:
    """Subtract from the times of `ranks` what their clock is ahead; return the error in ns."""
    count = max(1, min(_WINDOWS, len(bounds) // _PER_WINDOW))
    centres: list[float] = []
    middles: list[float] = []
    error = 0.0
    for window in np.array_split(bounds, count):
        low, high = int(window[:, 1].max()), int(window[:, 2].min())
        centres.append(float(window[:, 0].mean()))
        middles.append(low + (high - low) / 2)
        error = max(error, abs(high - low) / 2)
    _shift(ranks, centres, middles)
    return error


def _shift(ranks: list[RankTrace], at: list[float], ahead: list[float]) -> None:
    """Subtract from all times what the clock is ahead then, interpolated between the points."""
    for rank in ranks:
        for name in ("posted", "since", "done"):
            times = rank.rounds[name]
            known = times > 0
            times[known] -= np.interp(times[known], at, ahead).astype(np.int64)
        if rank.left is not None:
            when, outcome = rank.left
            rank.left = when - int(np.interp(when, at, ahead)), outcome


# -- waiting -----------------------------------------------------------------------------------


def _last_event(rank: RankTrace) -> float:
    left = rank.left[0] if rank.left else 0
    rounds = rank.rounds
    return float(max(left, rounds["done"].max(initial=0), rounds["posted"].max(initial=0)))


def _group_rounds(run: TraceRun, group: int, members: tuple[int, ...]) -> GroupRounds:
    column = {member: index for index, member in enumerate(members)}
    found = [
        (column[rank.rank], rank.rounds[rank.rounds["group"] == group])
        for rank in run.ranks
        if rank.rank in column
    ]
    numbers = np.unique(np.concatenate([rounds["number"] for _, rounds in found]))
    shape = len(numbers), len(members)
    posted, since, done = (np.full(shape, np.nan) for _ in range(3))
    call = np.full(shape, -1)
    failed, first = np.zeros((2, len(numbers)), bool)
    gone = np.zeros(shape, bool)  # the member's record ends before this round
    seen = np.full(shape, np.nan)  # when the member was last seen waiting
    never = np.zeros(shape, bool)  # the others wait for it, and the round never ends
    for index, rounds in found:
        at = np.searchsorted(numbers, rounds["number"])
        over = rounds["kind"] == ROUND
        posted[at, index], since[at, index] = rounds["posted"], rounds["since"]
        done[at[over], index] = rounds["done"][over]
        call[at, index] = rounds["call"]
        first[at] |= ~rounds["further"]
        failed[at[(rounds["outcome"] > 0) & over]] = True
        for row, waits in zip(at, rounds, strict=True) if (rounds["kind"] == WAITING).any() else ():
            for missing in _missing(run, waits):
                never[row, column[missing]] = True
                seen[row, index] = waits["done"]
        gone[:, index] = numbers > rounds["number"].max(initial=0)
    arrival = np.where(np.isnan(posted), -np.inf, posted)
    late: NDArray[Any] = arrival.argmax(axis=1)
    last: NDArray[Any] = arrival.max(axis=1)
    # If a member never arrived, all waited for that one until the round failed, or to the end.
    absent = never | (failed[:, None] & gone)
    late = np.where(absent.any(axis=1), absent.argmax(axis=1), late)
    until = np.where(np.isnan(done), seen, done)
    ended: NDArray[Any] = np.where(np.isnan(until), -np.inf, until).max(axis=1)
    last = np.where(absent.any(axis=1), ended, last)
    waited = np.fmax(np.fmin(until, last[:, None]) - since, 0.0)
    waited = np.where(np.isnan(until), 0.0, waited)
    rows = np.arange(len(numbers))
    waited[rows, late] = 0.0
    late = np.where(waited.sum(axis=1) > 0, late, -1)
    known = call[rows, np.maximum(late, 0)]
    call = np.where(known >= 0, known, call.max(axis=1, initial=-1))
    return GroupRounds(
        group, members, numbers, posted, since, done, call, first, late, waited, last
    )


def _missing(run: TraceRun, waits: Any) -> list[int]:
    """Return for which ranks a rank waits in a round that it has not left, where known."""
    if waits["kind"] != WAITING or not waits["done"]:
        return []
    members = run.names.groups[int(waits["group"])]
    try:
        missing = parse_ranks(run.names.outcomes[int(waits["outcome"])])
    except ValueError:  # a damaged text
        return []
    return [rank for rank in missing if rank in members]


def _open_rounds(run: TraceRun, groups: list[GroupRounds], stop: float) -> list[OpenRound]:
    """Return the rounds in which ranks wait when the trace ends, the longest wait first."""
    found: dict[tuple[int, int], set[int]] = {}
    for rank in run.ranks:
        for waits in rank.rounds[rank.rounds["done"] >= stop - _AT_THE_END]:
            if rank.left is None and (missing := _missing(run, waits)):
                found.setdefault((int(waits["group"]), int(waits["number"])), set()).update(missing)
    open_rounds: list[OpenRound] = []
    for group in groups:
        for (number, round_), absent in found.items():
            if number == group.group:
                row = int(np.searchsorted(group.number, round_))
                seconds = (group.waited[row] / 1e9).tolist()
                waited = dict(zip(group.members, seconds, strict=True))
                waiting = [rank for rank in group.members if waited[rank] and rank not in absent]
                open_rounds.append(OpenRound(
                    run.names.calls[int(group.call[row])], sorted(absent), waiting,
                    sum(waited.values()), max(waited.values()),
                ))  # fmt: skip
    return sorted(open_rounds, key=lambda one: -one.longest)


def _late_arrivals(run: TraceRun, groups: list[GroupRounds]) -> list[LateArrivals]:
    """Return one entry for every rank that was late at a call, over all groups."""
    found: dict[tuple[int, int], tuple[int, NDArray[Any], float]] = {}
    for rounds in groups:
        calls_begun = np.cumsum(rounds.first)
        chosen = np.flatnonzero(rounds.late >= 0)
        keys = np.stack([rounds.late[chosen], rounds.call[chosen]])
        pairs, which = np.unique(keys, axis=1, return_inverse=True)
        for number, (late, call) in enumerate(pairs.T):
            at = chosen[which.ravel() == number]
            key = rounds.members[int(late)], int(call)
            times, sums, longest = found.get(key, (0, np.zeros(run.world_size), 0.0))
            sums[list(rounds.members)] += rounds.waited[at].sum(axis=0)
            times += len(np.unique(calls_begun[at]))
            found[key] = times, sums, max(longest, float(rounds.waited[at].max()))
    return [
        LateArrivals(
            late,
            run.names.calls[call],
            times,
            float(sums.sum()) / 1e9,
            longest / 1e9,
            [int(rank) for rank in np.argsort(-sums, kind="stable") if sums[rank] > 0],
        )
        for (late, call), (times, sums, longest) in found.items()
    ]


def _summary(run: TraceRun, rank: RankTrace, groups: list[GroupRounds]) -> RankSummary:
    rounds = rank.rounds
    starts = [n for n, call in enumerate(run.names.calls) if call.kind == START_KIND]
    in_start = np.isin(rounds["call"], starts)
    joined = rounds["done"][in_start & (rounds["kind"] == ROUND)]
    end = _last_event(rank)
    begin = joined.max() if len(joined) else rounds["posted"].min(initial=int(end))
    span = end - float(begin)
    known = rounds[~in_start & (rounds["done"] > 0)]
    waiting = float((known["done"] - known["since"]).sum())
    waited_for = 0.0
    for group in groups:
        if rank.rank in group.members:
            mine = group.late == group.members.index(rank.rank)
            waited_for += float(group.waited[mine & ~np.isin(group.call, starts)].sum())
    return RankSummary(
        rank.rank, rank.host, len(rounds), span / 1e9, min(waiting, span) / 1e9,
        waited_for / 1e9, _describe_end(run, rank),
    )  # fmt: skip


def _describe_end(run: TraceRun, rank: RankTrace) -> str:
    if rank.left is not None:
        return f"with {rank.left[1]}" if rank.left[1] else "well"
    open_rounds = rank.rounds[rank.rounds["kind"] != ROUND]
    if len(open_rounds):
        last = open_rounds[open_rounds["posted"].argmax()]
        over = rank.rounds[rank.rounds["kind"] == ROUND]
        if last["posted"] >= over["done"].max(initial=0):
            call = run.names.calls[int(last["call"])]
            return f"killed, or still running: waits at {call} ({call.site})"
    return "killed, or still running"


def _hang(open_rounds: list[OpenRound]) -> tuple[str, list[int]]:
    """Return which ranks the others wait for when the trace ends, as a sentence, and these."""
    waiting = sorted({rank for one in open_rounds for rank in one.waiting})
    # A rank that waits itself is late because of another.
    causes = sorted({rank for one in open_rounds for rank in one.missing} - {*waiting})
    if not causes:
        each = "; ".join(
            f"{_names(one.waiting).lower()} in {one.call} ({one.call.site}) for "
            f"{_names(one.missing).lower()}"
            for one in open_rounds
        )
        return f"{_names(waiting)} wait for each other: {each}.", waiting
    worst = next(one for one in open_rounds if set(one.missing) & set(causes))
    late = [rank for rank in causes if rank in worst.missing]
    verb = "has" if len(late) == 1 else "have"
    count = f"{len(waiting)} ranks have" if len(waiting) > 1 else f"rank {waiting[0]} has"
    return (
        f"{_names(late)} {verb} not come to {worst.call} ({worst.call.site}); {count} waited "
        f"{seconds_text(worst.longest)}."
    ), causes


def _conclusion(
    run: TraceRun, late_arrivals: list[LateArrivals], summaries: list[RankSummary]
) -> tuple[str, list[int]]:
    """Return the result in one sentence, and the stragglers, if there are any."""
    if run.world_size == 1:
        return "A world of one: no rank waits for another.", []
    never = sorted({one.late for one in late_arrivals} - {one.rank for one in summaries})
    if never:
        return f"{_names(never)} never came, and left no trace: the others waited.", never
    total = sum(one.waited_for for one in summaries)
    spent = sum(one.span for one in summaries)
    if not spent or total < _NEGLIGIBLE * spent:
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
            f"{worst[0].rank}, mostly at {_main_places(late_arrivals, [worst[0].rank])}."
        ), []
    verb, them = ("is the straggler", "it") if len(found) == 1 else ("are the stragglers", "them")
    return (
        f"{_names(found)} {verb}: the others waited {seconds_text(share * total)} for {them} in "
        f"all, {share:.0%} of all waiting for a rank, mostly at "
        f"{_main_places(late_arrivals, found)}."
    ), found


def _names(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    return f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _main_places(late_arrivals: list[LateArrivals], ranks: list[int]) -> str:
    """Return the call at which others waited longest for each of these ranks."""
    places: dict[str, None] = {}
    for rank in ranks:
        calls = [one.call for one in late_arrivals if one.late == rank]
        for call in [call for call in calls if call.kind != START_KIND][:1]:
            places[f"{call} ({call.site})"] = None
    return " and ".join(places)


def seconds_text(seconds: float) -> str:
    """Return a duration with its unit, in three significant digits."""
    if seconds >= 999.5:
        return f"{seconds:.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return "0 s" if seconds <= 0 else f"{seconds * 1e9:.0f} ns"
