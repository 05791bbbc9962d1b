"""The search for ranks that wait for each other, and its text."""

from __future__ import annotations

import pytest

from syncprims._protocol.deadlock import Wait, deadlock_error, find_any_cycle, find_cycle


def waits(**missing: list[int]) -> dict[int, Wait]:
    """Return waits of ranks ``r0``, ``r1`` and so on for these ranks."""
    return {
        int(name[1:]): Wait(f"barrier 'b{name[1:]}' (a.py:1)", f"[{name[1:]}]", ranks)
        for name, ranks in missing.items()
    }


@pytest.mark.parametrize(
    ("waiting", "cycle"),
    [
        ({}, []),
        (waits(r0=[1]), []),  # rank 1 does not wait
        (waits(r0=[1], r1=[2], r2=[]), []),
        (waits(r0=[1], r1=[0]), [0, 1]),
        (waits(r0=[1], r1=[2], r2=[1]), [1, 2]),  # rank 0 is not in it, and waits for it
        (waits(r0=[3], r3=[2, 1], r2=[1], r1=[0]), [0, 3, 1]),  # the shortest one
    ],
)
def test_a_cycle_is_found_if_there_is_one(waiting: dict[int, Wait], cycle: list[int]) -> None:
    assert find_any_cycle(waiting) == cycle


def test_a_search_begins_with_its_rank_and_asks_for_each_wait_once() -> None:
    waiting = waits(r0=[1, 2], r1=[2, 3], r2=[3, 0], r3=[1], r9=[0])
    asked: list[int] = []

    def wait_of(rank: int) -> Wait | None:
        asked.append(rank)
        return waiting.get(rank)

    assert find_cycle(0, wait_of) == [0, 2]
    assert asked == [0, 1, 2]
    assert find_cycle(9, wait_of) == []  # it waits for a cycle, and no rank waits for it


def test_the_error_shows_every_rank_of_the_cycle() -> None:
    error = deadlock_error(waits(r1=[0], r0=[1]), rank=0)
    assert str(error) == (
        "ranks wait for each other in different groups, and none can go on:\n"
        "  rank 1: barrier 'b1' (a.py:1) in group [1]\n"
        "  rank 0: barrier 'b0' (a.py:1) in group [0]\n"
        "Every rank must make the calls of different groups in the same order."
    )
    assert (error.rank, error.call) == (0, "barrier 'b0' (a.py:1)")
