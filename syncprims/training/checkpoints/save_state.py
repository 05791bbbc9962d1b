"""Save the whole state of a training, atomically, by all ranks together."""

from __future__ import annotations

import json
import operator
import re
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from syncprims.training.rng import capture as capture_rng

from . import commit, manifest
from .async_save import Saving, finish_earlier, start_save
from .coordination import Directory, Team
from .integrity import digest, dump
from .manifest import Manifest, SavedState
from .safetensors_file import byte_size, write_safetensors
from .stateful import State, check_objects, is_dtensor, region_of, split_state, state_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    import torch

    from .commit import Digests, Place, Save, Tensors
    from .stateful import Stateful

_LARGE = 64 << 20  # bytes from which on the tensors of an object are worth splitting among ranks
_LARGEST = 5_000_000_000  # bytes in a file
#: How a state's files end. A model that is saved to the same directory has no such file.
_ENDING = ".state.safetensors"
_ENDINGS = r"\.state(?:-\d{5,}-of-\d{5,})?(?:\.v\d+)?\.safetensors"


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

    `objects` are the same on all ranks, and main's are saved; of distributed tensors (DTensor) each
    rank saves its shard. `rank_objects` are each rank's own, as is the state of the random numbers
    of Python, numpy and torch (`rng`). Nothing is pickled. A save over an older one in the same
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
    own = rank_objects or {}
    return save_to(Directory.of(directory), objects, own, step=step, rng=rng, block=block)


def save_to(
    directory: Directory,
    objects: Mapping[str, Stateful],
    rank_objects: Mapping[str, Stateful],
    *,
    step: int | None,
    rng: bool,
    block: bool,
    on_commit: Callable[[], None] | None = None,
) -> Saving:
    """Save as :func:`save_state`. Then the leading rank calls ``on_commit()``."""
    check_objects(objects, rank_objects)
    step = None if step is None else operator.index(step)
    doing = f"save_state to {directory.path}"
    finish_earlier()
    team = Team.meet(doing, directory)

    def plan() -> _StatePlan:
        own = {
            "rng": capture_rng() if rng else None,
            "objects": {name: state_of(thing) for name, thing in rank_objects.items()},
        }
        own_state = split_state(own)
        if own_state.shards:
            raise TypeError(
                f"rank_objects hold {min(own_state.shards)}, a DTensor: all ranks own it"
            )
        states = {name: split_state(state_of(thing)) for name, thing in objects.items()}
        groups = {name: _split(state.tensors, len(team.ranks)) for name, state in states.items()}
        return _StatePlan(doing, step, states, own_state, groups, team)

    with commit.planned(doing, team, directory.path, plan, "have different states") as save:
        save = save._replace(on_commit=on_commit)
        if block:
            save.run()
    return Saving(directory.path) if block else start_save(save)


def _split(tensors: Mapping[str, torch.Tensor], count: int) -> list[Tensors]:
    """Return the tensors of an object by file, so that so many ranks can share the writing."""
    plain = {key: tensor for key, tensor in tensors.items() if not is_dtensor(tensor)}
    if not plain:
        return []
    most = max(-(-byte_size(plain.values()) // count), _LARGE)
    return commit.split_by_size(plain, min(most, _LARGEST))


class _StatePlan(NamedTuple):
    """What this rank has to save of a state."""

    doing: str
    step: int | None
    states: dict[str, State]
    own: State
    groups: dict[str, list[Tensors]]  #: of each object: its tensors by file, DTensors excepted
    team: Team

    def summary(self) -> dict[str, Any]:
        """Return what the other ranks need to know."""
        structure = {
            name: [[list(group) for group in self.groups[name]], commit.describe(state.tensors)]
            for name, state in self.states.items()
        }
        every = [group for groups in self.groups.values() for group in groups]
        several = len(self.team.ranks) > 1
        return {
            "same": digest(dump(structure)),
            "digests": commit.group_digests(every) if several else [""] * len(every),
            "own": json.dumps(self.own.tree),
            "own_tensors": bool(self.own.tensors),
            "regions": {
                label: [list(numbers) for numbers in region_of(state.tensors[key])]
                for label, (state, key) in self._dtensors().items()
            },
        }

    def _dtensors(self) -> dict[str, tuple[State, str]]:
        """Return the DTensors of all objects, under the names that their shards have in files."""
        states = self.states.items()
        return {f"{name}/{key}": (state, key) for name, state in states for key in state.shards}

    def assign(self, summaries: list[dict[str, Any]], team: Team, place: Place) -> Save:
        """Return the save of the state."""
        names = {
            name: commit.group_names(f"{name}{_ENDING}", len(groups))
            for name, groups in self.groups.items()
        }
        flat = [file for files in names.values() for file in files]
        flat += [f"rank-{number:05d}{_ENDING}" for number in range(len(team.ranks))]
        free = dict(zip(flat, commit.unused(flat, place.taken), strict=True))
        own_names = [free[file] for file in flat[-len(team.ranks) :]]
        groups = [group for groups in self.groups.values() for group in groups]
        shared = [free[file] for file in flat[: len(groups)]]
        digests = [summary["digests"] for summary in summaries]
        files = commit.assign_writers(shared, groups, digests)
        own_shards = self._assign_shards(summaries, own_names)
        shards = [s for state in self.states.values() for s in chain(*state.shards.values())]
        ranks: list[SavedState] = []
        for number, (summary, file) in enumerate(zip(summaries, own_names, strict=True)):
            used = summary["own_tensors"]
            ranks.append(SavedState(json.loads(summary["own"]), [file] if used else []))
            if used or any(file == other for _, other in shards):
                tensors = {**self.own.tensors, **own_shards} if number == team.number else {}
                files.append(commit.FilePlan(file, number, tensors))
        objects = {
            name: SavedState(state.tree, [free[file] for file in names[name]])
            for name, state in self.states.items()
        }
        older = manifest.listed_files(place.path) if team.leads and not place.is_new else set()
        stems = "|".join([*map(re.escape, self.states), r"rank-\d{5,}"])
        ours = re.compile(f"(?:{stems}){_ENDINGS}")

        def list_files(digests: Digests) -> bytes:
            return Manifest(self.step, objects, ranks, digests).dump()

        return commit.Save(
            self.doing, team, place, files, _write_file, (manifest.NAME,), manifest.NAME,
            list_files, lambda name: name in older or ours.fullmatch(name) is not None,
        )  # fmt: skip

    def _assign_shards(self, summaries: list[dict[str, Any]], files: list[str]) -> Tensors:
        """Enter the shards of DTensors, each once, and return those that this rank writes."""
        own: Tensors = {}
        for label, (state, key) in self._dtensors().items():
            seen: set[tuple[int, ...]] = set()
            for number, summary in enumerate(summaries):
                offset, shape = summary["regions"][label]
                if tuple(offset) in seen or 0 in shape:
                    continue  # a replica of what another rank writes, or empty
                seen.add(tuple(offset))
                state.shards[key].append([offset, files[number]])
                if number == self.team.number:
                    tensor: Any = state.tensors[key]
                    own[label] = tensor.to_local()
        return own


def _write_file(path: str, tensors: Mapping[str, torch.Tensor]) -> str:
    return write_safetensors(path, tensors, {})
