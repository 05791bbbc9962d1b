"""Concurrent saves and loads: late ranks, groups, and ranks with different paths."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.file_faults import SETUPS, Net, Setup, Watched, watched
from support.rank_worlds import Kind, Ranks, Signs

import syncprims as sp
from syncprims.testing import run_world
from syncprims.training import (
    Checkpoints,
    load_checkpoint_in_model,
    load_state,
    save_model,
    save_state,
)
from syncprims.training.checkpoints import commit, filesystem


def listing(folder: Path) -> set[str]:
    """Return all names in a directory."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def started(tmp_path: Path, over: bool) -> Path:
    """Return where to save, over an older state or not."""
    path = tmp_path / "run" / "state"
    path.parent.mkdir()
    if over:
        run_world(lambda: save_state(path, {"model": Net(1)}, step=1), 1)
    return path


@pytest.mark.parametrize("over", [False, True])
def test_a_rank_late_for_a_save_takes_its_part_back(
    over: bool, meeting_place: Path, tmp_path: Path, signs: Signs
) -> None:
    path = started(tmp_path, over)
    before = listing(path.parent)

    def program() -> None:
        def late(number: int, name: str, args: tuple[Any, ...]) -> None:
            if sp.get_rank() == 1 and name == "write":
                signs.wait("given up")

        with watched(late):
            own = {"own": Net(sp.get_rank())}
            saving = save_state(path, {"model": Net(2)}, rank_objects=own, block=False)
            if sp.get_rank() == 2:
                raise RuntimeError("told to end")
            with pytest.raises(sp.PeerFailed, match="told to end"):
                saving.wait()
            assert saving.done
            if sp.is_main():
                signs.give("given up")

    done = Ranks(Kind("file", 3), meeting_place).outcomes(program)
    assert (done[:2], str(done[2])) == ([None, None], "told to end")
    assert listing(path.parent) == before


def test_a_save_whose_files_are_gone_is_not_committed(tmp_path: Path) -> None:
    """Another save has taken them for what a killed save left. The old checkpoint still stands."""
    path = tmp_path / "state"

    def lose(number: int, name: str, args: tuple[Any, ...]) -> None:
        for file in path.glob("rank-*.state.v2.safetensors"):
            if any(path.glob(".checkpoint.json.tmp-*")):  # the leading rank is about to commit
                file.unlink()

    def program() -> None:
        model = Net(1)
        save_state(path, {"model": model})
        with pytest.raises(sp.CheckpointError, match=r"has removed .*rank-0000"):
            save_state(path, {"model": Net(2)})
        load_state(path, {"model": model})

    with watched(lose):
        run_world(program, 2)


def test_a_groups_save_behind_training_is_waited_for_anywhere(tmp_path: Path) -> None:
    def program() -> list[int | None]:
        first, second = sp.group([0, 1]), sp.group([2, 3])
        if sp.get_rank() in first.ranks:
            with first:
                saving = save_state(tmp_path / "a", {"m": Net(3)}, step=3, block=False)
            if sp.get_rank() == 1:
                saving.wait()
        save_state(tmp_path / "all", {"m": Net(4)}, step=4)
        if sp.get_rank() in second.ranks:
            with second:
                saving = save_state(tmp_path / "b", {"m": Net(5)}, step=5, block=False)
        found = [load_state(tmp_path / "all", {"m": Net(0)}).step]
        saving.wait()
        for name in "ab":
            loaded = load_state(tmp_path / name, {"m": Net(0)}, any_world_size=True, rng=False)
            found.append(loaded.step)
        return found

    assert run_world(program, 4) == [[4, 3, 5]] * 4


