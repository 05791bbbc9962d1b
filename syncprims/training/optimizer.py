"""An optimizer that steps when its window is full, and clears only what a step has used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from .averaging import average_gradients

_is_profiled = torch.autograd._profiler_enabled  # type: ignore[attr-defined] # pyright: ignore[reportPrivateUsage]

if TYPE_CHECKING:
    from .accumulation import Accumulator
    from .window import Window


class PreparedOptimizer(Optimizer):
    """Stands before an optimizer: `step` and `zero_grad` do nothing between windows.

    Everything else (`state`, `param_groups`, hooks, state dicts) is that of the optimizer itself,
    :attr:`optimizer`.
    """

    def __init__(self, optimizer: Optimizer, accumulator: Accumulator) -> None:
        # Not Optimizer.__init__: there is nothing to hold but the optimizer and its window.
        self.optimizer = optimizer
        self.steps_taken = 0
        self.steps_skipped = 0
        self.step_was_skipped = False  #: the last step met an overflow, on some rank
        self._accumulator = accumulator
        self._inner = _Recorder(optimizer)
        self._used = False  # the gradients, by a step
        self._ready = False  # unscaled, and whole
        # Of earlier micro-batches, where other optimizers' losses reach these parameters, too.
        self._aside: dict[torch.Tensor, torch.Tensor] = {}
        self._put = False
        self._windows: list[Window] = []
        self._known_windows = self._known_groups = -1
        # Somebody's own way to clear is left to do so.
        self._plain = getattr(optimizer.zero_grad, "__func__", None) is Optimizer.zero_grad

    # -- the optimizer's own ------------------------------------------------------------------

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The optimizer's state by parameter."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The optimizer's parameters, in groups."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The optimizer's options."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet: a copy in the making
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"Prepared{self.optimizer!r}"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with another optimizer's state."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        self.optimizer.add_param_group(param_group)

    def train(self) -> None:
        """Switch an optimizer without schedule to training."""
        self.optimizer.train()  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

    def eval(self) -> None:
        """Switch an optimizer without schedule to evaluation."""
        self.optimizer.eval()  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

    # -- at the right time --------------------------------------------------------------------

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters of all groups."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def window(self) -> Window | None:
        """Return the window of these parameters, the last entered if there are many."""
        accumulator, groups = self._accumulator, len(self.optimizer.param_groups)
        if self._known_windows != accumulator.number_of_windows or self._known_groups != groups:
            # Looked for once: it is asked several times per step.
            self._known_windows, self._known_groups = accumulator.number_of_windows, groups
            self._windows = accumulator.windows_of(self.parameters)
        windows = self._windows
        if len(windows) > 1:
            return accumulator.last_entered(windows)
        return windows[0] if windows else None

    @property
    def aside(self) -> list[torch.Tensor]:
        """Gradients of this window that wait outside of ``.grad``."""
        return list(self._aside.values())

    def step(self, closure: Any = None) -> Any:
        """Step if the window is closed; otherwise keep the gradients for the step to come.

        Under fp16 a step whose gradients overflowed on any rank is skipped on all.
        """
        window = self.window()
        if window is not None and not window.sync:
            if self._accumulator.has_several_optimizers:
                self._put_aside()
            return None
        scaled = self._accumulator.precision.scaler is not None
        if scaled or self._put:
            self.ready()
        if scaled:
            self._step_scaled(closure)
            result = None
        else:
            result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
            self.step_was_skipped = False
        self._ready, self._used = False, True
        if window is not None:
            window.spent = True
        if self.step_was_skipped:
            self.steps_skipped += 1
        else:
            self.steps_taken += 1
        return result

    def _step_scaled(self, closure: Any) -> None:
        if closure is not None:
            raise ValueError("under fp16 a step takes no closure: its loss would not be scaled")
        self.step_was_skipped = False
        if any(p.grad is not None for p in self.parameters):
            self._inner.called = False
            self._accumulator.precision.step(self._inner)
            self.step_was_skipped = not self._inner.called

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients that a step has used; those that wait for one stay.

        What other losses have left since this optimizer's last `step` is dropped, as ever.
        """
        if not self._used:
            window = self.window()
            if window is not None and window.begun and (not window.sync or window.count > 1):
                if self._put:
                    for p in self.parameters:
                        p.grad = self._aside.pop(p, None)
                    self._put = False
                return
        if set_to_none and self._plain and not _is_profiled():
            # What torch does, less a mark for its profiler that takes longer than all the rest.
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        self._used = self._ready = self._put = False
        self._aside.clear()

    def ready(self) -> None:
        """Leave in ``.grad`` what the step will use: whole and unscaled. Once per step."""
        if self._ready:
            return
        self._ready = True
        if self._put:
            self._take_back()
        scaler = self._accumulator.precision.scaler
        if scaler is not None and any(p.grad is not None for p in self.parameters):
            if self._accumulator.precision.has_stepped(self._inner):
                self._begin_again(scaler)
            scaler.unscale_(self._inner)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]

    def _put_aside(self) -> None:
        """Keep what this step would have used from losses that are not this optimizer's."""
        for p in self.parameters:
            if p.grad is not None:
                before = self._aside.get(p)
                self._aside[p] = p.grad if before is None else before.add_(p.grad)
                p.grad = None
        self._put = True

    def _take_back(self) -> None:
        """Add what was put aside: averaged here, since the backward pass did not see it."""
        now = {p: p.grad for p in self.parameters}
        for p in self.parameters:
            p.grad = self._aside.pop(p, None)
        average_gradients(p for p in self.parameters if isinstance(p, torch.nn.Parameter))
        for p, gradient in now.items():
            if gradient is not None:
                p.grad = gradient if p.grad is None else p.grad.add_(gradient)
        self._put = False

    def _begin_again(self, scaler: torch.amp.GradScaler) -> None:
        """Let this optimizer step for a second time before the window ends."""
        before = scaler.get_scale()
        self._accumulator.precision.settle()
        after = scaler.get_scale()
        there = [p.grad for p in self.parameters if p.grad is not None]
        if there and after != before:
            torch._foreach_mul_(there, after / before)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


class _Recorder:
    """What a scaler steps: it tells whether it did, and hides that fused kernels could skip."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.called = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def step(self) -> Any:
        self.called = True
        return self._optimizer.step()
