"""Pickles between ranks, in which tensors on devices are replaced.

A plain pickle would restore them on their sender's device. For an object that cannot be pickled,
:func:`find_part` finds which part of it is the reason.
"""

from __future__ import annotations

import io
import pickle
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from syncprims._protocol.threads import is_from_signal_handler

from .arrays import has_devices, is_dict, is_list_or_tuple, is_on_device, own_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Parts = Callable[[Any, str], Iterator[tuple[str, object]]]

_DEEPEST = 50  # parts of parts


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        """Return what replaces a tensor on a device; None for anything else."""
        if not is_on_device(obj):
            return None
        import torch

        is_parameter = isinstance(obj, torch.nn.Parameter)
        return obj.device.type, obj.detach().cpu(), is_parameter, obj.requires_grad


class _Unpickler(pickle.Unpickler):
    local_rank: int

    def persistent_load(self, pid: Any) -> Any:
        import torch

        kind, tensor, is_parameter, requires_grad = pid
        here = tensor.to(own_device(kind, self.local_rank))
        if is_parameter:
            return torch.nn.Parameter(here, requires_grad)
        return here.requires_grad_(requires_grad)


def dumps(obj: object) -> bytes:
    """Return `obj` as a pickle."""
    if not has_devices():  # then no part of it needs a look
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return file.getvalue()


def loads(data: bytes, local_rank: int) -> Any:
    """Return what :func:`dumps` wrote, its tensors on this rank's own device."""
    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.local_rank = local_rank
    return unpickler.load()


# -- why an object has no pickle -------------------------------------------------------------------


def find_part(obj: object, is_bad: Callable[[object], bool], parts_of: Parts) -> tuple[str, object]:
    """Return the smallest part of `obj` that is bad, as ``obj['model'].lock``, and the part."""
    where, part = "obj", obj
    seen: set[int] = set()
    while len(seen) < _DEEPEST:
        seen.add(id(part))
        inside = parts_of(part, where)
        found = next((one for one in inside if id(one[1]) not in seen and is_bad(one[1])), None)
        if found is None:
            break
        where, part = found
    return where, part


def error_of(obj: object) -> Exception | None:
    """Return what pickle raises for `obj`, or None."""
    try:
        dumps(obj)
    except Exception as error:  # pickle calls the object's own methods: they may raise anything
        if is_from_signal_handler(error):
            raise
        return error
    return None


def fails(obj: object) -> bool:
    """Return whether `obj` cannot be pickled."""
    return error_of(obj) is not None


def items(obj: Any, where: str) -> Iterator[tuple[str, object]]:
    """Return the items of a container, and where they are."""
    if is_dict(obj):
        for key, value in obj.items():
            yield f"a key of {where}", key
            yield f"{where}[{key!r}]", value
    elif is_list_or_tuple(obj):
        for index, item in enumerate(obj):
            yield f"{where}[{index}]", item
    elif isinstance(obj, (set, frozenset)):
        for item in cast("set[object]", obj):
            yield f"an item of {where}", item


def parts(obj: Any, where: str) -> Iterator[tuple[str, object]]:
    """Return the items and attributes of an object, and where they are."""
    yield from items(obj, where)
    if not isinstance(obj, type | ModuleType):
        for name, value in getattr(obj, "__dict__", {}).items():
            yield f"{where}.{name}", value
