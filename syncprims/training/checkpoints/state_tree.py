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
_DOUBLE = struct.Struct("<d")
_FACTORIES = {kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, tuple)}
_SEQUENCES: dict[str, Any] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size
}  # fmt: skip
_MAPPINGS: dict[str, Any] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_PATHS: dict[str, Any] = {"path": Path, "purepath": PurePosixPath}
_NUMPYS: dict[str, Any] = {"str_": np.str_, "bytes_": np.bytes_}
_NAMES: dict[type[Any], str] = {
    kind: name for table in (_SEQUENCES, _MAPPINGS, _PATHS, _NUMPYS) for name, kind in table.items()
}
_NAMES[type(Path())] = "path"


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
    if kind in _MAPPINGS or kind == "default":
        items = {join(key): join(item) for key, item in node["items"]}
        if kind == "default":
            makes = node["makes"]
            return defaultdict(None if makes is None else _FACTORIES[makes], items)
        made = _MAPPINGS[kind](items)
        if "metadata" in node:
            made._metadata = join(node["metadata"])
        return made
    if kind == "array":
        raw = load_tensor(node).numpy().tobytes()
        return np.frombuffer(raw, _plain_dtype(node)).reshape(node["shape"]).copy()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](join(node["items"]))
    if kind in _NUMPYS:
        return _NUMPYS[kind](join(node["is"]))
    if kind == "deque":
        return deque(join(node["items"]), node["most"])
    return _join_leaf(kind, node)


def _join_leaf(kind: Any, node: dict[str, Any]) -> Any:
    """Return the value of a node that has no other nodes in it."""
    if kind in _PATHS:
        return _PATHS[kind](node["name"])
    match kind:
        case "int":
            return int(node["hex"], 16)
        case "float":
            return _DOUBLE.unpack(bytes.fromhex(node["bits"]))[0]
        case "complex":
            return complex(*struct.unpack("<dd", bytes.fromhex(node["bits"])))
        case "scalar":
            return np.frombuffer(_bytes(node), _plain_dtype(node))[0]
        case "bytes":
            return _bytes(node)
        case "bytearray":
            return bytearray(_bytes(node))
        case "dtype" if isinstance(found := getattr(torch, node["name"]), torch.dtype):
            return found
        case "device":
            return torch.device(node["name"])
        case _:
            raise ValueError(f"a kind {kind!r} of value that this version does not know")


def _plain_dtype(node: dict[str, Any]) -> np.dtype[Any]:
    found: np.dtype[Any] = np.dtype(node["dtype"])
    if found.hasobject:
        raise ValueError("an array of objects")
    return found


def _bytes(node: dict[str, Any]) -> bytes:
    return base64.b64decode(node["bytes"], validate=True)


class _Splitter:
    """Replaces the tensors in a state by nodes."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._seen: dict[Any, str] = {}

    def node(self, value: Any, key_path: tuple[str, ...]) -> Any:
        """Return the JSON for a value."""
        kind: type[Any] = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 64 else {KIND: "int", "hex": hex(value)}
        if kind is float:
            finite = value - value == 0
            return value if finite else {KIND: "float", "bits": _DOUBLE.pack(value).hex()}
        if len(key_path) > _DEEPEST:
            raise TypeError(f"{'.'.join(key_path[:5])}...: nested deeper than {_DEEPEST} levels")
        if kind is list:
            return self._items(value, key_path)
        if isinstance(value, dict):
            return self._mapping(kind, value, key_path)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, key_path)
        if kind in (np.str_, np.bytes_):  # str() and arrays would drop NULs at the end
            plain = str.__str__(value) if kind is np.str_ else bytes(value)
            return {KIND: _NAMES[kind], "is": self.node(plain, key_path)}
        if isinstance(value, (np.ndarray, np.generic)):
            return self._array(value, key_path)
        return self._other(kind, value, key_path)

    def _items(self, values: Any, key_path: tuple[str, ...]) -> list[Any]:
        return [self.node(value, (*key_path, str(i))) for i, value in enumerate(values)]

    def _mapping(self, kind: type[Any], value: dict[Any, Any], key_path: tuple[str, ...]) -> Any:
        if kind is dict and KIND not in value and all(type(key) is str for key in value):
            return {key: self.node(item, (*key_path, key)) for key, item in value.items()}
        name = _NAMES.get(kind)
        more: dict[str, Any] = {}
        if kind is defaultdict:
            factory = cast("defaultdict[Any, Any]", value).default_factory
            made = getattr(factory, "__name__", None)
            if factory is None or _FACTORIES.get(str(made)) is factory:
                name, more = "default", {"makes": made}
        if name is None:
            raise self._cannot(value, key_path)
        items = [
            [
                self.node(key, (*key_path, "key")),
                self.node(item, (*key_path, key if isinstance(key, str) else repr(key))),
            ]
            for key, item in value.items()
        ]
        # Of a module's state: the versions of its classes.
        versions = getattr(value, "_metadata", None)
        if versions is not None and name == "ordered":
            more["metadata"] = self.node(versions, (*key_path, "metadata"))
        return {KIND: name, **more, "items": items}

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
        raw = np.ascontiguousarray(value)
        if isinstance(value, np.generic):
            return {KIND: "scalar", "dtype": kind.str, "bytes": _text(raw.tobytes())}
        key = self._unused(".".join(key_path))
        self.tensors[key] = torch.from_numpy(np.frombuffer(raw.tobytes(), np.uint8).copy())
        return {KIND: "array", "key": key, "dtype": kind.str, "shape": list(value.shape)}

    def _other(self, kind: type[Any], value: Any, key_path: tuple[str, ...]) -> Any:
        name = _NAMES.get(kind)
        if name in _SEQUENCES:
            return {KIND: name, "items": self._items(value, key_path)}
        if name in _PATHS:
            return {KIND: name, "name": str(value)}
        if kind is deque:
            return {KIND: "deque", "most": value.maxlen, "items": self._items(value, key_path)}
        if kind is complex:
            return {KIND: "complex", "bits": struct.pack("<dd", value.real, value.imag).hex()}
        if kind in (bytes, bytearray):
            return {KIND: kind.__name__, "bytes": _text(value)}
        if kind is torch.dtype:
            return {KIND: "dtype", "name": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {KIND: "device", "name": str(value)}
        raise self._cannot(value, key_path)

    def _cannot(self, value: Any, key_path: tuple[str, ...]) -> TypeError:
        kind: type[Any] = type(value)
        spelled = ".".join(key_path) or "itself"
        of = f" of {value.dtype}" if isinstance(value, np.ndarray) else ""
        return TypeError(
            f"state {spelled} is a {kind.__module__}.{kind.__qualname__}{of}: it "
            f"could only be saved as a pickle, which runs code when it is loaded. Give a "
            f"state_dict() of numbers, texts, lists, dicts, arrays and tensors."
        )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
