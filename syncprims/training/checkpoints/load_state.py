"""Load the whole state of a training: all ranks check it first, and only then is it used."""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from syncprims import CheckpointError

from . import filesystem, manifest
from .async_save import finish_earlier
from .coordination import Directory, Team, coordinate
from .dtensor import from_shard, shard_region
from .integrity import digest, refusal
from .progress import progress_bar
from .safetensors_file import SafetensorsFile
from .state_tree import KIND, join_state
from .stateful import check_fits, check_objects, dtensors_of, load_into, restore_rng

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

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
        with contextlib.ExitStack() as files:
            reader = _StateReader(path, team, objects, own, files, strict=strict)
            return reader.read(rng=rng, any_world_size=any_world_size)

    found, digests = coordinate(doing, read, _Found.digest)
    _check_same_checkpoint(doing, team, digests)
    coordinate(doing, lambda: found.load_into({**objects, **own}))
    return Loaded(path, found.manifest.step, len(found.manifest.ranks))


def _check_same_checkpoint(doing: str, team: Team, digests: Sequence[str]) -> None:
    other = [rank for rank, one in zip(team.ranks, digests, strict=True) if one != digests[0]]
    if other:
        raise CheckpointError(
            f"{doing}: ranks {other} have found another checkpoint than rank {team.ranks[0]}. "
            f"Every rank loads the same one: pass the same directory, and the same step; where "
            f"hosts have disks of their own, copy the checkpoint to each.",
            rank=other[0],
        )


class _Found(NamedTuple):
    """States that are read and checked."""

    path: str
    manifest: Manifest
    states: dict[str, Any]
    rng: dict[str, Any] | None

    def digest(self) -> str:
        """Return what identifies this checkpoint and its copies."""
        return digest(self.manifest.dump())

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


class _StateReader:
    """Reads a checkpoint without changing an object."""

    def __init__(
        self,
        path: str,
        team: Team,
        objects: Mapping[str, Stateful],
        own: Mapping[str, Stateful],
        files: contextlib.ExitStack,
        *,
        strict: bool,
    ) -> None:
        self._path = path
        self._files = files
        self._team = team
        self._objects = objects
        self._own = own
        self._strict = strict
        if not filesystem.is_directory(path):
            raise refusal(path, "missing", "a directory with a checkpoint", "none")
        self._manifest = manifest.read(path)
        self._opened: dict[str, SafetensorsFile] = {}

    def read(self, *, rng: bool, any_world_size: bool) -> _Found:
        """Check all files that this rank reads, and return the states."""
        same = self._check_world_size(any_world_size)
        mine = self._manifest.ranks[self._team.place] if same else None
        self._open(mine)
        states: dict[str, Any] = {}
        for name in self._common_names(self._objects, self._manifest.objects):
            thing, item = self._objects[name], self._manifest.objects[name]
            states[name] = self._state(name, item, dtensors_of(thing))
            check_fits(self._path, name, thing, states[name])
        if mine is None:
            return _Found(self._path, self._manifest, states, None)
        kept: Any = self._state(f"of rank {self._team.place}", mine, {})
        if not isinstance(kept, dict) or not isinstance(kept.get("objects"), dict):
            path = f"{self._path}/{manifest.NAME}"
            raise refusal(path, "a rank's own state", "objects and random numbers", repr(kept))
        for name in self._common_names(self._own, kept["objects"]):
            states[name] = kept["objects"][name]
            check_fits(self._path, name, self._own[name], states[name])
        if rng and not isinstance(kept.get("rng"), dict):
            path = f"{self._path}/{manifest.NAME}"
            raise refusal(path, "random numbers", "their state", "none: saved with rng=False")
        return _Found(self._path, self._manifest, states, kept["rng"] if rng else None)

    def _check_world_size(self, any_world_size: bool) -> bool:
        saved, here = len(self._manifest.ranks), len(self._team.ranks)
        if saved != here and not any_world_size:
            raise CheckpointError(
                f"{self._path}/{manifest.NAME}: saved by {saved} ranks, and here are {here}: each "
                f"rank's random numbers and own objects would have no owner. Start {saved} ranks, "
                f"or load with any_world_size=True, which leaves those as they are.",
                path=f"{self._path}/{manifest.NAME}",
            )
        return saved == here

    def _common_names(self, here: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
        if self._strict and here.keys() != saved.keys():
            raise refusal(
                f"{self._path}/{manifest.NAME}", "objects",
                f"{sorted(here)}, which are to be loaded", f"{sorted(saved, key=repr)}",
            )  # fmt: skip
        return [name for name in here if name in saved]

    def _open(self, mine: SavedState | None) -> None:
        """Open and check all files that this rank reads."""
        names = {name for item in self._manifest.objects.values() for name in item.files}
        for item in self._manifest.objects.values():
            names |= {part[2] for parts in item.parts.values() for part in parts}
        names |= set(mine.files) if mine is not None else set()
        for name in sorted(names):
            path = f"{self._path}/{name}"
            file = self._files.enter_context(contextlib.closing(SafetensorsFile(path)))
            self._opened[name] = file
            self._manifest.files[name].check(path, file)
        total = sum(file.size for file in self._opened.values())
        with progress_bar("checking the state", total) as add:
            for file in self._opened.values():
                file.check_data(add)

    def _state(self, name: str, item: SavedState, targets: Mapping[str, DTensor]) -> Any:
        where = {key: file for file in item.files for key in self._opened[file].entries}

        def take(node: dict[str, Any]) -> torch.Tensor:
            key = node["key"]
            if node[KIND] == "sharded":
                return self._assemble(node, f"{name}/{key}", item.parts[key], _target(targets, key))
            return self._opened[where[key]].read_tensor(key)

        try:
            return join_state(item.tree, take)
        except CheckpointError:
            raise
        except Exception as error:  # of any kind, if the tree is damaged
            path = f"{self._path}/{manifest.NAME}"
            raise refusal(path, f"state {name!r}", "a state", repr(error)) from error

    def _assemble(
        self, node: dict[str, Any], label: str, parts: list[Any], target: DTensor | None
    ) -> torch.Tensor:
        """Return a DTensor, or without `target` the full tensor, from the saved shards."""
        full = tuple(node["shape"])
        begin, shape = ((0,) * len(full), full) if target is None else shard_region(target)
        made: torch.Tensor | None = None
        covered = 0
        for offset, size, file in parts:
            saved = self._opened[file].read_tensor(label)
            if made is None:
                made = torch.empty(shape, dtype=saved.dtype)
            covered += _overlay(made, begin, saved, offset, size)
        if made is None:
            made = torch.empty(shape)
        if covered != made.numel():
            path = f"{self._path}/{manifest.NAME}"
            raise refusal(path, f"parts of {label!r}", f"{made.numel()} numbers", f"{covered}")
        return made if target is None else from_shard(made, target)


def _target(targets: Mapping[str, DTensor], key: str) -> DTensor | None:
    """Return the DTensor that gives the placements of a saved one: by its name or its parameter."""
    found = targets.get(key)
    if found is not None:
        return found
    return next(
        (t for start, t in targets.items() if start[-1] == "." and key.startswith(start)), None
    )


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
