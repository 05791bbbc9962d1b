"""Gradient accumulation that is exact: at the tail, with weights, several models, uneven inputs."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as torch_clip_norm_
from torch.nn.utils import clip_grad_value_ as torch_clip_value_
from torch.optim import Optimizer

from syncprims import all_gather, all_reduce, broadcast, get_rank, get_world_size

from .accumulation_window import (
    AccumulationWindow,
    WindowSet,
    averages_gradients_itself,
    check_joinable,
    parameters_of,
    with_gradient_sync,
    without_gradient_sync,
)
from .gradient_sync import broadcast_model
from .optimizer import PreparedOptimizer, PreparedScheduler
from .precision import Precision

Parameters = torch.Tensor | Iterable[torch.Tensor]


class Accumulator:
    """Makes one step of `steps` micro-batches, with the gradients of one large batch.

    ``with accumulate(model):`` holds a micro-batch. After the last one of a window the gradients
    are the mean over its micro-batches and over all ranks; until then prepared optimizers do not
    step. A window also closes with the last batch of a prepared loader, or by :meth:`flush`, and is
    then scaled by the micro-batches that it holds. Models that are given together share a window;
    windows of different models, and different accumulators, are independent. Without
    `sync_with_dataloader` the end of a loader closes nothing. With `sync_each_batch` gradients are
    averaged over the ranks after each micro-batch, with the same result at the end. With
    `divide_by_steps` every mean loss is divided by `steps` at once, as in Accelerate: also where a
    window holds fewer.

    A plain ``loss.backward()`` averages over the ranks, too, except in a block that closes no
    window. It does not count as a micro-batch, and its loss is not scaled.

    :raises ValueError: if `steps` is not positive; TypeError if it is not a whole number.
    """

    def __init__(
        self,
        steps: int = 1,
        *,
        precision: Precision | None = None,
        sync_with_dataloader: bool = True,
        sync_each_batch: bool = False,
        divide_by_steps: bool = False,
    ) -> None:
        self.precision = precision or Precision("no")
        self.windows = WindowSet(
            steps,
            self.precision,
            sync_with_dataloader=sync_with_dataloader,
            sync_each_batch=sync_each_batch,
            divide_by_steps=divide_by_steps,
        )
        self.loaders = self.windows.loaders  #: prepared loaders that are being iterated
        self.models = self.windows.models  #: prepared models, for a block that names none
        self.optimizers: list[PreparedOptimizer] = []  #: that step with this accumulator
        self.schedules: list[PreparedScheduler] = []  #: that follow these optimizers
        self._entered = self.windows.entered
        self.steps = steps

    @property
    def steps(self) -> int:
        """Micro-batches per step; a new number counts from the next window on."""
        return self.windows.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        if operator.index(steps) < 1:
            raise ValueError(f"steps={steps!r}: a window holds a whole number of micro-batches")
        self.windows.steps = steps

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch closes its window, so that a step follows."""
        return self._entered[-1].sync if self._entered else True

    @sync_gradients.setter
    def sync_gradients(self, sync: bool) -> None:
        window = self._entered[-1] if self._entered else self.windows.get(())
        window.sync = bool(sync)

    # -- micro-batches --------------------------------------------------------------------------

    def accumulate(self, *models: nn.Module) -> AccumulationWindow:
        """Return a context manager around one micro-batch of `models`, prepared ones by default.

        :raises ValueError: if there are no models.
        :raises RuntimeError: if the block is entered inside of itself.
        """
        entered = self._entered
        if entered and entered[-1].given == models:
            return entered[-1]
        return self.windows.get(models)

    __call__ = accumulate

    def backward(self, loss: torch.Tensor, weight: float | None = None, **options: Any) -> None:
        """Add the gradients of `loss` to the window; with its last micro-batch, they are its mean.

        With `weight`, `loss` is the sum over that many items, and the window's result the mean over
        all items of all its micro-batches on all ranks. `options` are those of torch. Outside of
        any block, `loss` is a window of its own, divided by :attr:`steps`, as a loop that counts by
        itself expects.

        :raises ValueError: if a window mixes losses with and without a weight.
        """
        window = self._entered[-1] if self._entered else None
        if window is None or (window.stepped and not window.inside):
            self._backward_alone(loss, weight, options)
            return
        windows = self.windows
        if windows.announce is not None:
            windows.announce("backward", weight is not None)
        number = window.add_weight(weight)
        if not window.sync:
            early = windows.divide_by_steps and weight is None
            self._add(loss, 1.0 / windows.steps if early else 1.0, options)
        else:
            factor = window.factor(number)
            if window.count > 1:
                window.scale_earlier(factor)
            self._add(loss, factor, options)
        if window.averages and not window.alone:
            window.average(skip=windows.unsynced)

    def _backward_alone(
        self, loss: torch.Tensor, weight: float | None, options: dict[str, Any]
    ) -> None:
        """Add the gradients of a loss outside of any block: it is a window of its own."""
        window = AccumulationWindow(self.models, (), self.windows)
        window.open()
        window.count = 1
        number = window.add_weight(weight)
        factor = 1.0 / self.steps
        if weight is not None:
            if self.windows.announce is not None:
                self.windows.announce("weight", None)
            factor = window.factor(number)
        self._add(loss, factor, options)
        unsynced = self.windows.unsynced
        self.windows.average([m for m in self.models if not any(m is one for one in unsynced)])

    def _add(self, loss: torch.Tensor, factor: float, options: dict[str, Any]) -> None:
        """Add the gradients of `loss` times `factor`."""
        watch = self.windows.watch
        watch.paused = True
        try:
            self._run_backward(loss, factor, options)
        finally:
            watch.paused = False

    def _run_backward(self, loss: torch.Tensor, factor: float, options: dict[str, Any]) -> None:
        if self.precision.scaler is not None:
            loss = self.precision.scaler.scale(loss)
        if factor == 1.0:
            loss.backward(**options)  # type: ignore[no-untyped-call]
        elif loss.ndim or "gradient" in options:
            (loss * factor).backward(**options)  # type: ignore[no-untyped-call]
        else:  # the factor as the loss's own gradient: the same numbers, and two kernels less
            loss.backward(torch.full_like(loss, factor), **options)  # type: ignore[no-untyped-call]

    def flush(self) -> bool:
        """Close windows that are not full: average and scale them, and let the next step pass.

        For loops over iterators that are not prepared, after the last batch. Returns whether there
        was anything on any rank; if not, the next step does not pass. Collective.
        """
        if not self._entered and self.models:
            self.windows.get(())
        closed = [window.close() for window in self.windows.all()]  # all of them, in one order
        return any(closed)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Generator[None]:
        """In this block, backward passes do not average the gradients of `model` over ranks."""
        unsynced = self.windows.unsynced
        unsynced.append(model)
        try:
            with without_gradient_sync(model):
                yield
        finally:
            del unsynced[next(i for i, one in enumerate(unsynced) if one is model)]

    @contextlib.contextmanager
    def sync_in_backward(self, model: nn.Module) -> Generator[None]:
        """In this block a backward pass averages the gradients of `model` over ranks.

        Also if its forward pass was in a block of :meth:`no_sync`, or if this block is in one.
        """
        unsynced = self.windows.unsynced
        before = list(unsynced)
        unsynced[:] = [one for one in before if one is not model]
        try:
            with with_gradient_sync(model):
                yield
        finally:
            unsynced[:] = before

    # -- gradients ------------------------------------------------------------------------------

    def clip_grad_norm_(
        self, parameters: Parameters, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale the gradients down to `max_norm`; return their norm before, equal on all ranks.

        They are unscaled first, once per optimizer and step. Between windows this does nothing and
        returns the last window's norm (zero before the first).
        """
        chosen = _listed(parameters)
        window = self._window_of(chosen)
        if window is not None and not window.sync:
            return window.norm if window.norm is not None else torch.zeros(())
        self._unscale(chosen)
        norm: torch.Tensor = torch_clip_norm_(chosen, max_norm, norm_type)
        if window is not None:
            window.norm = norm
        return norm

    def clip_grad_value_(self, parameters: Parameters, clip_value: float) -> None:
        """Limit every gradient to plus and minus `clip_value`; between windows, do nothing."""
        chosen = _listed(parameters)
        window = self._window_of(chosen)
        if window is None or window.sync:
            self._unscale(chosen)
            torch_clip_value_(chosen, clip_value)

    def _window_of(self, parameters: list[torch.Tensor]) -> AccumulationWindow | None:
        """Return the window of these gradients; of several, the last entered one."""
        found = self.windows.owning(parameters)
        return found[-1] if found else None

    def _unscale(self, parameters: list[torch.Tensor]) -> None:
        """Unscale the gradients of the optimizers that own these parameters, and of no others."""
        wanted = {id(p) for p in parameters}
        owners = [o for o in self.optimizers if wanted & {id(p) for p in parameters_of(o)}]
        if not owners and self.precision.scaler is not None and parameters:
            raise ValueError(
                "under fp16 gradients are scaled, and no prepared optimizer owns these parameters; "
                "prepare the optimizer before clipping"
            )
        for optimizer in owners:
            optimizer.unscale_gradients()

    # -- preparing, saving ------------------------------------------------------------------------

    def prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Return `optimizer` wrapped: it steps and clears only when a window is closed."""
        if not isinstance(optimizer, PreparedOptimizer):
            prepared = PreparedOptimizer(optimizer, self.windows)
        elif any(optimizer is known for known in self.optimizers):
            return optimizer
        else:  # another accumulator's, or forgotten here
            prepared = optimizer
            prepared._follow(self.windows)  # pyright: ignore[reportPrivateUsage]
        self.optimizers.append(prepared)
        return prepared

    def forget(self) -> None:
        """Forget all models, optimizers, schedules and windows."""
        self.optimizers.clear()
        self.schedules.clear()
        self.windows.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what windows hold that are not full, with this rank's own gradients."""
        states = [window.state_dict() for window in self.windows.all()]
        return {"world_size": get_world_size(), "windows": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue: windows are matched in the order in which they are first entered.

        :raises ValueError: if a window is not full and the world has another size.
        """
        half = any(window["count"] for window in state["windows"])
        if half and state["world_size"] != get_world_size():
            raise ValueError(
                f"saved in the middle of a window on {state['world_size']} ranks, and there are "
                f"{get_world_size()}: save where sync_gradients is true, or use as many ranks"
            )
        for optimizer in self.optimizers:
            optimizer._forget_gradients()  # pyright: ignore[reportPrivateUsage]
        self.windows.load_state_dicts(state["windows"])


def _listed(parameters: Parameters) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


# -- uneven inputs: ranks without batches join the others' collectives with zeros -----------------


@contextlib.contextmanager
def join_uneven_inputs(accumulator: Accumulator) -> Generator[None]:
    """In this block, ranks may have different numbers of micro-batches. Collective.

    A rank without batches adds zeros to the others' steps, and takes over their models, optimizers
    and schedules at the end. Unweighted losses are averaged over all ranks, those without batches
    included; with ``backward(loss, weight=n)`` every item counts alike.

    In this block the library averages models in DDP itself, after the backward pass.

    :raises ValueError: for models whose forward pass needs all ranks: in FSDP, or in a DDP that
        copies buffers before it.
    """
    if get_world_size() == 1:
        yield
        return
    join = _Join(accumulator)
    windows = accumulator.windows
    windows.announce = join.announce
    with contextlib.ExitStack() as stack:
        for model in filter(averages_gradients_itself, windows.models):
            stack.enter_context(without_gradient_sync(model))
            stack.callback(model.register_forward_pre_hook(_check_joinable).remove)
            windows.watch.add(model)
        stack.callback(windows.end_join)
        yield
        join.follow()
    join.take_over()


def _check_joinable(model: nn.Module, _: Any) -> None:
    check_joinable([model])


class _Join:
    """What ranks announce to each other at each event of a micro-batch."""

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator
        self._windows = accumulator.windows
        self._active = list(range(get_world_size()))
        self._event = ""

    def announce(self, event: str, value: Any) -> list[Any]:
        """Send this rank's event; return the values of the ranks that still train. Collective.

        :raises RuntimeError: on all ranks, if their events differ.
        """
        sent = all_gather((event, value), name="join_uneven_inputs")
        active = [rank for rank, (other, _) in enumerate(sent) if other != "done"]
        events = {sent[rank][0] for rank in active}
        if len(events) > 1:
            raise RuntimeError(f"ranks that train take different turns: {sorted(events)}")
        if active:
            self._active, self._windows.first_active = active, active[0]
            self._event = events.pop()
        return [sent[rank][1] for rank in active]

    def follow(self) -> None:
        """Join the others' micro-batches with zeros until no rank trains any more."""
        window = None
        while values := self.announce("done", None):
            if self._event == "enter":
                window = self._windows.named(values[0][0])
                window.enter_without_batch(at_end=all(at_end for _, at_end in values))
            elif self._event == "gradients":
                self._windows.average_zeros(values[0][0], kept=values[0][1])
            elif self._event == "weight":
                all_reduce(0.0, name="weights")
            elif window is not None and self._event == "backward":
                number = window.add_weight(0.0 if values[0] else None)
                if window.sync:
                    window.scale_earlier(window.factor(number))
                if window.averages:
                    window.average()
            elif window is not None:
                window.end_micro_batch()

    def take_over(self) -> None:
        """Copy the state of a rank that trained last to all ranks. Collective."""
        if len(self._active) == get_world_size():
            return
        source, accumulator = self._active[0], self._accumulator
        windows = self._windows
        given = [model for window in windows.all() for model in window.models]
        for model in {id(model): model for model in [*windows.models, *given]}.values():
            broadcast_model(model, source)
        accumulator.precision.update_scaler()
        stateful: list[Any] = [*accumulator.optimizers, *accumulator.schedules]
        if accumulator.precision.scaler is not None:
            stateful.append(accumulator.precision)
        mine = [obj.state_dict() for obj in stateful]
        for obj, state in zip(stateful, broadcast(mine, source, name="states"), strict=True):
            if get_rank() != source:
                obj.load_state_dict(state)
        # A rank that has not stepped has gradients that the others have cleared, or not yet used.
        used = [p for optimizer in accumulator.optimizers for p in parameters_of(optimizer)]
        left = broadcast([p.grad for p in used], source)
        if get_rank() not in self._active:
            for p, gradient in zip(used, left, strict=True):
                p.grad = gradient
