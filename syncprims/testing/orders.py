"""Every order of the ranks that can make a difference, each of them once.

The order of two steps matters only if they are of different ranks and access the same thing, and
one of them changes it. Collectives commute. What can distinguish orders are calls of a store, looks
at a transfer, ranks that die or fail, decisions of `reform`, and what the program declares. All
other orders are equal to one that was run.

This is dynamic partial-order reduction. A run shows its races: pairs of steps that could come in
the other order. Each is reversed in a later run, until none is left. Source sets decide which rank
reverses a race, and sleep sets prevent that an order is run twice: Abdulla, Aronis, Jonsson and
Sagonas, "Optimal Dynamic Partial Order Reduction" (POPL 2014).
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

#: ``read`` and ``write`` are as usual. What one rank adds with ``post``, in any order with the
#: posts of others, another one awaits with ``collect``, or sees, or misses, with ``read``. A wait
#: whose deadline has come reads, also where it finds what it awaits: it could have ended without.
Mode = Literal["read", "write", "post", "collect"]
Footprint = dict[Hashable, set[Mode]]

#: Pairs of accesses, alphabetically, whose order makes a difference.
_RACES = {("read", "write"), ("write", "write"), ("post", "read")}
_ORDERED = _RACES | {("collect", "post")}  # a post without which the wait goes on comes first


def _pairs(one: Footprint, other: Footprint, kinds: set[tuple[str, str]]) -> bool:
    return any(
        (min(a, b), max(a, b)) in kinds
        for thing in one.keys() & other.keys()
        for a in one[thing]
        for b in other[thing]
    )


@dataclass
class Step:
    """The steps of one rank while it has the turn."""

    rank: int
    able: Sequence[int]  #: the ranks that could have had the turn
    usual: int  #: the one that has it where nothing else is asked for
    asleep: dict[int, Footprint]  #: ranks whose step here leads to orders that were run
    footprint: Footprint = field(default_factory=Footprint)
    explored: dict[int, Footprint] = field(default_factory=dict[int, Footprint])
    wanted: set[int] = field(default_factory=set[int])  #: ranks that reverse a race here


class OrderSchedule:
    """Repeats a prefix of an order, then lets each rank continue as long as it can."""

    exact = True

    def __init__(self, ranks: Mapping[int, int], asleep: Mapping[int, Footprint] | None = None):
        """Give the turn of these steps to these ranks; `asleep` applies after the last of them."""
        self.steps: list[Step] = []
        self.redundant: int | None = None  #: from this step on, it repeats an order
        self.diverged: bool = False  #: a rank could not continue that could in the run before
        self._ranks = ranks
        self._last = max(ranks, default=-1)
        self._asleep = dict(asleep or {})

    def pick(self, able: Sequence[int], current: int | None) -> int:
        """Return the rank that has the next step."""
        number = len(self.steps)
        if number > self._last and self.steps:
            last = self.steps[-1]
            self._asleep = {
                rank: footprint
                for rank, footprint in self._asleep.items()
                if rank != last.rank and not _pairs(footprint, last.footprint, _ORDERED)
            }
        usual = able[0] if current is None else current
        rank = self._ranks.get(number, usual)
        if rank not in able:
            self.diverged, rank = True, usual
        if number > self._last:
            awake = [one for one in (usual, *able) if one not in self._asleep]
            if not awake and self.redundant is None:
                self.redundant = number
            rank = next(iter(awake), usual)
        self.steps.append(Step(rank, tuple(able), usual, dict(self._asleep)))
        return rank

    def access(self, rank: int, thing: Hashable, mode: Mode) -> None:
        """Record that `rank`, which has the turn, accesses something that ranks share."""
        if self.steps and self.steps[-1].rank == rank:
            self.steps[-1].footprint.setdefault(thing, set()).add(mode)

    @property
    def order(self) -> tuple[tuple[int, int], ...]:
        """The steps, and their ranks, at which this order is not the usual one."""
        return tuple((n, s.rank) for n, s in enumerate(self.steps) if s.rank != s.usual)


def find_orders(ranks: int) -> Generator[OrderSchedule]:
    """Yield a schedule of each order; it must have been run before the next one is asked for."""
    path: list[Step] = []
    asleep: Mapping[int, Footprint] = {}
    while True:
        schedule = OrderSchedule({n: step.rank for n, step in enumerate(path)}, asleep)
        yield schedule
        if schedule.diverged:
            return
        steps = schedule.steps[: schedule.redundant]
        if path and len(steps) >= len(path):
            path[-1].footprint = steps[len(path) - 1].footprint
        path += steps[len(path) :]
        _find_races(path, ranks)
        while path:
            step = path[-1]
            step.explored[step.rank] = step.footprint
            left = step.wanted - step.explored.keys() - step.asleep.keys()
            if left:
                step.rank, step.footprint = min(left), {}
                asleep = step.asleep | step.explored
                break
            path.pop()
        else:
            return


def _find_races(path: Sequence[Step], ranks: int) -> None:
    """Want, for each race, a rank that reverses it, unless one is wanted already."""
    clocks: list[list[int]] = []  # of each step: how many steps of each rank come before, for sure
    numbers: list[int] = []  # of each step: how many its rank had made
    latest = [[0] * ranks for _ in range(ranks)]
    made = [0] * ranks
    last: dict[Hashable, dict[tuple[int, Mode], int]] = {}  # step of the last access of a kind
    for number, step in enumerate(path):
        clock = latest[step.rank][:]
        before = {
            earlier
            for thing in step.footprint
            for (rank, _), earlier in last.get(thing, {}).items()
            if rank != step.rank
        }
        racing: list[int] = []
        for earlier in sorted(before, reverse=True):
            other = path[earlier]
            if clock[other.rank] > numbers[earlier]:
                continue  # it comes before for another reason
            if _pairs(step.footprint, other.footprint, _ORDERED):
                if _pairs(step.footprint, other.footprint, _RACES):
                    racing.append(earlier)
                clock = [max(pair) for pair in zip(clock, clocks[earlier], strict=True)]
        numbers.append(made[step.rank])
        made[step.rank] += 1
        clock[step.rank] = made[step.rank]
        clocks.append(clock)
        latest[step.rank] = clock
        for thing, modes in step.footprint.items():
            last.setdefault(thing, {}).update({(step.rank, mode): number for mode in modes})
        for earlier in racing:
            _reverse(path, earlier, number, clocks, numbers)


def _reverse(
    path: Sequence[Step], first: int, second: int, clocks: list[list[int]], numbers: list[int]
) -> None:
    """Want a rank at the step `first` with which `second` can come before it."""

    def follows(later: int, earlier: int) -> bool:
        return clocks[later][path[earlier].rank] > numbers[earlier]

    free = [n for n in range(first + 1, second) if not follows(n, first)] + [second]
    starts = {
        path[n].rank for at, n in enumerate(free) if not any(follows(n, m) for m in free[:at])
    }
    step = path[first]
    possible = starts.intersection(step.able)
    if possible and not possible & (step.wanted | step.explored.keys() | {step.rank}):
        step.wanted.add(path[second].rank if path[second].rank in possible else min(possible))
