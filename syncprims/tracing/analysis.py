"""Which rank made others wait, at which call, and for how long.

In a round no rank goes on before the last has arrived. So the time from a rank's arrival to that of
the last one is attributed to the last one; the time after it is the cost of the round itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from syncprims.errors import parse_ranks
from syncprims.interface import Label

from .reading import RankTrace, TraceRun
from .recorder import ROUND, WAITING

_WINDOWS = 200  # of which each has its own alignment of clocks, at most
_PER_WINDOW = 20  # rounds in each, at least
START_KIND = "init"  # of the round in which a world starts: a rank that is late there started late
_NEGLIGIBLE = 0.01  # share of the time: less waiting than that is not reported
_AT_THE_END = 1e9  # ns before the last event: who was seen waiting then waits at the end


class Mark(NamedTuple):
    """A loss, or a process that joins."""

    rank: int
    at: float  #: seconds from the first arrival to when it was seen first, or last
    text: str
    joins: bool


class Alignment(NamedTuple):
    """How the clocks of a run were aligned."""

    hosts: list[str]  #: with another clock than that of the first rank
    error: float  #: seconds, of the worst of them
    guessed: list[str]  #: hosts that shared no round with the first: aligned by the calendar


@dataclass
class GroupRounds:
    """The rounds of one group, with a row per round and a column per member; times in ns."""

    group: int
    members: tuple[int, ...]
    number: NDArray[Any]  #: of the round, at its group's board
    posted: NDArray[Any]  #: NaN where the member has no such round
    since: NDArray[Any]
    until: NDArray[Any]  #: when the member left the round, or was last seen waiting in it
    absent: NDArray[Any]  #: whether others wait for the member in a round that they never leave
    call: NDArray[Any]  #: number of the late member's call, or of another's if it has none
    late: NDArray[Any]  #: the member that arrived last; -1 where no member waited
    waited: NDArray[Any]  #: how long each member waited for that one
    last: NDArray[Any]  #: when that one arrived


class LateArrivals(NamedTuple):
    """One rank that made others wait at one call."""

    late: int
    call: Label
    times: int
    waited: float  #: seconds, the sum over all ranks that waited
    longest: float  #: seconds, of one rank in one round
    waiting: list[int]  #: ranks, those that waited longest first


class _OpenRound(NamedTuple):
    """A round in which ranks wait for others when the trace ends."""

    call: Label
    missing: list[int]
    waiting: list[int]
    longest: float  #: seconds, of one rank
    waited: float  #: seconds, the sum over all ranks that wait


class RankSummary(NamedTuple):
    """One rank over the whole run."""

    rank: int  #: in an elastic run, the number of its process
    host: str
    rounds: int
    span: float  #: seconds from the start of the world to its end
    waiting: float  #: seconds of these in rounds
    waited_for: float  #: seconds that others waited for it
    end: str

    @property
    def waiting_share(self) -> float:
        """The share of its time that the rank spent in rounds."""
        return self.waiting / self.span if self.span else 0.0


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
    marks: list[Mark]  #: of an elastic run, by time


def analyse(run: TraceRun) -> Analysis:
    """Return which ranks made others wait in `run`, and change its times to one clock."""
    alignment = _align(run)
    groups = [
        _group_rounds(run, number, members)
        for number, (members, *_) in enumerate(run.groups)
        if len(members) > 1
    ]
    arrivals = [float(rank.rounds["posted"].min()) for rank in run.ranks if len(rank.rounds)]
    start = min(arrivals, default=0.0)
    stop = max(start, *(rank.last_event for rank in run.ranks))
    late_arrivals = sorted(_late_arrivals(run, groups), key=lambda row: -row.waited)
    summaries = [_summary(run, rank, groups) for rank in run.ranks]
    conclusion, stragglers = _conclusion(run, late_arrivals, summaries)
    if hang := _hang(run, groups, stop):
        waited, text, stragglers = hang
        others = sum(row.waited for row in late_arrivals) - waited
        conclusion = f"{text} In all: {conclusion}" if others > waited else text
    marks = sorted(_marks(run, start), key=lambda mark: mark.at)
    return Analysis(
        run, alignment, groups, late_arrivals, summaries, start, stop, conclusion, stragglers, marks
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
    first, *others = clocks.values()
    ours, error = _edges(first), 0.0
    guessed: list[str] = []
    for ranks in others:
        bounds = np.array(
            sorted(
                (released, arrived - ours[key][1], released - ours[key][0])
                for key, (arrived, released) in _edges(ranks).items()
                if key in ours
            )
        )
        if len(bounds):
            windows = np.array_split(bounds, max(1, min(_WINDOWS, len(bounds) // _PER_WINDOW)))
            low = np.array([window[:, 1].max() for window in windows])
            high = np.array([window[:, 2].min() for window in windows])
            at, ahead = [window[:, 0].mean() for window in windows], (low + high) / 2
            error = max(error, float(np.abs(high - low).max()) / 2)
        else:
            guessed.append(ranks[0].host)
            by_calendar = [trace.monotonic - trace.wall for trace in (ranks[0], first[0])]
            at, ahead = [0.0], np.array([by_calendar[0] - by_calendar[1]])
        for rank in ranks:
            for name in ("posted", "since", "done"):
                times = rank.rounds[name]
                known = times > 0
                times[known] -= np.interp(times[known], at, ahead).astype(np.int64)
            if rank.left is not None:
                when, outcome = rank.left
                rank.left = when - int(np.interp(when, at, ahead)), outcome
    return Alignment([ranks[0].host for ranks in others], error / 1e9, guessed)


def _edges(ranks: list[RankTrace]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return by group and round the last arrival and the first release among `ranks`."""
    edges: dict[tuple[int, int], tuple[int, int]] = {}
    for rank in ranks:
        rounds = rank.rounds[(rank.rounds["kind"] == ROUND) & (rank.rounds["outcome"] == 0)]
        for group, number, posted, done in rounds[["group", "number", "posted", "done"]].tolist():
            arrived, released = edges.get((group, number), (posted, done))
            edges[group, number] = max(arrived, posted), min(released, done)
    return edges


