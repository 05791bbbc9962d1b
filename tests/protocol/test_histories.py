"""Random programs with random faults keep every promise."""

from __future__ import annotations

from pathlib import Path

from conftest import seeds
from support import random_programs
from support.rank_worlds import Kind, Ranks, served_store

import syncprims as sp


@seeds([range(first, first + 25) for first in range(0, 50, 25)], range(1_000, 11_000, 250))
def test_random_programs_keep_promises(seeds: range, meeting_place: Path, tmp_path: Path) -> None:
    random_programs.check(seeds, meeting_place, tmp_path)
    Ranks(Kind("file", 2), meeting_place).run(lambda: sp.barrier())
    assert not any(meeting_place.iterdir())  # the last run clears what the killed have left


@seeds([range(2)], range(20_000, 22_000, 100))
def test_programs_on_several_hosts(seeds: range, meeting_place: Path, tmp_path: Path) -> None:
    with served_store() as store:
        random_programs.check(seeds, meeting_place, tmp_path, store)
