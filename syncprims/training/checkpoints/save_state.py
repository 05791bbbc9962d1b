"""Save the whole state of a training, atomically, by all ranks together."""

from __future__ import annotations

import json
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

from syncprims import current
from syncprims.training.rng import capture as capture_rng

from . import save_plan
from .async_save import Saving, finish_earlier, is_saving, start_save
from .commit import unused_version, versioned, write_and_commit
from .coordination import UNCHANGED, Directory, Team, check_equal, cleanup_on_error, coordinate
from .dtensor import is_dtensor, shard_region
from .integrity import digest
from .manifest import Manifest, SavedState
from .safetensors_file import byte_size
from .state_tree import State, split_state
from .state_writer import Destination, StateWriter
from .stateful import check_objects, state_of
from .weights import FIRST_FILES, is_model_file

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    import torch

    from .save_plan import PlannedFile, Tensors
    from .stateful import Stateful

_LARGE = 64 << 20  # bytes from which on the tensors of an object are worth splitting among ranks
_LARGEST = 5_000_000_000  # bytes in a file


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
    path = directory.path
    doing = f"save_state to {path}"
    finish_earlier()
    team = Team.meet(doing, directory)
    plan, summaries = coordinate(
        doing, lambda: _StatePlan.of(objects, rank_objects, rng, team), _StatePlan.summary,
        advice=UNCHANGED,
    )  # fmt: skip
    check_equal(doing, team.ranks, [one["structure"] for one in summaries], "have different states")
    extras = current().extras
    made: list[Destination] = []  # on the leading rank

    def prepare() -> list[Any]:
        made.extend([Destination.prepare(path)] if team.leads else [])
        return list(made[0]) if made else []

    def clean_up() -> None:
        if not is_saving(extras):  # else its threads still write there, here or on other ranks
            for destination in made:
                destination.remove()

    with cleanup_on_error(doing, clean_up):
        prepared = coordinate(doing, prepare, advice=UNCHANGED).by_rank
        files, manifest = plan.assign(summaries, team, Destination(*prepared[0]), step)
        writer = StateWriter(doing, team, Destination(*prepared[0]), files, manifest, on_commit)
        if not block:
            return start_save(writer)
        write_and_commit(doing, team, writer.write, writer.commit, writer.clean_up)
        return Saving(path)


class _StatePlan(NamedTuple):
    """What this rank has to save."""

    states: dict[str, State]
    own: State
    groups: dict[str, list[Tensors]]  #: of each object: its tensors by file, DTensors excepted
    digests: list[str]  #: of all groups, if several ranks may write them

    @classmethod
    def of(
        cls,
        objects: Mapping[str, Stateful],
        rank_objects: Mapping[str, Stateful],
        rng: bool,
        team: Team,
    ) -> _StatePlan:
        """Return the plan for these objects."""
        states = {name: split_state(state_of(thing)) for name, thing in objects.items()}
        own = {
            "rng": capture_rng() if rng else None,
            "objects": {name: state_of(thing) for name, thing in rank_objects.items()},
        }
        count = len(team.ranks)
        groups = {name: _split(state.tensors, count) for name, state in states.items()}
        every = [group for some in groups.values() for group in some]
        digests = save_plan.group_digests(every) if count > 1 else [""] * len(every)
        return cls(states, split_state(own), groups, digests)

    def summary(self) -> dict[str, Any]:
        """Return what the other ranks need to know."""
        structure = [
            [name, [list(group) for group in self.groups[name]], save_plan.describe(state.tensors)]
            for name, state in self.states.items()
        ]
        regions = {
            f"{name}/{key}": [list(part) for part in shard_region(tensor)]
            for name, state in self.states.items()
            for key, tensor in state.tensors.items()
            if is_dtensor(tensor)
        }
        return {
            "structure": digest(json.dumps(structure).encode()),
            "digests": self.digests,
            "own": json.dumps(self.own.tree),
            "own_tensors": bool(self.own.tensors),
            "regions": regions,
        }

    def assign(
        self,
        summaries: list[dict[str, Any]],
        team: Team,
        destination: Destination,
        step: int | None,
    ) -> tuple[list[PlannedFile], Manifest]:
        """Return which rank writes which file, and the manifest without the file records."""
        names = {
            name: save_plan.group_names(f"{name}.safetensors", len(groups))
            for name, groups in self.groups.items()
        }
        own_names = [f"rank-{number:05d}.safetensors" for number in range(len(team.ranks))]
        # Beside a model, no file of the state has a model's name: it would be read as the model.
        reserved = FIRST_FILES if any(is_model_file(name) for name in destination.taken) else ()
        every = [file for some in names.values() for file in some] + own_names
        version = unused_version(every, [*destination.taken, *reserved])
        names = {name: [versioned(file, version) for file in some] for name, some in names.items()}
        own_names = [versioned(file, version) for file in own_names]

        groups = [group for some in self.groups.values() for group in some]
        flat = [file for some in names.values() for file in some]
        files = save_plan.assign_writers(flat, groups, [one["digests"] for one in summaries])
        parts, own_shards = self._assign_shards(summaries, own_names, team)
        with_shards = {part[2] for some in parts.values() for part in some}
        ranks: list[SavedState] = []
        for number, (one, file) in enumerate(zip(summaries, own_names, strict=True)):
            used = one["own_tensors"] or file in with_shards
            ranks.append(SavedState(json.loads(one["own"]), [file] if used else [], {}))
            if used and number == team.number:
                files.append(
                    save_plan.PlannedFile(file, number, {**self.own.tensors, **own_shards})
                )
        objects = {
            name: SavedState(
                state.tree,
                names[name],
                {key: parts[f"{name}/{key}"] for key in state.tensors if f"{name}/{key}" in parts},
            )
            for name, state in self.states.items()
        }
        return files, Manifest(step, objects, ranks, {})

    def _assign_shards(
        self, summaries: list[dict[str, Any]], files: list[str], team: Team
    ) -> tuple[dict[str, list[Any]], Tensors]:
        """Return the shards of DTensors, each once, and those that this rank writes."""
        found: dict[str, list[Any]] = {}
        own: Tensors = {}
        for label in summaries[0]["regions"]:
            seen: set[tuple[int, ...]] = set()
            found[label] = []
            for number, one in enumerate(summaries):
                offset, shape = one["regions"][label]
                if tuple(offset) in seen or 0 in shape:
                    continue  # a replica of what another rank writes, or empty
                seen.add(tuple(offset))
                found[label].append([offset, shape, files[number]])
                if number == team.number:
                    name, key = label.split("/", 1)
                    tensor: Any = self.states[name].tensors[key]
                    own[label] = tensor.to_local()
        return found, own


def _split(tensors: Mapping[str, torch.Tensor], count: int) -> list[Tensors]:
    """Return the tensors of an object by file, so that so many ranks can share the writing."""
    plain = {key: tensor for key, tensor in tensors.items() if not is_dtensor(tensor)}
    if not plain:
        return []
    most = max(-(-byte_size(plain.values()) // count), _LARGE)
    return save_plan.split_by_size(plain, min(most, _LARGEST))
