"""File system faults under checkpoints: calls can be counted, failed or made deadly."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors.torch import load_file
from torch import nn

import syncprims as sp
from support.checkpoint_worlds import Kept
from support.rank_worlds import Kind, Ranks
from syncprims.accelerate import Accelerator
from syncprims.training import load_checkpoint_in_model, load_state, save_model, save_state
from syncprims.training.checkpoints import filesystem

#: The calls of `os` that checkpoints use. A test checks that there are no others.
CALLS = (
    "open", "write", "lseek", "read", "preadv", "posix_fadvise", "fsync", "close", "fstat", "stat",
    "lstat", "listdir", "mkdir", "replace", "unlink", "rmdir",
)  # fmt: skip


class Watched:
    """An `os` that calls `at` before every call on the file system."""

    def __init__(self, at: At) -> None:
        self.count = 0
        self._at = at

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            number, self.count = self.count, self.count + 1
            self._at(number, name, args)
            return real(*args, **kwargs)

        return call


@contextlib.contextmanager
def watched(at: At) -> Generator[Watched]:
    """Make checkpoints use a watched `os`: all of this process, so also ranks that are threads."""
    module: Any = filesystem
    assert module.os is os, "it is watched already; watch a world of threads from outside"
    fake = Watched(at)
    module.os = fake
    try:
        yield fake
    finally:
        module.os = os


At: TypeAlias = "Callable[[int, str, tuple[Any, ...]], object]"  #: called before each call


def nothing(number: int, name: str, args: tuple[Any, ...]) -> None:
    """Do nothing."""


def kill_at(point: int) -> At:
    """Kill this process before the call."""

    def at(number: int, name: str, args: tuple[Any, ...]) -> None:
        if number == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return at


def fail_at(point: int, code: int) -> At:
    """Make the call fail with an errno."""

    def at(number: int, name: str, args: tuple[Any, ...]) -> None:
        if number == point:
            path = args[0] if args and isinstance(args[0], str) else None
            raise OSError(code, os.strerror(code), path)

    return at


class Net(nn.Module):
    """A model with all kinds of entries. All its numbers are equal: they are its version."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 8, bias=False)
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.fill_(version)

    def version(self) -> int:
        """Return the version, after checking all numbers."""
        return one_version(self.state_dict())


def one_version(state: dict[str, torch.Tensor]) -> int:
    """Return the number that all of these consist of."""
    found = {float(value) for tensor in state.values() for value in tensor.reshape(-1)}
    assert len(found) == 1, f"a mixture of {found}"
    return int(found.pop())


class Setup(NamedTuple):
    """A way to save and load, with a number of ranks."""

    ranks: int
    save: Callable[[str, int], object]
    load: Callable[[str], int]


def model_in(odd: int | str, even: int | str) -> Callable[[str, int], object]:
    """Return a save of a model with shards of these sizes, by its version."""
    return lambda path, version: save_model(Net(version), path, (even, odd)[version % 2])


def _load_model(path: str) -> int:
    net = Net(0)
    load_checkpoint_in_model(net, path)
    return net.version()


def _objects(version: int) -> tuple[dict[str, Any], dict[str, Any]]:
    net, own = Net(version), version + 100 * sp.get_rank()
    optimizer = torch.optim.SGD(net.parameters(), lr=float(version), momentum=0.5)
    for parameter in net.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, version)
    counter = Kept({"version": version, "tensor": torch.full((5,), float(version))})
    return {"model": net, "optimizer": optimizer, "counter": counter}, {"own": Kept([own])}


def _save_state(path: str, version: int, block: bool = True) -> None:
    objects, own = _objects(version)
    torch.manual_seed(version)
    save_state(path, objects, rank_objects=own, step=version, block=block).wait()


