"""One clock for all hosts, found from the rounds themselves.

Nobody leaves a round before the last has arrived. So if clock B is ahead of clock A by `d`, every
round that both took part in bounds it: from below, since A's release is after B's arrival
(d >= arrival_B - release_A), and from above, since B's release is after A's arrival
(d <= release_B - arrival_A). The tightest of many bounds leave an interval, whose middle is taken:
half its width is the error. Clocks drift, so this is done over windows of the run, with a line from
middle to middle. The method is that of Duda, Harrus, Haddad and Bernard, "Estimating Global Time in
Distributed Systems", ICDCS 1987, which bounds clocks by messages; a round is one both ways.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncprims._protocol.trace_file import ROUND

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .reading import RankTrace, Run

_WINDOWS = 200  # at most
_PER_WINDOW = 20  # rounds in each, at least


class Alignment(NamedTuple):
    """How the clocks of a run were brought together."""

    hosts: list[str]  #: those whose clock is not that of the first rank
    error: float  #: seconds that the worst of them may be off
    guessed: list[str]  #: those that shared no round with the others: by the calendar


class _Bounds(NamedTuple):
    """What rounds say of one clock against the reference."""

    at: NDArray[Any]
    lower: NDArray[Any]
    upper: NDArray[Any]


def align(run: Run) -> Alignment:
    """Bring the times of all ranks to the clock of the first."""
    clocks: dict[str, list[RankTrace]] = {}
    for rank in run.ranks:
        clocks.setdefault(rank.clock, []).append(rank)
    reference, *others = clocks
    done, left = [reference], list(others)
    error = 0.0
    hosts: list[str] = []
    guessed: list[str] = []
    while left:
        # Those that met the reference, or what has been brought to it already.
        known = [rank for clock in done for rank in clocks[clock]]
        bounds = {clock: _bounds(known, clocks[clock]) for clock in left}
        clock = max(left, key=lambda clock: len(bounds[clock].at))
        hosts.append(clocks[clock][0].host)
        if len(bounds[clock].at):
            error = max(error, _bring(clocks[clock], bounds[clock]))
        else:
            guessed.append(clocks[clock][0].host)
            first, mine = known[0], clocks[clock][0]
            ahead = (mine.monotonic - mine.wall) - (first.monotonic - first.wall)
            _shift(clocks[clock], [0.0], [float(ahead)])
        left.remove(clock)
        done.append(clock)
    return Alignment(hosts, error / 1e9, guessed)


def _edges(ranks: list[RankTrace]) -> dict[int, dict[int, tuple[int, int]]]:
    """Return by group and round the last arrival and the first release among `ranks`."""
    found: dict[int, dict[int, tuple[int, int]]] = {}
    for rank in ranks:
        rounds = rank.rounds[(rank.rounds["kind"] == ROUND) & (rank.rounds["outcome"] == 0)]
        for number, group, posted, done in zip(
            rounds["number"].tolist(),
            rounds["group"].tolist(),
            rounds["posted"].tolist(),
            rounds["done"].tolist(),
            strict=True,
        ):
            seen = found.setdefault(group, {})
            before = seen.get(number)
            if before is not None:
                posted, done = max(posted, before[0]), min(done, before[1])
            seen[number] = posted, done
    return found


def _bounds(known: list[RankTrace], others: list[RankTrace]) -> _Bounds:
    """Return what the rounds that both took part in say of the others' clock."""
    ours, theirs = _edges(known), _edges(others)
    rows: list[tuple[int, int, int]] = []
    for group, rounds in theirs.items():
        mine = ours.get(group, {})
        for number in rounds.keys() & mine.keys():
            arrived_b, released_b = rounds[number]
            arrived_a, released_a = mine[number]
            rows.append((released_b, arrived_b - released_a, released_b - arrived_a))
    rows.sort()
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 3)
    return _Bounds(table[:, 0], table[:, 1], table[:, 2])


def _bring(ranks: list[RankTrace], bounds: _Bounds) -> float:
    """Take from the times of `ranks` what their clock is ahead; return the worst error, in ns."""
    count = max(1, min(_WINDOWS, len(bounds.at) // _PER_WINDOW))
    centres: list[float] = []
    middles: list[float] = []
    error = 0.0
    for at, lower, upper in zip(*(np.array_split(side, count) for side in bounds), strict=True):
        low, high = int(lower.max()), int(upper.min())
        centres.append(float(at.mean()))
        middles.append(low + (high - low) / 2)
        error = max(error, abs(high - low) / 2)
    _shift(ranks, centres, middles)
    return error


def _shift(ranks: list[RankTrace], at: list[float], ahead: list[float]) -> None:
    """Take from all times what the clock is ahead then, on the line between what is known."""
    for rank in ranks:
        for name in ("posted", "since", "done"):
            times = rank.rounds[name]
            known = times > 0
            times[known] -= np.interp(times[known], at, ahead).astype(np.int64)
        if rank.left is not None:
            when, outcome = rank.left
            rank.left = when - int(np.interp(when, at, ahead)), outcome
