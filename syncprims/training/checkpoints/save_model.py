"""Save a model in the layout that other programs read, or one object: atomically."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import xxhash

from syncprims import CheckpointError

from . import filesystem, manifest, save_plan
from .commit import (
    commit,
    is_temporary,
    new_token,
    temporary,
    unused_version,
    versioned,
    write_and_commit,
    write_files,
)
from .coordination import (
    UNCHANGED,
    Directory,
    Outcome,
    Team,
    check_equal,
    cleanup_on_error,
    combine,
    coordinate,
)
from .integrity import digest, dump_with_digest
from .safetensors_file import METADATA, FileRecord, byte_size, check_storable, write_safetensors
from .weights import FIRST_FILES, INDEX, SAFETENSORS, SHARDS, TORCH, is_model_file, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from .save_plan import PlannedFile, Tensors


def save_model(
    model: nn.Module,
    directory: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    safe_serialization: bool = True,
) -> None:
    """Save the model so that the directory holds it completely and durably on return.

    Writes ``model.safetensors``, or shards of at most `max_shard_size` and an index; without
    `safe_serialization`, torch's ``pytorch_model.bin``, which is a pickle. The model that was there
    before, in any of these forms, is replaced in one step; other files stay. All ranks call it, and
    share the writing. Tied weights are written once, and wrappers of DDP and ``torch.compile`` left
    out.

    :raises CheckpointError: on all ranks, if a rank's part fails. Then the old model still stands,
        and nothing is left of the new one, unless the message says that it is in place.
    :raises TypeError: if `directory` is neither a str nor a path.
    :raises ValueError: if `max_shard_size` is not a size, or `directory` is empty.
    """
    most = save_plan.parse_size(max_shard_size)
    where = Directory.of(directory)
    doing = f"save_model to {where.path}"
    team = Team.meet(doing, where)
    plan, summaries = coordinate(
        doing, lambda: _ModelPlan.of(model, most, team), _ModelPlan.summary, advice=UNCHANGED
    )
    check_equal(doing, team.ranks, [one["model"] for one in summaries], "have different models")
    prepared = coordinate(
        doing, lambda: _prepare_directory(where.path) if team.leads else [], advice=UNCHANGED
    ).by_rank
    made, taken, token = prepared[0]
    with cleanup_on_error(
        doing, lambda: filesystem.remove_empty_directories(made) if team.leads else None
    ):
        single = SAFETENSORS if safe_serialization else TORCH
        names = save_plan.group_names(single, len(plan.groups))
        first = single + INDEX if names[1:] else single
        waiting = temporary(first, token)
        version = unused_version(names, taken)
        names = [versioned(name, version) for name in names] if names[1:] else [waiting]
        every = [one["digests"] for one in summaries]
        files = save_plan.assign_writers(names, plan.groups, every)
        writer = _ModelWriter(where.path, team, first, waiting, files, plan.ties)
        write_and_commit(doing, team, writer.write, writer.commit, writer.remove_files)


def _prepare_directory(path: str) -> list[Any]:
    """Return the directories that were made, the names that were there, and a unique token.

    :raises CheckpointError: if a state in the directory has files that the model would replace.
    """
    made = filesystem.make_directory(path)
    try:
        taken = filesystem.names(path)
        files: dict[str, FileRecord] = {}  # of a state in this directory
        if manifest.NAME in taken:
            with contextlib.suppress(CheckpointError):  # then it cannot be loaded anyway
                files = manifest.read(path).files
        lost = [name for name in files if is_model_file(name)]
        if lost:
            raise CheckpointError(
                f"{path}/{manifest.NAME}: here is a saved state, and {lost[0]} is a file of it, "
                f"which a model would replace. Save the model to another directory.",
                path=f"{path}/{manifest.NAME}",
            )
        return [made, taken, new_token()]
    except BaseException:
        filesystem.remove_empty_directories(made)
        raise


class _ModelPlan(NamedTuple):
    """What this rank has to save."""

    groups: list[Tensors]  #: one for each file
    ties: dict[str, str]
    digests: list[str]  #: of the groups, if several ranks may write them

    @classmethod
    def of(cls, model: nn.Module, most: int, team: Team) -> _ModelPlan:
        """Return the plan for a model."""
        tensors, ties = tensors_of(model)
        groups = save_plan.split_by_size(tensors, most)
        shared = len(groups) > 1 and len(team.ranks) > 1
        return cls(groups, ties, save_plan.group_digests(groups) if shared else [""] * len(groups))

    def summary(self) -> dict[str, Any]:
        """Return what the other ranks need to know."""
        model = [[save_plan.describe(group) for group in self.groups], self.ties]
        return {"model": digest(json.dumps(model).encode()), "digests": self.digests}


class _ModelWriter(NamedTuple):
    """Writes this rank's files of a model, and on the leading rank makes them current."""

    path: str
    team: Team
    first: str  #: the file whose rename is the commit: that of the model, or the index
    waiting: str  #: its temporary name
    files: list[PlannedFile]
    ties: dict[str, str]

    def write(self) -> dict[str, list[Any]]:
        """Write this rank's files; return the file record of each."""
        write_file = write_safetensors if self.first.startswith(SAFETENSORS) else _write_torch

        def write(path: str, tensors: Any, on_progress: Any) -> FileRecord:
            ties = {other: name for other, name in self.ties.items() if name in tensors}
            return write_file(path, tensors, ties, on_progress)

        return write_files(self.path, self.files, self.team.number, "saving the model", write)

    def remove_files(self) -> None:
        """Remove this rank's files; on the leading rank all, so that the directory can go."""
        for name, writer, _ in self.files:
            if self.team.leads or writer == self.team.number:
                filesystem.remove_or_log(f"{self.path}/{name}")

    def commit(self, records: dict[str, FileRecord]) -> None:
        """Make the new files the model, and remove the older ones."""
        path, first = self.path, self.first
        names = [file.name for file in self.files]  # without the index

        def prepare() -> str | None:
            if self.first.endswith(INDEX):
                filesystem.write_small(f"{path}/{self.waiting}", self._index(records))
            filesystem.sync_directory(path)
            found = filesystem.names(path)
            preferred = [name for name in FIRST_FILES[: FIRST_FILES.index(first)] if name in found]
            for name in preferred[1:]:  # hidden by the first of them: no reader reads these now
                filesystem.remove(f"{path}/{name}")
            if preferred[1:]:
                filesystem.sync_directory(path)
            return f"{path}/{preferred[0]}" if preferred else None

        def undo() -> None:
            for name in (self.waiting, *names):
                filesystem.remove_or_log(f"{path}/{name}")

        commit("model", prepare, f"{path}/{self.waiting}", f"{path}/{first}", undo)

        def is_old(name: str) -> bool:
            if is_model_file(name):
                return name not in (first, *names)
            return any(is_temporary(name, one) for one in FIRST_FILES)

        filesystem.remove_each_or_log(path, is_old)

    def _index(self, records: dict[str, FileRecord]) -> bytes:
        file_of = {name: file.name for file in self.files for name in file.tensors}
        metadata = {
            "total_size": sum(byte_size(file.tensors.values()) for file in self.files),
            SHARDS: {name: list(record) for name, record in records.items()},
        }
        return dump_with_digest({"metadata": metadata, "weight_map": file_of}, "metadata")[0]


