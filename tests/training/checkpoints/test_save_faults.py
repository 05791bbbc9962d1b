"""Saves that fail or are killed at any file system call: exactly the old or new one loads."""

from __future__ import annotations

import os
from collections import Counter as Tally
from typing import TYPE_CHECKING

import pytest
from support.file_faults import ERRNOS, NEW, NONE, OLD, SETUPS, Trial, fail_at, kill_at, nothing

import syncprims as sp

if TYPE_CHECKING:
    from pathlib import Path

#: Of the tests of every day: (setup, over an older save?, every how many-th point).
SHORT = [
    ("single-1", False, 5), ("single-1", True, 3), ("shards-1", True, 3), ("to-shards-1", True, 3),
    ("from-shards-1", True, 3), ("state-1", False, 7), ("state-1", True, 7),
    ("shards-2", True, 7), ("state-2", False, 13), ("state-2", True, 13),
    ("state-behind-2", True, 17), ("state-4", True, 23), ("object-1", True, 7),
    ("safe-object-1", True, 5),
]  # fmt: skip
LONG = [(name, overwrite, 1) for name in SETUPS for overwrite in (False, True)]
everywhere = pytest.mark.parametrize(("name", "overwrite", "stride"), SHORT)
everywhere_at_length = pytest.mark.parametrize(("name", "overwrite", "stride"), LONG)


def points(trial: Trial, stride: int) -> list[tuple[int, int]]:
    """Return (victim, call) pairs: all, or some that move from victim to victim."""
    every = [(victim, call) for victim, count in enumerate(trial.counts) for call in range(count)]
    return every[::stride]


def kill_everywhere(name: str, overwrite: bool, stride: int, folder: Path) -> Tally[int]:
    trial = Trial(SETUPS[name], folder, overwrite=overwrite)
    before = OLD if overwrite else NONE
    trial.save(0, nothing)
    after = [clean.replace(".v2", "") for clean in trial.listing()]
    seen: Tally[int] = Tally()
    for number, (victim, call) in enumerate(points(trial, stride)):
        outcomes = trial.save(victim, kill_at(call))
        assert isinstance(outcomes[victim], BaseException), (victim, call)
        found = trial.versions()
        assert set(found) in ({before}, {NEW}), (victim, call, found)
        seen[found[0]] += 1
        if number % 4:
            continue
        trial.save_again()
        assert trial.versions() == [NEW] * trial.setup.ranks
        left = sorted({one.replace(".v2", "").replace(".v3", "") for one in trial.listing()})
        assert left == sorted(set(after)), (victim, call, trial.listing())
    assert seen.keys() <= {before, NEW}
    return seen


@everywhere
def test_killed_anywhere_it_is_the_old_or_the_new(
    name: str, overwrite: bool, stride: int, tmp_path: Path
) -> None:
    seen = kill_everywhere(name, overwrite, stride, tmp_path)
    assert seen.total() > 3
    assert seen[OLD if overwrite else NONE] > 0


@pytest.mark.soak
@everywhere_at_length
def test_killed_at_every_call_of_every_rank(
    name: str, overwrite: bool, stride: int, tmp_path: Path
) -> None:
    seen = kill_everywhere(name, overwrite, stride, tmp_path)
    assert seen[OLD if overwrite else NONE] > 0
    assert seen[NEW] > 0
    print(f"killed: {name} overwrite={overwrite}: {dict(seen)}")


def fail_everywhere(
    name: str, overwrite: bool, codes: list[int], stride: int, folder: Path
) -> Tally[tuple[bool, int]]:
    trial = Trial(SETUPS[name], folder, overwrite=overwrite)
    before, standing = OLD if overwrite else NONE, trial.stands
    seen: Tally[tuple[bool, int]] = Tally()
    for number, (victim, call) in enumerate(points(trial, stride)):
        for code in codes if stride == 1 else [codes[number % len(codes)]]:
            outcomes = trial.save(victim, fail_at(call, code))
            left = trial.listing()
            found = trial.versions()
            where = (victim, call, os.strerror(code), outcomes, left)
            errors = [one for one in outcomes if isinstance(one, BaseException)]
            assert set(found) in ({before}, {NEW}), where
            seen[bool(errors), found[0]] += 1
            if errors:
                check_errors(errors, trial, victim, code)
                in_place = "in place" in str(errors[0])
                assert found[0] == (NEW if in_place else before), where
                assert in_place or left == standing, where
            else:
                assert found[0] == NEW, where  # only what was superseded could not be removed
            assert not [one for one in left if ".tmp-" in one], where
    return seen


def check_errors(errors: list[BaseException], trial: Trial, victim: int, code: int) -> None:
    """Accept the same error on all ranks, which says where and what."""
    assert len(errors) == trial.setup.ranks
    assert len({str(error) for error in errors}) == 1, errors
    for error in errors:
        assert isinstance(error, sp.CheckpointError)
        assert error.errno == code
        assert error.rank == victim
        assert set(error.failures) == {victim}
        assert str(error.filename).startswith(str(trial.path.parent))
        assert os.strerror(code) in str(error)
        assert f"rank {victim}" in str(error)


@everywhere
def test_failing_anywhere_all_ranks_say_the_same(
    name: str, overwrite: bool, stride: int, tmp_path: Path
) -> None:
    codes = list(ERRNOS.values())
    seen = fail_everywhere(name, overwrite, codes, stride, tmp_path)
    assert seen[True, OLD if overwrite else NONE] > 0


@pytest.mark.soak
@everywhere_at_length
def test_failing_at_every_call_with_every_errno(
    name: str, overwrite: bool, stride: int, tmp_path: Path
) -> None:
    seen = fail_everywhere(name, overwrite, list(ERRNOS.values()), stride, tmp_path)
    assert seen[True, OLD if overwrite else NONE] > 0
    print(f"failed: {name} overwrite={overwrite}: {dict(seen)}")


def test_a_failed_sync_is_not_tried_again(tmp_path: Path) -> None:
    trial = Trial(SETUPS["single-1"], tmp_path, overwrite=True)
    synced: list[str] = []

    def at(number: int, name: str, args: tuple[object, ...]) -> None:
        if name == "fsync":
            synced.append(name)
            raise OSError(5, os.strerror(5))

    def save() -> list[str]:
        with pytest.raises(sp.CheckpointError):
            trial._save(at)
        return synced

    assert trial._ranks.run(save) == [["fsync"]]