def test_ranks_that_find_different_checkpoints_load_none(tmp_path: Path) -> None:
    def program() -> tuple[int, list[int]]:
        steps = Checkpoints(tmp_path / "steps")
        for step in (1, 2):
            steps.save(step, {"m": Net(step)})
        net, other = Net(7), 1 + sp.get_rank() // 2
        with pytest.raises(
            sp.CheckpointError, match=r"ranks \[2\] have found a different"
        ) as caught:
            load_state(steps.path(other), {"m": net})
        with pytest.raises(sp.CheckpointError, match=r"ranks \[2\] have found a different"):
            steps.load({"m": net}, step=other)
        assert caught.value.rank == 2
        untouched = net.version()
        copy = str(tmp_path / f"copy-{sp.get_rank()}")  # as on disks of several hosts
        shutil.copytree(steps.path(2), copy)
        load_state(copy, {"m": net})
        return untouched, [net.version()]

    assert run_world(program, 3) == [(7, [2])] * 3


def test_leftovers_go_with_their_steps_and_not_before(tmp_path: Path) -> None:
    """What looks like one of a later step may be a save of somebody else, right now."""
    left = {step: tmp_path / f".step-{step}.tmp-{step:016x}" for step in (1, 2, 5, 9)}

    def program() -> None:
        for folder in left.values():
            folder.mkdir()
        for step in (2, 3, 4):
            Checkpoints(tmp_path, keep_last=2).save(step, {"m": Net(step)})
        Checkpoints(tmp_path).save(5, {"m": Net(5)})

    run_world(program, 1)
    assert [step for step, folder in left.items() if folder.exists()] == [9]
    assert Checkpoints(tmp_path).steps() == [3, 4, 5]


@pytest.mark.parametrize("size", ["5GB", 600])
def test_a_model_and_a_state_in_one_directory_keep_their_files(size: Any, tmp_path: Path) -> None:
    def program() -> None:
        both = tmp_path / "both"
        save_model(Net(1), both, max_shard_size=size)
        for version in (2, 3):
            save_state(both, {"model": Net(version)}, step=version)
            net = Net(0)
            load_checkpoint_in_model(net, both)
            assert net.version() == 1
            assert load_state(both, {"model": net}).step == net.version() == version
        save_model(Net(4), both, max_shard_size=size)
        load_checkpoint_in_model(net, both)
        assert (net.version(), load_state(both, {"model": net}).step, net.version()) == (4, 3, 3)

        save_state(tmp_path / "state", {"model": Net(2)}, step=2)  # here the state comes first
        save_model(Net(5), tmp_path / "state", max_shard_size=size)
        load_checkpoint_in_model(net, tmp_path / "state")
        assert net.version() == 5
        assert load_state(tmp_path / "state", {"model": net}).step == net.version() == 2

    run_world(program, 2)


def test_a_rank_that_raises_leaves_no_save_to_the_next_world(tmp_path: Path) -> None:
    def slow(number: int, name: str, args: tuple[Any, ...]) -> None:
        if name == "write" and threading.current_thread().name == "syncprims-save":
            time.sleep(0.1)

    def program() -> None:
        save_state(tmp_path / "s", {"m": Net(1)}, block=False)
        if sp.get_rank() == 1:
            raise RuntimeError("told to end")
        sp.barrier()

    with watched(slow), pytest.raises(RuntimeError, match="told to end"):
        run_world(program, 2)
    assert not [t for t in threading.enumerate() if t.name == "syncprims-save"]


def save_step(path: str, version: int) -> None:
    Checkpoints(path, keep_last=1).save(version, {"m": Net(version)})


def load_step(path: str) -> int:
    net = Net(0)
    Checkpoints(path).load({"m": net})
    return net.version()


READS = {way: SETUPS[f"{way}-1"] for way in ("shards", "to-shards", "state")}
READS["steps"] = Setup(1, save_step, load_step)


