"""Gradient accumulation that is right: at the tail, with weights, with several models."""

from __future__ import annotations

import contextlib
import operator
from typing import TYPE_CHECKING, Any

import torch

from syncprims import get_world_size

from .clipping import clip_norm_, clip_value_
from .precision import Precision
from .tracking import OpenLoaders
from .window import Window, syncs_itself, without_sync

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from .optimizer import PreparedOptimizer
    from .schedule import PreparedScheduler


class Accumulator:
    """Makes one step out of `steps` micro-batches, exactly as one large batch would.

    ``with accumulate(model):`` holds a micro-batch. After the last one of a window the gradients
    are the mean over its micro-batches and over all ranks; until then prepared optimizers do not
    step. A window also closes with the last batch of a prepared loader, or by :meth:`flush`, and is
    then scaled by the micro-batches it really holds. Models that are given together share a window;
    windows of different models, and different accumulators, do not disturb each other. Without
    `sync_with_dataloader` the end of a loader closes nothing.

    :raises ValueError: if `steps` is not positive; TypeError if it is no whole number.
    """

    def __init__(
        self,
        steps: int = 1,
        *,
        precision: Precision | None = None,
        sync_with_dataloader: bool = True,
    ) -> None:
        self.steps = steps
        self.precision = precision or Precision("no")
        self.sync_with_dataloader = sync_with_dataloader  #: a loader's last batch closes a window
        self.loaders = OpenLoaders()  #: prepared loaders that are being iterated
        self.optimizers: list[PreparedOptimizer] = []  #: that step with this accumulator
        self.models: list[nn.Module] = []  #: prepared ones: of a block that names none
        self.schedules: list[PreparedScheduler] = []  #: that follow these optimizers
        self.meet: Callable[[str, Any], list[Any]] | None = None  #: of ranks with unequal inputs
        self.first = 0  #: the lowest rank that still trains
        self._windows: dict[tuple[nn.Module, ...], Window] = {}
        self._recent: list[Window] = []  # the last entered comes last
        self._unsynced: list[nn.Module] = []
        self._loaded: list[dict[str, Any]] = []

    @property
    def steps(self) -> int:
        """Micro-batches per step; a new number counts from the next window on."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        if operator.index(steps) < 1:
            raise ValueError(f"steps={steps!r}: a window holds a whole number of micro-batches")
        self._steps = steps

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch closes its window, so that a step follows."""
        return self._recent[-1].sync if self._recent else True

    @property
    def has_several_optimizers(self) -> bool:
        """Whether one optimizer's loss may reach another's parameters."""
        return len(self.optimizers) > 1

    # -- micro-batches --------------------------------------------------------------------------

    def accumulate(self, *models: nn.Module) -> Window:
        """Return a context manager around one micro-batch of `models`, prepared ones by default.

        :raises ValueError: if there are no models.
        :raises RuntimeError: if the block is entered inside of itself.
        """
        recent = self._recent
        if recent and recent[-1].given == models:
            return recent[-1]
        window = self._windows.get(models)
        if window is None:
            return self._new_window(models)
        recent.remove(window)
        recent.append(window)
        return window

    __call__ = accumulate

    def _new_window(self, models: tuple[nn.Module, ...]) -> Window:
        chosen = models or self.models
        if not chosen:
            raise ValueError("accumulate() takes the models whose gradients add up, or prepare one")
        window = Window(chosen, models, self)
        self._windows[models] = window
        self._recent.append(window)
        if self._loaded:
            window.load_state_dict(self._loaded.pop(0))
        return window

    def opens(self, window: Window) -> None:
        """Let the scaler choose a new factor, unless gradients wait that have the old one."""
        others = (w for w in self._recent if w is not window)
        if all(w.sync or not w.count for w in others):
            self.precision.settle()

    def backward(self, loss: torch.Tensor, weight: float | None = None, **options: Any) -> None:
        """Add the gradients of `loss` to the window; with its last micro-batch, they are its mean.

        With `weight`, `loss` is the sum over that many items, and the window's result the mean over
        all items of all its micro-batches on all ranks. `options` are torch's. Outside of any
        block, `loss` is a window of its own, divided by :attr:`steps` as in a loop that counts by
        itself.

        :raises ValueError: if a window mixes losses with and without a weight.
        """
        window = self._recent[-1] if self._recent else None
        if window is None or (window.spent and not window.inside):
            self._backward_alone(loss, weight, options)
            return
        if self.meet is not None:
            self.meet("backward", weight is not None)
        number = window.weigh(weight)
        if not window.sync:
            self._add(loss, 1.0, options)
            return
        factor = window.factor(number)
        if window.count > 1:
            window.settle(factor, self._aside(window))
        self._add(loss, factor, options)
        if not window.alone:
            window.average(skip=self._unsynced)

    def _backward_alone(
        self, loss: torch.Tensor, weight: float | None, options: dict[str, Any]
    ) -> None:
        window = Window(self.models, (), self)
        window.open()
        window.count = 1
        number = window.weigh(weight)
        self._add(loss, window.factor(number) if weight is not None else 1.0 / self.steps, options)
        window.average(skip=self._unsynced)

    def _add(self, loss: torch.Tensor, factor: float, options: dict[str, Any]) -> None:
        """Add the gradients of `loss` times `factor`."""
        if self.precision.scaler is not None:
            loss = self.precision.scaler.scale(loss)
        if factor == 1.0:
            loss.backward(**options)  # type: ignore[no-untyped-call]
        elif loss.ndim or "gradient" in options:
            (loss * factor).backward(**options)  # type: ignore[no-untyped-call]
        else:  # the factor as the loss's own gradient: the same numbers, and two kernels less
            loss.backward(torch.full_like(loss, factor), **options)  # type: ignore[no-untyped-call]

    def tell(self, window: Window, turn: str, what: Any) -> list[Any]:
        """Tell the others of a turn, where ranks have unequal inputs; return what they say."""
        assert self.meet is not None
        return self.meet(turn, (self._name_of(window), what))

    @property
    def windows(self) -> list[Window]:
        """All windows, in the order in which they were first entered."""
        return list(self._windows.values())

    def _name_of(self, window: Window) -> int | tuple[int, ...]:
        """Return what other ranks know `window` by: its prepared models, else its number."""
        prepared = {id(model): i for i, model in enumerate(self.models)}
        if all(id(model) in prepared for model in window.given):
            return tuple(prepared[id(model)] for model in window.given)
        return self.windows.index(window)

    def window_named(self, name: int | tuple[int, ...]) -> Window:
        """Return the window that another rank calls `name`, also if this one never entered it."""
        if not isinstance(name, int):
            return self.accumulate(*(self.models[i] for i in name))
        if name >= len(self._windows):
            raise ValueError(
                "join_uneven_inputs(): a rank without any batch cannot know models that nobody "
                "prepared; prepare them"
            )
        return self.windows[name]

    def follow(self, window: Window, *, weighted: bool) -> None:
        """Take part in another rank's backward pass, with nothing of one's own."""
        number = window.weigh(0.0 if weighted else None)
        if window.sync:
            window.settle(window.factor(number), self._aside(window))
            window.average()

    def flush(self) -> bool:
        """Close windows that are not full: synchronize, scale, and let the next step through.

        For loops over iterators that nobody prepared, after the last batch. Returns whether there
        was anything on any rank; if not, steps stay closed. Collective.
        """
        if not self._recent and self.models:
            self._new_window(())
        return True in [
            window.close(self._aside(window)) for window in self.windows
        ]  # each of them

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Generator[None]:
        """Leave `model`'s gradients unsynchronized by backward passes in this block."""
        self._unsynced.append(model)
        try:
            with without_sync(model) if syncs_itself(model) else contextlib.nullcontext():
                yield
        finally:
            self._unsynced.remove(model)

    # -- gradients ------------------------------------------------------------------------------

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
    ) -> torch.Tensor:
        """Scale the gradients down to `max_norm`; return their norm before, alike on all ranks.

        Unscaled first, once per optimizer and step. Between windows nothing happens, and the last
        window's norm is returned (zero before the first).
        """
        return clip_norm_(self, parameters, max_norm, norm_type)

    def clip_grad_value_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float
    ) -> None:
        """Cut every gradient off at plus and minus `clip_value`; between windows, nothing."""
        clip_value_(self, parameters, clip_value)

    def window_of(self, parameters: Sequence[torch.Tensor]) -> Window | None:
        """Return the window that the parameters' gradients belong to, the last entered if many."""
        ids = {id(p) for p in parameters}
        for window in reversed(self._recent):
            if window.holds(ids):
                return window
        return None

    def windows_of(self, parameters: Sequence[torch.Tensor]) -> list[Window]:
        """Return all windows that hold gradients of these parameters."""
        ids = {id(p) for p in parameters}
        return [window for window in self._recent if window.holds(ids)]

    @property
    def number_of_windows(self) -> int:
        """How many there are by now."""
        return len(self._recent)

    def last_entered(self, windows: Sequence[Window]) -> Window:
        """Return the one of `windows` that was entered last."""
        return next(window for window in reversed(self._recent) if window in windows)

    def _aside(self, window: Window) -> list[torch.Tensor]:
        return [
            gradient
            for optimizer in self.optimizers
            if window.holds({id(p) for p in optimizer.parameters})
            for gradient in optimizer.aside
        ]

    # -- preparing, saving ------------------------------------------------------------------------

    def prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Return `optimizer`, stepping and clearing only when a window is closed."""
        from .optimizer import PreparedOptimizer

        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        prepared = PreparedOptimizer(optimizer, self)
        self.optimizers.append(prepared)
        return prepared

    def forget(self) -> None:
        """Let go of all models, optimizers and windows."""
        self.optimizers.clear()
        self.models.clear()
        self.schedules.clear()
        self._windows.clear()
        self._recent.clear()
        self._loaded.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what windows hold that are not full, with this rank's own gradients."""
        return {
            "world_size": get_world_size(),
            "windows": [window.state_dict() for window in self._windows.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue: windows are met again in the order in which they were first entered.

        :raises ValueError: if a window is half full and the world has another size.
        """
        windows = state["windows"]
        half = any(window["count"] for window in windows)
        if half and state["world_size"] != get_world_size():
            raise ValueError(
                f"saved in the middle of a window on {state['world_size']} ranks, and there are "
                f"{get_world_size()}: save where sync_gradients is true, or use as many ranks"
            )
        self._loaded = list(windows)
        for window in self._windows.values():
            if self._loaded:
                window.load_state_dict(self._loaded.pop(0))