# -- waiting -----------------------------------------------------------------------------------


def _group_rounds(run: TraceRun, group: int, members: tuple[int, ...]) -> GroupRounds:
    column = {member: index for index, member in enumerate(members)}
    recorded = [
        (rank, column[rank.rank], rank.rounds[rank.rounds["group"] == group])
        for rank in run.ranks
        if rank.rank in column
    ]
    numbers = np.unique(np.concatenate([rounds["number"] for _, _, rounds in recorded]))
    shape = len(numbers), len(members)
    posted, since, until = (np.full(shape, np.nan) for _ in range(3))
    call = np.full(shape, -1)
    failed = np.zeros(len(numbers), bool)
    absent, gone = np.zeros((2, *shape), bool)  # gone: its record ends before this round
    for rank, index, rounds in recorded:
        at = np.searchsorted(numbers, rounds["number"])
        over = rounds["kind"] == ROUND
        posted[at, index], since[at, index] = rounds["posted"], rounds["since"]
        until[at[over], index] = rounds["done"][over]
        call[at, index] = rounds["call"]
        failed[at[(rounds["outcome"] > 0) & over]] = True
        waiting = (rounds["kind"] == WAITING) & (rounds["done"] > 0) & (rank.left is None)
        for row, waits in zip(at[waiting], rounds[waiting], strict=True):
            with contextlib.suppress(ValueError):  # a damaged text
                missing = {*parse_ranks(run.outcomes[int(waits["outcome"])])} & column.keys()
                absent[row, [column[late] for late in missing]] = True
                if missing:
                    until[row, index] = waits["done"]
        gone[:, index] = numbers > rounds["number"].max(initial=0)
    # If a member never arrived, all waited for that one until the round failed, or to the end.
    blamed = absent | (failed[:, None] & gone)
    never = blamed.any(axis=1)
    arrival: NDArray[Any] = np.where(np.isnan(posted), -np.inf, posted)
    ended: NDArray[Any] = np.where(np.isnan(until), -np.inf, until)
    late: NDArray[Any] = arrival.argmax(axis=1)
    last: NDArray[Any] = arrival.max(axis=1)
    late[never], last[never] = blamed.argmax(axis=1)[never], ended.max(axis=1)[never]
    waited = np.fmax(np.fmin(until, last[:, None]) - since, 0.0)
    waited = np.where(np.isnan(until), 0.0, waited)
    rows = np.arange(len(numbers))
    waited[rows, late] = 0.0
    known = call[rows, late]
    call = np.where(known >= 0, known, call.max(axis=1, initial=-1))
    late = np.where(waited.sum(axis=1) > 0, np.array(members)[late], -1)
    return GroupRounds(
        group, members, numbers, posted, since, until, absent, call, late, waited, last
    )


