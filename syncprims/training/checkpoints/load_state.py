"""Load the whole state of a training: all ranks check it first, and only then is it used."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from syncprims import CheckpointError
from syncprims.training.rng import restore as restore_rng

from . import filesystem, manifest, stateful
from .async_save import finish_earlier
from .coordination import Directory, Team, check_equal, coordinate
from .integrity import digest, refusal
from .safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from .manifest import Manifest, SavedState
    from .stateful import Stateful


class Loaded(NamedTuple):
    """What :func:`load_state` returns."""

    path: str
    step: int | None  #: as it was saved
    world_size: int  #: of the run that saved it


def load_state(
    directory: str | os.PathLike[str],
    objects: Mapping[str, Stateful],
    *,
    rank_objects: Mapping[str, Stateful] | None = None,
    rng: bool = True,
    strict: bool = True,
    any_world_size: bool = False,
) -> Loaded:
    """Load the objects' states, after every rank has checked that all is as it was saved.

    The training then continues bit for bit as if it had not been interrupted. The names must be
    those that were saved; without `strict`, names that are only on one side are ignored. The rank
    objects and random numbers are only loaded by as many ranks as saved them. Any other number of
    ranks is an error, or, with `any_world_size`, leaves those unchanged. DTensors are redistributed
    for the ranks that load. All ranks call it. No code in a checkpoint is run.

    :raises CheckpointError: on all ranks, naming the file, what was expected and what was found;
        or the ranks that found a different checkpoint. Then no object is changed, unless one of
        them refuses its state: the message says so.
    :raises TypeError: for objects as :func:`save_state`.
    :raises ValueError: for names as :func:`save_state`.
    """
    own = rank_objects or {}
    stateful.check_objects(objects, own)
    path = Directory.of(directory).path
    doing = f"load_state from {path}"
    finish_earlier()
    team = Team.meet(doing)

    def read() -> tuple[Manifest, dict[str, Any], Any]:
        if not filesystem.is_directory(path):
            raise refusal(path, "missing", "a directory with a checkpoint", "none")
        saved = manifest.read(path)
        here, count = len(team.ranks), len(saved.ranks)
        if count != here and not any_world_size:
            file = f"{path}/{manifest.NAME}"
            raise CheckpointError(
                f"{file}: saved by {count} ranks, and here are {here}: each rank's random numbers "
                f"and own objects would have no owner. Start {count} ranks, or load with "
                f"any_world_size=True, which leaves those as they are.",
                path=file,
            )
        with contextlib.ExitStack() as stack:
            reader = _StateReader(path, saved, strict, stack, {})
            states = reader.common_states(objects)
            if count != here:
                return saved, states, None
            own_states, rng_state = reader.rank_states(own, team.number, rng)
            return saved, {**states, **own_states}, rng_state

    # Checkpoints and their copies are identified by their manifests.
    (saved, states, rng_state), digests = coordinate(doing, read, lambda r: digest(r[0].dump()))
    check_equal(
        doing, team.ranks, digests, "have found a different checkpoint",
        "Every rank loads the same one: pass the same directory, and the same step; where hosts "
        "have disks of their own, copy the checkpoint to each.",
    )  # fmt: skip
    coordinate(doing, lambda: _load_into(path, {**objects, **own}, states, rng_state))
    return Loaded(path, saved.step, len(saved.ranks))


def _load_into(
    path: str, objects: Mapping[str, Stateful], states: dict[str, Any], rng_state: Any
) -> None:
    """Load the states into the objects, and the random numbers last."""
    for name, state in states.items():
        try:
            stateful.load_into(objects[name], state)
        except Exception as error:
            raise CheckpointError(
                f"{path}: object {name!r} refuses its state: {type(error).__name__}: "
                f"{error}. Objects before it have been loaded: do not go on with them.",
                path=path,
            ) from error
    try:
        if rng_state is not None:
            restore_rng(rng_state)
    except Exception as error:
        raise CheckpointError(
            f"{path}: the random numbers cannot go on: {type(error).__name__}: {error}. "
            f"The objects have been loaded.",
            path=path,
        ) from error


class _StateReader(NamedTuple):
    """Reads and checks a checkpoint without changing an object."""

    path: str
    manifest: Manifest
    strict: bool
    stack: contextlib.ExitStack  #: closes the files
    files: dict[str, SafetensorsFile]  #: those that are open, and have been checked

    @property
    def manifest_path(self) -> str:
        """The manifest's file, for errors."""
        return f"{self.path}/{manifest.NAME}"

    def common_states(self, objects: Mapping[str, Stateful]) -> dict[str, Any]:
        """Return the states of the objects that are the same on all ranks."""
        states: dict[str, Any] = {}
        for name in self._common_names(objects, self.manifest.objects):
            targets = stateful.dtensors_of(objects[name])
            states[name] = self._state(name, self.manifest.objects[name], targets)
            stateful.check_fits(self.path, name, objects[name], states[name])
        return states

    def rank_states(
        self, objects: Mapping[str, Stateful], number: int, rng: bool
    ) -> tuple[dict[str, Any], Any]:
        """Return the states of one rank's own objects, and of its random numbers."""
        saved: Any = self._state(f"of rank {number}", self.manifest.ranks[number], {})
        if not isinstance(saved, dict) or not isinstance(saved.get("objects"), dict):
            expected = "objects and random numbers"
            raise refusal(self.manifest_path, "a rank's own state", expected, repr(saved))
        names = self._common_names(objects, saved["objects"])
        for name in names:
            stateful.check_fits(self.path, name, objects[name], saved["objects"][name])
        if rng and not isinstance(saved.get("rng"), dict):
            found = "none: saved with rng=False"
            raise refusal(self.manifest_path, "random numbers", "their state", found)
        return {name: saved["objects"][name] for name in names}, saved["rng"] if rng else None

    def _common_names(self, here: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
        if self.strict and here.keys() != saved.keys():
            raise refusal(
                self.manifest_path, "objects",
                f"{sorted(here)}, which are to be loaded", f"{sorted(saved, key=repr)}",
            )  # fmt: skip
        return [name for name in here if name in saved]

    def _file(self, name: str) -> SafetensorsFile:
        """Return an open file, all of which has been checked."""
        if name not in self.files:
            written = self.manifest.files[name]
            file = SafetensorsFile(f"{self.path}/{name}")
            self.stack.callback(file.close)
            file.check_digest(written)
            file.read({}, check=True)
            self.files[name] = file
        return self.files[name]

    def _state(self, name: str, saved: SavedState, targets: Mapping[str, Any]) -> Any:
        where = {key: file for file in saved.files for key in self._file(file).entries}

        def load_tensor(node: dict[str, Any]) -> torch.Tensor:
            key = node["key"]
            if "shards" not in node:
                return self._file(where[key]).read_tensor(key)
            # A state of an optimizer is distributed as its parameter is.
            target = targets.get(key, targets.get(".".join(key.split(".")[:2])))
            return self._assemble(node, f"{name}/{key}", target)

        try:
            return stateful.join_state(saved.tree, load_tensor)
        except CheckpointError:
            raise
        except Exception as error:  # of any kind, if the tree is damaged
            what = f"state {name!r}"
            raise refusal(self.manifest_path, what, "a state", repr(error)) from error

    def _assemble(self, node: dict[str, Any], label: str, target: Any) -> torch.Tensor:
        """Return a DTensor, or without `target` the full tensor, from the saved shards."""
        full = tuple(node["shape"])
        begin, shape = ((0,) * len(full), full) if target is None else stateful.region_of(target)
        shards = [(offset, self._file(name).read_tensor(label)) for offset, name in node["shards"]]
        dtype = shards[0][1].dtype if shards else None
        # If the shards do not have that many numbers, there is no need to ask for the memory.
        whole = sum(shard.numel() for _, shard in shards) >= math.prod(full)
        tensor = torch.empty(shape if whole else (0,), dtype=dtype, device="cpu")
        covered = sum(_copy_common(tensor, begin, shard, offset) for offset, shard in shards)
        if not whole or covered != tensor.numel():
            what = f"shards of {label!r}"
            raise refusal(self.manifest_path, what, f"all of {shape}", f"{covered} numbers")
        return tensor if target is None else stateful.from_shard(tensor, target)


def _copy_common(into: torch.Tensor, begin: Any, shard: torch.Tensor, offset: Any) -> int:
    """Copy what two regions of a tensor have in common; return how many numbers that is."""
    ours: list[slice] = []
    theirs: list[slice] = []
    for a, length, b, extent in zip(begin, into.shape, offset, shard.shape, strict=True):
        low, high = max(a, b), min(a + length, b + extent)
        if low >= high:
            return 0
        ours.append(slice(low - a, high - a))
        theirs.append(slice(low - b, high - b))
    piece = shard[tuple(theirs)]
    into[tuple(ours)] = piece
    return piece.numel()