@pytest.mark.parametrize("way", READS)
def test_a_load_during_a_save_is_of_one_version_or_an_error(way: str, tmp_path: Path) -> None:
    path = str(tmp_path / "it")
    version = 0

    def save() -> None:
        nonlocal version
        version += 1
        READS[way].save(path, version)

    def load(point: int) -> int | str:
        """Load, with a save before one of its calls; return how old the result is."""
        busy, calls = False, itertools.count()  # those of the load alone

        def at(number: int, name: str, args: tuple[Any, ...]) -> None:
            nonlocal busy
            if not busy and next(calls) == point:
                busy = True
                save()
                busy = False

        save()
        with watched(at):
            try:
                return READS[way].load(path) - version
            except sp.CheckpointError as error:
                return str(error)

    [results] = run_world(lambda: [load(point) for point in range(40)], 1)
    assert all(found in (0, -1) or "load again" in str(found) for found in results)


SAVES: dict[str, Callable[[str, int], object]] = {
    "state": lambda path, version: save_state(path, {"m": Net(version)}),
    "behind": lambda path, version: save_state(path, {"m": Net(version)}, block=False).wait(),
    "shards": lambda path, version: save_model(Net(version), path, 600),
}


def version_in(path: str) -> int:
    def load() -> int:
        net = Net(0)
        if Path(path, "checkpoint.json").exists():
            load_state(path, {"m": net})
        else:
            load_checkpoint_in_model(net, path)
        return net.version()

    [version] = run_world(load, 1)
    assert isinstance(version, int)
    return version


#: Way, over an older save, fails: half of them in the tests of every day.
CASES = [
    pytest.param(way, over, fails, marks=[pytest.mark.soak] * ((number + over + fails) % 2))
    for number, way in enumerate(SAVES)
    for over in (False, True)
    for fails in (False, True)
]


@pytest.mark.parametrize(("way", "over", "fails"), CASES)
def test_of_two_programs_that_save_to_one_place_one_waits(
    way: str, over: bool, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one saves, or fails at its end, before any file-system call of the first."""
    monkeypatch.setattr(commit, "LOCK_SECONDS", 0)
    errors: list[str] = []

    def save(path: str, version: int) -> None:
        try:
            run_world(lambda: SAVES[way](path, version), 1)
        except sp.CheckpointError as error:
            errors.append(str(error))
        else:
            errors.append("")

    def fail(number: int, name: str, args: tuple[Any, ...]) -> None:
        if fails and name == "replace":
            raise OSError(errno.EIO, os.strerror(errno.EIO), args[0])

    def save_at(point: int, path: str) -> int:
        """Save, and before the call of this number in another thread; return how many calls."""

        def save_there() -> None:
            module: Any = filesystem
            outer, module.os = module.os, Watched(fail)
            try:
                save(path, 3)
            finally:
                module.os = outer

        def at(number: int, name: str, args: tuple[Any, ...]) -> None:
            if number == point:
                thread = threading.Thread(target=save_there)
                thread.start()
                thread.join()

        with watched(at) as calls:
            save(path, 2)
        return calls.count

    point, calls = 0, 1
    while point < calls:
        path = str(tmp_path / f"{point}" / "it")
        if over:
            save(path, 1)
            errors.clear()
        calls = save_at(point, path)
        other, own = errors
        for error in errors:
            assert not error or "another save there" in error or (fails and "Input/output" in error)
        assert not (fails and not other)
        assert fails or not (own and other)
        saved = [v for v, error in ((2, own), (3, other)) if not error] or ([1] if over else [])
        assert not saved or version_in(path) in saved, (point, errors)
        assert [p.name for p in Path(path).parent.iterdir()] == ["it"] * bool(saved), point
        errors.clear()
        point += 1
    assert point > 20


def test_a_second_program_waits_and_goes_on(tmp_path: Path) -> None:
    path, started = tmp_path / "it", threading.Event()

    def first() -> None:
        def slow(number: int, name: str, args: tuple[Any, ...]) -> None:
            if name == "write" and not started.is_set():
                started.set()
                time.sleep(0.3)

        with watched(slow):
            run_world(lambda: save_state(path, {"m": Net(1)}), 1)

    thread = threading.Thread(target=first)
    thread.start()
    started.wait()
    run_world(lambda: save_state(path, {"m": Net(2)}), 1)
    thread.join()
    assert version_in(str(path)) == 2
