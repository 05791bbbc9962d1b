"""In which numbers a model computes: full, or half with autocast and, for fp16, a loss scaler."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import torch

from syncprims import ConfigurationError, current

from .devices import map_tensors

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn

M = TypeVar("M", bound="nn.Module")
Mode = Literal["no", "fp16", "bf16"]
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Precision:
    """The numbers of one job: ``"no"`` (as the model is), ``"bf16"``, or ``"fp16"`` with a scaler.

    Without a `mode`, ``SYNCPRIMS_MIXED_PRECISION`` decides, else ``"no"``. `scaler` holds options
    of :class:`torch.amp.GradScaler`.

    :raises ConfigurationError: for an unknown mode, and where the device has no such autocast or
        scaler: nothing falls back to full precision in silence.
    """

    def __init__(
        self,
        mode: str | None = None,
        device: torch.device | str = "cpu",
        *,
        scaler: dict[str, Any] | None = None,
    ) -> None:
        said = "mixed_precision"
        if mode is None:
            mode, said = _from_environment()
        if mode not in ("no", "fp16", "bf16"):
            raise ConfigurationError(f"{said}={mode!r}: it takes 'no', 'fp16' or 'bf16'")
        self.mode: Mode = cast("Mode", mode)  # pyright: ignore[reportUnnecessaryCast]
        self.device = torch.device(device)
        self.scaler: torch.amp.GradScaler | None = None  #: of the loss; fp16 only
        self._stepped: set[int] = set()
        if mode != "no":
            _check_autocast(self.device, _DTYPES[mode], said, mode)
        if mode == "fp16":
            self.scaler = _make_scaler(self.device, said, scaler or {})

    def __repr__(self) -> str:
        return f"Precision({self.mode!r}, {str(self.device)!r})"

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context in which forward passes compute in this precision."""
        if self.mode == "no":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=_DTYPES[self.mode])

    def apply(self, model: M) -> M:
        """Let `model` compute in this precision by itself and return float32; return `model`."""
        if self.mode != "no" and not isinstance(model.forward, AutocastForward):
            model.forward = AutocastForward(model, self.device.type, _DTYPES[self.mode])
        return model

    def step(self, optimizer: Steppable) -> None:
        """Let `optimizer` step, unless its gradients overflowed; :meth:`settle` is then due."""
        assert self.scaler is not None
        self.scaler.step(optimizer)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
        self._stepped.add(id(optimizer))

    def has_stepped(self, optimizer: Steppable) -> bool:
        """Tell whether `optimizer` has stepped since the scaler was last updated."""
        return id(optimizer) in self._stepped

    def settle(self) -> None:
        """Update the scaler once for all optimizers that have stepped since the last time.

        Several optimizers share a factor: it must not change between their steps.
        """
        if self.scaler is not None and self._stepped:
            self._stepped.clear()
            self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state; empty without one."""
        self.settle()
        return self.scaler.state_dict() if self.scaler is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with a scaler's state.

        :raises ConfigurationError: if the state is of a job with another precision.
        """
        if bool(state) != (self.scaler is not None):
            saved = "with" if state else "without"
            raise ConfigurationError(
                f"the saved job ran {saved} a loss scaler, this one is {self.mode!r}; resume with "
                f"the same mixed_precision"
            )
        if self.scaler is not None:
            self.scaler.load_state_dict(state)


class Steppable(Protocol):
    """What a scaler needs of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameters, in groups."""
        ...

    def step(self) -> Any:
        """Move the parameters."""
        ...


class AutocastForward:
    """A model's forward, in half precision inside and float32 outside.

    Stands in for the method on the instance, so it is pickled and copied with the model.
    """

    def __init__(self, model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        self.before = model.forward
        self._device_type = device_type
        self._dtype = dtype
        functools.update_wrapper(self, self.before, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the forward pass's result, half precision widened."""
        with torch.autocast(self._device_type, dtype=self._dtype):
            result = self.before(*args, **kwargs)
        return map_tensors(_widened, result)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if half else tensor


def plain_forward(model: nn.Module) -> None:
    """Take an autocast forward off `model` again."""
    if isinstance(model.__dict__.get("forward"), AutocastForward):
        del model.__dict__["forward"]


def _from_environment() -> tuple[str, str]:
    return current().settings.mixed_precision or "no", "SYNCPRIMS_MIXED_PRECISION"


def _check_autocast(device: torch.device, dtype: torch.dtype, said: str, mode: str) -> None:
    possible = torch.amp.autocast_mode.is_autocast_available(device.type)
    if possible and device.type == "cuda" and dtype is torch.bfloat16:
        possible = torch.cuda.is_bf16_supported()
    if possible:
        import warnings

        with warnings.catch_warnings(record=True) as said_by_torch:  # it warns, and then goes on
            warnings.simplefilter("always")
            with torch.autocast(device.type, dtype=dtype):
                possible = torch.is_autocast_enabled(device.type)
        possible = possible and not said_by_torch
    if not possible:
        raise ConfigurationError(
            f"{said}={mode!r}: torch {torch.__version__} has no autocast to {dtype} on "
            f"{device.type}; choose another precision or device"
        )


def _make_scaler(device: torch.device, said: str, options: dict[str, Any]) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler(device.type, **options)
    if not scaler.is_enabled():
        raise ConfigurationError(
            f"{said}='fp16': torch has no working loss scaler on {device.type}, and fp16 without "
            f"one loses small gradients; choose 'bf16' or 'no'"
        )
    return scaler
