"""Save a model in the layout that others read: whole or not at all, by all ranks together."""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from syncprims import CheckpointError

from . import disk, manifest, torchfile
from .directory import Directory
from .meter import metered
from .seal import digest, sealed
from .sharded import is_sharded, whole
from .sharing import owners
from .tensorfile import Written, content_digest, write
from .together import STANDS, Team, check_alike, clearing, together
from .weightfiles import (
    FILES,
    SAFE,
    TORCH,
    Format,
    Replacement,
    is_models,
    remove_or_report,
    temporary,
    unique,
    unused_version,
)
from .weights import parse_size, shards, tensors_of

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import torch
    from torch import nn


def save_model(
    model: nn.Module,
    directory: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    safe_serialization: bool = True,
) -> None:
    """Save the model so that the directory holds it whole, durably, when any rank returns.

    Writes ``model.safetensors``, or shards of at most `max_shard_size` and an index; without
    `safe_serialization`, torch's ``pytorch_model.bin``, which is a pickle. Whatever model was there
    before, in any of these forms, is replaced in one step; other files stay. All ranks call it, and
    share the writing. Tied weights are written once, and wrappers of DDP and ``torch.compile`` left
    out.

    :raises CheckpointError: on all ranks, if a rank's part fails. Then the old model still stands,
        and nothing is left of the new one, unless the message says that it is in place.
    :raises TypeError: if `directory` is neither a str nor a path.
    :raises ValueError: if `max_shard_size` is no size, or `directory` is empty.
    """
    most = parse_size(max_shard_size)
    where = Directory.of(directory)
    path, doing = where.path, f"save_model to {where.path}"
    form = SAFE if safe_serialization else TORCH
    team = Team.met(doing, where)
    plan, told = together(doing, lambda: _plan(model, most, team), _Plan.told, advice=STANDS)
    check_alike(doing, team.ranks, "models", [one["model"] for one in told])
    prepared = together(
        doing, lambda: list(_prepare(path)) if team.leads else [], advice=STANDS
    ).by_rank
    place = _Place(*prepared[0])
    with clearing(doing, lambda: disk.unmake_directories(place.made) if team.leads else None):
        job = _Job.of(plan, path, form, place, [one["digests"] for one in told])
        _save(doing, job, plan, team)


def _save(doing: str, job: _Job, plan: _Plan, team: Team) -> None:
    try:
        written = together(doing, lambda: _write(job, plan, team), advice=STANDS).by_rank
    except BaseException:
        # The leading rank removes all, so that the directory may go; the others help.
        for name in job.files if team.leads else job.written_by(team.place):
            remove_or_report(f"{job.path}/{name}")
        raise
    files = {name: Written(*facts) for some in written for name, facts in some.items()}
    together(doing, lambda: _commit(job, plan, files) if team.leads else None, advice=STANDS)


class _Place(NamedTuple):
    """The directory, as the leading rank has found it."""

    made: list[str]  #: directories that were not there
    taken: list[str]  #: names that were
    token: str  #: for a name that nothing has


def _prepare(path: str) -> _Place:
    made = disk.make_directory(path)
    try:
        taken = disk.names(path)
        _check_apart(path, taken)
        return _Place(made, taken, unique())
    except BaseException:
        disk.unmake_directories(made)
        raise


def _check_apart(path: str, taken: Sequence[str]) -> None:
    """Accept a directory without a state that has files called as a model's.

    :raises CheckpointError: otherwise: they would be replaced, and the state be lost.
    """
    if manifest.NAME not in taken:
        return
    try:
        files = manifest.read(path).files
    except CheckpointError:
        return  # there is none to be lost
    lost = [name for name in files if is_models(name)]
    if lost:
        raise CheckpointError(
            f"{path}/{manifest.NAME}: here is a saved state, and {lost[0]} is a file of it, which "
            f"a model would replace. Save the model to another directory.",
            path=f"{path}/{manifest.NAME}",
        )


class _Plan(NamedTuple):
    """What there is to save."""

    tensors: dict[str, torch.Tensor]
    ties: dict[str, str]
    groups: list[list[str]]
    sizes: list[int]  #: of the groups, in bytes
    digests: list[str]  #: of their content, where several ranks may write them

    def told(self) -> dict[str, Any]:
        """Return what the other ranks need to know."""
        what = [[name, str(t.dtype), list(t.shape)] for name, t in self.tensors.items()]
        model = digest(json.dumps([what, self.ties, self.groups]).encode())
        return {"model": model, "digests": self.digests}


