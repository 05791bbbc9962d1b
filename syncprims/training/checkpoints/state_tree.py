"""A state as JSON and tensors: what the ``state_dict()`` of an object may hold.

None, bool, int, float, str, lists and dicts with str keys stand for themselves in the JSON. Every
other value is an object whose ``"$"`` names its kind. Tensors and arrays are stored under names.
Types are kept exactly. A value that only code could make again is refused when it is saved.
"""

from __future__ import annotations

import base64
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from .dtensor import check_placements, is_dtensor
from .safetensors_file import check_storable
from .weights import storage_key

if TYPE_CHECKING:
    from collections.abc import Callable

KIND = "$"
_DEEPEST = 150
_FACTORIES = {kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, tuple)}
_MAPPINGS: dict[str, Any] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}


def _to_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _from_text(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _to_bits(value: float) -> str:
    return struct.pack("<d", value).hex()


def _from_bits(bits: str) -> float:
    (value,) = struct.unpack("<d", bytes.fromhex(bits))
    return float(value)


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return dtype


#: Of each other type: its kind, a simpler value that stands for it, and the way back.
_SIMPLER: dict[type[Any], tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    int: ("int", hex, lambda text: int(text, 16)),
    float: ("float", _to_bits, _from_bits),
    complex: ("complex", lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    bytes: ("bytes", _to_text, _from_text),
    bytearray: ("bytearray", _to_text, lambda text: bytearray(_from_text(text))),
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
    np.bytes_: ("bytes_", _to_text, lambda text: np.bytes_(_from_text(text))),
}
_FROM_SIMPLER = {kind: restore for kind, _, restore in _SIMPLER.values()}


class State(NamedTuple):
    """An object's state in two parts."""

    tree: Any  #: JSON
    tensors: dict[str, torch.Tensor]  #: by the names in the tree


def split_state(state: Any) -> State:
    """Return a state as JSON and tensors. A tensor in several places is stored once.

    :raises TypeError: naming what cannot be saved without pickle.
    """
    splitter = _Splitter()
    return State(splitter.node(state, ()), splitter.tensors)


def join_state(tree: Any, load_tensor: Callable[[dict[str, Any]], torch.Tensor]) -> Any:
    """Return the state of a tree; ``load_tensor(node)`` returns the tensor of a tensor's node.

    :raises Exception: of any kind, if :func:`split_state` has not made the tree.
    """

    def join(node: Any) -> Any:
        return join_state(node, load_tensor)

    if isinstance(tree, list):
        return [join(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    node = cast("dict[str, Any]", tree)
    kind = node.get(KIND)
    if kind is None:
        return {key: join(item) for key, item in node.items()}
    if kind in ("tensor", "sharded"):
        tensor = load_tensor(node)
        learns = node.get("learns")  # of a parameter only
        return tensor if learns is None else torch.nn.Parameter(tensor, requires_grad=learns)
    if kind == "default":
        makes = node["makes"]
        return defaultdict(None if makes is None else _FACTORIES[makes], _join_items(node, join))
    if kind in _MAPPINGS:
        mapping = _MAPPINGS[kind](_join_items(node, join))
        if "metadata" in node:
            mapping._metadata = join(node["metadata"])
        return mapping
    if kind in ("array", "scalar"):
        dtype: np.dtype[Any] = np.dtype(node["dtype"])
        if dtype.hasobject:
            raise ValueError("an array of objects")
        if kind == "scalar":
            return np.frombuffer(_from_text(node["bytes"]), dtype)[0]
        raw = load_tensor(node).numpy().tobytes()
        return np.frombuffer(raw, dtype).reshape(node["shape"]).copy()
    return _FROM_SIMPLER[kind](join(node["is"]))


def _join_items(node: dict[str, Any], join: Callable[[Any], Any]) -> dict[Any, Any]:
    return {join(key): join(item) for key, item in node["items"]}


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
        node: dict[str, Any] = {KIND: next((n for n, t in _MAPPINGS.items() if t is kind), None)}
        if kind is defaultdict:
            factory = cast("defaultdict[Any, Any]", value).default_factory
            makes = getattr(factory, "__name__", None)
            if factory is None or _FACTORIES.get(str(makes)) is factory:
                node = {KIND: "default", "makes": makes}
        if node[KIND] is None:
            raise self._cannot(value, key_path)
        # Of a module's state: the versions of its classes.
        versions = getattr(value, "_metadata", None)
        if versions is not None and kind is OrderedDict:
            node["metadata"] = self.node(versions, (*key_path, "metadata"))
        node["items"] = [
            [self.node(key, (*key_path, "key")), self.node(item, (*key_path, _spell(key)))]
            for key, item in value.items()
        ]
        return node

    def _tensor(self, value: torch.Tensor, key_path: tuple[str, ...]) -> dict[str, Any]:
        spelled = ".".join(key_path)
        if is_dtensor(value):
            check_placements(spelled, value)
            check_storable(spelled, value.to_local())
        elif type(value) in (torch.Tensor, torch.nn.Parameter):
            check_storable(spelled, value)
        else:
            raise self._cannot(value, key_path)
        same = storage_key(value)
        key = self._seen.get(same)
        if key is None:
            key = self._unused(spelled)
            self.tensors[key] = value.detach()
            if same is not None:
                self._seen[same] = key
        if is_dtensor(value):
            return {KIND: "sharded", "key": key, "shape": list(value.shape)}
        if type(value) is torch.nn.Parameter:
            return {KIND: "tensor", "key": key, "learns": value.requires_grad}
        return {KIND: "tensor", "key": key}

    def _unused(self, key: str) -> str:
        while key in self.tensors or key.startswith("__"):
            key = f"{key}_" if not key.startswith("__") else f".{key}"
        return key

    def _array(self, value: Any, key_path: tuple[str, ...]) -> dict[str, Any]:
        kind = value.dtype
        known = type(value) in (np.ndarray, kind.type) and kind.itemsize and not kind.hasobject
        if not known or np.dtype(kind.str) != kind:  # structures and foreign types become |V2
            raise self._cannot(value, key_path)
        raw = np.ascontiguousarray(value).tobytes()
        if isinstance(value, np.generic):
            return {KIND: "scalar", "dtype": kind.str, "bytes": _to_text(raw)}
        key = self._unused(".".join(key_path))
        self.tensors[key] = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
        return {KIND: "array", "key": key, "dtype": kind.str, "shape": list(value.shape)}

    def _cannot(self, value: Any, key_path: tuple[str, ...]) -> TypeError:
        kind: type[Any] = type(value)
        spelled = ".".join(key_path) or "itself"
        of = f" of {value.dtype}" if isinstance(value, np.ndarray) else ""
        return TypeError(
            f"state {spelled} is a {kind.__module__}.{kind.__qualname__}{of}: it "
            f"could only be saved as a pickle, which runs code when it is loaded. Give a "
            f"state_dict() of numbers, texts, lists, dicts, arrays and tensors."
        )


def _spell(key: Any) -> str:
    return key if isinstance(key, str) else repr(key)
