"""Save the whole state of a training: whole or not at all, by all ranks together."""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import json
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

from syncprims import current

from . import generators, tree
from .directory import Directory
from .job import File, Job, Place
from .manifest import Item, Manifest
from .objects import check_objects, state_of
from .saving import Saving, finish_earlier, is_under_way, save_behind, save_now
from .seal import digest
from .sharded import box, is_sharded
from .sharing import owners
from .tensorfile import content_digest
from .together import STANDS, Team, check_alike, clearing, together
from .weightfiles import FIRST_FILES, is_models, unused_version, versioned
from .weights import shards

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    import torch

    from .objects import Stateful

_LARGE = 64 << 20  # bytes from which on an object is worth sharing out among ranks
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
    """Save the objects' states so that the directory holds them whole, durably, on return.

    `objects` are the same on all ranks, and what is saved is main's, but for tensors spread over
    ranks (DTensor), of which each rank saves its part; `rank_objects` are each rank's own, as is
    the state of the random numbers of Python, numpy and torch (`rng`). Nothing is pickled. A save
    over an older one in the same directory replaces it in one step; other files stay. All ranks
    call it, and share the writing.

    With ``block=False`` it returns once everything is copied, and is written behind the training:
    the returned handle's ``wait()`` returns when it is durable. At most one save is under way: the
    next one waits for it, and raises what it failed with.

    :raises CheckpointError: on all ranks, if a rank's part fails. Then the old checkpoint still
        stands, and nothing is left of the new one, unless the message says that it is in place.
    :raises TypeError: if something has no ``state_dict`` and ``load_state_dict``, or `directory` is
        neither a str nor a path.
    :raises ValueError: if a name is none for a file, or `directory` is empty.
    """
    return begin(
        Directory.of(directory),
        objects,
        rank_objects or {},
        step=step,
        rng=rng,
        block=block,
        after=None,
    )


def begin(
    directory: Directory,
    objects: Mapping[str, Stateful],
    own: Mapping[str, Stateful],
    *,
    step: int | None,
    rng: bool,
    block: bool,
    after: Callable[[], None] | None,
) -> Saving:
    """Save as :func:`save_state`; then the leading rank calls `after`, where that is said."""
    check_objects(objects, own)
    step = None if step is None else operator.index(step)
    path = directory.path
    doing = f"save_state to {path}"
    finish_earlier()
    team = Team.met(doing, directory)
    plan, told = together(
        doing, lambda: _Plan.of(objects, own, rng, team), _Plan.told, advice=STANDS
    )
    check_alike(doing, team.ranks, "states", [one["what"] for one in told])
    extras = current().extras
    made: list[Place] = []  # by the leading rank, which takes it away if anything happens

    def prepare() -> list[Any]:
        made.extend([Place.prepare(path)] if team.leads else [])
        return list(made[0]) if made else []

    def clear() -> None:
        if not is_under_way(extras):  # else its thread writes there, and those of other ranks
            for place in made:
                place.give_up()

    with clearing(doing, clear):
        prepared = together(doing, prepare, advice=STANDS).by_rank
        job = _job(doing, team, Place(*prepared[0]), step, plan, told)._replace(after=after)
        return save_now(job) if block else save_behind(job)


