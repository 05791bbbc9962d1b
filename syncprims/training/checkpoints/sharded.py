"""Tensors that are spread over ranks (DTensor, FSDP2), and their parts."""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Tell whether a value is a tensor of which this rank has a part."""
    module = sys.modules.get("torch.distributed.tensor")  # if nobody has imported it, nothing is
    return module is not None and isinstance(value, module.DTensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with all its parts; of a sharded one, on all ranks, which all call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def check_spread(name: str, tensor: DTensor) -> None:
    """Accept a tensor whose numbers are where they belong.

    :raises TypeError: if a rank has only its summand of them.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise TypeError(
            f"tensor {name!r} is a DTensor that is not summed up yet ({tensor.placements}): each "
            f"rank has its summand only. Give what its redistribute() returns for other placements"
        )


def part(tensor: DTensor) -> tuple[tuple[int, ...], torch.Tensor]:
    """Return where this rank's part of a tensor begins, and the part."""
    return box(tensor)[0], tensor.to_local()


def box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where this rank's part of a tensor begins, and its shape."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offset), tuple(shape)


def like(target: DTensor, local: torch.Tensor) -> DTensor:
    """Return a tensor spread like `target`, of which `local` is this rank's part."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local.to(target.to_local().device), target.device_mesh, target.placements,
        run_check=False, shape=target.shape, stride=target.stride(),
    )  # fmt: skip


def cut(whole_tensor: torch.Tensor, target: DTensor) -> DTensor:
    """Return a whole tensor spread like `target`. Every rank has the whole: nothing is sent."""
    offset, shape = box(target)
    local = whole_tensor
    for dim, (begin, length) in enumerate(zip(offset, shape, strict=True)):
        local = local.narrow(dim, begin, length) if length else local.narrow(dim, 0, 0)
    return like(target, local.to(target.dtype))