def _late_arrivals(run: TraceRun, groups: list[GroupRounds]) -> list[LateArrivals]:
    """Return one entry for every rank that was late at a call, over all groups."""
    totals: dict[tuple[int, int], tuple[int, NDArray[Any], float]] = {}
    for rounds in groups:
        pairs: list[tuple[int, int]] = np.stack([rounds.late, rounds.call], axis=1).tolist()
        for late, call in {(late, call) for late, call in pairs}:
            if late >= 0:
                waited = rounds.waited[(rounds.late == late) & (rounds.call == call)]
                new = 0, np.zeros(run.members[-1] + 1), 0.0
                times, sums, longest = totals.get((late, call), new)
                sums[list(rounds.members)] += waited.sum(axis=0)
                totals[late, call] = times + len(waited), sums, max(longest, float(waited.max()))
    rows: list[LateArrivals] = []
    for (late, number), (times, sums, longest) in totals.items():
        waiting = [int(rank) for rank in np.argsort(-sums, kind="stable") if sums[rank] > 0]
        total = float(sums.sum()) / 1e9
        rows.append(LateArrivals(late, run.calls[number], times, total, longest / 1e9, waiting))
    return rows


def _summary(run: TraceRun, rank: RankTrace, groups: list[GroupRounds]) -> RankSummary:
    rounds = rank.rounds
    starts = [number for number, call in enumerate(run.calls) if call.kind == START_KIND]
    in_start = np.isin(rounds["call"], starts)
    joined = rounds["done"][in_start & (rounds["kind"] == ROUND)]
    end = rank.last_event
    begin = joined.min() if len(joined) else rounds["posted"].min(initial=int(end))
    span = end - float(begin)
    known = rounds[~in_start & (rounds["done"] > 0)]
    waiting = float((known["done"] - known["since"]).sum())
    waited_for = 0.0
    for group in groups:
        its_fault = (group.late == rank.rank) & ~np.isin(group.call, starts)
        waited_for += float(group.waited[its_fault].sum())
    return RankSummary(
        rank.rank, rank.host, len(rounds), span / 1e9, min(waiting, span) / 1e9,
        waited_for / 1e9, _describe_end(run, rank),
    )  # fmt: skip


# -- in words ----------------------------------------------------------------------------------


def _describe_end(run: TraceRun, rank: RankTrace) -> str:
    if how := run.lost.get(rank.rank):
        return how
    if rank.left is not None:
        return f"with {rank.left[1]}" if rank.left[1] else "well"
    over = rank.rounds["kind"] == ROUND
    after = rank.rounds["posted"] >= rank.rounds["done"][over].max(initial=0)
    open_rounds = rank.rounds[~over & after]
    if not len(open_rounds):
        return "killed, or still running"
    last = open_rounds[open_rounds["posted"].argmax()]
    return f"killed, or still running: waits at {run.calls[int(last['call'])]}"


def _marks(run: TraceRun, start: float) -> Iterator[Mark]:
    """Return when processes joined and were lost, with their rank at that time."""
    for rank in run.ranks:
        epochs = [epoch for epoch, members in run.epochs.items() if rank.rank in members]
        if not epochs or not len(rank.rounds):
            continue
        if rank.rank >= run.ranks[0].world_size:
            members = run.epochs[min(epochs)]
            text = f"joins as rank {members.index(rank.rank)} of {len(members)}"
            at = (float(rank.rounds["posted"].min()) - start) / 1e9
            yield Mark(rank.rank, at, text, joins=True)
        if rank.rank in run.lost:
            number = run.epochs[max(epochs)].index(rank.rank)
            text = f"rank {number} is lost, ended: {_describe_end(run, rank)}"
            yield Mark(rank.rank, (rank.last_event - start) / 1e9, text, joins=False)


