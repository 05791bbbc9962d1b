"""Costs that must stay small with thousands of ranks."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

import syncprims as sp
from syncprims import errors

# A search among thousands of ranks, which no test can start.
from syncprims._protocol.deadlock import DeadlockDetector

# Backends of thousands of ranks, which no test can start.
from syncprims._world.registry import load_backend
from syncprims.errors import format_ranks, name_ranks, parse_ranks
from syncprims.interface import Settings, Topology

SETS: list[list[int]] = [[], [0], [3, 1], [0, 1, 2, 5, 7, 8], [*range(5000)], [*range(1, 5000, 2)]]


@pytest.mark.parametrize("ranks", SETS, ids=len)
def test_ranks_as_text_come_back(ranks: list[int]) -> None:
    assert parse_ranks(format_ranks(ranks)) == ranks


def test_names_of_groups_are_short_and_their_own() -> None:
    groups = [range(2), range(60), range(61), range(0, 5000, 2), [*range(0, 4996, 2), 4997, 4998]]
    names = [name_ranks(ranks) for ranks in groups]
    assert names[:3] == ["[0, 1]", "[0-59]", "[0-60]"]
    assert len(set(names)) == len(names)
    assert all(len(name) < 120 for name in names)


@pytest.mark.parametrize("step", [1, 2])
def test_an_error_for_the_others_fits_into_its_room(step: int) -> None:
    ranks = list(range(1, 20_000, step))
    error = sp.SyncTimeout(f"ranks {ranks} have come", missing=[0], arrived=ranks)
    data = errors.dump(error)
    assert len(data) <= errors.LONGEST_DUMP
    found = errors.load(data)
    assert type(found) is sp.SyncTimeout
    assert found.missing == [0]
    assert found.arrived == ranks[: len(found.arrived)] != []
    assert step > 1 or found.arrived == ranks


class Place:
    """A board of `members`, as far as it matters here."""

    collected = 1
    name = ""

    def __init__(self, members: Sequence[int], posted: int) -> None:
        self.members, self.posted = tuple(members), posted


@pytest.fixture
def seats(tmp_path: Path) -> Generator[list[Any]]:
    """Two ranks' seats in a world of 1024, both in this process."""
    tmp_path.chmod(0o700)
    settings, run = Settings(directory=str(tmp_path)), uuid.uuid4().hex
    places = [Topology(rank, 1024, rank, 1024, run_id=run) for rank in (0, 2)]
    taken = [load_backend("file")(place, settings) for place in places]
    yield taken
    for seat in taken:
        seat.close()


def test_deadlocks_of_large_groups(seats: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # The threads of the test runner are none of a rank's.
    monkeypatch.setattr("syncprims._protocol.deadlock.threads_that_may_call", set)
    everybody, even = range(1024), range(0, 1024, 2)
    here, there = (DeadlockDetector(seat) for seat in seats)
    waits: list[Any] = [Place(even, 2), Place(everybody, 2)]  # each for the other
    others: list[Any] = [Place(everybody, 1), Place(even, 1)]
    for known, wait, other in zip((here, there), waits, others, strict=True):
        known.add(wait)
        known.add(other)
    calls = [f"barrier 'of {len(wait.members)}' (train.py:41)" for wait in waits]
    assert here.search(waits[0], calls[0], [2]) is None  # the other has published no wait
    assert there.search(waits[1], calls[1], [0]) is None  # it takes two looks
    found = there.search(waits[1], calls[1], [0])
    assert isinstance(found, sp.CollectiveMismatch)
    assert "rank 0: barrier 'of 512' (train.py:41) in group [0,2,4," in str(found)
    assert "rank 2: barrier 'of 1024' (train.py:41) in group [0-1023]" in str(found)
    assert len(str(found)) < 1000
    verdict = here.verdict_for(waits[0], [2])  # for a rank that looks only now
    assert str(verdict) == str(found)
