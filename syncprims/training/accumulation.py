"""Gradient accumulation that is exact: at the tail, with weights, with several models."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_ as torch_clip_norm_
from torch.nn.utils import clip_grad_value_ as torch_clip_value_
from torch.optim import Optimizer

from syncprims import all_gather, all_reduce, any_rank, get_world_size

from .data.loader import Cursor, OpenLoaders
from .gradient_sync import (
    BackwardWatch,
    average_gradients,
    averages_gradients_itself,
    broadcast_buffers,
    gradient_sync,
)
from .precision import Precision, forget_gradients

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
        self._averager = Averager(self.models, self.entered)
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
            self._averager.watch_model(model)
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
        if window.sync:
            factor = window.close_factor()
        else:
            factor = 1.0 / self.steps if self.divide_by_steps and weight is None else 1.0
        self._run_backward(loss, factor, options)
        if window.averages:
            self._averager.average(window.models, skip=self._averager.unsynced)

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
        self._averager.average_outside(self.models)

    def _run_backward(self, loss: torch.Tensor, factor: float, options: dict[str, Any]) -> None:
        """Add the gradients of `loss` times `factor`."""
        watch = self._averager.watch
        watch.paused = True
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
            watch.paused = False

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


class Averager:
    """Averages the gradients of one accumulator's models over the ranks."""

    def __init__(self, models: list[nn.Module], entered: list[AccumulationWindow]) -> None:
        """`models` are the prepared ones; both lists are the accumulator's, which changes them."""
        self._models, self._entered = models, entered
        #: Of :func:`join_uneven_inputs`: announces an event of this rank to the others, and returns
        #: what the ranks that still train have announced.
        self.announce: Callable[[str, Any], list[Any]] | None = None
        self.first_active: int = 0  #: the lowest rank that still trains
        self.unsynced: list[nn.Module] = []  #: models in a block of `no_sync`
        self.watch: BackwardWatch = BackwardWatch(self._average_plain)
        self._averaged: dict[nn.Parameter, torch.Tensor | None] = {}  # while ranks join

    def watch_model(self, model: nn.Module) -> None:
        """Average the gradients of `model` after passes that the library does not run, too."""
        is_ddp = isinstance(model, DistributedDataParallel)
        if get_world_size() > 1 and (is_ddp or not averages_gradients_itself(model)):
            self.watch.add(model)

    @contextlib.contextmanager
    def with_sync(self, model: nn.Module, *, enabled: bool) -> Generator[None]:
        """In this block, average the gradients of `model` after a backward pass, or do not."""
        before = self.unsynced
        others = [other for other in before if other is not model]
        self.unsynced = others if enabled else [*others, model]
        try:
            with gradient_sync(model, enabled):
                yield
        finally:
            self.unsynced = before

    def _average_plain(self, models: Sequence[nn.Module]) -> None:
        """Average after a script's own backward pass, unless a window holds its gradients."""
        waiting = [m for w in self._entered if w.inside and not w.averages for m in w.models]
        self.average_outside([m for m in models if m not in waiting])

    def average_outside(self, models: Sequence[nn.Module]) -> None:
        """Average gradients that a backward pass outside of windows left in `models`. Collective.

        Those in a block of `no_sync` wait. The buffers of the others are main's afterwards, except
        where ranks without batches join.
        """
        models = [m for m in models if m not in self.unsynced]
        if get_world_size() == 1 or not models:
            return
        if self.announce is None:
            for model in models:
                if any(True for _ in model.buffers()):
                    broadcast_buffers(model)
            self.average(models)
            return
        own = dict.fromkeys(p for m in models for p in m.parameters())
        numbers = [i for i, known in enumerate(self._models) if known in models]
        uncleared = any(p.grad is not None and p.grad is self._averaged.get(p) for p in own)
        self.announce("gradients", (numbers, uncleared))
        average_gradients(own)
        self._averaged.update((p, p.grad) for p in own)

    def average(self, models: Sequence[nn.Module], skip: Collection[nn.Module] = ()) -> None:
        """Average the gradients of `models` that no wrapper averages, but for `skip`. Collective.

        Of DDP, these are what it has missed on any rank; while ranks join, it averages nothing.
        """
        if get_world_size() == 1:
            return
        joining = self.announce is not None
        skipped = {p for model in skip for p in model.parameters()}
        chosen = [m for m in models if joining or not averages_gradients_itself(m)]
        own = dict.fromkeys(p for m in chosen for p in m.parameters())
        average_gradients(p for p in own if p not in skipped)
        if joining:
            return
        wrapped = [m for m in models if isinstance(m, DistributedDataParallel) and m not in skip]
        missed = [self.watch.misses(m) for m in wrapped]
        if missed and any_rank(any(missed), name="gradients outside of DDP"):
            average_gradients(dict.fromkeys(p for m in wrapped for p in m.parameters()))

    def end_join(self) -> None:
        """Return to ranks with equally many micro-batches."""
        self.announce, self.first_active = None, 0
        self._averaged.clear()

    def clear(self) -> None:
        """Forget all models."""
        self._averaged.clear()
        self.watch.clear()


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
        self._ids = {id(p) for p in self.parameters}
        self._wrapped = [m for m in models if averages_gradients_itself(m)]
        sends_buffers = get_world_size() > 1
        self._buffered = [m for m in models if sends_buffers and any(True for _ in m.buffers())]
        self._reset()

    def _reset(self) -> None:
        self.period: object = object()  #: the identity of the sums until the next step
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
        """All parameters of all models, each once. Not cached: models may grow."""
        return list(dict.fromkeys(p for m in self.models for p in m.parameters()))

    def owns(self, ids: Collection[int]) -> bool:
        """Return whether any of these is the id of a parameter of its models."""
        if self._ids.isdisjoint(ids):
            self._ids = {id(p) for p in self.parameters}
        return not self._ids.isdisjoint(ids)

    @property
    def averages(self) -> bool:
        """Whether the gradients are averaged over the ranks after the current backward pass."""
        return self.sync or self._accumulator.sync_each_batch

    # -- micro-batches ----------------------------------------------------------------------

    def __enter__(self) -> None:
        if self.inside:
            raise RuntimeError("accumulate() is inside of itself; a block is one micro-batch")
        announce = self._averager.announce
        at_end = self._at_end()
        if announce is not None:
            check_joinable(self._wrapped)
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
        if self.sync:
            for model in self._buffered:
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
            self._factor = 1.0 / (self._accumulator.steps if divides else self.count)
        if self.count > 1:
            self._scale(self._factor)
        return self._factor

    def _scale(self, factor: float) -> None:
        if factor == 1.0 or (self._accumulator.divide_by_steps and not self._weighted):
            return  # each loss has been divided
        there = [p.grad for p in self.parameters if p.grad is not None] if self.passes else []
        if there:
            torch._foreach_mul_(there, factor)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

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
        self._factor = _mean_factor(sum(items for _, items in sums))
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