def _hang(
    run: TraceRun, groups: list[GroupRounds], stop: float
) -> tuple[float, str, list[int]] | None:
    """Return for which ranks others wait when the trace ends; None if no rank waits then.

    That is the sum of these waits in seconds, a sentence, and the ranks to blame.
    """
    waits: list[_OpenRound] = []
    for group in groups:
        seen = np.where(np.isnan(group.until), 0.0, group.until).max(axis=1)
        for row in np.flatnonzero(group.absent.any(axis=1) & (seen >= stop - _AT_THE_END)):
            waited, absent = group.waited[row] / 1e9, group.absent[row]
            members = np.array(group.members)
            missing, waiting = members[absent].tolist(), members[(waited > 0) & ~absent].tolist()
            call = run.calls[int(group.call[row])]
            times = float(waited.max()), float(waited.sum())
            waits.append(_OpenRound(call, missing, waiting, *times))
    if not waits:
        return None
    total = sum(wait.waited for wait in waits)
    waiting = sorted({rank for wait in waits for rank in wait.waiting})
    # A rank that waits itself is late because of another.
    causes = sorted({rank for wait in waits for rank in wait.missing} - {*waiting})
    if not causes:
        each = "; ".join(
            f"{run.names(wait.waiting)} in {wait.call} for {run.names(wait.missing)}"
            for wait in waits
        )
        return total, f"{run.names(waiting).capitalize()} wait for each other: {each}.", waiting
    worst = max((wait for wait in waits if {*wait.missing} & {*causes}), key=lambda w: w.longest)
    late = [rank for rank in causes if rank in worst.missing]
    verb = "has" if len(late) == 1 else "have"
    count = f"{len(waiting)} ranks have" if len(waiting) > 1 else f"{run.names(waiting)} has"
    others = f"{count} waited {seconds_text(worst.longest)}"
    who = run.names(late).capitalize()
    return total, f"{who} {verb} not come to {worst.call}; {others}.", causes


def _conclusion(
    run: TraceRun, late_arrivals: list[LateArrivals], summaries: list[RankSummary]
) -> tuple[str, list[int]]:
    """Return the result in one sentence, and the stragglers, if there are any."""
    if len(run.members) == 1:
        return "A world of one: no rank waits for another.", []
    if never := sorted({row.late for row in late_arrivals} - {rank.rank for rank in summaries}):
        who = run.names(never).capitalize()
        return f"{who} never came, and left no trace: the others waited.", never
    total = sum(rank.waited_for for rank in summaries)
    spent = sum(rank.span for rank in summaries)
    share = total / spent if spent else 0.0
    if share < _NEGLIGIBLE:
        return f"No rank makes others wait: waiting takes {share:.1%} of the ranks' time.", []
    worst = sorted(summaries, key=lambda rank: -rank.waited_for)
    for count in range(1, max(1, min(3, len(run.members) // 2)) + 1):
        stragglers = [rank.rank for rank in worst[:count]]
        waited = sum(rank.waited_for for rank in worst[:count])
        if waited >= (0.5 + 0.4 / len(run.members) if count == 1 else 0.8) * total:
            break
    else:
        return (
            f"No rank is the straggler: ranks waited {seconds_text(total)} for each other in all, "
            f"{share:.0%} of their time, {worst[0].waited_for / total:.0%} of it for {run.noun} "
            f"{worst[0].rank}, mostly at {_main_calls(late_arrivals, [worst[0].rank])}."
        ), []
    verb, them = ("is the straggler", "it") if count == 1 else ("are the stragglers", "them")
    return (
        f"{run.names(stragglers).capitalize()} {verb}: the others waited {seconds_text(waited)} "
        f"for {them} in all, {waited / total:.0%} of all waiting for a rank, mostly at "
        f"{_main_calls(late_arrivals, stragglers)}."
    ), stragglers


def _main_calls(late_arrivals: list[LateArrivals], ranks: list[int]) -> str:
    """Return the call at which others waited longest for each of these ranks."""
    calls: dict[int, str] = {}
    for row in late_arrivals:  # worst first
        if row.late in ranks and row.call.kind != START_KIND:
            calls.setdefault(row.late, str(row.call))
    return " and ".join(dict.fromkeys(calls.values()))


def seconds_text(seconds: float) -> str:
    """Return a duration with its unit, in three significant digits."""
    if seconds >= 999.5:
        return f"{seconds:.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return "0 s" if seconds <= 0 else f"{seconds * 1e9:.0f} ns"
