"""Power cuts at any moment of a save, on a simulated disk with minimal guarantees."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.checkpoint_worlds import Alone
from support.file_faults import NEW, NONE, OLD, SETUPS, Net, Setup, Watched

import syncprims as sp
from syncprims.training import save_model
from syncprims.training.checkpoints import filesystem

_ALL_SELECTIONS = 7  # up to this many changes; for more: each alone, each left out, and each prefix


class File:
    """The content of a file, now and at its last sync."""

    def __init__(self, content: bytes = b"", *, lasting: bool = False) -> None:
        self.now = bytearray(content)
        self.lasting = content if lasting else b""
        self.at = 0  #: where the next write begins

    def states(self) -> list[bytes]:
        """Return the possible contents."""
        now = bytes(self.now)
        if now == self.lasting:
            return [now]
        return [self.lasting, now, now[: len(now) // 2], bytes(len(now))]


class Change(NamedTuple):
    """A change of the names in a directory by one call."""

    removes: str | None
    adds: tuple[str, Any] | None


class Directory:
    """The names of a directory at its last sync, and the changes since."""

    def __init__(self) -> None:
        self.lasting: dict[str, Any] = {}
        self.changes: list[Change] = []

    def now(self) -> dict[str, Any]:
        """Return the current names."""
        return self._with(self.changes)

    def sync(self) -> None:
        """Make all changes durable."""
        self.lasting, self.changes = self.now(), []

    def _with(self, changes: list[Change]) -> dict[str, Any]:
        names = dict(self.lasting)
        for change in changes:
            if change.removes is not None:
                names.pop(change.removes, None)
            if change.adds is not None:
                names[change.adds[0]] = change.adds[1]
        return names

    def states(self) -> Iterator[dict[str, Any]]:
        """Yield the possible sets of names."""
        count = len(self.changes)
        numbers = range(count)
        selections: set[tuple[int, ...]] = set()
        if count <= _ALL_SELECTIONS:
            for size in range(count + 1):
                selections |= set(itertools.combinations(numbers, size))
        else:
            selections |= {tuple(range(size)) for size in range(count + 1)}
            selections |= {(one,) for one in numbers}
            selections |= {tuple(n for n in numbers if n != one) for one in numbers}
        for selection in sorted(selections):
            yield self._with([self.changes[n] for n in selection])


class WeakDisk:
    """Follow the calls of a save, and yield the possible states after each."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self.tree = self._read(self._root)
        self._open: dict[int, Any] = {}

    def _read(self, path: str) -> Directory:
        found = Directory()
        for entry in os.scandir(path):
            if entry.is_dir():
                found.lasting[entry.name] = self._read(entry.path)
            else:
                found.lasting[entry.name] = File(Path(entry.path).read_bytes(), lasting=True)
        return found

    def _find(self, path: str) -> Any:
        node: Any = self.tree
        inner = os.path.relpath(path, self._root)
        for name in [] if inner == "." else inner.split("/"):
            node = node.now()[name]
        return node

    def _parent(self, path: str) -> tuple[Directory, str]:
        return self._find(str(Path(path).parent)), Path(path).name

    def follow(self, name: str, args: tuple[Any, ...], result: Any) -> bool:
        """Apply a call; return whether it changed anything."""
        if name == "open":
            if args[1] & os.O_CREAT:
                directory, base = self._parent(args[0])
                directory.changes.append(Change(None, (base, File())))
            self._open[result] = self._find(args[0])
        elif name == "write":
            file = self._open[args[0]]
            file.now[file.at : file.at + result] = bytes(args[1])[:result]
            file.at += result
        elif name == "fsync":
            node = self._open[args[0]]
            if isinstance(node, Directory):
                node.sync()
            else:
                node.lasting = bytes(node.now)
        elif name == "mkdir":
            directory, base = self._parent(args[0])
            directory.changes.append(Change(None, (base, Directory())))
        elif name == "replace":
            directory, base = self._parent(args[0])
            assert Path(args[1]).parent == Path(args[0]).parent
            directory.changes.append(Change(base, (Path(args[1]).name, self._find(args[0]))))
        elif name in ("unlink", "rmdir"):
            directory, base = self._parent(args[0])
            directory.changes.append(Change(base, None))
        else:
            if name == "lseek":
                self._open[args[0]].at = args[1]
            return False
        return True

    def states(self, node: Any = None) -> Iterator[Any]:
        """Yield the possible states: bytes, or pairs of a name and the state of what it names."""
        if isinstance(node, File):
            yield from node.states()
            return
        for names in (node or self.tree).states():
            order = sorted(names)
            inner = [list(self.states(names[name])) for name in order]
            for contents in itertools.product(*inner):
                yield tuple(zip(order, contents, strict=True))


def lay_out(state: Any, path: Path) -> None:
    """Write a state as a file, or as a directory."""
    if isinstance(state, bytes):
        path.write_bytes(state)
        return
    path.mkdir()
    for name, child in state:
        lay_out(child, path / name)


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
                self._moments.append(set(self._weak.states()))
            return result

        return told


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
        lay_out(state, folder / "found")
        try:
            found[state] = setup.load(str(folder / "found" / "checkpoint"))
        except sp.CheckpointError:
            found[state] = NONE
        shutil.rmtree(folder / "found")
        assert found[state] in (before, NEW), state
    assert {found[state] for state in moments[-1]} == {NEW}, "it had returned"
    return len(moments), len(found), sum(version == NEW for version in found.values())


#: Into what the save writes.
CASES = [
    pytest.param(name, before, marks=[pytest.mark.soak] * (before == "an empty directory"))
    for name in ("single", "shards", "to-shards", "from-shards", "state")
    for before in ("nothing", "an empty directory", "an older one")
]


@pytest.mark.parametrize(("name", "before"), CASES)
def test_power_cuts_leave_old_or_new(name: str, before: str, tmp_path: Path, alone: Alone) -> None:
    over, empty = before == "an older one", before == "an empty directory"
    run = alone(lambda: crash(SETUPS[f"{name}-1"], over, tmp_path, empty=empty))
    moments, states, new = run
    assert moments > 10
    assert 0 < new < states


def test_power_cuts_bring_back_no_model_that_was_replaced_before(
    tmp_path: Path, alone: Alone
) -> None:
    """Other programs have left an index beside the weights that readers take."""

    def save(path: str, version: int) -> None:
        if version == OLD:
            save_model(Net(9), path, 500)
            save_model(Net(OLD), f"{path}-single")
            Path(f"{path}-single/model.safetensors").rename(f"{path}/model.safetensors")
            shutil.rmtree(f"{path}-single")
        else:
            save_model(Net(version), path, safe_serialization=False)

    setup = Setup(1, save, SETUPS["single-1"].load)
    _, states, new = alone(lambda: crash(setup, True, tmp_path))
    assert 0 < new < states
