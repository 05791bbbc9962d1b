"""Align the clocks of all hosts, by the rounds themselves.

No rank leaves a round before the last has arrived. So if clock B is ahead of clock A by `d`, every
round in which both took part bounds it: from below, since A's release is after B's arrival
(d >= arrival_B - release_A), and from above, since B's release is after A's arrival
(d <= release_B - arrival_A). All bounds together leave an interval: its middle is taken, and half
its width is the error. Clocks drift, so this is done for windows of the run, with straight lines
between their middles. The method is that of Duda, Harrus, Haddad and Bernard, "Estimating Global
Time in Distributed Systems", ICDCS 1987, which bounds clocks by messages; a round is a message in
both directions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncprims._protocol.trace_file import ROUND

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .reading import RankTrace, TraceRun

_WINDOWS = 200  # at most
_PER_WINDOW = 20  # rounds in each, at least


class Alignment(NamedTuple):
    """How the clocks of a run were aligned."""

    hosts: list[str]  #: with another clock than that of the first rank
    error: float  #: seconds, of the worst of them
    guessed: list[str]  #: hosts that shared no round with the others: aligned by the calendar


def align(run: TraceRun) -> Alignment:
    """Change the times of all ranks to the clock of the first."""
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
