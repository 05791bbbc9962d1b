"""The objects that can be saved by name, and their states as JSON and tensors.

None, bool, int, float, str, lists and dicts with str keys stand for themselves in the JSON. Every
other value is an object whose ``"$"`` names its kind. Tensors and arrays are stored under names.
Types are kept exactly. A value that only code could make again is refused when it is saved.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import nn

from syncprims import CheckpointError
from syncprims._data.arrays import strides_kept
from syncprims._protocol.validation import require
from syncprims.training.preparation import unwrap_model
from syncprims.training.private_names import NAMES
from syncprims.training.pytree import is_dtensor

from .integrity import refusal
from .safetensors_file import check_storable

if TYPE_CHECKING:  # slow to import
    from torch.distributed.tensor import DTensor

KIND = "$"
_DEEPEST = 150
_MAPPINGS: dict[str, Any] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_RESERVED_NAME = re.compile(r"rank-\d+")


class Stateful(Protocol):
    """Anything with a state that can be saved: model, optimizer, scheduler, your own."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state."""


def check_objects(objects: Mapping[str, object], own: Mapping[str, object]) -> None:
    """Raise unless the objects can be saved and loaded, under names that files can have.

    :raises TypeError: if something has no state, or a name is not a str.
    :raises ValueError: if a name cannot be a file's name, or is in both.
    """
    for name, thing in (*objects.items(), *own.items()):
        require(name, str, "objects are saved under names")
        # isinstance() does not see what __getattr__ gives, from Python 3.12 on.
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            what = f"{name!r} is a {type(thing).__name__}"
            raise TypeError(f"{what}: it has no state_dict() and load_state_dict()")
        if not _NAME.fullmatch(name) or _RESERVED_NAME.fullmatch(name):
            what = "a name has at most 100 letters, digits, '_', '.' and '-', begins with one of "
            what += "the first two, and is not 'rank-' with a number"
            raise ValueError(f"{name!r} cannot name an object: {what}")
    both = sorted(objects.keys() & own.keys())
    if both:
        raise ValueError(f"{both} are in objects and in rank_objects: pass each in one of them")


def state_of(thing: Stateful) -> Any:
    """Return an object's state; of a wrapped model, that of the model inside."""
    if not isinstance(thing, nn.Module):
        return thing.state_dict()
    state = unwrap_model(thing).state_dict()
    return _rename(state, portable_name)


def load_into(thing: Stateful, state: object) -> None:
    """Load a state into an object; into a wrapped model, the model inside."""
    if isinstance(thing, nn.Module):
        inner = unwrap_model(thing)
        names = {portable_name(name): name for name in inner.state_dict()}
        inner.load_state_dict(_rename(state, lambda name: names.get(name, name)))
    else:
        thing.load_state_dict(state)


def _rename(state: Any, new_name: Callable[[str], str]) -> Any:
    renamed = type(state)((new_name(name), value) for name, value in state.items())
    versions = NAMES.of(state, "Module._metadata", None)
    if versions is not None:
        NAMES.set(renamed, "Module._metadata", versions)
    return renamed


def check_fits(path: str, name: str, thing: Stateful, state: object) -> None:
    """Raise if a state does not fit an object, as far as that is known before it is loaded.

    :raises CheckpointError: in that case. A model takes the names and shapes of its own tensors,
        and must have memory for them.
    """
    if not isinstance(thing, nn.Module):
        try:
            _check_other(thing, state)
        except Exception as error:  # of any kind, if the state is damaged
            why = f"{type(error).__name__}: {error}"
            raise refusal(path, f"object {name!r} refuses it", "its state", why) from error
        return
    own: dict[str, Any] = state_of(thing)
    saved: dict[Any, Any] = state if isinstance(state, dict) else {"state": state}
    for key in {**own, **saved}:
        value, expected, found = own.get(key), _shape(own, key), _shape(saved, key)
        if isinstance(value, torch.Tensor) and value.is_meta:
            what = f"{path}: object {name!r}: the model's {key!r} is on the meta device"
            cure = "Call model.to_empty(device=...), or use load_checkpoint_in_model()"
            raise CheckpointError(f"{what}, without memory. {cure}.", path=path)
        if expected != found and (isinstance(value, torch.Tensor) or None in (expected, found)):
            what = f"object {name!r} is of another model: {key!r}"
            raise refusal(path, what, f"{expected or 'nothing'}, as in the model", found or "none")


