"""Load a model's weights, written here or by another program: checked first, then used.

A CPU parameter that has the same layout as in the file is filled from it by several threads, and
no other copy is made. All other tensors are copied, one after the other.

A model that is on the meta device has no values that could be lost. Its new memory is filled while
the files are checked, in one pass. If they are damaged, it is on the meta device again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import nn

from syncprims import CheckpointError
from syncprims.training.preparation import unwrap_model
from syncprims.training.private_names import NAMES
from syncprims.training.pytree import is_dtensor

from . import filesystem, integrity
from .integrity import check_file_name, reading, refusal
from .safetensors_file import RESERVED, SafetensorsFile, StoredTensor, in_huge_pages
from .save_model import FIRST_FILES, INDEX, SHARDS
from .stateful import distribute, portable_name

#: A tensor of a checkpoint: still in its file, or in memory, as those of torch's own files.
Stored: TypeAlias = StoredTensor | torch.Tensor
_PLAIN = torch.Tensor, nn.Parameter  # and not classes derived from them
_NOWHERE = ("disk", "meta", "auto", "balanced", "sequential")  # devices that hold no tensors


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | str | int | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    strict: bool = True,
    allow_links: bool = False,
) -> None:
    """Load the weights of a checkpoint into the model, after the files are verified.

    `checkpoint` is a weights file, an index, or a directory with one. `device_map` gives the device
    for each part of the model by the beginning of its name (``""`` is all), or one device for all;
    `dtype` another type for its floating-point tensors. Parameters on the meta device are created
    on the device of the map, else on the CPU. If the whole model is there, its files are verified
    while they are read, in one pass, and otherwise before. Without `strict`, tensors that are
    missing or unknown to the model are logged and left. Symbolic links, as in the cache of a hub,
    are followed only with `allow_links`. Every rank that calls this reads for itself.

    :raises CheckpointError: naming the file, what was expected and what was found. The model is
        then unchanged, unless the message says otherwise: if the disk fails or the file is written
        to after it was verified, or if a part of the model loads names or values in its own way, so
        that only the load shows what is missing. A model on the meta device is always unchanged.
    :raises TypeError: if `checkpoint` is neither a str nor a path.
    :raises ValueError: if `device_map` names a device that cannot hold tensors, or none for a
        parameter.
    """
    path = filesystem.path_of(checkpoint, "checkpoint")
    inner = unwrap_model(model)
    empty = all(t.is_meta for t in _tensors_of(inner).values())
    custom = _has_custom_loading(inner)
    with contextlib.ExitStack() as files:
        # A module with its own loading may read its tensors: then all files are checked before.
        with reading(path):
            file = _first_file(path) if filesystem.is_directory(path) else path
        weights = _open_weights(file, files, allow_links, check=custom or not empty)
        state = _match(inner, weights, path, strict=strict, custom=custom)
        with _back_to_meta_on_error(inner) if empty else contextlib.nullcontext():
            _place(inner, state, device_map, dtype)
            try:
                if custom:
                    own = _tensors_of(inner)
                    read = {
                        name: _read_for(stored, own.get(name)) for name, stored in state.items()
                    }
                else:
                    read = _load_in_place(inner, state, weights, check=empty)
                # Only torch can distinguish renamed or converted tensors from missing ones.
                inner.load_state_dict(read, strict=strict)
            except (CheckpointError, RuntimeError) as error:
                why = str(error) if isinstance(error, CheckpointError) else f"{path}: {error}"
                after = "still on the meta device" if empty else "loaded in part: do not use it"
                facts: dict[str, Any] = {"path": path, "errno": getattr(error, "errno", None)}
                raise CheckpointError(f"{why} The model is {after}.", **facts) from error
    saved, buffers = inner.state_dict().keys(), inner.named_buffers(remove_duplicate=False)
    unset = [name for name, buffer in buffers if buffer.is_meta and name not in saved]
    if unset:
        text = "%s: no checkpoint holds the buffers %s: they are on the meta device, compute them"
        filesystem.LOG.warning(text, path, _listed(unset))


# -- the files ------------------------------------------------------------------------------------


def _open_weights(
    path: str, files: contextlib.ExitStack, follow: bool, *, check: bool
) -> dict[str, Stored]:
    """Return the tensors of a weights file or index; the files stay open until `files` is closed.

    With `check` their data are compared with their digests. Otherwise the caller does so for those
    of safetensors files: :meth:`SafetensorsFile.read`.

    :raises CheckpointError: if anything is not as it was written.
    """
    if not path.endswith(INDEX):
        return _open_file(path, "", files, follow, check)
    file_of, digests = _read_index(path, follow)
    by_file: dict[str, list[str]] = {}
    for name, file in file_of.items():
        by_file.setdefault(check_file_name(path, file), []).append(name)
    if digests and digests.keys() != by_file.keys():
        raise refusal(path, "files", ", ".join(sorted(digests)), ", ".join(sorted(by_file)))
    tensors: dict[str, Stored] = {}
    for file, names in by_file.items():
        shard = f"{os.path.dirname(path) or os.curdir}/{file}"  # noqa: PTH120
        stored = _open_file(shard, digests.get(file, ""), files, follow, check)
        lacking = [name for name in names if name not in stored]
        if lacking:
            raise refusal(shard, "tensors", ", ".join(lacking), "none of these")
        # A tensor that the index does not list is used only if it is tied to a listed one.
        listed = {id(stored[name]) for name in names}
        tensors |= {n: t for n, t in stored.items() if file_of.get(n, file) == file}
        tensors = {n: t for n, t in tensors.items() if n in file_of or id(t) in listed}
    return tensors


def _first_file(directory: str) -> str:
    names = filesystem.names(directory)
    others = [name for name in names if name.endswith(INDEX)]
    for name in (*FIRST_FILES, *(others if len(others) == 1 else ())):
        if name in names:
            return f"{directory}/{name}"
    expected = f"one of {', '.join(FIRST_FILES)}"
    raise refusal(directory, "no model in it", expected, ", ".join(names) or "nothing")


def _read_index(path: str, follow: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the file of each tensor, and the files' digests, which only our own indexes have."""
    with reading(path):
        data = filesystem.read_small(path, follow=follow)
    index = integrity.parse(path, data)
    file_of, metadata = index.get("weight_map"), index.get("metadata", {})
    if not isinstance(metadata, dict) or not isinstance(file_of, dict):
        raise refusal(path, "not an index", "metadata and weight_map", ", ".join(index))
    if not integrity.has_seal(data, SHARDS):
        return file_of, {}
    integrity.check_seal(path, data)
    digests = metadata.get(SHARDS)
    if not isinstance(digests, dict):
        raise refusal(path, "list of files", "the digest of each", repr(digests))
    return file_of, {check_file_name(path, file): str(found) for file, found in digests.items()}


