"""Load the whole state of a training: proved first, by all ranks, and only then brought in."""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from syncprims import CheckpointError

from . import disk, generators, manifest, tree
from .directory import Directory
from .meter import metered
from .objects import check_fits, check_objects, give_back, targets
from .refusal import refusal
from .saving import finish_earlier
from .seal import digest
from .sharded import box, like
from .stored import TensorFile
from .together import Team, together

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from torch.distributed.tensor import DTensor

    from .manifest import Item, Manifest
    from .objects import Stateful


class Loaded(NamedTuple):
    """What :func:`load_state` has loaded."""

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
    """Give the objects their states back, once every rank has proved that all is as it was saved.

    Then the training goes on bit for bit as if it had not been interrupted. Names must be those
    that were saved; without `strict`, those that are on one side only are left. The ranks' own
    objects and random numbers are only given back to as many ranks as saved them: with another
    number it is refused, or, with `any_world_size`, those are left as they are. Tensors spread over
    ranks are cut anew. All ranks call it. Nothing in a checkpoint is run.

    :raises CheckpointError: on all ranks, naming the file, what was expected and what was found;
        or the ranks that found another checkpoint than the rest. Then no object is changed, unless
        one of them refuses its state: the message says so.
    :raises TypeError: for objects as :func:`save_state`.
    :raises ValueError: for names as :func:`save_state`.
    """
    own = rank_objects or {}
    check_objects(objects, own)
    path = Directory.of(directory).path
    doing = f"load_state from {path}"
    finish_earlier()
    team = Team.met(doing)

    def read() -> _Found:
        with contextlib.ExitStack() as files:
            reader = _Reader(path, team, objects, own, files, strict=strict)
            return reader.read(rng=rng, any_world_size=any_world_size)

    found, seals = together(doing, read, _Found.seal)
    _check_same(doing, team, seals)
    together(doing, lambda: found.give_back({**objects, **own}))
    return Loaded(path, found.manifest.step, len(found.manifest.ranks))


def _check_same(doing: str, team: Team, seals: Sequence[str]) -> None:
    other = [rank for rank, seal in zip(team.ranks, seals, strict=True) if seal != seals[0]]
    if other:
        raise CheckpointError(
            f"{doing}: ranks {other} have found another checkpoint than rank {team.ranks[0]}. "
            f"Every rank loads the same one: pass the same directory, and the same step; where "
            f"hosts have disks of their own, copy the checkpoint to each.",
            rank=other[0],
        )


class _Found(NamedTuple):
    """States, ready to be given back."""

    path: str
    manifest: Manifest
    states: dict[str, Any]
    rng: dict[str, Any] | None

    def seal(self) -> str:
        """Return what only this checkpoint, and whatever copy of it, has."""
        return digest(self.manifest.dump())

    def give_back(self, objects: Mapping[str, Stateful]) -> None:
        """Give all objects their states back, and the random numbers last."""
        for name, state in self.states.items():
            try:
                give_back(objects[name], state)
            except Exception as error:
                raise CheckpointError(
                    f"{self.path}: object {name!r} refuses its state: {type(error).__name__}: "
                    f"{error}. Objects before it have been loaded: do not go on with them.",
                    path=self.path,
                ) from error
        try:
            if self.rng is not None:
                generators.restore(self.rng)
        except Exception as error:
            raise CheckpointError(
                f"{self.path}: the random numbers cannot go on: {type(error).__name__}: {error}. "
                f"The objects have been loaded.",
                path=self.path,
            ) from error