class _Plan(NamedTuple):
    """What there is to save on this rank."""

    states: dict[str, tree.State]
    own: tree.State
    groups: dict[str, list[list[str]]]  #: of each object, the names of its tensors by file
    digests: list[str]  #: of each group's content, where several ranks may write it

    @classmethod
    def of(
        cls, objects: Mapping[str, Stateful], own: Mapping[str, Stateful], rng: bool, team: Team
    ) -> _Plan:
        """Look at the objects."""
        states = {name: tree.split(state_of(thing)) for name, thing in objects.items()}
        mine = {
            "rng": generators.capture() if rng else None,
            "objects": {name: state_of(thing) for name, thing in own.items()},
        }
        count = len(team.ranks)
        groups = {name: _groups(state, count) for name, state in states.items()}
        digests = [
            _digest(states[name], group) if count > 1 else ""
            for name, some in groups.items()
            for group in some
        ]
        return cls(states, tree.split(mine), groups, digests)

    def told(self) -> dict[str, Any]:
        """Return what the other ranks need to know."""
        what = [
            [
                name,
                self.groups[name],
                [[str(t.dtype), list(t.shape)] for t in state.tensors.values()],
            ]
            for name, state in self.states.items()
        ]
        boxes = {
            f"{name}/{key}": [list(side) for side in box(tensor)]
            for name, state in self.states.items()
            for key, tensor in state.tensors.items()
            if is_sharded(tensor)
        }
        return {
            "what": digest(json.dumps(what).encode()),
            "digests": self.digests,
            "own": json.dumps(self.own.tree),
            "own_tensors": bool(self.own.tensors),
            "boxes": boxes,
        }


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _groups(state: tree.State, count: int) -> list[list[str]]:
    """Return the names of an object's tensors by file, so that the ranks can share them."""
    sizes = {key: _size(t) for key, t in state.tensors.items() if not is_sharded(t)}
    if not sizes:
        return []
    most = max(-(-sum(sizes.values()) // count), _LARGE)
    return shards(sizes, min(most, _LARGEST))


def _digest(state: tree.State, group: list[str]) -> str:
    return digest("".join(content_digest(state.tensors[key]) for key in group).encode())


def _job(
    doing: str, team: Team, place: Place, step: int | None, plan: _Plan, told: list[dict[str, Any]]
) -> Job:
    """Return who writes what, and the manifest but for what is known only after the writing."""
    names = {name: _file_names(name, len(some)) for name, some in plan.groups.items()}
    own_names = [f"rank-{number:05d}.safetensors" for number in range(len(team.ranks))]
    every = [file for some in names.values() for file in some] + own_names
    # Beside a model, no file of the state is called as one: it would be read in its place.
    models = FIRST_FILES if any(is_models(name) for name in place.taken) else ()
    version = unused_version(every, [*place.taken, *models])
    parts, own_parts = _parts(plan, told, [versioned(name, version) for name in own_names], team)
    sizes = [
        sum(_size(plan.states[name].tensors[key]) for key in group)
        for name, some in plan.groups.items()
        for group in some
    ]
    shared = iter(owners(sizes, [one["digests"] for one in told]))
    files = [
        File(versioned(file, version), next(shared), {k: plan.states[n].tensors[k] for k in group})
        for n, some in plan.groups.items()
        for file, group in zip(names[n], some, strict=True)
    ]
    ranks: list[Item] = []
    for number, one in enumerate(told):
        file = versioned(own_names[number], version)
        has = one["own_tensors"] or any(file == p[2] for some in parts.values() for p in some)
        ranks.append(Item(json.loads(one["own"]), [file] if has else [], {}))
        if has and number == team.place:
            files.append(File(file, number, {**plan.own.tensors, **own_parts}))
    objects = {
        name: Item(
            state.tree,
            [versioned(file, version) for file in names[name]],
            {key: parts[f"{name}/{key}"] for key in state.tensors if f"{name}/{key}" in parts},
        )
        for name, state in plan.states.items()
    }
    return Job(doing, team, place, files, Manifest(step, objects, ranks, {}))


def _file_names(name: str, count: int) -> list[str]:
    if count == 1:
        return [f"{name}.safetensors"]
    return [f"{name}-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]


def _parts(
    plan: _Plan, told: list[dict[str, Any]], files: list[str], team: Team
) -> tuple[dict[str, list[Any]], dict[str, torch.Tensor]]:
    """Return the parts of tensors spread over ranks, each once, and those that this rank writes."""
    found: dict[str, list[Any]] = {}
    own: dict[str, torch.Tensor] = {}
    for label in told[0]["boxes"]:
        seen: set[tuple[int, ...]] = set()
        found[label] = []
        for number, one in enumerate(told):
            offset, shape = one["boxes"][label]
            if tuple(offset) in seen or 0 in shape:
                continue  # a replica of what another rank writes, or nothing
            seen.add(tuple(offset))
            found[label].append([offset, shape, files[number]])
            if number == team.place:
                name, key = label.split("/", 1)
                tensor: Any = plan.states[name].tensors[key]
                own[label] = tensor.to_local()
    return found, own
