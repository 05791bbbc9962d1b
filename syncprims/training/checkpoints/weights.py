"""A model's weights: its tensors under names that other programs know, and the files with them.

A directory may hold a model in four ways. Readers take the first one that is there: a single
safetensors file, an index of safetensors shards, and the same two in torch's format.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from syncprims.training.preparation import unwrap_model

from . import filesystem
from .integrity import (
    ChunkedDigest,
    check_file_name,
    check_seal,
    has_seal,
    parse,
    reading,
    refusal,
)
from .safetensors_file import (
    METADATA,
    RESERVED,
    SafetensorsFile,
    StoredTensor,
    check_storable,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn

# -- a model's tensors ----------------------------------------------------------------------------


def portable_name(name: str) -> str:
    """Return a parameter's name without the marks of compiled submodules."""
    return name.replace("_orig_mod.", "")


def tensors_of(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return a model's tensors by name, each once, and the other names of tied ones.

    :raises TypeError: if something in its state is not a tensor that a file can hold.
    """
    inner = unwrap_model(model)
    declared = getattr(inner, "_tied_weights_keys", None) or ()
    kept: dict[str, torch.Tensor] = {}
    others: dict[str, str] = {}
    seen: dict[Any, str] = {}
    state: dict[str, Any] = inner.state_dict()

    def is_declared(name: str) -> bool:
        return any(name == pattern or re.search(pattern, name) for pattern in declared)

    # Names that the model declares as copies come last, so that the other name is kept.
    for name in sorted(state, key=is_declared):
        tensor = state[name]
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{name!r} in the model's state is a {type(tensor).__name__}: a weights file "
                f"holds tensors only; save_state saves the rest, too"
            )
        key = portable_name(name)
        if key == METADATA:
            raise TypeError(
                f"a tensor of the model is called {METADATA!r}, as is a file's own part"
            )
        same = storage_key(tensor)
        if same in seen:
            others[key] = seen[same]
            continue
        if same is not None:
            seen[same] = key
        check_storable(key, tensor)
        kept[key] = tensor
    order = [portable_name(name) for name in state]
    return {name: kept[name] for name in order if name in kept}, others


def storage_key(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for two tensors that are the same memory; None if unknown."""
    local = getattr(tensor, "_local_tensor", tensor)
    if tensor.is_meta or not local.numel():
        return None
    place = local.data_ptr(), tuple(local.stride()), tuple(tensor.shape)
    return (*place, tensor.dtype, tensor.device, local.is_conj(), local.is_neg())


# -- the files of a model's directory -------------------------------------------------------------


SAFETENSORS = "model.safetensors"
TORCH = "pytorch_model.bin"
INDEX = ".index.json"  #: appended to these, the file that lists the shard of each tensor
#: The files that make a model, in the order in which readers look for them.
FIRST_FILES = (SAFETENSORS, SAFETENSORS + INDEX, TORCH, TORCH + INDEX)
SHARDS = "syncprims.files"  #: in an index's metadata: the digest of each shard
_LONGEST_INDEX = 512 << 20  # bytes
_SHARD = re.compile(r"(?:model|pytorch_model)-\d{5,}-of-\d{5,}(?:\.v\d+)?\.(?:safetensors|bin)")


def is_model_file(name: str) -> bool:
    """Return whether a save of a model replaces, or removes, a file of this name."""
    return name in FIRST_FILES or _SHARD.fullmatch(name) is not None


#: A tensor of a checkpoint: still in its file, or in memory, as those of torch's own files.
Stored: TypeAlias = StoredTensor | torch.Tensor


@contextlib.contextmanager
def open_weights(
    path: str, *, follow: bool = False, check: bool = True
) -> Generator[dict[str, Stored]]:
    """Yield the tensors of a weights file, index or directory, checked against their digests.

    Without `check`, the data of safetensors files are left to the caller:
    :meth:`SafetensorsFile.read`.

    :raises CheckpointError: if anything is not as it was written.
    """
    with reading(path):
        if filesystem.is_directory(path):
            path = _first_file(path)
    with contextlib.ExitStack() as files:
        if path.endswith(INDEX):
            yield _open_shards(path, files, follow, check)
        else:
            yield _open_file(path, None, files, follow, check)


def _first_file(directory: str) -> str:
    found = filesystem.names(directory)
    for name in FIRST_FILES:
        if name in found:
            return f"{directory}/{name}"
    others = [name for name in found if name.endswith(INDEX)]
    if len(others) == 1:
        return f"{directory}/{others[0]}"
    expected = f"one of {', '.join(FIRST_FILES)}"
    raise refusal(directory, "no model in it", expected, ", ".join(found) or "nothing")


def _open_file(
    path: str, digest: str | None, files: contextlib.ExitStack, follow: bool, check: bool
) -> dict[str, Stored]:
    """Return the tensors of one file; with `digest`, of the one that was written.

    The file stays open until `files` is closed.
    """
    if not path.endswith(".safetensors"):
        return {**_read_torch(path, digest, follow=follow)}
    opened = SafetensorsFile(path, follow=follow)
    file = files.enter_context(contextlib.closing(opened))
    if digest is not None:
        file.check_digest(digest)
    if check:
        file.read({}, check=True)
    tensors: dict[str, Stored] = {name: StoredTensor(file, name) for name in file.entries}
    for other, name in file.metadata.items():  # tied: the safetensors library notes it so, too
        if other not in RESERVED and other not in tensors and name in tensors:
            tensors[other] = tensors[name]
    return tensors


def _open_shards(
    path: str, files: contextlib.ExitStack, follow: bool, check: bool
) -> dict[str, Stored]:
    """Return the tensors of the files in an index."""
    file_of, digests = _read_index(path, follow)
    by_file: dict[str, list[str]] = {}
    for name, file in file_of.items():
        by_file.setdefault(check_file_name(path, file), []).append(name)
    if digests and digests.keys() != by_file.keys():
        raise refusal(path, "files", ", ".join(sorted(digests)), ", ".join(sorted(by_file)))
    tensors: dict[str, Stored] = {}
    directory = os.path.dirname(path) or os.curdir  # noqa: PTH120
    for file, names in by_file.items():
        found = _open_file(f"{directory}/{file}", digests.get(file), files, follow, check)
        lacking = [name for name in names if name not in found]
        if lacking:
            raise refusal(f"{directory}/{file}", "tensors", ", ".join(lacking), "none of these")
        tensors |= {name: found[name] for name in names}
        # What the index does not list is used only if it is tied to what it lists.
        listed = {id(found[name]) for name in names}
        ties = {n: t for n, t in found.items() if n not in file_of and id(t) in listed}
        tensors |= ties
    return tensors


def _read_index(path: str, follow: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the file of each tensor, and the files' digests, which only our own indexes have."""
    with reading(path):
        data = filesystem.read_small(path, _LONGEST_INDEX, follow=follow)
    index = parse(path, data)
    file_of, metadata = index.get("weight_map"), index.get("metadata", {})
    if not isinstance(metadata, dict) or not isinstance(file_of, dict):
        raise refusal(path, "not an index", "metadata and weight_map", ", ".join(index))
    if not has_seal(data, SHARDS):
        return file_of, {}
    check_seal(path, data)
    digests: Any = metadata.get(SHARDS)
    if not isinstance(digests, dict):
        raise refusal(path, "list of files", "the digest of each", repr(digests))
    return file_of, {check_file_name(path, file): str(found) for file, found in digests.items()}


def _digest_of(file: filesystem.ExistingFile) -> str:
    hashed, buffer = ChunkedDigest(), memoryview(bytearray(1 << 20))
    for start in range(0, file.size, len(buffer)):
        some = buffer[: file.size - start]
        file.read_into(some, start)
        hashed.update(some)
    return hashed.hexdigest()


def _read_torch(path: str, digest: str | None, *, follow: bool) -> dict[str, torch.Tensor]:
    """Return the tensors in one of torch's files. No code in it is run.

    :raises CheckpointError: if it cannot be read, needs code, or is not the file with that digest.
    """
    with reading(path), contextlib.closing(filesystem.ExistingFile(path, follow=follow)) as file:
        zipped = file.read(0, min(4, file.size)) == b"PK\x03\x04"
        found = None if digest is None else _digest_of(file)
    if found != digest:
        raise refusal(path, "not what was written", f"the digest {digest}", found)
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # torch raises many kinds of errors
        first = str(error).strip().split("\n", 1)[0]
        raise refusal(path, "not a weights file", "tensors, and no code", first) from error
    if not isinstance(state, dict):
        raise refusal(path, "not a weights file", "a dict of tensors", type(state).__name__)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            raise refusal(path, f"entry {name!r}", "a tensor under a name", kind)
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise refusal(path, f"tensor {name!r}", "a dense tensor", str(tensor.layout))
        with contextlib.suppress(RuntimeError):
            tensor = tensor.detach()
        tensors[name] = tensor
    return tensors