def _open_file(
    path: str, digest: str, files: contextlib.ExitStack, follow: bool, check: bool
) -> dict[str, Stored]:
    """Return the tensors of one file; with `digest`, of the one that was written."""
    if not path.endswith(".safetensors"):
        return {**_read_torch(path, follow=follow)}
    file = files.enter_context(contextlib.closing(SafetensorsFile(path, follow=follow)))
    if digest:
        file.check_digest(digest)
    if check:
        file.read({}, check=True)
    tensors: dict[str, Stored] = {**file.tensors}
    for other, name in file.metadata.items():  # tied: the safetensors library notes it so, too
        if other not in RESERVED and other not in tensors and name in tensors:
            tensors[other] = tensors[name]
    return tensors


def _read_torch(path: str, *, follow: bool) -> dict[str, torch.Tensor]:
    """Return the tensors in one of torch's files. No code in it is run.

    :raises CheckpointError: if it cannot be read, or needs code.
    """
    with reading(path):
        filesystem.ExistingFile(path, follow=follow).close()
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds of errors
        first = str(error).strip().split("\n", 1)[0]
        raise refusal(path, "not a weights file", "tensors, and no code", first) from error
    for name, tensor in state.items() if isinstance(state, dict) else [(None, state)]:
        dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if not isinstance(name, str) or not dense or tensor.is_quantized:
            kind = getattr(tensor, "layout", type(tensor).__name__)
            raise refusal(path, f"entry {name!r}", "a dense tensor under a name", str(kind))
    return cast("dict[str, torch.Tensor]", state)


