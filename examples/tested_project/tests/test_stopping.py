"""Tests that find bugs in milliseconds that would make a cluster hang."""

from __future__ import annotations

import pytest
from wordcount import until_common

from syncprims import PeerLost, SyncError, SyncTimeout, any_rank, barrier, get_rank, split
from syncprims.testing import Delay, Kill, explore, run_world

LINES = ["a b", "b c", "c b", "b d", "d a"]


def careless(lines: list[str]) -> None:
    """Do the same as `until_common`, but with shares that are not padded."""
    for line in split(lines):
        if any_rank("z" in line):
            break


@pytest.mark.world(ranks=[1, 2, 3, 4], kind=["threads", "processes"])
def test_all_stop_after_the_same_line() -> None:
    read = until_common(LINES * 4, times=3)
    assert 1 <= read < len(LINES * 4)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_careless_loop_is_caught(ranks: int) -> None:
    with pytest.raises(SyncError, match="rank"):  # at once, without a timeout
        run_world(lambda: careless(LINES), ranks)


def test_no_order_of_ranks_changes_the_answer() -> None:
    found = explore(lambda: until_common(LINES, times=2), ranks=3, schedules=30)
    assert found.schedules == 30


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(PeerLost, match="rank 1"):
        run_world(lambda: until_common(LINES, times=9), ranks=2, faults=[Kill(1, at=1)])


def test_half_an_hour_passes_at_once() -> None:
    """Time is virtual in threads, so the test does not wait."""

    def late() -> None:
        barrier("start", timeout=1800)

    with pytest.raises(SyncTimeout, match=r"ranks \[2\] did not come"):
        run_world(late, ranks=3, faults=[Delay(2, at=1, seconds=3600)])


@pytest.mark.world(ranks=2, schedules=20)
def test_a_mark_tries_orders_too() -> None:
    assert until_common([f"rank {get_rank()}"], times=5) == 1
