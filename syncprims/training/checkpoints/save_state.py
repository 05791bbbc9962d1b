"""Save the whole state of a training, atomically, by all ranks together."""

from __future__ import annotations

import json
import operator
import re
from itertools import chain
from typing import TYPE_CHECKING, Any

from syncprims.training.rng import capture as capture_rng

from . import commit, manifest
from .async_save import Saving, finish_earlier, start_save
from .commit import FilePlan, Plan
from .coordination import Directory, Team
from .manifest import Manifest, SavedState
from .safetensors_file import byte_size, write_safetensors
from .stateful import check_objects, is_dtensor, region_of, split_state, state_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    import torch

    from .commit import Place, Save, Tensors
    from .stateful import State, Stateful

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

    def plan() -> Plan:
        own = {
            "rng": capture_rng() if rng else None,
            "objects": {name: state_of(thing) for name, thing in rank_objects.items()},
        }
        states = {name: split_state(state_of(thing)) for name, thing in objects.items()}
        return _plan_state(doing, team, step, states, split_state(own))

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


def _plan_state(
    doing: str, team: Team, step: int | None, states: dict[str, State], own: State
) -> Plan:
    if own.shards:
        raise TypeError(f"{min(own.shards)} in rank_objects is a DTensor of all ranks")
    groups = {
        name + _ENDING: _split(state.tensors, len(team.ranks)) for name, state in states.items()
    }
    #: under the names that their shards have in files
    dtensors = {f"{name}/{key}": (s, key) for name, s in states.items() for key in s.shards}
    regions = {label: region_of(state.tensors[key]) for label, (state, key) in dtensors.items()}

    def assign_shards(regions: list[dict[str, Any]], names: list[str]) -> Tensors:
        """Enter the shards of DTensors, each once, and return those that this rank writes."""
        written: Tensors = {}
        for label, (state, key) in dtensors.items():
            seen: set[tuple[int, ...]] = set()
            for number, name in enumerate(names):
                offset, shape = regions[number][label]
                if tuple(offset) in seen or 0 in shape:
                    continue  # a replica of what another rank writes, or empty
                seen.add(tuple(offset))
                state.shards[key].append([offset, name])
                if number == team.number:
                    tensor: Any = state.tensors[key]
                    written[label] = tensor.to_local()
        return written

    def complete(files: list[FilePlan], ranks: list[Any], place: Place) -> Save:
        count = len(files)
        own_files = [FilePlan(f"rank-{n:05d}{_ENDING}", n, {}) for n in range(len(ranks))]
        files = commit.with_unused_names([*files, *own_files], place)
        names = [file.name for file in files]
        shards = assign_shards([regions for _, _, regions in ranks], names[count:])
        unassigned = iter(names)
        objects = {
            name: SavedState(state.tree, [next(unassigned) for _ in groups[name + _ENDING]])
            for name, state in states.items()
        }
        saved_ranks = [
            SavedState(json.loads(tree), [name] if has_tensors else [])
            for (tree, has_tensors, _), name in zip(ranks, names[count:], strict=True)
        ]
        mine = count + team.number
        files[mine] = files[mine]._replace(tensors={**own.tensors, **shards})
        used = {*names[:count], *chain.from_iterable(rank.files for rank in saved_ranks)}
        used |= {name for s in states.values() for _, name in chain(*s.shards.values())}
        older = manifest.listed_files(place.path) if team.leads and not place.is_new else set()
        stems = "|".join([*map(re.escape, states), r"rank-\d{5,}"])
        ours = re.compile(f"(?:{stems}){_ENDINGS}")
        return commit.Save(
            doing, team, place, [file for file in files if file.name in used],
            lambda path, tensors: write_safetensors(path, tensors, {}),
            (manifest.NAME,), manifest.NAME,
            lambda digests: Manifest(step, objects, saved_ranks, digests).dump(),
            lambda name: name in older or ours.fullmatch(name) is not None,
        )  # fmt: skip

    more = [json.dumps(own.tree), bool(own.tensors), regions]
    shapes = {label: list(state.tensors[key].shape) for label, (state, key) in dtensors.items()}
    return Plan([[*states], shapes], groups, more, complete)
