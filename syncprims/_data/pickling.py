"""Pickles between ranks, in which tensors on devices are replaced.

A plain pickle would restore them on their sender's device.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from . import Value
from .arrays import has_devices, is_on_device, own_device


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._replaced: dict[int, Any] = {}  # by identity: kept, so that no other object has it

    def persistent_id(self, obj: Value) -> Any:
        """Return what replaces a tensor on a device; None for anything else."""
        if not is_on_device(obj):
            return None
        import torch

        number = id(obj)
        if number in self._replaced:  # tied weights stay one tensor
            return number
        self._replaced[number] = obj
        is_parameter = isinstance(obj, torch.nn.Parameter)
        return number, obj.device.type, obj.detach().cpu(), is_parameter, obj.requires_grad


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, local_rank: int) -> None:
        super().__init__(file)
        self._local_rank = local_rank
        self._made: dict[int, Any] = {}  # by the sender's identity

    def persistent_load(self, pid: Any) -> Any:
        import torch

        if isinstance(pid, int):
            return self._made[pid]
        number, kind, tensor, is_parameter, requires_grad = pid
        here = tensor.to(own_device(kind, self._local_rank))
        if is_parameter:
            here = torch.nn.Parameter(here, requires_grad)
        self._made[number] = here.requires_grad_(requires_grad)
        return self._made[number]


def dumps(obj: object) -> bytes:
    """Return `obj` as a pickle."""
    if not has_devices():  # then no part of it needs a look
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    file = io.BytesIO()
    _Pickler(file).dump(obj)
    return file.getvalue()


def loads(data: bytes, local_rank: int) -> Any:
    """Return what :func:`dumps` wrote, its tensors on this rank's own device."""
    return _Unpickler(io.BytesIO(data), local_rank).load()
