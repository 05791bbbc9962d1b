"""Load a model's weights, written here or by another program: checked first, then used.

A CPU parameter that has the same layout as in the file is filled from it by several threads, and
no other copy is made. All other tensors are copied, one after the other.

A model that is on the meta device has no values that could be lost. Its new memory is filled while
the files are checked, in one pass. If they are damaged, it is on the meta device again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from syncprims import CheckpointError
from syncprims.training.preparation import unwrap_model

from .dtensor import distribute, is_dtensor
from .filesystem import LOG
from .integrity import refusal
from .safetensors_file import SafetensorsFile, StoredTensor, in_huge_pages
from .weights import open_weights, portable_name

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Mapping, Sequence

    from .weights import Stored


def load_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | str | int | torch.device | None,
    dtype: torch.dtype | str | None,
    *,
    strict: bool,
    allow_links: bool,
) -> None:
    """Load the weights of a checkpoint into the model. See ``load_checkpoint_in_model``."""
    path = os.fspath(cast("Any", checkpoint))
    if not isinstance(path, str):
        raise TypeError(f"checkpoint={checkpoint!r}: it takes a str or a path")
    inner = unwrap_model(model)
    empty = _is_empty(inner)
    # A part with its own loading may look at what it gets.
    check = not empty or _has_custom_loading(inner)
    with open_weights(path, follow=allow_links, check=check) as weights:
        _load_weights(inner, weights, path, device_map, dtype, strict, empty)
    unset = [
        slot.full
        for slot in _slots(model)
        if slot.tensor.is_meta and slot.name in slot.module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
    ]
    if unset:
        LOG.warning(
            "%s: %sthese are in no checkpoint, and still on the meta device: compute them again",
            path, _listed("buffers without values", unset),
        )  # fmt: skip


def _load_weights(
    model: nn.Module,
    weights: Mapping[str, Stored],
    path: str,
    device_map: Any,
    dtype: torch.dtype | str | None,
    strict: bool,
    empty: bool,
) -> None:
    own: dict[str, Any] = model.state_dict(keep_vars=True)
    state, missing, unexpected = _matched(own, weights)
    custom = _has_custom_loading(model)
    if (missing or unexpected) and strict and not custom:
        expected = f"the model's {len(own)} tensors"
        found = f"{_listed('missing', missing)}{_listed('not in the model', unexpected)}"
        raise refusal(path, "another model", expected, found.strip("; "))
    for name, stored in state.items():
        target = own.get(name)
        if isinstance(target, torch.Tensor) and target.shape != stored.shape:
            what = f"shape of {name!r}"
            found = str(tuple(stored.shape))
            raise refusal(path, what, f"{tuple(target.shape)}, the model's", found)
    if missing or unexpected:
        LOG.warning("%s: %s%s", path, _listed("missing", missing), _listed("unused", unexpected))
    with _kept_on_meta(model) if empty else contextlib.nullcontext():
        _place(model, state, device_map, dtype)
        try:
            if custom:
                own = model.state_dict(keep_vars=True)
                read = {name: _read_for(stored, own.get(name)) for name, stored in state.items()}
            else:
                known = {name: state[name] for name in own if name in state}
                read = _load_in_place(model, known, weights, check=empty)
            # Only torch can distinguish what a module renames or converts from what is missing.
            model.load_state_dict(read, strict=strict)
        except (CheckpointError, RuntimeError) as error:
            text = str(error) if isinstance(error, CheckpointError) else f"{path}: {error}"
            part = "The model has been loaded in part: do not go on with it."
            raise CheckpointError(
                f"{text} {'The model is still on the meta device.' if empty else part}",
                path=path, errno=getattr(error, "errno", None),
            ) from error  # fmt: skip


def _is_empty(model: nn.Module) -> bool:
    """Return whether a model has no values yet."""
    return all(
        isinstance(tensor, torch.Tensor) and tensor.is_meta
        for tensor in model.state_dict(keep_vars=True).values()
    )


@contextlib.contextmanager
def _kept_on_meta(model: nn.Module) -> Generator[None]:
    """Give a model its tensors back if this block raises."""
    before = list(_slots(model))
    try:
        yield
    except BaseException:
        for slot in before:
            slot.table[slot.name] = slot.tensor
        raise


def _read_for(stored: Stored, target: Any) -> torch.Tensor:
    """Return a tensor of a checkpoint in memory, distributed over ranks as its target is."""
    tensor = stored.tensor() if isinstance(stored, StoredTensor) else stored
    return distribute(tensor, target) if is_dtensor(target) else tensor


def _matched(
    own: dict[str, Any], weights: Mapping[str, Stored]
) -> tuple[dict[str, Stored], list[str], list[str]]:
    """Return the weights under the model's names, the names that are missing, and those unused."""
    names = {portable_name(name): name for name in own}
    state = {names.get(name, name): tensor for name, tensor in weights.items()}
    unexpected = [name for name in state if name not in own]
    loaded = {id(own[name]): state[name] for name in state if name in own}
    missing: list[str] = []
    for name, tensor in own.items():
        if name in state or not isinstance(tensor, torch.Tensor):
            continue
        if id(tensor) in loaded:  # tied in the model to one that is loaded
            state[name] = loaded[id(tensor)]
        else:
            missing.append(name)
    return state, missing, unexpected


