"""Deadlocks: the search for ranks that wait for each other, and the error that describes them.

A rank that waits needs the notes of *all* missing members, and posts nothing until it has them.
So if each rank of a cycle lacks the note of the next one, no rank of the cycle can ever continue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncprims.errors import CollectiveMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class Wait(NamedTuple):
    """Where one rank waits."""

    call: str  #: that it waits in, as messages show it
    group: str  #: whose round it waits for, as messages show it
    missing: Iterable[int]  #: members that have not posted to this round


def find_cycle(start: int, wait_of: Callable[[int], Wait | None]) -> list[int]:
    """Return the shortest cycle of waiting ranks that begins with `start`; empty if there is none.

    Each rank of it lacks the note of the next one, and the last that of `start`. `wait_of` returns
    None for a rank that does not wait. It is called at most once per rank, and only for ranks that
    `start` waits for directly or indirectly; each `missing` is iterated once.
    """
    waited_for_by = {start: start}
    queue = [start]
    for rank in queue:
        wait = wait_of(rank)
        for other in () if wait is None else wait.missing:
            if other == start:
                cycle = [rank]
                while cycle[0] != start:
                    cycle.insert(0, waited_for_by[cycle[0]])
                return cycle
            if other not in waited_for_by:
                waited_for_by[other] = rank
                queue.append(other)
    return []


def find_any_cycle(waits: Mapping[int, Wait]) -> list[int]:
    """Return a cycle among these waits, beginning with the lowest rank in any; empty if none."""
    for rank in sorted(waits):
        if cycle := find_cycle(rank, waits.get):
            return cycle
    return []


def deadlock_error(cycle: Mapping[int, Wait], rank: int) -> CollectiveMismatch:
    """Return the error that `rank`, one of this cycle, raises; it shows every rank of the cycle."""
    lines = "\n".join(
        f"  rank {waiting}: {wait.call} in group {wait.group}" for waiting, wait in cycle.items()
    )
    return CollectiveMismatch(
        f"ranks wait for each other in different groups, and none can go on:\n{lines}\n"
        f"Every rank must make the calls of different groups in the same order.",
        rank=rank,
        call=cycle[rank].call,
    )