def _plan(model: nn.Module, most: int, team: Team) -> _Plan:
    tensors, ties = tensors_of(model)
    sizes = {name: t.numel() * t.element_size() for name, t in tensors.items()}
    groups = shards(sizes, most)
    totals = [sum(sizes[name] for name in group) for group in groups]
    shared = len(groups) > 1 and len(team.ranks) > 1
    digests = [_digest(tensors, group) if shared else "" for group in groups]
    return _Plan(tensors, ties, groups, totals, digests)


def _digest(tensors: dict[str, torch.Tensor], group: list[str]) -> str:
    # What is sharded over ranks is gathered on all of them, and so the same.
    own = [content_digest(tensors[name]) for name in group if not is_sharded(tensors[name])]
    return digest("".join(own).encode())


class _Job(NamedTuple):
    """Who writes which file."""

    path: str
    form: Format
    first: str  #: the file whose coming is the commit
    waiting: str  #: its name until then
    files: list[str]  #: of the groups
    owners: list[int]

    @classmethod
    def of(
        cls, plan: _Plan, path: str, form: Format, place: _Place, digests: list[list[str]]
    ) -> _Job:
        """Return the same job on every rank."""
        count = len(plan.groups)
        first = form.single if count == 1 else form.listing
        waiting = temporary(first, place.token)
        if count == 1:
            return cls(path, form, first, waiting, [waiting], [0])
        canonical = [form.shard(number, count, 1) for number in range(count)]
        version = unused_version(canonical, place.taken)
        files = [form.shard(number, count, version) for number in range(count)]
        shared = owners(plan.sizes, digests)
        return cls(path, form, first, waiting, files, shared)

    def written_by(self, place: int) -> list[str]:
        """Return the names of the files that a rank writes."""
        return [name for name, owner in zip(self.files, self.owners, strict=True) if owner == place]


def _write(job: _Job, plan: _Plan, team: Team) -> dict[str, list[Any]]:
    """Write this rank's files; return size and seal of each."""
    mine = sum(s for s, owner in zip(plan.sizes, job.owners, strict=True) if owner == team.place)
    written: dict[str, list[Any]] = {}
    failure: Exception | None = None
    with metered("saving the model", mine) as meter:
        for group, file, owner in zip(plan.groups, job.files, job.owners, strict=True):
            # Gathering is for all ranks: whoever has failed still takes part.
            tensors = {name: whole(plan.tensors[name]) for name in group}
            if owner != team.place or failure is not None:
                continue
            ties = {other: name for other, name in plan.ties.items() if name in tensors}
            try:
                if job.form is SAFE:
                    done = write(f"{job.path}/{file}", tensors, ties, meter)
                else:
                    done = torchfile.write(f"{job.path}/{file}", tensors, ties, meter)
                written[file] = list(done)
            except Exception as error:
                failure = error
    if failure is not None:
        raise failure
    return written


def _commit(job: _Job, plan: _Plan, files: dict[str, Written]) -> None:
    """Make what has been written the model, and clear away what it replaces."""
    shard_names = [] if job.first == job.form.single else job.files
    change = Replacement(job.path, job.first, shard_names)
    try:
        if shard_names:
            disk.write_small(f"{job.path}/{job.waiting}", _index(job, plan, files))
        change.commit(job.waiting)
    except BaseException as error:
        if not change.committed:
            change.undo(job.waiting)
        elif isinstance(error, OSError):
            raise CheckpointError(
                f"the new model is in place, but may not outlive a loss of power: {error}",
                path=error.filename, errno=error.errno,
            ) from error  # fmt: skip
        raise
    change.clear_superseded()


def _index(job: _Job, plan: _Plan, files: dict[str, Written]) -> bytes:
    placed = {n: file for group, file in zip(plan.groups, job.files, strict=True) for n in group}
    metadata = {"total_size": sum(plan.sizes), FILES: {n: list(w) for n, w in files.items()}}
    return sealed({"metadata": metadata, "weight_map": placed}, "metadata")[0]
