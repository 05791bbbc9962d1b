"""Random programs with random faults keep every promise."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import random_programs
from support.rank_worlds import Kind, Ranks, served_store

import syncprims as sp

CHUNK = 25


def judge(first: int, count: int, meeting_place: Path, logs: Path) -> None:
    random_programs.check(range(first, first + count), meeting_place, logs)
    Ranks(Kind("file", 2), meeting_place).run(lambda: sp.barrier())
    assert not any(meeting_place.iterdir())  # the last run clears what the killed have left


@pytest.mark.parametrize("first", range(0, 125, CHUNK))
def test_random_programs_keep_promises(first: int, meeting_place: Path, tmp_path: Path) -> None:
    judge(first, CHUNK, meeting_place, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1_000, 11_000, 250))
def test_ten_thousand_random_programs(first: int, meeting_place: Path, tmp_path: Path) -> None:
    judge(first, 250, meeting_place, tmp_path)


@pytest.mark.parametrize(
    "seeds",
    [
        *(range(first, first + 2) for first in (0, 30)),
        *(
            pytest.param(range(first, first + 100), marks=pytest.mark.soak)
            for first in range(20_000, 22_000, 100)
        ),
    ],
    ids=str,
)
def test_programs_on_several_hosts(seeds: range, meeting_place: Path, tmp_path: Path) -> None:
    with served_store() as store:
        random_programs.check(seeds, meeting_place, tmp_path, store)
