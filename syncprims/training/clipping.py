"""Clipping of whole, unscaled, synchronized gradients; between windows, of nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad_norm_ as torch_norm_
from torch.nn.utils import clip_grad_value_ as torch_value_

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .accumulation import Accumulator

    Parameters = torch.Tensor | Iterable[torch.Tensor]


def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    accumulator: Accumulator | None = None,
) -> torch.Tensor:
    """Scale the gradients down to `max_norm` and return their norm before.

    With `accumulator`, as its method of the same name; without, as torch's.
    """
    if accumulator is not None:
        return clip_norm_(accumulator, parameters, max_norm, norm_type)
    return torch_norm_(parameters, max_norm, norm_type)


def clip_grad_value_(
    parameters: Parameters, clip_value: float, *, accumulator: Accumulator | None = None
) -> None:
    """Cut every gradient off at plus and minus `clip_value`.

    With `accumulator`, as its method of the same name; without, as torch's.
    """
    if accumulator is not None:
        clip_value_(accumulator, parameters, clip_value)
    else:
        torch_value_(parameters, clip_value)


def clip_norm_(
    accumulator: Accumulator, parameters: Parameters, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Clip by norm at the end of a window; see :meth:`Accumulator.clip_grad_norm_`."""
    chosen = _listed(parameters)
    window = accumulator.window_of(chosen)
    if window is not None and not window.sync:
        return window.norm if window.norm is not None else torch.zeros(())
    _unscale(accumulator, chosen)
    norm: torch.Tensor = torch_norm_(chosen, max_norm, norm_type)
    if window is not None:
        window.norm = norm
    return norm


def clip_value_(accumulator: Accumulator, parameters: Parameters, clip_value: float) -> None:
    """Clip by value at the end of a window; see :meth:`Accumulator.clip_grad_value_`."""
    chosen = _listed(parameters)
    window = accumulator.window_of(chosen)
    if window is None or window.sync:
        _unscale(accumulator, chosen)
        torch_value_(chosen, clip_value)


def _listed(parameters: Parameters) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _unscale(accumulator: Accumulator, parameters: list[torch.Tensor]) -> None:
    """Make ready what the optimizers of these parameters will use, and of no others."""
    wanted = {id(p) for p in parameters}
    owners: list[Any] = [
        optimizer
        for optimizer in accumulator.optimizers
        if any(id(p) in wanted for p in optimizer.parameters)
    ]
    if not owners and accumulator.precision.scaler is not None and parameters:
        raise ValueError(
            "under fp16 gradients are scaled, and no prepared optimizer owns these parameters; "
            "prepare the optimizer before clipping"
        )
    for optimizer in owners:
        optimizer.ready()
