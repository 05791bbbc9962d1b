"""Gradient accumulation that is exact: at the tail, with weights, with several models."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_ as torch_clip_norm_
from torch.nn.utils import clip_grad_value_ as torch_clip_value_
from torch.optim import Optimizer

from syncprims import all_gather, all_reduce, any_rank, get_world_size

from .averager import Averager
from .data.loader import Cursor, OpenLoaders
from .gradient_sync import (
    average_gradients,
    averages_gradients_itself,
    broadcast_buffers,
    gradient_sync,
)
from .precision import Precision, forget_gradients
from .pytree import is_dtensor

Parameters = torch.Tensor | Iterable[torch.Tensor]


class Accumulator:
    """Makes one step of `steps` micro-batches, with the gradients of one large batch.

    ``with accumulate(model):`` holds a micro-batch. After the last one of a window the gradients
    are the mean over its micro-batches and over all ranks; until then prepared optimizers do not
    step. A window also closes with the last batch of a prepared loader, or by :meth:`flush`, and is
    then scaled by the micro-batches that it holds. What an earlier step left in ``.grad`` is scaled
    with it: clear gradients after each step. Models that are given together share a window;
    windows of different models, and different accumulators, are independent. Without
    `sync_with_dataloader` the end of a loader closes nothing. With `sync_each_batch` gradients are
    averaged over the ranks after each micro-batch, with the same result at the end. With
    `check_replicas` n, every n-th step of a prepared optimizer ends with a comparison between ranks
    of prepared models and of the optimizer's tensors, by digest: a difference is a `RankMismatch`
    on all ranks, with the first tensors that differ. None is ``SYNCPRIMS_CHECK_REPLICAS``, else 0:
    never. With `divide_by_steps` every mean loss is divided by `steps` at once, as in Accelerate:
    also where a window holds fewer.

    A prepared model that the block does not name, and that its passes reach, is averaged after each
    of them, and scaled with the window. A plain ``loss.backward()`` averages over the ranks, too,
    except in a block that closes no window. It does not count as a micro-batch, and its loss is not
    scaled.

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
        check_replicas: int | None = None,
    ) -> None:
        self.precision: Precision = precision or Precision("no")
        self.sync_with_dataloader = sync_with_dataloader  #: a loader's last batch closes a window
        self.sync_each_batch = sync_each_batch  #: gradients are averaged after each micro-batch
        self.divide_by_steps = divide_by_steps  #: each mean loss, whatever its window holds
        #: steps from one comparison of the replicas to the next; 0: there is none
        self.check_replicas: int | None = check_replicas
        if check_replicas is not None and operator.index(check_replicas) < 0:
            raise ValueError(f"check_replicas={check_replicas!r}: it takes a number of steps, or 0")
        self.skipped: int = 0  #: micro-batches that :meth:`backward` has skipped on all ranks
        self.loaders: OpenLoaders = OpenLoaders()  #: prepared loaders that are being iterated
        self.models: list[nn.Module] = []  #: prepared models, for a block that names none
        self.optimizers: list[Any] = []  #: prepared optimizers that step with this accumulator
        self.schedules: list[Any] = []  #: that follow these optimizers
        self._windows: dict[tuple[nn.Module, ...], AccumulationWindow] = {}
        self.entered: list[AccumulationWindow] = []  #: in the order of their latest blocks
        self.adoptions: int = 0  #: of models that windows do not name
        self._averager = Averager(self._waiting, self._half_full)
        self.steps = steps

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
        return self.entered[-1].sync if self.entered else True

    @sync_gradients.setter
    def sync_gradients(self, sync: bool) -> None:
        window = self.entered[-1] if self.entered else self.accumulate()
        window.sync = bool(sync)

    def _waiting(self) -> list[nn.Module]:
        """Return the models whose gradients wait for the end of their window."""
        return [m for w in self.entered if w.inside and not w.averages for m in w.models]

    def _half_full(self) -> list[nn.Module]:
        """Return the models whose windows wait for more micro-batches."""
        return [m for w in self.entered if w.is_half_full for m in w.models]

    # -- micro-batches --------------------------------------------------------------------------

    def accumulate(self, *models: nn.Module) -> AccumulationWindow:
        """Return a context manager around one micro-batch of `models`, prepared ones by default.

        :raises RuntimeError: if the block is entered inside of itself.
        """
        window = self._windows.get(models)
        if window is not None:
            if window is not self.entered[-1]:
                self.entered.remove(window)
                self.entered.append(window)
            return window
        chosen = models or self.models
        window = self._windows[models] = AccumulationWindow(chosen, models, self)
        for model in chosen:
            self._averager.watch(model)
        self.entered.append(window)
        return window

    __call__ = accumulate

    def backward(
        self,
        /,
        loss: torch.Tensor,
        weight: float | None = None,
        *,
        skip: object = None,
        **options: object,
    ) -> None:
        """Add the gradients of `loss` to the window; with its last micro-batch, they are its mean.

        With `weight`, `loss` is the sum over that many items, and the window's result the mean over
        all items of all its micro-batches on all ranks. `options` are those of torch. Outside of
        any block, `loss` is a window of its own, divided by :attr:`steps`, as a loop that counts by
        itself expects.

        If `skip` is true on any rank, the micro-batch does not count on any: the window waits for
        another one, or closes without it at the end of a loader. All ranks give `skip`, or none.

        :raises ValueError: if a window mixes losses with and without a weight, or a micro-batch
            losses of different weights.
        """
        window, announce = self.entered[-1] if self.entered else None, self._averager.announce
        if skip is not None and (window is None or not window.inside or announce):
            raise ValueError(
                "backward(skip=...): call it in `with accumulate(model):`, and not in "
                "join_uneven_inputs(), where ranks have different numbers of batches"
            )
        if skip is not None and window is not None and window.current is not None:
            raise ValueError("backward(skip=...): give it one loss, the sum of a micro-batch's")
        if window is None or (window.stepped and not window.inside):
            self._backward_outside(loss, weight, options)
            return
        if skip is not None and any_rank(skip, name="skip"):
            self.skipped += 1
            window.skip()
            return
        if announce is not None:
            announce("backward", weight is not None)
        window.count_pass(weight)
        factor = window.close_factor() if window.sync else 1.0 / window.divisor
        if window.inside and self._averager.unsynced:
            with self._averager.reducing_shards():
                self._run_backward(loss, factor, options)
        else:
            self._run_backward(loss, factor, options)
        window.average()

    def _backward_outside(
        self, loss: torch.Tensor, weight: float | None, options: dict[str, Any]
    ) -> None:
        """Add the gradients of a loss outside of any block: it is a window of its own."""
        _update_scaler(self)
        if weight is None:
            factor = 1.0 / self.steps
        else:
            if self._averager.announce is not None:
                what = "backward(weight=...) in join_uneven_inputs() is outside of a micro-batch"
                raise ValueError(f"{what}; put it in `with accumulate(model):`")
            factor = _mean_factor(all_reduce(_checked(weight), name="weights"))
        self._run_backward(loss, factor, options)
        self._averager.average_outside()

    def _run_backward(self, loss: torch.Tensor, factor: float, options: dict[str, Any]) -> None:
        """Add the gradients of `loss` times `factor`."""
        self._averager.begin_pass()
        try:
            if self.precision.scaler is not None:
                loss = self.precision.scaler.scale(loss)
            if factor == 1.0:
                loss.backward(**options)  # type: ignore[no-untyped-call]
            elif loss.ndim or "gradient" in options:
                (loss * factor).backward(**options)  # type: ignore[no-untyped-call]
            else:  # the factor as the loss's own gradient: the same numbers, and two kernels less
                loss.backward(torch.full_like(loss, factor), **options)  # type: ignore[no-untyped-call]
        finally:
            self._averager.end_pass()

    def flush(self) -> bool:
        """Close windows that are not full: average and scale them, and let the next step pass.

        For loops over iterators that are not prepared, after the last batch. Returns whether there
        was anything on any rank; if not, the next step does not pass. Collective.
        """
        if not self.entered and self.models:
            self.accumulate()
        closed = [window.close() for window in self._windows.values()]  # all, in one order
        return any(closed)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """In this block, backward passes do not average the gradients of `model` over ranks."""
        return self._averager.with_sync(model, enabled=False)

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """In this block a backward pass averages the gradients of `model` over ranks.

        Also if its forward pass was in a block of :meth:`no_sync`, or if this block is in one.
        """
        return self._averager.with_sync(model, enabled=True)

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
        self._averager.check_averaged(chosen, "clip_grad_norm_()")
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
            self._averager.check_averaged(chosen, "clip_grad_value_()")
            self._unscale(chosen)
            if any(p.grad is not None for p in chosen):  # else torch raises an error
                torch_clip_value_(chosen, clip_value)

    def _window_of(self, parameters: Iterable[torch.Tensor]) -> AccumulationWindow | None:
        """Return the window of these gradients; of several, the last entered one."""
        ids = {id(p) for p in parameters}
        return next((window for window in reversed(self.entered) if window.owns(ids)), None)

    def _unscale(self, parameters: list[torch.Tensor]) -> None:
        """Unscale the gradients of the optimizers that own these parameters, and of no others."""
        wanted = {id(p) for p in parameters}
        owners = [o for o in self.optimizers if wanted & {id(p) for p in parameters_of(o)}]
        if not owners and self.precision.scaler is not None and parameters:
            text = "fp16: no prepared optimizer owns these parameters; prepare it before clipping"
            raise ValueError(text)
        for optimizer in owners:
            optimizer.unscale_gradients()

    # -- forgetting -------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget all models, optimizers, schedules and windows."""
        for held in (self.models, self.optimizers, self.schedules, self._windows, self.entered):
            held.clear()
        self._averager.clear()

    @property
    def is_half_full(self) -> bool:
        """Whether gradients of some micro-batches wait for others: no saved state has them."""
        return any(window.is_half_full for window in self.entered)

    def restart(self) -> None:
        """Drop the gradients of all windows, after a state was loaded in place of them."""
        forget_gradients(self.precision)
        for optimizer in self.optimizers:
            optimizer._forget_gradients()
        for window in self.entered:
            window.restart()


