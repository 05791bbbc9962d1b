"""The whole state of a training: saved and loaded by all ranks together, once or step by step.

The manifest, a small file, holds everything except the tensors, and names all other files with
their digests. A directory holds a checkpoint if and only if it holds a manifest.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from syncprims import CheckpointError, get_rank
from syncprims._data.arrays import laid_out, strides_kept
from syncprims.training.pytree import is_dtensor
from syncprims.training.rng import capture as capture_rng
from syncprims.training.rng import check as check_rng
from syncprims.training.rng import restore as restore_rng

from . import commit, filesystem, integrity, stateful
from .async_save import Saving, finish_earlier, start_save
from .commit import Digests, FilePlan, Save, Tensors
from .coordination import check_equal, coordinate, meet
from .integrity import BLANK, SEAL, check_file_name, reading, refusal
from .safetensors_file import byte_size, read_safetensors, write_safetensors
from .stateful import State, Stateful, split_state, state_of

MANIFEST = "checkpoint.json"  #: not ``*.index.json``, which readers of weights look for
_FORMAT = 1
_RNG = "random numbers"  # among the objects of a rank; no other one may have a name like this
_LARGE = 64 << 20  # bytes from which on the tensors of an object are worth splitting among ranks
_LARGEST = 5_000_000_000  # bytes in a file
#: How a state's files end. A model that is saved to the same directory has no such file.
_ENDING = ".state.safetensors"
_STATE_FILE = re.compile(r".+\.state(?:-\d{5,}-of-\d{5,})?(?:\.v\d+)?\.safetensors")


# -- the manifest ---------------------------------------------------------------------------------


class SavedState(NamedTuple):
    """The saved state of one object: its tree without tensors, and the files with the tensors."""

    tree: object
    files: list[str]


class Manifest(NamedTuple):
    """Everything that a checkpoint holds except the tensors."""

    step: int | None
    objects: dict[str, SavedState]  #: the same for all ranks
    ranks: list[SavedState]  #: of the rank objects, by rank
    files: dict[str, str]  #: the digest of each file

    def dump(self) -> bytes:
        """Return the file's content."""
        document = {SEAL: BLANK, "format": _FORMAT, **self._asdict()}
        return integrity.put_seal(integrity.dump(document))


def read_manifest(directory: str) -> Manifest:
    """Return the manifest in a directory.

    :raises CheckpointError: if there is none, or it is not as it was written.
    """
    if not filesystem.is_directory(directory):
        raise refusal(directory, "missing", "a directory with a checkpoint", "none")
    path = f"{directory}/{MANIFEST}"
    with reading(path):
        data = filesystem.read_small(path)
    document = integrity.parse(path, data)
    integrity.check_seal(path, data)
    if document.get("format") != _FORMAT:
        expected = f"format {_FORMAT}, this version's"
        raise refusal(path, "made by another version", expected, repr(document.get("format")))
    try:
        files = {check_file_name(path, n): str(digest) for n, digest in document["files"].items()}
        objects = {name: SavedState(*state) for name, state in document["objects"].items()}
        ranks = [SavedState(*state) for state in document["ranks"]]
        step = document["step"]
    except (AttributeError, KeyError, TypeError) as error:
        raise refusal(path, "not a manifest", "its fields", repr(error)) from error
    if not (step is None or type(step) is int):
        raise refusal(path, "not a manifest", "a step", repr(step))
    return Manifest(step, objects, ranks, files)


# -- saving ---------------------------------------------------------------------------------------


def save_state(
    directory: str | os.PathLike[str],
    objects: Mapping[str, Stateful],
    *,
    rank_objects: Mapping[str, Stateful] | None = None,
    step: int | None = None,
    rng: bool = True,
    block: bool = True,
) -> Saving:
    """Save the objects' states so that the directory holds all of them, durably, on return.

    `objects` are the same on all ranks, and main's are saved; distributed tensors (DTensor) are
    saved whole. `rank_objects` are each rank's own, as is the state of the random numbers of
    Python, numpy and torch (`rng`). Nothing is pickled. Dense tensors keep their strides; a numpy
    array comes back in C order. A save over an older one in the same
    directory replaces it in one step; other files stay. All ranks call it, and share the writing.

    With ``block=False`` it returns when everything is copied, and a thread writes it beside the
    training: the returned handle's ``wait()`` returns when it is durable. There is at most one save
    in progress: the next one waits for it, and raises its error if it failed.

    :raises CheckpointError: on all ranks, if a rank's part fails. Then the old checkpoint still
        stands, and nothing is left of the new one, unless the message says that it is in place.
    :raises TypeError: if something has no ``state_dict`` and ``load_state_dict``, or `directory` is
        neither a str nor a path.
    :raises ValueError: if a name cannot be a file's name, or `directory` is empty.
    """
    path = filesystem.directory_path(directory)
    return save_to(path, objects, rank_objects or {}, step=step, rng=rng, block=block)


