"""Saves that are killed, fail or are told to end at any file system call: old or new loads."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import sys
import threading
from collections import Counter as Tally
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.file_faults import (
    CALLS,
    ERRNOS,
    NEW,
    NONE,
    OLD,
    SETUPS,
    Trial,
    fail_at,
    kill_at,
    nothing,
    watched,
)

import syncprims as sp

#: (setup, over an older save?, every how many-th call of any rank): in the tests of every day.
SHORT = [
    ("single-1", False, 7), ("single-1", True, 7), ("shards-1", True, 11), ("to-shards-1", True, 7),
    ("from-shards-1", True, 11), ("state-1", True, 13), ("shards-2", True, 11),
    ("state-2", False, 23), ("state-2", True, 23), ("state-behind-2", True, 23),
    ("state-4", True, 29), ("object-1", True, 11), ("safe-object-1", True, 5),
]  # fmt: skip
SHORT_SIGNALS = [
    ("state-behind-1", False, 4), ("state-behind-1", True, 3), ("state-behind-2", True, 11),
    ("state-1", True, 7), ("shards-2", True, 9),
]  # fmt: skip
#: At length: every call.
LONG = [
    pytest.param(name, over, 1, marks=pytest.mark.soak) for name in SETUPS for over in (False, True)
]
LONG_SIGNALS = [each for each in LONG if "object" not in str(each.values[0])]
everywhere = pytest.mark.parametrize(("name", "over", "stride"), [*SHORT, *LONG])


def points(trial: Trial, stride: int) -> list[tuple[int, int]]:
    """Return (victim, call) pairs: all, or some that move from victim to victim."""
    every = [(victim, call) for victim, count in enumerate(trial.counts) for call in range(count)]
    return every[::stride]


@everywhere
def test_killed_it_is_old_or_new(name: str, over: bool, stride: int, tmp_path: Path) -> None:
    trial = Trial(SETUPS[name], tmp_path, overwrite=over)
    before = OLD if over else NONE
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
    assert seen.total() > 3
    assert seen[before] > 0
    assert stride > 1 or seen[NEW] > 0


@everywhere
def test_failing_all_say_the_same(name: str, over: bool, stride: int, tmp_path: Path) -> None:
    trial, codes = Trial(SETUPS[name], tmp_path, overwrite=over), list(ERRNOS.values())
    before, standing = OLD if over else NONE, trial.stands
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
    assert seen[True, before] > 0


def check_errors(errors: list[BaseException], trial: Trial, victim: int, code: int) -> None:
    """Accept the same error on all ranks, which says where and what."""
    assert len(errors) == trial.setup.ranks
    assert len({str(error) for error in errors}) == 1, errors
    for error in errors:
        assert isinstance(error, sp.CheckpointError)
        assert (error.errno, error.rank, set(error.failures)) == (code, victim, {victim})
        assert str(error.filename).startswith(str(trial.path.parent))
        assert os.strerror(code) in str(error)
        assert f"rank {victim}" in str(error)


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


@contextlib.contextmanager
def leaving_on_sigterm() -> Generator[None]:
    """End the block on SIGTERM as a program ends: once its threads have."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for thread in threading.enumerate():
            if thread.name == "syncprims-save":
                thread.join()


def told_at(point: int) -> Callable[[int, str, tuple[Any, ...]], object]:
    """Send SIGTERM to this process before a call, in whatever thread."""

    def at(number: int, name: str, args: tuple[Any, ...]) -> None:
        if number == point:
            os.kill(os.getpid(), signal.SIGTERM)

    return at


@pytest.mark.parametrize(("name", "over", "stride"), [*SHORT_SIGNALS, *LONG_SIGNALS])
def test_ended_it_is_old_or_new(name: str, over: bool, stride: int, tmp_path: Path) -> None:
    trial = Trial(SETUPS[name], tmp_path, overwrite=over)
    before, standing = OLD if over else NONE, trial.stands
    trial.save(0, nothing)
    complete = len(trial.listing())
    seen: Tally[tuple[int, bool]] = Tally()
    for victim, call in points(trial, stride):
        trial.reset()

        def program(victim: int = victim, call: int = call) -> None:
            at = told_at(call) if sp.get_rank() == victim else nothing
            with leaving_on_sigterm(), watched(at):
                trial.setup.save(str(trial.path), NEW)

        outcomes = trial._ranks.outcomes(program, start=True)
        assert not isinstance(outcomes[victim], Exception), (victim, call, outcomes)
        left = trial.listing()
        found = trial.versions()
        assert set(found) in ({before}, {NEW}), (victim, call, found, left)
        clean = left == standing if found[0] == before else len(left) == complete
        seen[found[0], clean] += 1
        # Behind the training the thread goes on to its end. Else what the new one has replaced may
        # still be there, for the next save to remove; but nothing of one that has not come to be.
        assert clean or (found[0] == NEW and "behind" not in name), (victim, call, found, left)
        assert not [one for one in left if ".tmp-" in one], (victim, call, left)
        if not clean:
            trial.save_again()
            assert len(trial.listing()) == complete
    assert seen.total() > 3
    assert seen[before, True] > 0


PACKAGE = ROOT / "syncprims" / "training" / "checkpoints"
#: What reads and writes no file.
HARMLESS = {
    "fspath", "fsencode", "path", "PathLike", "curdir", "pardir", "cpu_count", "stat_result",
    "SEEK_SET",
}  # fmt: skip


def names_used(path: Path) -> set[str]:
    """Return the functions and constants of `os` in a module, and what else opens files."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & {"open"}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {node.attr} if node.value.id == "os" else set()
            found |= {"Path"} if node.value.id == "Path" else set()
    return {name for name in found if not name.startswith(("O_", "POSIX_"))}


def test_one_module_touches_files_by_calls_that_tests_see() -> None:
    for path in PACKAGE.glob("*.py"):
        allowed = {*HARMLESS, *CALLS} if path.name == "filesystem.py" else HARMLESS
        assert names_used(path) <= allowed, path.name
