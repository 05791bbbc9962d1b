"""Pickles between ranks, in which tensors on devices are replaced.

A plain pickle would restore them on their sender's device.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from .arrays import has_devices, is_on_device, own_device


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