# -- into the model -------------------------------------------------------------------------------


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's state: its own, and not copies."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _match(
    model: nn.Module, weights: Mapping[str, Stored], path: str, *, strict: bool, custom: bool
) -> dict[str, Stored]:
    """Return the weights under the model's names.

    :raises CheckpointError: if one has another shape, or with `strict` if the names differ.
    """
    own = _tensors_of(model)
    names = {portable_name(name): name for name in own}
    state = {names.get(name, name): tensor for name, tensor in weights.items()}
    unexpected = [name for name in state if name not in own]
    loaded = {id(own[name]): state[name] for name in state if name in own}
    # A tensor may be tied in the model to one that is loaded.
    state |= {
        name: loaded[id(t)] for name, t in own.items() if name not in state if id(t) in loaded
    }
    differences = {
        "missing": [name for name in own if name not in state], "not in the model": unexpected,
    }  # fmt: skip
    text = "; ".join(f"{what}: {_listed(some)}" for what, some in differences.items() if some)
    if text and strict and not custom:
        raise refusal(path, "another model", f"the model's {len(own)} tensors", text)
    for name, stored in state.items():
        if name in own and own[name].shape != stored.shape:
            expected = f"{tuple(own[name].shape)}, the model's"
            raise refusal(path, f"shape of {name!r}", expected, str(tuple(stored.shape)))
    if text:
        filesystem.LOG.warning("%s: %s", path, text)
    return state


def _has_custom_loading(model: nn.Module) -> bool:
    """Return whether a module handles names or values itself when it is loaded."""

    def is_custom(method: object) -> bool:
        return not str(getattr(method, "__module__", "")).startswith("torch.nn.")

    return any(
        NAMES.of(module, "Module._load_state_dict_pre_hooks")
        or is_custom(NAMES.of(type(module), "Module._load_from_state_dict"))
        or is_custom(type(module).load_state_dict)
        for module in model.modules()
    )


def _read_for(stored: Stored, target: object) -> torch.Tensor:
    """Return a tensor of a checkpoint in memory, distributed over ranks as its target is."""
    tensor = stored.load() if isinstance(stored, StoredTensor) else stored
    return distribute(tensor, target) if is_dtensor(target) else tensor


def _load_in_place(
    model: nn.Module, state: Mapping[str, Stored], weights: Mapping[str, Stored], *, check: bool
) -> dict[str, torch.Tensor]:
    """Load a state into a model; return what ``load_state_dict`` is to be called with.

    For a tensor that is loaded that is the model's own, which torch then does not copy. The others
    are new tensors that the model loads. With `check`, all files of `weights` are checked on the
    way, also those of which the state has nothing.

    :raises CheckpointError: if a file cannot be read.
    :raises RuntimeError: if the model cannot take a tensor.
    """
    result = {name: tensor for name, tensor in _tensors_of(model).items() if name in state}
    own = {name: tensor for name, tensor in result.items() if type(tensor) in _PLAIN}
    files: dict[SafetensorsFile, dict[str, torch.Tensor]] = {
        stored.file: {} for stored in weights.values() if isinstance(stored, StoredTensor)
    }
    direct: set[str] = set()
    for name, target in own.items() if _have_separate_memory(state, own) else ():
        stored = state[name]
        if not isinstance(stored, StoredTensor) or not _is_alike(target, stored):
            continue
        if files[stored.file].setdefault(stored.name, target) is target:
            direct.add(name)
    with torch.no_grad():
        # Torch does not see this change, and a backward pass in progress has to notice it.
        torch.autograd.graph.increment_version([own[name] for name in direct])
        for file, into in files.items():
            file.read(into, check=check)
        for name, target in result.items():
            if name not in own:
                result[name] = _read_for(state[name], target)
            elif name not in direct:
                target.copy_(_read_for(state[name], None))
    return result


def _is_alike(target: torch.Tensor, stored: StoredTensor) -> bool:
    """Return whether a tensor in the CPU's memory has the layout of its bytes in the file."""
    return (
        target.device.type == "cpu"
        and target.layout == torch.strided
        and target.dtype == stored.dtype
        and target.is_contiguous()
        and not (target.is_conj() or target.is_neg() or target.is_inference())
        # Some wrappers remove its memory temporarily.
        and target.untyped_storage().nbytes()
        >= (target.storage_offset() + target.numel()) * target.element_size()
    )