def _load_state(path: str) -> int:
    objects, own = _objects(0)
    loaded = load_state(path, objects, rank_objects=own)
    optimizer, counter = objects["optimizer"], objects["counter"].state
    found = {
        objects["model"].version(), loaded.step, counter["version"],
        own["own"].state[0] - 100 * sp.get_rank(), torch.initial_seed(),
        int(optimizer.param_groups[0]["lr"]), one_version({"tensor": counter["tensor"]}),
        *(one_version(state) for state in optimizer.state_dict()["state"].values()),
    }  # fmt: skip
    assert len(found) == 1, f"a mixture of {found}"
    version: int = found.pop()
    return version


def _object(safe: bool) -> Setup:
    """Return the way to save the weights of a model as one object."""

    def load(path: str) -> int:
        if not Path(path).exists():
            raise sp.CheckpointError("nothing is there")
        return one_version(load_file(path) if safe else torch.load(path, weights_only=True))

    return Setup(1, lambda p, v: Accelerator(cpu=True).save(Net(v).state_dict(), p, safe), load)


WAYS: dict[str, tuple[Callable[[str, int], object], Callable[[str], int]]] = {
    "single": (model_in("5GB", "5GB"), _load_model),
    "shards": (model_in(600, 400), _load_model),
    "to-shards": (model_in("5GB", 500), _load_model),
    "from-shards": (model_in(500, "5GB"), _load_model),
    "state": (_save_state, _load_state),
    "state-behind": (partial(_save_state, block=False), _load_state),
}
SETUPS = {f"{way}-{n}": Setup(n, *both) for way, both in WAYS.items() for n in (1, 2, 4)}
SETUPS |= {"object-1": _object(safe=False), "safe-object-1": _object(safe=True)}
NONE = 0  #: the version before the first save
OLD, NEW = 1, 2


def copy(source: Path, target: Path) -> None:
    """Copy the saved directory or file."""
    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)


class Trial:
    """Saves with faults, and loads after them."""

    def __init__(self, setup: Setup, folder: Path, *, overwrite: bool) -> None:
        self.setup = setup
        self.overwrite = overwrite
        self._folder = folder
        meeting = folder / "meet"
        meeting.mkdir(mode=0o700)
        kind = Kind("file" if setup.ranks > 1 else "single", setup.ranks)
        self._ranks = Ranks(kind, meeting)
        self._old = folder / "old"
        self._new = folder / "new"
        self.path = folder / "run" / "checkpoint"
        if overwrite:
            self._ranks.run(lambda: setup.save(str(self._old), OLD))
        self.reset()
        self.counts: list[int] = self._ranks.run(lambda: self._save(nothing))
        assert self.versions() == [NEW] * setup.ranks
        copy(self.path, self._new)

    def reset(self) -> None:
        """Restore the directory to its state before the save."""
        shutil.rmtree(self.path.parent, ignore_errors=True)
        self.path.parent.mkdir()
        if self.overwrite:
            copy(self._old, self.path)

    def _save(self, at: At) -> int:
        with watched(at) as fake:
            self.setup.save(str(self.path), NEW)
        return fake.count

    def save(self, victim: int, at: At) -> list[Any]:
        """Save with a fault on one rank; return the outcome of each rank."""
        self.reset()
        return self._ranks.outcomes(
            lambda: self._save(at if sp.get_rank() == victim else nothing), start=True
        )

    def versions(self) -> list[int]:
        """Return what each rank loads; nothing if nothing was saved before."""

        def load() -> int:
            try:
                return self.setup.load(str(self.path))
            except sp.CheckpointError:
                if self.overwrite:
                    raise
                return NONE

        return self._ranks.run(load)

    def save_again(self) -> None:
        """Save again, without a fault."""
        self._ranks.run(lambda: self.setup.save(str(self.path), NEW))

    def listing(self) -> list[str]:
        """Return all names in the checkpoint and next to it."""
        return sorted(str(p.relative_to(self.path.parent)) for p in self.path.parent.rglob("*"))

    @property
    def stands(self) -> list[str]:
        """The names before the save."""
        self.reset()
        return self.listing()


ERRNOS = {name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EDQUOT", "EINTR")}
