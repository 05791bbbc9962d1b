"""Mixed precision: autocast and, for fp16, a loss scaler."""

from __future__ import annotations

import contextlib
import functools
import warnings
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

from syncprims import ConfigurationError, current

from .private_names import NAMES
from .pytree import map_tensors

M = TypeVar("M", bound="nn.Module")
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Precision:
    """The precision of a job: ``"no"`` (the model's own), ``"bf16"``, or ``"fp16"`` with a scaler.

    If `mode` is None, ``SYNCPRIMS_MIXED_PRECISION`` is used, else ``"no"``. `scaler` holds options
    of :class:`torch.amp.GradScaler`.

    :raises ConfigurationError: for an unknown mode, and if the device has no such autocast or
        scaler: there is no silent fallback to full precision.
    """

    def __init__(
        self,
        mode: str | None = None,
        device: torch.device | str = "cpu",
        *,
        scaler: dict[str, Any] | None = None,
    ) -> None:
        source = "mixed_precision"
        if mode is None:
            mode, source = current().settings.mixed_precision or "no", "SYNCPRIMS_MIXED_PRECISION"
        if mode not in ("no", "fp16", "bf16"):
            raise ConfigurationError(f"{source}={mode!r}: it takes 'no', 'fp16' or 'bf16'")
        self.mode = mode
        self.device: torch.device = torch.device(device)
        self.scaler: torch.amp.GradScaler | None = None  #: of the loss; fp16 only
        self._stepped: set[int] = set()
        if mode != "no":
            _check_autocast(self.device, _DTYPES[mode], source, mode)
        if mode == "fp16":
            self.scaler = torch.amp.GradScaler(self.device.type, **(scaler or {}))
            if not self.scaler.is_enabled():
                what = f"{source}='fp16': torch has no loss scaler on {self.device.type}"
                raise ConfigurationError(f"{what}; choose 'bf16' or 'no'")

    def __repr__(self) -> str:
        return f"Precision({self.mode!r}, {str(self.device)!r})"

    def autocast(
        self, enabled: bool = True, cache_enabled: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context in which forward passes compute in this precision, if `enabled`."""
        if self.mode == "no":
            return contextlib.nullcontext()
        dtype = _DTYPES[self.mode]
        return torch.autocast(self.device.type, dtype, enabled, cache_enabled)

    def apply(self, model: M, **options: object) -> M:
        """Make the forward pass of `model` autocast and return float32; return `model`.

        `options` are those of :meth:`autocast`.
        """
        if self.mode != "no" and not isinstance(model.forward, _AutocastForward):
            options |= {"device_type": self.device.type, "dtype": _DTYPES[self.mode]}
            model.forward = _AutocastForward(model, options)
        return model

    def step(self, optimizer: Any) -> None:
        """Step `optimizer`, unless its gradients overflowed; :meth:`update_scaler` must follow."""
        assert self.scaler is not None
        self.scaler.step(optimizer)
        self._stepped.add(id(optimizer))

    def has_stepped(self, optimizer: object) -> bool:
        """Return whether `optimizer` has stepped since the scaler was last updated."""
        return id(optimizer) in self._stepped

    def update_scaler(self) -> None:
        """Update the scaler once for all optimizers that have stepped since the last update.

        Several optimizers share a factor, which must not change between their steps.
        """
        if self.scaler is not None and self._stepped:
            self._stepped.clear()
            self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state; empty without one."""
        self.update_scaler()
        return self.scaler.state_dict() if self.scaler is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the scaler's state of a saved job.

        :raises ConfigurationError: if only one of the two jobs has a loss scaler.
        """
        self._check_state(state)
        if self.scaler is not None:
            self.scaler.load_state_dict(state)
            # Steps since its last update are not those of the saved job.
            self._stepped.clear()
            forget_gradients(self)

    def _check_state(self, state: dict[str, Any]) -> None:
        if bool(state) != (self.scaler is not None):
            saved = f"the saved job ran {'with' if state else 'without'} a loss scaler"
            raise ConfigurationError(f"{saved}: resume with the same mixed_precision")
        for key in self.scaler.state_dict() if self.scaler is not None else ():
            float(state[key])


def forget_gradients(precision: Precision) -> None:
    """Forget which optimizers have unscaled gradients: others take their place."""
    precision.update_scaler()
    if precision.scaler is not None:
        NAMES.of(precision.scaler, "GradScaler._per_optimizer_states").clear()


class _AutocastForward:
    """A model's forward method, in half precision inside; its results are float32.

    It is an attribute of the instance, so it is pickled and copied with the model.
    """

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        self.before = model.forward
        self._options = options
        functools.update_wrapper(self, self.before, updated=())

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Return the result of the forward pass, half precision converted to float32."""
        with torch.autocast(**self._options):
            result = self.before(*args, **kwargs)
        return map_tensors(_to_float32, result)


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if half else tensor


def remove_autocast(model: nn.Module) -> None:
    """Undo :meth:`Precision.apply`."""
    if isinstance(model.__dict__.get("forward"), _AutocastForward):
        del model.__dict__["forward"]


def _check_autocast(device: torch.device, dtype: torch.dtype, source: str, mode: str) -> None:
    try:
        # Some devices only warn, and compute in full precision.
        with warnings.catch_warnings(action="error"), torch.autocast(device.type, dtype=dtype):
            possible = torch.is_autocast_enabled(device.type)
    except (RuntimeError, Warning):
        possible = False
    if not possible:
        what = f"{source}={mode!r}: torch has no autocast to {dtype} on {device.type}"
        raise ConfigurationError(f"{what}; choose another precision or device")