def _have_separate_memory(state: Mapping[str, Stored], targets: Mapping[str, torch.Tensor]) -> bool:
    """Return whether no two tensors share memory, except tied ones that get the same values.

    Other tensors that share memory must be loaded one after the other: the last one wins.
    """
    memory = {
        (id(target), id(state[name])): target.untyped_storage().data_ptr()
        for name, target in targets.items()
        if target.numel() and target.layout == torch.strided
    }
    return len(set(memory.values())) == len(memory)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# -- devices and dtypes ---------------------------------------------------------------------------


class _Slot(NamedTuple):
    """The position of a parameter or buffer in a module."""

    module: nn.Module
    name: str
    tensor: torch.Tensor
    full: str  #: its name in the model


def _slots(model: nn.Module) -> Generator[_Slot]:
    for path, module in model.named_modules(remove_duplicate=False):
        for named in (module.named_parameters, module.named_buffers):
            for name, tensor in named(recurse=False, remove_duplicate=False):
                yield _Slot(module, name, tensor, f"{path}.{name}" if path else name)


@contextlib.contextmanager
def _back_to_meta_on_error(model: nn.Module) -> Generator[None]:
    """Give a model its tensors back if this block raises."""
    before = list(_slots(model))
    try:
        yield
    except BaseException:
        for slot in before:
            setattr(slot.module, slot.name, slot.tensor)
        raise


def _place(
    model: nn.Module, names: Collection[str], device_map: object, dtype: torch.dtype | str | None
) -> None:
    """Move the parameters and buffers of these names to the devices of the map, in that dtype.

    Tied parameters stay tied. Parameters on the meta device have no values: they are replaced by
    new ones, and so optimizers must be made afterwards.

    :raises ValueError: for a dtype or a device that cannot be used, or a map that gives none for
        some of them; then nothing was moved.
    """
    kind = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is not None and not isinstance(kind, torch.dtype):
        raise ValueError(f"dtype={dtype!r}: torch has no such type")
    slots = [slot for slot in _slots(model) if slot.full in names]
    devices = {} if device_map is None else _devices(device_map, slots)
    moved: dict[int, torch.Tensor] = {}
    for module, name, tensor, _ in slots:
        if id(tensor) not in moved:
            moved[id(tensor)] = _move(tensor, devices.get(id(tensor)), kind)
        setattr(module, name, moved[id(tensor)])


def _devices(device_map: Any, slots: Sequence[_Slot]) -> dict[int, torch.device]:
    """Return the device of each tensor by its identity: that of the first name the map covers.

    The longest prefix of a name in the map counts.
    """
    given: Mapping[str, Any] = device_map if hasattr(device_map, "items") else {"": device_map}
    for name, device in given.items():
        if device in _NOWHERE:
            what = f"device_map gives {device!r} for {name!r}; it takes devices with memory"
            raise ValueError(f"{what}, as 'cpu', 0 or 'cuda:1': nothing is offloaded")
    table = {portable_name(name): torch.device(device) for name, device in given.items()}
    devices: dict[int, torch.device] = {}
    for slot in slots:
        name = portable_name(slot.full)
        prefixes = [p for p in table if p == "" or f"{name}.".startswith(f"{p}.")]
        if prefixes:
            devices.setdefault(id(slot.tensor), table[max(prefixes, key=len)])
    lacking = [slot.full for slot in slots if id(slot.tensor) not in devices]
    if lacking:
        what = f"device_map gives no device for {_listed(lacking)}"
        raise ValueError(f"{what}; name the parts that hold them, or all others by ''")
    return devices


def _move(
    tensor: torch.Tensor, device: torch.device | None, kind: torch.dtype | None
) -> torch.Tensor:
    kind = kind if kind is not None and tensor.is_floating_point() else tensor.dtype
    if not tensor.is_meta:
        device = device or tensor.device
        if tensor.device != device or tensor.dtype != kind:
            tensor.data = tensor.data.to(device, kind)
        return tensor
    new = torch.empty_like(tensor, device=device or "cpu", dtype=kind)
    if new.device.type == "cpu" and type(new) is torch.Tensor:
        in_huge_pages(new)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(new, requires_grad=tensor.requires_grad) if is_parameter else new
