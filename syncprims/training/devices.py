"""The device of this rank, and how batches are moved to it."""

from __future__ import annotations

from typing import Any

import torch

from syncprims import get_local_rank
from syncprims._data.arrays import own_device

from .pytree import map_tensors


def rank_device(*, cpu: bool = False) -> torch.device:
    """Return this rank's device, and make it the current one; the CPU if there is no accelerator.

    Which one, :func:`syncprims.interface.own_device_index` decides. With `cpu` no accelerator is
    asked for, nor initialized.
    """
    available = not cpu and torch.accelerator.is_available()
    found = torch.accelerator.current_accelerator() if available else None
    if found is None:
        return torch.device("cpu")
    device: torch.device = own_device(found.type, get_local_rank())
    module: Any = getattr(torch, device.type)
    if hasattr(module, "set_device"):  # whatever asks torch for the current device agrees
        module.set_device(device)
    return device


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """Return `batch` with its tensors on `device`, in lists, tuples, mappings and dataclasses.

    Any other object in it that has ``.to(device)`` is moved by that method.
    """

    def move(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.to(device, non_blocking=non_blocking)
        return part.to(device)

    return map_tensors(move, batch, _can_move)


def _can_move(part: Any) -> bool:
    return callable(getattr(part, "to", None)) and not isinstance(part, type)
