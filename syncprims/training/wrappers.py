"""Wrappers around models: DDP, FSDP, `torch.compile`, and what they do in a backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unwrap(model: Any, *, keep_torch_compile: bool = False) -> nn.Module:
    """Return the model inside of data-parallel wrappers and, by default, of `torch.compile`."""
    while True:
        inner = None
        if isinstance(model, DistributedDataParallel | nn.DataParallel):
            inner = model.module
        elif not keep_torch_compile:
            inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model  # type: ignore[no-any-return]
        model = inner


def averages_gradients_itself(model: nn.Module) -> bool:
    """Return whether `model` averages its gradients over the ranks, as in DDP and FSDP."""
    return isinstance(model, DistributedDataParallel) or hasattr(
        model, "set_requires_gradient_sync"
    )


def sends_buffers_in_forward(model: Any) -> bool:
    """Return whether DDP copies buffers before each forward pass of `model`."""
    asked = getattr(model, "forward_sync_buffers", getattr(model, "broadcast_buffers", False))
    return bool(asked) and any(True for _ in model.buffers())


@contextlib.contextmanager
def without_gradient_sync(model: Any) -> Generator[None]:
    """In this block a backward pass of the wrapper leaves gradients as they are on this rank."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield
