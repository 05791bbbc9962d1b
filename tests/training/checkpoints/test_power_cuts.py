"""Power cuts at any moment of a save, on a simulated disk with minimal guarantees."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from support.crash_model import WeakDisk, freeze, lay_out
from support.file_faults import NEW, NONE, OLD, SETUPS, Setup, Watched

import syncprims as sp
from syncprims.training.checkpoints import filesystem

if TYPE_CHECKING:
    from pathlib import Path

    from support.checkpoint_worlds import Alone


class Recorder(Watched):
    """An `os` that reports every call to a weak disk, once it is done."""

    def __init__(self, weak: WeakDisk, moments: list[set[Any]]) -> None:
        super().__init__(lambda *_: None)
        self._weak = weak
        self._moments = moments

    def __getattr__(self, name: str) -> Any:
        call = super().__getattr__(name)
        if not callable(call):
            return call

        def told(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            if self._weak.follow(name, args, result):
                self._moments.append({freeze(state) for state in self._weak.states()})
            return result

        return told


def thaw(state: Any) -> Any:
    if isinstance(state, bytes):
        return state
    return {name: thaw(child) for name, child in state}


def crash(
    setup: Setup, overwrite: bool, folder: Path, *, empty: bool = False
) -> tuple[int, int, int]:
    """Return how many moments and states there are, and how many load as the new."""
    run, path = folder / "run", folder / "run" / "checkpoint"
    run.mkdir()
    if overwrite:
        setup.save(str(path), OLD)
    elif empty:
        path.mkdir()
    weak, moments = WeakDisk(run), list[set[Any]]()
    module: Any = filesystem
    real = module.os
    try:
        module.os = Recorder(weak, moments)
        setup.save(str(path), NEW)
    finally:
        module.os = real
    before, found = OLD if overwrite else NONE, dict[Any, int]()
    for state in set().union(*moments):
        lay_out(thaw(state), folder / "found")
        try:
            found[state] = setup.load(str(folder / "found" / "checkpoint"))
        except sp.CheckpointError:
            found[state] = NONE
        shutil.rmtree(folder / "found")
        assert found[state] in (before, NEW), thaw(state)
    assert {found[state] for state in moments[-1]} == {NEW}, "it had returned"
    return len(moments), len(found), sum(version == NEW for version in found.values())


#: Into what the save writes.
CASES = [
    (name, before)
    for name in ("single", "shards", "to-shards", "from-shards", "state")
    for before in ("nothing", "an empty directory", "an older one")
]


@pytest.mark.parametrize(("name", "before"), CASES)
def test_what_a_power_cut_leaves_is_the_old_or_the_new(
    name: str, before: str, tmp_path: Path, alone: Alone
) -> None:
    over, empty = before == "an older one", before == "an empty directory"
    run = alone(lambda: crash(SETUPS[f"{name}-1"], over, tmp_path, empty=empty))
    moments, states, new = run
    assert moments > 10
    assert 0 < new < states
    print(f"power cut: {name} over {before}: {moments} moments, {states} states, {new} new")


@pytest.mark.parametrize("call", ["sync_directory", "NewFile.finish"])
@pytest.mark.parametrize("name", ["single", "shards", "state"])
def test_a_save_that_forgets_to_sync_is_found_out(
    name: str, call: str, tmp_path: Path, alone: Alone
) -> None:
    def program() -> bool:
        with pytest.MonkeyPatch.context() as patch:
            if call == "sync_directory":
                patch.setattr(filesystem, "sync_directory", lambda path: None)
            else:
                patch.setattr(filesystem.NewFile, "finish", filesystem.NewFile.close)
            try:
                crash(SETUPS[f"{name}-1"], True, tmp_path)
            except AssertionError:
                return True
        return False

    assert alone(program)
