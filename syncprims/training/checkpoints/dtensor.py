"""Tensors that are distributed over ranks (DTensor, FSDP2), and the shard of this rank."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # not imported: there are none
    return module is not None and isinstance(value, module.DTensor)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with all its shards. Collective for a DTensor."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def check_placements(name: str, tensor: DTensor) -> None:
    """Raise if the numbers of a tensor are not final.

    :raises TypeError: if a placement is `Partial`: each rank has only a summand.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise TypeError(
            f"tensor {name!r} is a DTensor that is not summed up yet ({tensor.placements}): each "
            f"rank has its summand only. Give what its redistribute() returns for other placements"
        )


def shard_region(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offset of this rank's shard in a tensor, and its shape."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offset), tuple(shape)


def from_shard(local: torch.Tensor, target: DTensor) -> DTensor:
    """Return a tensor distributed like `target`, of which `local` is this rank's shard."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local.to(target.to_local().device), target.device_mesh, target.placements,
        run_check=False, shape=target.shape, stride=target.stride(),
    )  # fmt: skip


def distribute(full: torch.Tensor, target: DTensor) -> DTensor:
    """Return a tensor distributed like `target`. Every rank has `full`: nothing is sent."""
    offset, shape = shard_region(target)
    local = full
    for dim, (begin, length) in enumerate(zip(offset, shape, strict=True)):
        local = local.narrow(dim, begin if length else 0, length)
    return from_shard(local.to(target.dtype), target)
