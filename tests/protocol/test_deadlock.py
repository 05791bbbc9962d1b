"""The search for ranks that wait for each other, and its text."""

from __future__ import annotations

import pytest

# A table of waits: ranks that stand in each would take seconds.
from syncprims._protocol.deadlock import Wait, deadlock_error, find_cycle, find_stuck

Waits = dict[int, list[Wait]]


def waits(**missing: list[int]) -> Waits:
    """Return waits of ranks ``r0``, ``r1`` and so on for these ranks."""
    return {
        int(name[1:]): [Wait(f"barrier 'b{name[1:]}' (a.py:1)", f"[{name[1:]}]", ranks)]
        for name, ranks in missing.items()
    }


def any_of(*ranks: int) -> list[Wait]:
    """Return the wait of one thread for the first note of any of these ranks."""
    return [Wait("recv (a.py:1)", "[0-3]", ranks, any=True)]


@pytest.mark.parametrize(
    ("waiting", "stuck", "cycle"),
    [
        ({}, set(), []),
        (waits(r0=[1]), set(), []),  # rank 1 does not wait
        (waits(r0=[1], r1=[2], r2=[]), set(), []),
        (waits(r0=[1], r1=[0]), {0, 1}, [0, 1]),
        (waits(r0=[1], r1=[2], r2=[1]), {0, 1, 2}, []),  # rank 0 waits for a cycle, and is in none
        (waits(r0=[3], r3=[2, 1], r2=[1], r1=[0]), {0, 1, 2, 3}, [0, 3, 1]),  # the shortest one
        ({0: any_of(1, 2), **waits(r1=[0])}, set(), []),  # rank 2 may send
        ({0: any_of(1, 2), **waits(r1=[0], r2=[1])}, {0, 1, 2}, [0, 1]),
        ({0: any_of(1), 1: any_of(0, 2), **waits(r3=[0])}, set(), []),
        ({0: any_of(1), 1: any_of(0)}, {0, 1}, [0, 1]),
        ({0: [*any_of(1), *any_of(2)], **waits(r1=[0])}, set(), []),  # a thread may continue
        ({0: [*any_of(1), *any_of(2)], **waits(r1=[0], r2=[0])}, {0, 1, 2}, [0, 1]),
    ],
)
def test_a_deadlock_is_found_if_there_is(waiting: Waits, stuck: set[int], cycle: list[int]) -> None:
    assert find_stuck(waiting) == stuck
    assert (find_cycle(0, waiting, stuck) if 0 in stuck else []) == cycle


def test_the_error_shows_every_wait() -> None:
    waiting = waits(r1=[0], r0=[1])
    waiting[1] += any_of(0)
    error = deadlock_error(waiting, rank=0)
    assert str(error) == (
        "ranks wait for each other in different groups, and none can go on:\n"
        "  rank 1: barrier 'b1' (a.py:1) in group [1], and another thread: recv (a.py:1) in group "
        "[0-3]\n"
        "  rank 0: barrier 'b0' (a.py:1) in group [0]\n"
        "Every rank must make the calls of different groups in the same order."
    )
    assert (error.rank, error.call) == (0, "barrier 'b0' (a.py:1)")
    assert error.missing == [0, 1]
