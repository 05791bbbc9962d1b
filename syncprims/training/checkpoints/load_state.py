"""Load the whole state of a training: all ranks check it first, and only then is it used."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from syncprims import CheckpointError
from syncprims.training.rng import restore as restore_rng

from . import filesystem, manifest
from .async_save import finish_earlier
from .coordination import Directory, Team, check_equal, coordinate
from .integrity import digest, refusal
from .safetensors_file import SafetensorsFile
from .stateful import (
    KIND,
    check_fits,
    check_objects,
    dtensors_of,
    from_shard,
    join_state,
    load_into,
    shard_region,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch.distributed.tensor import DTensor

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
    check_objects(objects, own)
    path = Directory.of(directory).path
    doing = f"load_state from {path}"
    finish_earlier()
    team = Team.meet(doing)

    def read() -> _Found:
        if not filesystem.is_directory(path):
            raise refusal(path, "missing", "a directory with a checkpoint", "none")
        with contextlib.ExitStack() as stack:
            reader = _StateReader(path, team, objects, own, strict, manifest.read(path), stack, {})
            return reader.read(rng=rng, any_world_size=any_world_size)

    # Checkpoints and their copies are identified by their manifests.
    found, digests = coordinate(doing, read, lambda found: digest(found.manifest.dump()))
    check_equal(
        doing, team.ranks, digests, "have found a different checkpoint",
        "Every rank loads the same one: pass the same directory, and the same step; where hosts "
        "have disks of their own, copy the checkpoint to each.",
    )  # fmt: skip
    coordinate(doing, lambda: found.load_into({**objects, **own}))
    return Loaded(path, found.manifest.step, len(found.manifest.ranks))


class _Found(NamedTuple):
    """States that are read and checked."""

    path: str
    manifest: Manifest
    states: dict[str, Any]
    rng: dict[str, Any] | None

    def load_into(self, objects: Mapping[str, Stateful]) -> None:
        """Load the states into the objects, and the random numbers last."""
        for name, state in self.states.items():
            try:
                load_into(objects[name], state)
            except Exception as error:
                raise CheckpointError(
                    f"{self.path}: object {name!r} refuses its state: {type(error).__name__}: "
                    f"{error}. Objects before it have been loaded: do not go on with them.",
                    path=self.path,
                ) from error
        try:
            if self.rng is not None:
                restore_rng(self.rng)
        except Exception as error:
            raise CheckpointError(
                f"{self.path}: the random numbers cannot go on: {type(error).__name__}: {error}. "
                f"The objects have been loaded.",
                path=self.path,
            ) from error


class _StateReader(NamedTuple):
    """Reads a checkpoint without changing an object."""

    path: str
    team: Team
    objects: Mapping[str, Stateful]
    rank_objects: Mapping[str, Stateful]
    strict: bool
    manifest: Manifest
    stack: contextlib.ExitStack  #: closes the files
    files: dict[str, SafetensorsFile]  #: those that are open

    def read(self, *, rng: bool, any_world_size: bool) -> _Found:
        """Check all files that this rank reads, and return the states."""
        saved, here = len(self.manifest.ranks), len(self.team.ranks)
        if saved != here and not any_world_size:
            raise CheckpointError(
                f"{self.manifest_path}: saved by {saved} ranks, and here are {here}: each "
                f"rank's random numbers and own objects would have no owner. Start {saved} ranks, "
                f"or load with any_world_size=True, which leaves those as they are.",
                path=self.manifest_path,
            )
        mine = self.manifest.ranks[self.team.number] if saved == here else None
        self._open(mine)
        states: dict[str, Any] = {}
        for name in self._common_names(self.objects, self.manifest.objects):
            thing, item = self.objects[name], self.manifest.objects[name]
            states[name] = self._state(name, item, dtensors_of(thing))
            check_fits(self.path, name, thing, states[name])
        if mine is None:
            return _Found(self.path, self.manifest, states, None)
        kept: Any = self._state(f"of rank {self.team.number}", mine, {})
        if not isinstance(kept, dict) or not isinstance(kept.get("objects"), dict):
            expected = "objects and random numbers"
            raise refusal(self.manifest_path, "a rank's own state", expected, repr(kept))
        for name in self._common_names(self.rank_objects, kept["objects"]):
            states[name] = kept["objects"][name]
            check_fits(self.path, name, self.rank_objects[name], states[name])
        if rng and not isinstance(kept.get("rng"), dict):
            found = "none: saved with rng=False"
            raise refusal(self.manifest_path, "random numbers", "their state", found)
        return _Found(self.path, self.manifest, states, kept["rng"] if rng else None)

    @property
    def manifest_path(self) -> str:
        """The manifest's file, for errors."""
        return f"{self.path}/{manifest.NAME}"

    def _common_names(self, here: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
        if self.strict and here.keys() != saved.keys():
            raise refusal(
                self.manifest_path, "objects",
                f"{sorted(here)}, which are to be loaded", f"{sorted(saved, key=repr)}",
            )  # fmt: skip
        return [name for name in here if name in saved]

    def _open(self, mine: SavedState | None) -> None:
        """Open and check all files that this rank reads."""
        names: set[str] = set()
        for item in (*self.manifest.objects.values(), *([mine] if mine else [])):
            names.update(item.files, (part[2] for parts in item.parts.values() for part in parts))
        for name in sorted(names):
            path = f"{self.path}/{name}"
            file = self.stack.enter_context(contextlib.closing(SafetensorsFile(path)))
            self.files[name] = file
            file.check_digest(self.manifest.files[name])
        for file in self.files.values():
            file.read({}, check=True)

    def _state(self, name: str, item: SavedState, targets: Mapping[str, DTensor]) -> Any:
        where = {key: file for file in item.files for key in self.files[file].entries}

        def take(node: dict[str, Any]) -> torch.Tensor:
            key = node["key"]
            if node[KIND] == "sharded":
                return self._assemble(node, f"{name}/{key}", item.parts[key], _target(targets, key))
            return self.files[where[key]].read_tensor(key)

        try:
            return join_state(item.tree, take)
        except CheckpointError:
            raise
        except Exception as error:  # of any kind, if the tree is damaged
            what = f"state {name!r}"
            raise refusal(self.manifest_path, what, "a state", repr(error)) from error

    def _assemble(
        self, node: dict[str, Any], label: str, parts: list[Any], target: DTensor | None
    ) -> torch.Tensor:
        """Return a DTensor, or without `target` the full tensor, from the saved shards."""
        full = tuple(node["shape"])
        begin, shape = ((0,) * len(full), full) if target is None else shard_region(target)
        made: torch.Tensor | None = None
        covered = 0
        for offset, size, file in parts:
            saved = self.files[file].read_tensor(label)
            if made is None:
                made = torch.empty(shape, dtype=saved.dtype, device=saved.device)
            covered += _overlay(made, begin, saved, offset, size)
        if made is None:
            made = torch.empty(shape, device="cpu")
        if covered != made.numel():
            what = f"parts of {label!r}"
            raise refusal(self.manifest_path, what, f"{made.numel()} numbers", f"{covered}")
        return made if target is None else from_shard(made, target)


def _target(targets: Mapping[str, DTensor], key: str) -> DTensor | None:
    """Return the DTensor that gives the placements of a saved one: by its name or its parameter."""
    for name, target in targets.items():
        if key == name or (name.endswith(".") and key.startswith(name)):
            return target
    return None


def _overlay(made: torch.Tensor, begin: Any, saved: torch.Tensor, offset: Any, size: Any) -> int:
    """Copy what two regions have in common; return how many numbers that is."""
    ours: list[slice] = []
    theirs: list[slice] = []
    for start, length, other, extent in zip(begin, made.shape, offset, size, strict=True):
        low, high = max(start, other), min(start + length, other + extent)
        if low >= high:
            return 0
        ours.append(slice(low - start, high - start))
        theirs.append(slice(low - other, high - other))
    piece = saved[tuple(theirs)]
    made[tuple(ours)] = piece
    return piece.numel()
