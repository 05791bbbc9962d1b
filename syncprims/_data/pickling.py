"""Pickles between ranks, in which tensors on devices are replaced.

A plain pickle would restore them on their sender's device.
"""

from __future__ import annotations

import io
import pickle
from functools import partial
from typing import Any

from . import Value
from .arrays import has_devices, is_on_device, own_device


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Value) -> Any:
        """Return how a tensor on a device is made again; of anything else, pickle knows it."""
        if not is_on_device(obj):
            return NotImplemented
        import torch

        is_parameter = isinstance(obj, torch.nn.Parameter)
        return _place, (obj.device.type, obj.detach().cpu(), is_parameter, obj.requires_grad)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, local_rank: int) -> None:
        super().__init__(file)
        self._local_rank = local_rank

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return partial(found, self._local_rank) if found is _place else found


def _place(local_rank: int, kind: str, tensor: Any, is_parameter: bool, requires_grad: bool) -> Any:
    """Return a tensor on this rank's own device of this kind."""
    import torch

    here = tensor.to(own_device(kind, local_rank))
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
    return _Unpickler(io.BytesIO(data), local_rank).load()