def _has_custom_loading(model: nn.Module) -> bool:
    """Return whether a module handles names or values itself when it is loaded."""
    return any(
        module._load_state_dict_pre_hooks  # pyright: ignore[reportPrivateUsage]
        or not _is_torchs(type(module)._load_from_state_dict)  # pyright: ignore[reportPrivateUsage]
        or not _is_torchs(type(module).load_state_dict)
        for module in model.modules()
    )


def _is_torchs(method: Any) -> bool:
    return str(getattr(method, "__module__", "")).startswith("torch.nn.")


def _listed(what: str, names: list[str]) -> str:
    return f"{what}: {_first_of(names)}; " if names else ""


def _first_of(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}"


# -- into the model's memory ----------------------------------------------------------------------


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
    plain = torch.Tensor, nn.Parameter  # not classes derived from them
    places: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    places |= dict(model.named_buffers(remove_duplicate=False))
    targets = {name: places[name] for name in state if type(places.get(name)) in plain}
    separate = _are_separate(state, targets)
    direct: list[str] = []
    in_files = (stored for stored in weights.values() if isinstance(stored, StoredTensor))
    files: dict[SafetensorsFile, dict[str, torch.Tensor]] = {s.file: {} for s in in_files}
    for name, target in targets.items() if separate else ():
        stored = state[name]
        if not isinstance(stored, StoredTensor) or not _is_alike(target, stored):
            continue
        if files[stored.file].setdefault(stored.name, target) is target:
            direct.append(name)
    with torch.no_grad():
        # Torch does not see this change, and a backward pass in progress has to notice it.
        torch.autograd.graph.increment_version([targets[name] for name in direct])
        for file, into in files.items():
            file.read(into, check=check)
        result = {
            name: _read_for(state[name], places.get(name)) for name in state if name not in targets
        }
        for name in targets.keys() - set(direct) if separate else targets:
            targets[name].copy_(_read_for(state[name], None))
        return {**result, **targets}


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


def _are_separate(state: Mapping[str, Stored], targets: Mapping[str, torch.Tensor]) -> bool:
    """Return whether no two tensors share memory, except tied ones that get the same values.

    Other tensors that share memory must be loaded one after the other: the last one wins.
    """
    places: dict[tuple[str, int, int], Stored] = {}
    for name, target in targets.items():
        if target.numel() and target.layout == torch.strided:
            last = sum(
                (n - 1) * step for n, step in zip(target.shape, target.stride(), strict=True)
            )
            begin = target.data_ptr()
            place = str(target.device), begin, begin + (last + 1) * target.element_size()
            if places.setdefault(place, state[name]) is not state[name]:
                return False
    found = sorted(places)
    return all(one[0] != other[0] or one[2] <= other[1] for one, other in itertools.pairwise(found))


# -- devices and dtypes ---------------------------------------------------------------------------


def _place(
    model: nn.Module, names: Collection[str], device_map: Any, dtype: torch.dtype | str | None
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
    made: dict[int, torch.Tensor] = {}
    for _, table, name, tensor, _ in slots:
        if id(tensor) not in made:
            made[id(tensor)] = _moved(tensor, devices.get(id(tensor)), kind)
        table[name] = made[id(tensor)]


class _Slot(NamedTuple):
    """Where a parameter or buffer is in a module."""

    module: nn.Module
    table: dict[str, Any]  #: the module's own
    name: str
    tensor: torch.Tensor
    full: str  #: its name in the model


def _slots(model: nn.Module) -> Generator[_Slot]:
    for path, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):  # pyright: ignore[reportPrivateUsage]
            for name, tensor in table.items():
                if tensor is not None:
                    yield _Slot(module, table, name, tensor, f"{path}.{name}" if path else name)


def _devices(device_map: Any, slots: Sequence[_Slot]) -> dict[int, torch.device]:
    """Return the device of each tensor by its identity: that of the first name the map covers.

    The longest prefix of a name in the map counts.
    """
    given: Mapping[str, Any] = device_map if hasattr(device_map, "items") else {"": device_map}
    for name, device in given.items():
        if device in ("disk", "meta", "auto", "balanced", "sequential"):
            raise ValueError(
                f"device_map gives {device!r} for {name!r}: it takes devices that hold tensors, as "
                f"'cpu', 0 or 'cuda:1'; nothing is offloaded here"
            )
    table = {portable_name(name): torch.device(device) for name, device in given.items()}
    found: dict[int, torch.device] = {}
    for slot in slots:
        name = portable_name(slot.full)
        prefixes = [p for p in table if p == "" or f"{name}.".startswith(f"{p}.")]
        if prefixes:
            found.setdefault(id(slot.tensor), table[max(prefixes, key=len)])
    lacking = [slot.full for slot in slots if id(slot.tensor) not in found]
    if lacking:
        raise ValueError(
            f"device_map gives no device for {_first_of(lacking)}: name the parts that hold them, "
            f"or all others by ''"
        )
    return found


def _moved(
    tensor: torch.Tensor, device: torch.device | None, kind: torch.dtype | None
) -> torch.Tensor:
    kind = kind if kind is not None and tensor.is_floating_point() else tensor.dtype
    if tensor.is_meta:
        made = torch.empty_like(tensor, device=device or "cpu", dtype=kind)
        if made.device.type == "cpu" and type(made) is torch.Tensor:
            in_huge_pages(made)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made
    device = device or tensor.device
    if tensor.device != device or tensor.dtype != kind:
        tensor.data = tensor.data.to(device, kind)
    return tensor