class AccumulationWindow:
    """The gradients of some models, from one step to the next.

    Gradients of micro-batches add up unscaled. The micro-batch that closes the window knows how
    many there are, or how many items. It scales what has added up, and its own loss by the same
    factor. The object is the context manager of each micro-batch.
    """

    def __init__(
        self, models: Sequence[nn.Module], given: tuple[nn.Module, ...], accumulator: Accumulator
    ) -> None:
        self.models: tuple[Any, ...] = tuple(models)
        self.given = given  #: the models that its blocks name: none means all prepared models
        #: It is closed, or closes with the current micro-batch: a step follows.
        self.sync: bool = False
        self.inside: bool = False  #: the current code is in its block
        self.norm: torch.Tensor | None = None  #: of the last clipped gradients
        self._accumulator = accumulator
        self._averager = averager_of(accumulator)
        self._serial = 0  # of the latest batch that it has seen
        self._driver: Cursor | None = None  # the loader whose last batch closes it
        self._chunked = False  # one batch makes several micro-batches
        self._unsynced = contextlib.ExitStack()
        # FSDP keeps sums that it has not reduced in a place of its own, where nothing scales them:
        # so it reduces those of each micro-batch.
        self._wrapped = [m for m in models if isinstance(m, DistributedDataParallel)]
        #: models without a window of their own, which its passes have reached, and whether in it
        self._others: dict[nn.Module, bool] = {}
        self._ids = {id(p) for p in self.parameters}
        self._reset()

    def _reset(self) -> None:
        self.period: object = object()  #: the identity of the sums until the next step
        self.divisor: float = 1.0  #: of each loss, before the factor of all is known
        self.count: int = 0  #: micro-batches, the current one included
        self.passes: int = 0  #: backward passes
        self.sync = False
        self.stepped: bool = False  #: an optimizer has stepped with it
        self._items = 0.0  # of this rank; without weights, its micro-batches
        self._weighted: bool | None = None
        #: items of the current micro-batch; None before its loss
        self.current: float | None = None
        self._ends_loader = False  # it is the last one of its loader
        self._factor: float | None = None  # the sums were scaled by it
        self._others = dict.fromkeys(self._others, False)

    @property
    def is_half_full(self) -> bool:
        """Whether the window contains micro-batches and waits for more."""
        return self.count > 0 and not self.sync

    def restart(self) -> None:
        """Drop its gradients; the next block begins it again."""
        for p in self.parameters:
            p.grad = None
        self._reset()
        self.sync = True
        self.stepped = True

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters of all its models, each once. Not cached: models may grow."""
        return list(dict.fromkeys(p for m in (*self.models, *self._others) for p in m.parameters()))

    def owns(self, ids: Collection[int]) -> bool:
        """Return whether any of these is the id of a parameter of its models."""
        if self._ids.isdisjoint(ids):
            self._ids = {id(p) for p in self.parameters}
        return not self._ids.isdisjoint(ids)

    def average(self) -> None:
        """Average what a backward pass has left, also in models that the window does not name.

        Collective. Those are averaged at once, and scaled when the window closes, unless they have
        a window of their own.
        """
        for model in self._averager.average(self.models, now=self.averages):
            if any(model in window.models for window in self._accumulator.entered):
                self._others.pop(model, None)
            else:
                if model not in self._others:
                    self._accumulator.adoptions += 1
                if not self._others.get(model):
                    self._check_adopted(model)
                self._others[model] = True

    def _check_adopted(self, model: nn.Module) -> None:
        """Raise if the sums of `model` are those of another window, too: each would scale them."""
        for other in self._accumulator.entered:
            if other is not self and other._others.get(model) and other.is_half_full:
                what = f"passes of two windows reach {type(model).__name__}, and none names it"
                cure = "name it in the accumulate() of one, or give each loop one accumulate(a, b)"
                raise RuntimeError(f"{what}: {cure}")

    @property
    def averages(self) -> bool:
        """Whether the gradients are averaged over the ranks after the current backward pass."""
        return self.sync or self._accumulator.sync_each_batch

    # -- micro-batches ----------------------------------------------------------------------

    def __enter__(self) -> None:
        if self.inside:
            raise RuntimeError("accumulate() is inside of itself; a block is one micro-batch")
        if self._accumulator.steps > 1 and any(w.inside for w in self._accumulator.entered):
            what = "accumulate() is inside of one for other models, which would miss its passes"
            raise RuntimeError(f"{what}: name all in one block, accumulate(a, b)")
        announce = self._averager.announce
        at_end = self._at_end()
        if announce is not None:
            check_joinable(self.models)
            numbers = {id(model): i for i, model in enumerate(self._accumulator.models)}
            if any(id(model) not in numbers for model in self.given):
                raise ValueError("join_uneven_inputs(): accumulate() takes prepared models there")
            given = [numbers[id(model)] for model in self.given]
            at_end = all(end for _, end in announce("enter", (given, at_end)))
        self.begin_micro_batch(at_end=at_end)
        self.inside = True
        if self._wrapped and (announce is not None or not self.averages):
            for model in self._wrapped:
                self._unsynced.enter_context(gradient_sync(model, False))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.inside = False
        if self._wrapped:
            self._unsynced.close()
        if kind is None:
            if self._averager.announce is not None:
                self._averager.announce("leave", None)
            self.end_micro_batch()

    def begin_micro_batch(self, *, at_end: bool) -> None:
        """Count a micro-batch, the last one of its loader or not; after a step, the first one."""
        if self.sync or not self.count:
            _update_scaler(self._accumulator, besides=self)
            self._reset()
        self.count += 1
        self._averager.expect(self.models)
        self.current = None
        self._ends_loader = at_end
        self.sync = at_end or self.count >= self._accumulator.steps

    def skip(self) -> None:
        """Leave the current micro-batch out of the window, as all ranks do. Collective."""
        self.count -= 1
        self.sync = False
        self.current = 0.0
        if self._ends_loader:
            self.close()

    def end_micro_batch(self) -> None:
        """Make buffers equal on all ranks if the micro-batch was the last of its window."""
        if self.sync and get_world_size() > 1:
            for model in (*self.models, *self._others):
                broadcast_buffers(model, self._averager.first_active)

    def _at_end(self) -> bool:
        """Return whether the current micro-batch is the last of its loader."""
        loaders = self._accumulator.loaders
        if loaders.serial == self._serial and self._driver is None:
            return False  # these batches come from no prepared loader
        fresh = loaders.since(self._serial)
        if not fresh:
            # A batch is cut into pieces: only counting, or flush(), shows which one is the last.
            self._chunked = self._chunked or self._driver in loaders.open
            return False
        self._serial = loaders.serial
        same = [c for c in fresh if self._driver is not None and c.loader is self._driver.loader]
        driver = same[-1] if same else fresh[-1]
        if driver is not self._driver:
            self._driver, self._chunked = driver, False
        if not self._accumulator.sync_with_dataloader:
            return False
        over = driver.at_end or any(c.at_end for c in fresh if c in driver.beside)
        return over and not self._chunked

    # -- gradients ----------------------------------------------------------------------------

    def count_pass(self, weight: float | None) -> None:
        """Count a backward pass and its weight.

        :raises ValueError: if the window mixes sums with means, or the micro-batch sums of
            different weights, or `weight` is not a count of items.
        """
        items = 1.0 if weight is None else _checked(weight)
        if self._weighted not in (None, weight is not None):
            what = "some losses of the window are sums, given with weight=n, and others are means"
            raise ValueError(f"{what}; use one form in all of its micro-batches")
        if self.current is None:
            self._items += items
        elif self.current != items:
            what = "the backward passes of one micro-batch have different weights"
            raise ValueError(f"{what}; add their losses, or use one Accumulator for each")
        self._weighted, self.current = weight is not None, items
        divides = self._accumulator.divide_by_steps and weight is None
        if not self.passes:  # sums of fp16 overflow
            narrow = self._averager.has_narrow
            self.divisor = float(self._accumulator.steps if divides or narrow else 1)
        self.passes += 1

    def close_factor(self) -> float:
        """Return the factor for the sums of this window; scale what has been added up by it, once.

        Collective if weighted.
        """
        if self._factor is not None:
            return self._factor
        if self._weighted:
            self._factor = _mean_factor(all_reduce(self._items, name="weights"))
        else:
            divides = self._accumulator.divide_by_steps
            self._factor = 1.0 / (self.divisor if divides else self.count)
        if self.count > 1:
            self._scale(self._factor)
        return self._factor

    def _scale(self, factor: float) -> None:
        """Make the sums of its passes sums with this factor."""
        factor *= self.divisor
        if factor == 1.0 or not self.passes:
            return
        chosen = [*self.models, *(model for model, reached in self._others.items() if reached)]
        sharded = self._averager.sharded
        scaled: dict[torch.Tensor, None] = dict.fromkeys(
            p for m in chosen for p in (*m.parameters(), *sharded.get(m, ()))
        )
        for optimizer in self._accumulator.optimizers:
            # What belongs to no model that is known here has no other window.
            if optimizer._window() is self:
                rest = (p for p in parameters_of(optimizer) if p not in self._averager.parameters)
                scaled |= dict.fromkeys(rest)
        there = [p.grad for p in scaled if p.grad is not None]
        for kind in True, False:
            if same := [g for g in there if is_dtensor(g) == kind]:
                torch._foreach_mul_(same, factor)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

    def close(self) -> bool:
        """Close the window early on all ranks: scale and average its gradients. Collective.

        Returns False, and lets no step follow, if no rank has a backward pass in it.
        """
        waiting = self.passes and not self.sync
        sums = [(self._weighted, self._items)] if waiting else []
        sums = [part for parts in all_gather(sums, name="flush") for part in parts]
        if len({weighted for weighted, _ in sums}) > 1:  # then no step passes
            raise ValueError("flush(): some ranks have losses with a weight, others without one")
        self.sync = bool(sums)
        if not sums:
            self.count = 0
            return False
        divides = self._accumulator.divide_by_steps and not sums[0][0]
        every = sum(items for _, items in sums)
        self._factor = 1.0 / self.divisor if divides else _mean_factor(every)
        self._scale(self._factor)
        average_gradients(self.parameters)
        self.end_micro_batch()
        return True

    def waits_for(self, stepped: object) -> bool:
        """Return whether gradients wait for a step, other than that of the period `stepped`."""
        is_new = self.passes > 0 and self.period is not stepped
        return is_new and (not self.sync or self.count > 1)


def averager_of(accumulator: Accumulator) -> Averager:
    """Return what users of `accumulator` do not see."""
    return accumulator._averager  # pyright: ignore[reportPrivateUsage]


def _update_scaler(accumulator: Accumulator, besides: AccumulationWindow | None = None) -> None:
    """Update the loss scaler, unless other windows hold gradients of the present scale."""
    if accumulator.precision.scaler is None:
        return  # at once: every micro-batch comes here
    if not any(w.is_half_full for w in accumulator.entered if w is not besides):
        accumulator.precision.update_scaler()


def _checked(weight: float) -> float:
    if not 0 <= (items := float(weight)) < math.inf:
        raise ValueError(f"weight={weight!r}: it is the number of items the loss sums up")
    return items


def _mean_factor(items: float) -> float:
    """Return the factor that makes a sum over these items of all ranks their mean."""
    return get_world_size() / items if items else 0.0


def _listed(parameters: Parameters) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return all parameters of all groups of `optimizer`."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def check_joinable(models: Iterable[nn.Module]) -> None:
    """Raise ValueError for models whose forward pass needs all ranks."""
    for model in filter(averages_gradients_itself, models):
        is_ddp = isinstance(model, DistributedDataParallel)
        if not is_ddp or (model.broadcast_buffers and any(True for _ in model.buffers())):
            what = f"join_uneven_inputs(): all ranks run the forward pass of {type(model).__name__}"
            raise ValueError(f"{what}; use DDP with broadcast_buffers=False, or even batches")
