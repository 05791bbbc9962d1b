"""Save a model in the layout that other programs read, or one object: atomically."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from syncprims._world.runtime import get_world
from syncprims.training.preparation import unwrap_model
from syncprims.training.private_names import NAMES

from . import commit, filesystem
from .commit import Digests
from .coordination import coordinate
from .integrity import BLANK, SEAL, dump, put_seal
from .safetensors_file import byte_size, check_storable, write_safetensors
from .stateful import portable_name, storage_key

_SAFETENSORS = "model.safetensors"
_TORCH = "pytorch_model.bin"
INDEX = ".index.json"  #: appended to these, the file that lists the shard of each tensor
#: The files that make a model, in the order in which readers look for them.
FIRST_FILES = (_SAFETENSORS, _SAFETENSORS + INDEX, _TORCH, _TORCH + INDEX)
SHARDS = "syncprims.files"  #: in an index's metadata: the digest of each shard
_SHARD = re.compile(r"(?:model|pytorch_model)-\d{5,}-of-\d{5,}(?:\.v\d+)?\.(?:safetensors|bin)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", re.IGNORECASE)


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
    most = _parse_size(max_shard_size)
    path = filesystem.directory_path(directory)
    doing = f"save_model to {path}"
    first_file = _SAFETENSORS if safe_serialization else _TORCH

    def make(ranks: list[int]) -> commit.Save:
        return _ModelSave(doing, ranks, model, most, first_file)

    with (
        contextlib.ExitStack() as lock,
        commit.planned(doing, path, make, "have different models", lock) as save,
    ):
        save.run()


def _parse_size(size: int | str) -> int:
    """Return a number of bytes, given as an int or as ``"5GB"``, ``"500MB"``, ``"2GiB"``.

    :raises ValueError: if it is neither, or not positive.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        if match is not None:
            base = 1024 if match[3] else 1000
            size = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    if not isinstance(size, int) or size <= 0:
        raise ValueError(f"max_shard_size={size!r}: it takes a number of bytes, or as '5GB'")
    return size


def _tensors_of(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return a model's tensors by name, each once, and the other names of tied ones.

    :raises TypeError: if something in its state is not a tensor that a file can hold.
    """
    inner = unwrap_model(model)
    declared = NAMES.of(inner, "PreTrainedModel._tied_weights_keys", None) or ()
    kept: dict[str, torch.Tensor] = {}
    others: dict[str, str] = {}
    seen: dict[Any, str] = {}
    state: dict[str, Any] = inner.state_dict()

    def is_declared(name: str) -> bool:
        return any(name == pattern or re.search(pattern, name) for pattern in declared)

    # Names that the model declares as copies come last, so that the other name is kept.
    for name in sorted(state, key=is_declared):
        tensor = state[name]
        key = portable_name(name)
        check_storable(key, tensor)
        same = storage_key(tensor)
        if same in seen:
            others[key] = seen[same]
            continue
        if same is not None:
            seen[same] = key
        kept[key] = tensor
    order = [portable_name(name) for name in state]
    return {name: kept[name] for name in order if name in kept}, others


class _ModelSave(commit.Save):
    """The save of a model: one weights file, or shards and an index."""

    heads = FIRST_FILES

    def __init__(
        self, doing: str, ranks: list[int], model: nn.Module, most: int, first_file: str
    ) -> None:
        super().__init__(doing, ranks)
        self._tensors, self.structure = _tensors_of(model)
        self._first_file = self.head = first_file
        self.groups = {first_file: commit.split_by_size(self._tensors, most)}

    def name_files(self, files: list[commit.FilePlan], more: list[Any]) -> None:
        if len(files) > 1:
            self.head += INDEX
            files = commit.with_unused_names(files, self.place)
        elif not self.place.is_new:
            files = [files[0]._replace(name=commit.temporary(self.head, self.place.token))]
        self.files = files

    def write_file(self, path: str, tensors: Mapping[str, torch.Tensor]) -> str:
        names = {other: name for other, name in self.structure.items() if name in tensors}
        write = write_safetensors if self._first_file == _SAFETENSORS else _write_torch
        return write(path, tensors, names)

    def list_files(self, digests: Digests) -> bytes | None:
        if len(self.files) == 1:
            return None
        size = byte_size(self._tensors.values())
        metadata = {SEAL: BLANK, "total_size": size, SHARDS: digests}
        file_of = {name: file.name for file in self.files for name in file.tensors}
        return put_seal(dump({"metadata": metadata, "weight_map": file_of}))

    def is_ours(self, name: str) -> bool:
        return name in FIRST_FILES or _SHARD.fullmatch(name) is not None


# -- a single object ------------------------------------------------------------------------------


def save_object(obj: object, path: str | os.PathLike[str], *, safe: bool) -> None:
    """Write `obj` to the file `path`, durably. Not collective.

    With `safe` it is a dict of tensors, and the file is in the safetensors format; else it is in
    torch's own. If the path is a link, the link stays, and its target is replaced.

    :raises CheckpointError: with path and errno; the older files remain, unless the
        message says otherwise.
    :raises TypeError: if `path` is neither a str nor a path.
    """
    target = filesystem.absolute(filesystem.path_of(path, "f", "a str, a path or an opened file"))
    with get_world().own_group():
        coordinate(f"save to {target}", lambda: _write_object(obj, target, safe))


def _write_object(obj: object, target: str, safe: bool) -> None:
    target = filesystem.resolve_target(target)
    folder, name = os.path.split(target)
    waiting = f"{folder}/{commit.temporary(name)}"

    def prepare() -> None:
        if not safe:
            _write_torch_object(waiting, obj)
            return
        if not isinstance(obj, dict):
            raise TypeError(f"a safetensors file holds a dict of tensors, and this is {type(obj)}")
        for key, tensor in obj.items():
            check_storable(key, tensor)
        write_safetensors(waiting, obj, {})

    commit.replace_durably(prepare, waiting, target, lambda: filesystem.remove_or_log(waiting))
    # A killed save may have left some:
    filesystem.remove_each_or_log(folder, lambda entry: commit.final_name(entry) == name)


# -- torch's own files ----------------------------------------------------------------------------


def _write_torch(path: str, tensors: Mapping[str, torch.Tensor], ties: Mapping[str, str]) -> str:
    """Write these tensors, tied ones under all their names. The format has no digest."""
    own: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        # Torch saves the whole storage: it must not be larger than the tensor.
        whole = tensor.untyped_storage().nbytes() == byte_size([tensor])
        own[name] = tensor.detach() if whole else tensor.detach().clone()
    _write_torch_object(path, own | {other: own[name] for other, name in ties.items()})
    return ""


def _write_torch_object(path: str, obj: object) -> None:
    """Write `obj` by `torch.save` to the new file `path`, and sync it."""
    with contextlib.closing(filesystem.NewFile(path)) as file:
        try:
            torch.save(obj, file)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        except BaseException:
            if file.error is not None:
                raise file.error from None
            raise
        file.finish()