# -- a single object ------------------------------------------------------------------------------


def save_object(obj: Any, path: str | os.PathLike[str], *, safe: bool) -> None:
    """Write `obj` to the file `path`, durably. Not collective.

    With `safe` it is a dict of tensors, and the file is in the safetensors format; else it is in
    torch's own. If the path is a link, the link stays, and its target is replaced.

    :raises CheckpointError: with path and errno; what was there before still stands, unless the
        message says otherwise.
    :raises TypeError: if `path` is neither a str nor a path.
    """
    given = os.fspath(cast("Any", path))
    if not isinstance(given, str):
        raise TypeError(f"f={path!r}: it takes a str, a path or an opened file")
    target = filesystem.absolute(given)
    outcome = Outcome.of(lambda: _write_object(obj, target, safe), lambda _: None)
    combine(f"save to {target}", outcome, [outcome.message], UNCHANGED)


def _write_object(obj: Any, target: str, safe: bool) -> None:
    target = filesystem.resolve_target(target)
    folder, name = os.path.split(target)
    waiting = f"{folder}/{temporary(name, new_token())}"

    def prepare() -> None:
        if safe:
            write_safetensors(waiting, _check_tensors(obj), {})
        else:
            _write_torch_object(waiting, obj)

    commit("file", prepare, waiting, target, lambda: filesystem.remove_or_log(waiting))
    # A killed save may have left some:
    filesystem.remove_each_or_log(folder, lambda found: is_temporary(found, name))


def _check_tensors(obj: Any) -> Mapping[str, torch.Tensor]:
    """Return `obj` if a safetensors file can hold it.

    :raises TypeError: if it cannot.
    """
    if not isinstance(obj, dict):
        raise TypeError(f"safetensors files hold a dict of tensors, and this is {type(obj)}")
    for name, tensor in obj.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"safetensors files hold tensors by name, and {name!r} is {type(tensor)}"
            )
        if name == METADATA:
            raise TypeError(f"{name!r} is the name of a safetensors file's own part")
        check_storable(name, tensor)
    return obj


# -- torch's own files ----------------------------------------------------------------------------


class _Stream:
    """The stream that `torch.save` writes to: it hashes the data on their way to the file."""

    def __init__(self, file: filesystem.NewFile, on_progress: Callable[[int], object]) -> None:
        self._file = file
        self._on_progress = on_progress
        self.hashed = xxhash.xxh3_128()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        with memoryview(data) as view:
            raw = view.cast("B")
            try:
                self._file.write(raw)
            except OSError as error:  # torch raises another error instead
                self.error = error
                raise
            self.hashed.update(raw)
            self.size += len(raw)
            self._on_progress(len(raw))
            return len(raw)

    def flush(self) -> None:
        """Do nothing: there is no buffer."""


def _write_torch(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    ties: Mapping[str, str],
    on_progress: Callable[[int], object],
) -> FileRecord:
    """Write these tensors, tied ones under all their names, to the new file `path`, and sync it."""
    own: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        # Torch saves the whole storage: it must not be larger than the tensor.
        whole = tensor.untyped_storage().nbytes() == byte_size([tensor])
        own[name] = tensor.detach() if whole else tensor.detach().clone()
    own |= {other: own[name] for other, name in ties.items()}
    return _write_torch_object(path, own, on_progress)


def _write_torch_object(
    path: str, obj: Any, on_progress: Callable[[int], object] = lambda done: None
) -> FileRecord:
    """Write what `torch.save` makes of `obj` to the new file `path`, and sync it."""
    with contextlib.closing(filesystem.NewFile(path)) as file:
        stream = _Stream(file, on_progress)
        try:
            torch.save(obj, stream)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        except BaseException:
            if stream.error is not None:
                raise stream.error from None
            raise
        file.finish()
    return FileRecord(stream.size, stream.hashed.hexdigest())