def save_to(
    path: str,
    objects: Mapping[str, Stateful],
    rank_objects: Mapping[str, Stateful],
    *,
    step: int | None,
    rng: bool,
    block: bool,
    on_commit: Callable[[], None] | None = None,
) -> Saving:
    """Save as :func:`save_state`. Then the leading rank calls ``on_commit()``."""
    stateful.check_objects(objects, rank_objects)
    step = None if step is None else operator.index(step)
    doing = f"save_state to {path}"
    finish_earlier()

    def make(ranks: list[int]) -> Save:
        own = {name: state_of(thing) for name, thing in rank_objects.items()}
        own |= {_RNG: capture_rng()} if rng else {}
        states = {name: split_state(state_of(thing)) for name, thing in objects.items()}
        return _StateSave(doing, ranks, step, states, split_state(own))

    with contextlib.ExitStack() as lock:
        with commit.planned(doing, path, make, "have different states", lock) as save:
            save.on_commit = on_commit
            if block:
                save.run()
        return Saving(path) if block else start_save(save, lock)


def _split(tensors: Tensors, count: int) -> list[Tensors]:
    """Return the tensors of an object by file, so that so many ranks can share the writing."""
    most = max(-(-byte_size(tensors.values()) // count), _LARGE)
    return commit.split_by_size(tensors, min(most, _LARGEST)) if tensors else []


class _StateSave(Save):
    """The save of a state: files with the tensors, and the manifest."""

    heads, head = (MANIFEST,), MANIFEST

    def __init__(
        self, doing: str, ranks: list[int], step: int | None, states: dict[str, State], own: State
    ) -> None:
        super().__init__(doing, ranks)
        distributed = [name for name, t in own.tensors.items() if is_dtensor(t)]
        if distributed:
            raise TypeError(f"{distributed[0]} in rank_objects is a DTensor of all ranks")
        self._step, self._states, self._own = step, states, own
        self.structure, self.more = [*states], [json.dumps(own.tree), bool(own.tensors)]
        self.groups = {
            name + _ENDING: _split(state.tensors, len(ranks)) for name, state in states.items()
        }

    def name_files(self, files: list[FilePlan], more: list[Any]) -> None:
        with_tensors = [number for number, (_, has_tensors) in enumerate(more) if has_tensors]
        rank_files = [
            FilePlan(f"rank-{n:05d}{_ENDING}", n, self._own.tensors if n == self.number else {})
            for n in with_tensors
        ]
        self.files = commit.with_unused_names([*files, *rank_files], self.place)
        names = iter(file.name for file in self.files)  # in the order of the plans above
        objects = {
            name: SavedState(state.tree, [next(names) for _ in self.groups[name + _ENDING]])
            for name, state in self._states.items()
        }
        ranks = [
            SavedState(json.loads(tree), [next(names)] if has_tensors else [])
            for tree, has_tensors in more
        ]
        self._manifest = Manifest(self._step, objects, ranks, {})

    def write_file(self, path: str, tensors: Mapping[str, torch.Tensor]) -> str:
        return write_safetensors(path, tensors, {})

    def list_files(self, digests: Digests) -> bytes:
        return self._manifest._replace(files=digests).dump()

    def is_ours(self, name: str) -> bool:
        return _STATE_FILE.fullmatch(name) is not None


# -- loading --------------------------------------------------------------------------------------


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
    own: dict[str, Any] = dict(rank_objects or {})
    stateful.check_objects(objects, own)
    own |= {_RNG: _RandomNumbers()} if rng else {}
    things = {**objects, **own}
    path = filesystem.directory_path(directory)
    doing = f"load_state from {path}"
    finish_earlier()
    ranks = meet(doing)
    saved, digests = coordinate(
        doing, lambda: read_manifest(path), lambda manifest: integrity.digest(manifest.dump())
    )
    cure = "Pass the same directory and step; copy the checkpoint to hosts with disks of their own."
    check_equal(doing, ranks, digests, "have found a different checkpoint", cure)

    def read_states() -> dict[str, Any]:
        here, count = len(ranks), len(saved.ranks)
        if count != here and not any_world_size:
            what = f"{path}/{MANIFEST}: saved by {count} ranks, and here are {here}"
            cure = "or pass any_world_size=True: each rank keeps its random numbers and objects"
            raise CheckpointError(f"{what}. Start {count} ranks, {cure}.", path=path)
        reader = _StateReader(path, saved, strict)
        states = reader.common_states(objects)
        if count == here:
            states |= reader.rank_states(own, ranks.index(get_rank()))
        for name, state in states.items():
            stateful.check_fits(path, name, things[name], state)
        stateful.match_layouts(things, states)
        return states

    states, _ = coordinate(doing, read_states, lambda _: None)
    coordinate(doing, lambda: _load_into(path, things, states))
    return Loaded(path, saved.step, len(saved.ranks))


def _load_into(path: str, objects: Mapping[str, Stateful], states: dict[str, Any]) -> None:
    """Load the states into the objects, and the random numbers last.

    Models, whose states are known to fit, come after what may refuse its state.
    """
    loaded: list[str] = []
    order = sorted(states, key=lambda name: (name == _RNG, isinstance(objects[name], nn.Module)))
    for name in order:
        try:
            stateful.load_into(objects[name], states[name])
        except Exception as error:
            what = f"{path}: {name!r} refuses its state: {type(error).__name__}: {error}"
            cure = f"{loaded} have been loaded before it: do not use them."
            raise CheckpointError(f"{what}. {cure if loaded else ''}".strip(), path=path) from error
        loaded.append(name)


class _RandomNumbers:
    """The random numbers of this rank, as one of its objects."""

    _check_state = staticmethod(check_rng)
    state_dict = staticmethod(capture_rng)
    load_state_dict = staticmethod(restore_rng)


class _StateReader(NamedTuple):
    """Reads and checks a checkpoint without changing an object."""

    path: str
    manifest: Manifest
    strict: bool

    def common_states(self, objects: Mapping[str, Stateful]) -> dict[str, Any]:
        """Return the states of the objects that are the same on all ranks."""
        saved = self.manifest.objects
        return {
            name: self._state(
                name, saved[name], stateful.dtensors_of(objects[name], saved[name].tree)
            )
            for name in self._common_names(objects, saved)
        }

    def rank_states(self, objects: Mapping[str, Stateful], number: int) -> dict[str, Any]:
        """Return the states of one rank's own objects, and of its random numbers."""
        saved = self._state(f"of rank {number}", self.manifest.ranks[number], {})
        if not isinstance(saved, dict):
            expected = "those of its objects"
            raise refusal(f"{self.path}/{MANIFEST}", "a rank's states", expected, repr(saved))
        if _RNG not in objects:
            saved.pop(_RNG, None)
        return {name: saved[name] for name in self._common_names(objects, saved)}

    def _common_names(self, here: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
        if self.strict and here.keys() != saved.keys():
            expected = f"{sorted(here)}, which are to be loaded"
            found = str(sorted(saved, key=repr))
            raise refusal(f"{self.path}/{MANIFEST}", "objects", expected, found)
        return [name for name in here if name in saved]

    def _state(self, name: str, saved: SavedState, targets: Mapping[str, Any]) -> Any:
        tensors: dict[str, torch.Tensor] = {}

        def load_tensor(key: str, strides: Sequence[int]) -> torch.Tensor:
            if strides and strides_kept(tensors[key].shape, strides) != tuple(strides):
                raise ValueError(f"{key!r} is not dense with the strides {strides}")
            tensor: torch.Tensor = laid_out(tensors[key], strides)
            tensors[key] = tensor
            # A state of an optimizer is distributed as its parameter is.
            target = targets.get(key, targets.get(".".join(key.split(".")[:2])))
            if target is None or target.shape != tensor.shape:
                return tensor
            return stateful.distribute(tensor, target)

        try:
            for file in saved.files:
                tensors |= read_safetensors(f"{self.path}/{file}", self.manifest.files[file])
            return stateful.join_state(saved.tree, load_tensor)
        except CheckpointError:
            raise
        except Exception as error:  # of any kind, if the tree is damaged
            what = f"state {name!r}"
            raise refusal(f"{self.path}/{MANIFEST}", what, "a state", repr(error)) from error


# -- a directory of checkpoints, one for each step ------------------------------------------------


class Checkpoints:
    """The checkpoints of a run: ``<directory>/step-1000``, ``step-2000`` and so on.

    Each is complete, since one rename creates it. Other files in the directory are ignored.
    Of the complete ones, the last `keep_last` are kept (all, with None); the one just saved is
    always among them, and none is removed before that is durable.

    :raises TypeError: if `keep_last` is not a whole number.
    :raises ValueError: if `keep_last` is below 1, or `prefix` cannot begin a file's name.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        prefix: str = "step-",
    ) -> None:
        keep_last = None if keep_last is None else operator.index(keep_last)
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last={keep_last!r}: it takes 1 or more, or None for all")
        if "/" in prefix or prefix.startswith(".") or "\0" in prefix:
            raise ValueError(f"prefix={prefix!r}: it must be the beginning of a directory's name")
        self.directory: str = filesystem.directory_path(directory)
        self.keep_last = keep_last
        self.prefix = prefix

    def path(self, step: int) -> str:
        """Return the directory of a step's checkpoint, whether it exists or not."""
        return f"{self.directory}/{self.prefix}{step}"

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, ascending. Not collective."""
        pattern = re.compile(re.escape(self.prefix) + r"(0|[1-9][0-9]*)")
        steps: list[int] = []
        for _ in range(3):
            with reading(self.directory, "a directory"):
                names = filesystem.names(self.directory)
                matches = [match for match in map(pattern.fullmatch, names) if match]
                manifests = {int(m[1]): f"{self.directory}/{m[0]}/{MANIFEST}" for m in matches}
                steps = sorted(step for step, path in manifests.items() if filesystem.exists(path))
                if names == filesystem.names(self.directory):
                    break  # else another program may have replaced all of these
        return steps

    def latest(self) -> int | None:
        """Return the highest step with a complete checkpoint, or None. Not collective."""
        return max(self.steps(), default=None)

    def save(
        self,
        step: int,
        objects: Mapping[str, Stateful],
        *,
        rank_objects: Mapping[str, Stateful] | None = None,
        rng: bool = True,
        block: bool = True,
    ) -> Saving:
        """Save a step as :func:`save_state` does, then remove the oldest beyond `keep_last`.

        :raises CheckpointError: on all ranks, if a rank's part fails; no older one is lost.
        """
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"step={step}: steps are counted from 0")
        return save_to(
            self.path(step), objects, rank_objects or {},
            step=step, rng=rng, block=block, on_commit=lambda: self._prune(step),
        )  # fmt: skip

    def load(
        self, objects: Mapping[str, Stateful], step: int | None = None, **options: Any
    ) -> Loaded:
        """Load the checkpoint of a step, by default the latest. Options as of :func:`load_state`.

        :raises CheckpointError: on all ranks, if there is none, or it is not as it was saved; the
            message then names an older one, which is not loaded automatically.
        """
        steps = agreed_steps(self, f"Checkpoints.load from {self.directory}")
        if step is None and not steps:
            what = f"{self.directory}: no complete checkpoint {self.prefix}<number> in it"
            cure = "expected one, found none. Save one, or start from the beginning."
            raise CheckpointError(f"{what}: {cure}", path=self.directory)
        chosen = max(steps) if step is None else step
        try:
            return load_state(self.path(chosen), objects, **options)
        except CheckpointError as error:
            older = [other for other in steps if other < chosen]
            if older:
                error.args = (f"{error} The newest older one is {self.path(older[-1])}.",)
            raise

    def _prune(self, saved: int) -> None:
        """Remove the oldest steps, and what killed saves of such steps left; log failures."""
        if self.keep_last is None:
            return
        try:
            steps = self.steps()
            others = [step for step in steps if step != saved]
            gone = others[: max(0, len(others) - self.keep_last + 1)]
            for step in gone:
                # Rename it first, so that no reader finds half of one.
                away = f"{self.directory}/{commit.temporary(f'{self.prefix}{step}')}"
                with contextlib.suppress(BlockingIOError):
                    commit.remove_unlocked(self.path(step), away)
            # Another process may be saving one of the later steps now.
            oldest = min({*steps, saved} - {*gone})
            for name in filesystem.names(self.directory):
                final = commit.final_name(name)
                number = final.removeprefix(self.prefix)
                whole = final.startswith(self.prefix) and number.isdecimal()
                if whole and int(number) < oldest:
                    with contextlib.suppress(BlockingIOError):
                        commit.remove_unlocked(f"{self.directory}/{name}")
        except OSError as error:
            text = "could not remove older checkpoints in %s: %s"
            filesystem.LOG.warning(text, self.directory, error)


def agreed_steps(checkpoints: Checkpoints, doing: str) -> list[int]:
    """Return the steps that the leading rank finds, once no save is in progress. Collective."""
    finish_earlier()
    leads = meet(doing)[0] == get_rank()
    _, steps = coordinate(doing, checkpoints.steps, lambda steps: steps if leads else None)
    return cast("list[int]", steps[0])
