"""Tensors on accelerators: how they travel, and where they arrive.

A tensor never arrives on its sender's device: eight ranks would crowd the first GPU. It arrives on
the receiver's own, the one it has made current, or else that of its local rank.
"""

from __future__ import annotations

import sys
from typing import Any


def has_devices() -> bool:
    """Tell whether this process may hold tensors on an accelerator."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(
        torch.cuda.is_initialized() or torch.backends.mps.is_available() or torch.xpu.is_available()
    )


def is_on_device(tensor: Any) -> bool:
    """Tell whether a dense tensor has its items on an accelerator."""
    return tensor.device.type not in ("cpu", "meta")


def own_device(kind: str, local_rank: int) -> Any:
    """Return this rank's device of that kind; the CPU if it has none."""
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    found = getattr(torch, kind, None)
    if found is None or not found.is_available():
        return torch.device("cpu")
    if not hasattr(found, "current_device"):
        return torch.device(kind)
    index = found.current_device()
    if index == 0 and 0 < local_rank < found.device_count():
        index = local_rank  # nobody has chosen: one for each
    return torch.device(kind, index)


def portable(obj: Any) -> tuple[str, Any, bool, bool] | None:
    """Return what stands in a pickle for a tensor on a device; None for anything else."""
    import torch

    if not isinstance(obj, torch.Tensor) or not is_on_device(obj):
        return None
    is_parameter = isinstance(obj, torch.nn.Parameter)
    return obj.device.type, obj.detach().cpu(), is_parameter, obj.requires_grad


def arrived(said: tuple[str, Any, bool, bool], local_rank: int) -> Any:
    """Return the tensor that :func:`portable` spoke of, on this rank's own device."""
    import torch

    kind, tensor, is_parameter, requires_grad = said
    here = tensor.to(own_device(kind, local_rank))
    if is_parameter:
        return torch.nn.Parameter(here, requires_grad)
    return here.requires_grad_(requires_grad)