def _check_other(thing: Any, state: Any) -> None:
    """Raise what loading it would raise, of an object of torch or of this library."""
    if isinstance(thing, torch.optim.Optimizer):
        plain = getattr(thing, "optimizer", thing)  # of a prepared one
        if type(plain).load_state_dict is torch.optim.Optimizer.load_state_dict:
            sizes = [[len(group["params"]) for group in groups["param_groups"]]
                     for groups in ({"param_groups": plain.param_groups}, state)]  # fmt: skip
            if sizes[0] != sizes[1]:
                raise ValueError(f"parameters in its groups: {sizes[0]} here, {sizes[1]} saved")
            _match_parameters(plain, state)
    elif isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
        dict.items(state)
    elif isinstance(thing, torch.amp.GradScaler):
        for key in thing.state_dict():
            float(state[key])
    elif hasattr(type(thing), "_check_state"):
        thing._check_state(state)


def _match_parameters(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Put what was saved of each parameter where that is now, by their names.

    :raises ValueError: if there are other names, or other shapes: fused kernels do not look.
    """
    here, saved = optimizer.param_groups, state["param_groups"]
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim") and kind is not torch.optim.LBFGS
    for group, old, numbers in zip(here, saved, _saved_numbers(optimizer, saved), strict=True):
        names = group.get("param_names", [f"parameter {i}" for i in range(len(numbers))])
        old["params"] = numbers
        if "param_names" in old and "param_names" in group:
            old["param_names"] = [*names]
        for p, name, number in zip(group["params"], names, numbers, strict=True):
            kept = dict.items(state["state"].get(number, {}))
            for key, value in kept if known else ():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    both = zip(value.shape, p.shape, strict=False)
                    if value.ndim != p.ndim or any(a not in (1, b) for a, b in both):
                        what = f"{key!r} of {name} has the shape {tuple(value.shape)}"
                        raise ValueError(f"{what}, and the parameter {tuple(p.shape)}")


def _saved_numbers(optimizer: torch.optim.Optimizer, saved: Any) -> list[list[Any]]:
    """Return the numbers under which the parameters of each group were saved.

    :raises ValueError: if they had other names then.
    """
    found: list[list[Any]] = []
    for group, old in zip(optimizer.param_groups, saved, strict=False):
        numbers, names, before = old["params"], group.get("param_names"), old.get("param_names")
        if names and before and names != before:
            if sorted(names) != sorted(before):
                new, gone = sorted({*names} - {*before}), sorted({*before} - {*names})
                what = f"a group has the parameters {new}" if new else "a group lacks parameters"
                raise ValueError(f"{what}, and {gone} were saved in it")
            of_names = dict(zip(before, numbers, strict=True))
            numbers = [of_names[name] for name in names]
        found.append(numbers)
    return found


def _shape(values: Mapping[Any, Any], key: object) -> str | None:
    """Return the shape of one of these values, or its type if it is not a tensor."""
    value = values.get(key)
    if isinstance(value, torch.Tensor):
        return str(tuple(value.shape))
    return type(value).__name__ if key in values else None


def match_layouts(things: Mapping[str, Stateful], states: dict[str, Any]) -> None:
    """Lay out what optimizers keep of parameters as these are here, if that is not as it was saved.

    Fused kernels take the layout of both for equal. The earlier one is that of a model among these.
    """
    saved: dict[int, Any] = {}  # the strides of parameters, by identity
    for name in states:
        if isinstance(model := things[name], nn.Module):
            for key, p in unwrap_model(model).named_parameters(remove_duplicate=False):
                if isinstance(value := states[name].get(portable_name(key)), torch.Tensor):
                    saved[id(p)] = value.stride()
    for name, state in states.items():
        if not isinstance(optimizer := things[name], torch.optim.Optimizer):
            continue
        params = [p for group in optimizer.param_groups for p in group["params"]]
        with contextlib.suppress(AttributeError, KeyError, TypeError):  # a form of its own
            numbers = [number for group in state["param_groups"] for number in group["params"]]
            for p, number in zip(params, numbers, strict=False):
                kept = state["state"].get(number, {}) if saved.get(id(p)) != p.stride() else {}
                for key, value in kept.items():
                    if type(value) is torch.Tensor and value.shape == p.shape:
                        room = torch.empty_like(p.detach(), dtype=value.dtype, device=value.device)
                        kept[key] = room.copy_(value)


def dtensors_of(thing: Stateful, tree: Any) -> Mapping[str, Any]:
    """Return an object's DTensors by the names under which they are saved in a tree.

    Of an optimizer: its parameters, by the beginnings of the names, since it may have no state yet.
    """
    if isinstance(thing, nn.Module):
        return {key: value for key, value in state_of(thing).items() if is_dtensor(value)}
    if isinstance(thing, torch.optim.Optimizer):
        params = [p for group in thing.param_groups for p in group["params"]]
        if any(map(is_dtensor, params)):
            numbers = chain.from_iterable(_saved_numbers(thing, tree.get("param_groups", ())))
            both = zip(numbers, params, strict=False)
            return {f"state.{number}": p for number, p in both if is_dtensor(p)}
    return {}


# -- a state as JSON and tensors ----------------------------------------------------------------


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is not a dtype")
    return dtype


#: Of each other type: its kind, a simpler value that represents it, and the way back.
_SIMPLER: dict[type[Any], tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    int: ("int", hex, lambda text: int(text, 16)),
    float: ("float", float.hex, float.fromhex),
    complex: ("complex", lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    bytes: ("bytes", bytes.hex, bytes.fromhex),
    bytearray: ("bytearray", bytearray.hex, bytearray.fromhex),
    tuple: ("tuple", list, tuple),
    set: ("set", list, set),
    frozenset: ("frozenset", list, frozenset),
    deque: ("deque", lambda items: [list(items), items.maxlen], lambda parts: deque(*parts)),
    torch.Size: ("size", list, torch.Size),
    torch.dtype: ("dtype", lambda dtype: str(dtype).removeprefix("torch."), _torch_dtype),
    torch.device: ("device", str, torch.device),
    PurePosixPath: ("purepath", str, PurePosixPath),
    type(Path()): ("path", str, Path),
    # As arrays, these would lose NULs at their ends.
    np.str_: ("str_", str.__str__, np.str_),
    np.bytes_: ("bytes_", bytes.hex, lambda text: np.bytes_(bytes.fromhex(text))),
}
_FROM_SIMPLER = {kind: restore for kind, _, restore in _SIMPLER.values()}


class State(NamedTuple):
    """An object's state in two parts."""

    tree: object  #: JSON
    tensors: dict[str, torch.Tensor]  #: by the names in the tree


def split_state(state: object) -> State:
    """Return a state as JSON and tensors. A tensor in several places is stored once.

    :raises TypeError: naming what cannot be saved without pickle.
    """
    splitter = _Splitter()
    return State(splitter.node(state, ()), splitter.tensors)


def join_state(tree: object, load_tensor: Callable[[str, Sequence[int]], torch.Tensor]) -> Any:
    """Return the state of a tree.

    ``load_tensor(name, strides)`` returns a tensor by its name in the tree, laid out so.

    :raises Exception: of any kind, if :func:`split_state` has not made the tree.
    """

    def join(node: object) -> Any:
        return join_state(node, load_tensor)

    if isinstance(tree, list):
        return [join(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    node = cast("dict[str, Any]", tree)
    kind = node.get(KIND)
    if kind is None:
        return {key: join(item) for key, item in node.items()}
    if kind == "tensor":
        tensor = load_tensor(node["key"], node.get("strides", ()))
        learns = node.get("learns")  # of a parameter only
        return tensor if learns is None else torch.nn.Parameter(tensor, requires_grad=learns)
    if kind in _MAPPINGS:
        mapping = _MAPPINGS[kind]({join(key): join(item) for key, item in node["items"]})
        if "metadata" in node:
            NAMES.set(mapping, "Module._metadata", join(node["metadata"]))
        return mapping
    if kind == "array":
        dtype: np.dtype[Any] = np.dtype(node["dtype"])
        if dtype.hasobject:
            raise ValueError("an array of objects")
        array = np.frombuffer(load_tensor(node["key"], ()).numpy().tobytes(), dtype)
        return array[0] if node["shape"] is None else array.reshape(node["shape"]).copy()
    return _FROM_SIMPLER[kind](join(node["is"]))


class _Splitter:
    """Replaces the tensors in a state by nodes."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._seen: dict[Any, str] = {}

    def node(self, value: Any, key_path: tuple[str, ...]) -> Any:
        """Return the JSON for a value."""
        kind: type[Any] = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int and -(1 << 63) <= value < 1 << 64:
            return value
        if kind is float and value - value == 0:  # neither infinite nor NaN
            return value
        if len(key_path) > _DEEPEST:
            raise TypeError(f"{'.'.join(key_path[:5])}...: nested deeper than {_DEEPEST} levels")
        if kind is list:
            return [self.node(item, (*key_path, str(i))) for i, item in enumerate(value)]
        if isinstance(value, dict):
            return self._mapping(kind, value, key_path)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, key_path)
        if kind in _SIMPLER:
            name, simplify, _ = _SIMPLER[kind]
            return {KIND: name, "is": self.node(simplify(value), key_path)}
        if isinstance(value, (np.ndarray, np.generic)):
            return self._array(value, key_path)
        raise self._cannot(value, key_path)

    def _mapping(self, kind: type[Any], value: dict[Any, Any], key_path: tuple[str, ...]) -> Any:
        if kind is dict and KIND not in value and all(type(key) is str for key in value):
            return {key: self.node(item, (*key_path, key)) for key, item in value.items()}
        names = [name for name, known in _MAPPINGS.items() if known is kind]
        if not names:
            raise self._cannot(value, key_path)
        node: dict[str, Any] = {KIND: names[0]}
        # Of a module's state: the versions of its classes.
        if kind is OrderedDict and (versions := NAMES.of(value, "Module._metadata", None)):
            node["metadata"] = self.node(versions, (*key_path, "metadata"))
        node["items"] = [
            [self.node(key, (*key_path, "key")), self.node(item, (*key_path, _spell(key)))]
            for key, item in value.items()
        ]
        return node

    def _tensor(self, value: torch.Tensor, key_path: tuple[str, ...]) -> dict[str, Any]:
        spelled = ".".join(key_path)
        if type(value) not in (torch.Tensor, torch.nn.Parameter) and not is_dtensor(value):
            raise self._cannot(value, key_path)
        same = storage_key(value)
        key = self._seen.get(same)
        if key is None:
            key = self._unused(spelled)
            check_storable(key, value)
            self.tensors[key] = value.detach()
            if same is not None:
                self._seen[same] = key
        node: dict[str, Any] = {KIND: "tensor", "key": key}
        if strides := strides_kept(value.shape, value.stride()):  # not what the file shows
            node["strides"] = strides
        if type(value) is torch.nn.Parameter:
            node["learns"] = value.requires_grad
        return node

    def _unused(self, key: str) -> str:
        while key in self.tensors or key.startswith("__"):
            key = f"{key}_" if not key.startswith("__") else f".{key}"
        return key

    def _array(self, value: Any, key_path: tuple[str, ...]) -> dict[str, Any]:
        kind = value.dtype
        known = type(value) in (np.ndarray, kind.type) and kind.itemsize and not kind.hasobject
        if not known or np.dtype(kind.str) != kind:  # structures and foreign types become |V2
            raise self._cannot(value, key_path)
        key = self._unused(".".join(key_path))
        raw = np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8)
        self.tensors[key] = torch.from_numpy(raw.copy())
        shape = None if isinstance(value, np.generic) else list(value.shape)
        return {KIND: "array", "key": key, "dtype": kind.str, "shape": shape}

    def _cannot(self, value: object, key_path: tuple[str, ...]) -> TypeError:
        kind: type[Any] = type(value)
        spelled = ".".join(key_path) or "itself"
        of = f" of {value.dtype}" if isinstance(value, np.ndarray) else ""
        what = f"state {spelled} is a {kind.__module__}.{kind.__qualname__}{of} and needs a pickle"
        cure = "Give a state_dict() of numbers, texts, lists, dicts, arrays and tensors."
        return TypeError(f"{what}: loading that would run code. {cure}")


def _spell(key: object) -> str:
    return key if isinstance(key, str) else repr(key)


# -- tensors ---------------------------------------------------------------------------------------


def portable_name(name: str) -> str:
    """Return a parameter's name without the marks of compiled submodules."""
    return name.replace("_orig_mod.", "")


def storage_key(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for two tensors that are the same memory; None if unknown."""
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    if tensor.is_meta or not local.numel():
        return None
    place = local.data_ptr(), tuple(local.stride()), tuple(tensor.shape)
    return (*place, tensor.dtype, tensor.device, local.is_conj(), local.is_neg())


def distribute(full: torch.Tensor, target: DTensor) -> DTensor:
    """Return a tensor distributed like `target`. Every rank has `full`: nothing is sent.

    :raises ValueError: if `target` is not summed up yet, so that each rank has a summand only.
    """
    from torch.distributed.tensor import DTensor

    mesh, placements = target.device_mesh, target.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"a tensor with the placements {placements} cannot be loaded")
    local = full.to(target.dtype)
    region = NAMES["compute_local_shape_and_global_offset"](target.shape, mesh, placements)
    for dim, (length, begin) in enumerate(zip(*region, strict=True)):
        local = local.narrow(dim, begin if length else 0, length)
    local = torch.empty_like(target.to_local().detach()).copy_(local)  # laid out in the same way
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=target.shape, stride=target.stride()
    )