class _Reader:
    """Reads a checkpoint, and changes nothing."""

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
        if not disk.is_directory(path):
            raise refusal(path, "missing", "a directory with a checkpoint", "none")
        self._manifest = manifest.read(path)
        self._opened: dict[str, TensorFile] = {}

    def read(self, *, rng: bool, any_world_size: bool) -> _Found:
        """Return the states, from files that have been proved."""
        same = self._check_world_size(any_world_size)
        mine = self._manifest.ranks[self._team.place] if same else None
        self._open(mine)
        states: dict[str, Any] = {}
        for name in self._wanted(self._objects, self._manifest.objects):
            thing, item = self._objects[name], self._manifest.objects[name]
            states[name] = self._state(name, item, targets(thing))
            check_fits(self._path, name, thing, states[name])
        if mine is None:
            return _Found(self._path, self._manifest, states, None)
        kept: Any = self._state(f"of rank {self._team.place}", mine, {})
        if not isinstance(kept, dict) or not isinstance(kept.get("objects"), dict):
            path = f"{self._path}/{manifest.NAME}"
            raise refusal(path, "a rank's own state", "objects and random numbers", repr(kept))
        for name in self._wanted(self._own, kept["objects"]):
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

    def _wanted(self, here: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
        if self._strict and here.keys() != saved.keys():
            raise refusal(
                f"{self._path}/{manifest.NAME}", "objects",
                f"{sorted(here)}, which are to be loaded", f"{sorted(saved, key=repr)}",
            )  # fmt: skip
        return [name for name in here if name in saved]

    def _open(self, mine: Item | None) -> None:
        """Open and prove all files that this rank reads."""
        names = {name for item in self._manifest.objects.values() for name in item.files}
        for item in self._manifest.objects.values():
            names |= {part[2] for parts in item.parts.values() for part in parts}
        names |= set(mine.files) if mine is not None else set()
        for name in sorted(names):
            path = f"{self._path}/{name}"
            file = self._files.enter_context(contextlib.closing(TensorFile(path)))
            self._opened[name] = file
            self._manifest.files[name].same_as(path, file)
        total = sum(file.size for file in self._opened.values())
        with metered("checking the state", total) as meter:
            for file in self._opened.values():
                file.prove(meter)

    def _state(self, name: str, item: Item, spread: Mapping[str, DTensor]) -> Any:
        where = {key: file for file in item.files for key in self._opened[file].entries}

        def take(node: dict[str, Any]) -> torch.Tensor:
            key = node["key"]
            if node[tree.KIND] == "sharded":
                return self._cut(node, f"{name}/{key}", item.parts[key], _target(spread, key))
            return self._opened[where[key]].tensor(key)

        try:
            return tree.join(item.tree, take)
        except CheckpointError:
            raise
        except Exception as error:  # whatever a tree that is none makes of it
            path = f"{self._path}/{manifest.NAME}"
            raise refusal(path, f"state {name!r}", "a state", repr(error)) from error

    def _cut(
        self, node: dict[str, Any], label: str, parts: list[Any], target: DTensor | None
    ) -> torch.Tensor:
        """Return a spread tensor, or what of it is this rank's, from the parts that were saved."""
        whole = tuple(node["shape"])
        begin, shape = ((0,) * len(whole), whole) if target is None else box(target)
        made: torch.Tensor | None = None
        covered = 0
        for offset, size, file in parts:
            saved = self._opened[file].tensor(label)
            if made is None:
                made = torch.empty(shape, dtype=saved.dtype)
            covered += _overlay(made, begin, saved, offset, size)
        if made is None:
            made = torch.empty(shape)
        if covered != made.numel():
            path = f"{self._path}/{manifest.NAME}"
            raise refusal(path, f"parts of {label!r}", f"{made.numel()} numbers", f"{covered}")
        return made if target is None else like(target, made)


def _target(spread: Mapping[str, DTensor], key: str) -> DTensor | None:
    """Return the tensor whose ranks a saved one belongs to: of its name, or of its parameter's."""
    found = spread.get(key)
    if found is not None:
        return found
    return next(
        (t for start, t in spread.items() if start[-1] == "." and key.startswith(start)), None
    )


def _overlay(made: torch.Tensor, begin: Any, saved: torch.Tensor, offset: Any, size: Any) -> int:
    """Copy what two boxes have in common; return how many numbers that is."""
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
