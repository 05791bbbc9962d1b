"""Windows: the micro-batches whose gradients make one step, for one set of models."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from syncprims import all_gather, all_reduce, get_world_size

from .data import Cursor, OpenLoaders
from .gradient_sync import BackwardWatch, average_gradients, broadcast_buffers
from .precision import Precision

#: How ranks name a window to each other: by its prepared models, else by its number.
WindowName = int | tuple[int, ...]
#: Of each parameter of an optimizer, what its step between windows has taken out of ``.grad``.
HeldGradients = dict[torch.Tensor, torch.Tensor | None]


class WindowSet:
    """The windows of one accumulator, and what they and the prepared optimizers share."""

    def __init__(
        self,
        steps: int,
        precision: Precision,
        *,
        sync_with_dataloader: bool,
        sync_each_batch: bool,
        divide_by_steps: bool,
    ) -> None:
        self.steps = steps
        self.precision = precision
        self.sync_each_batch = sync_each_batch  #: gradients are averaged after each micro-batch
        self.divide_by_steps = divide_by_steps  #: each mean loss, whatever its window holds
        self.sync_with_dataloader = sync_with_dataloader  #: a loader's last batch closes a window
        self.loaders = OpenLoaders()  #: prepared loaders that are being iterated
        self.models: list[nn.Module] = []  #: prepared models, for a block that names none
        self.entered: list[AccumulationWindow] = []  #: in the order of their latest blocks
        #: per prepared optimizer, gradients that are kept outside of ``.grad`` until its step
        self.held: list[tuple[Optimizer, HeldGradients]] = []
        #: with unequal inputs: sends what this rank does, returns what the ranks that train sent
        self.announce: Callable[[str, Any], list[Any]] | None = None
        self.first_active = 0  #: the lowest rank that still trains
        self.unsynced: list[nn.Module] = []  #: models in a block of ``no_sync``
        self.watch = BackwardWatch(self._average_plain)
        self._averaged: dict[nn.Parameter, torch.Tensor | None] = {}
        self._by_models: dict[tuple[nn.Module, ...], AccumulationWindow] = {}
        self._loaded: list[dict[str, Any]] = []  # states of windows that no block has entered yet

    def get(self, models: tuple[nn.Module, ...]) -> AccumulationWindow:
        """Return the window of `models` as the last entered one; it is made at the first call."""
        window = self._by_models.get(models)
        if window is not None:
            self.entered.remove(window)
        else:
            chosen = models or self.models
            if not chosen:
                raise ValueError(
                    "accumulate() takes the models whose gradients add up, or prepare one"
                )
            window = self._by_models[models] = AccumulationWindow(chosen, models, self)
            for model in chosen:
                self.add_model(model)
            if self._loaded:
                window.load_state_dict(self._loaded.pop(0))
        self.entered.append(window)
        return window

    def all(self) -> list[AccumulationWindow]:
        """Return the windows in the order in which they were first entered."""
        return list(self._by_models.values())

    def has_scaled(self, *, besides: AccumulationWindow) -> bool:
        """Return whether another window, or one that was loaded, has gradients of this scale."""
        loaded = any(state["count"] for state in self._loaded)
        return loaded or any(w.count and not w.sync for w in self.entered if w is not besides)

    def owning(self, parameters: Iterable[torch.Tensor]) -> list[AccumulationWindow]:
        """Return the windows that hold gradients of these parameters, the last entered one last."""
        ids = {id(p) for p in parameters}
        return [window for window in self.entered if window.owns(ids)]

    def name_of(self, window: AccumulationWindow) -> WindowName:
        """Return the name of `window` for other ranks."""
        prepared = {id(model): i for i, model in enumerate(self.models)}
        name = tuple(prepared.get(id(model), -1) for model in window.given)
        return self.all().index(window) if -1 in name else name

    def named(self, name: WindowName) -> AccumulationWindow:
        """Return the window that another rank calls `name`, even if no block here has entered it.

        :raises ValueError: if `name` is a number that this rank does not know.
        """
        if not isinstance(name, int):
            return self.get(tuple(self.models[i] for i in name))
        windows = self.all()
        if name >= len(windows):
            raise ValueError(
                "join_uneven_inputs(): a rank without any batch cannot know models that are not "
                "prepared; prepare them"
            )
        return windows[name]

    def add_model(self, model: nn.Module) -> None:
        """Average the gradients of `model` after passes that the library does not run, too."""
        if get_world_size() > 1 and not averages_gradients_itself(model):
            self.watch.add(model)

    def clear(self) -> None:
        """Forget all models and windows."""
        for container in (self.models, self.entered, self.held, self._by_models, self._loaded):
            container.clear()
        self.watch.clear()
        self._averaged.clear()

    # -- backward passes outside of windows ---------------------------------------------------

    def _average_plain(self, models: Sequence[nn.Module]) -> None:
        """Average after a script's own backward pass, unless a window or ``no_sync`` holds it."""
        waiting = [m for w in self.entered if w.inside and not w.averages for m in w.models]
        held = [*waiting, *self.unsynced]
        self.average([m for m in models if not any(m is one for one in held)])

    def average(self, models: Sequence[nn.Module]) -> None:
        """Average what a backward pass outside of windows left in `models`. Collective.

        Their buffers are main's afterwards, except where ranks without batches join.
        """
        if get_world_size() == 1:
            return
        joining = self.announce is not None
        for model in models:
            if not joining and any(True for _ in model.buffers()):
                broadcast_buffers(model)
        models = [m for m in models if joining or not averages_gradients_itself(m)]
        if not models:
            return
        own = dict.fromkeys(p for m in models for p in m.parameters())
        if self.announce is not None:
            places = [i for i, known in enumerate(self.models) if any(known is m for m in models)]
            kept = any(p.grad is not None and p.grad is self._averaged.get(p) for p in own)
            self.announce("gradients", (places, kept))
        average_gradients(own)
        if joining:
            self._averaged.update((p, p.grad) for p in own)

    def end_join(self) -> None:
        """Return to ranks with equally many micro-batches."""
        self.announce, self.first_active = None, 0
        self._averaged.clear()

    def average_zeros(self, places: Sequence[int], *, kept: bool) -> None:
        """Add zeros to the gradients of other ranks' models. Collective.

        If they have `kept` what the last pass left, so does this rank: it is the same everywhere.
        """
        own = dict.fromkeys(p for i in places for p in self.models[i].parameters())
        if not kept:
            for p in own:
                p.grad = None
        average_gradients(own)

    def load_state_dicts(self, states: Iterable[dict[str, Any]]) -> None:
        """Continue windows, matched in the order in which they are first entered."""
        self._loaded = list(states)
        for window in self._by_models.values():
            for p in window.parameters:  # what they hold now is of no step any more
                p.grad = None
        for window in self._by_models.values():
            window.load_state_dict(self._loaded.pop(0) if self._loaded else _FULL)


#: The state of a window that is full, or that no block has entered.
_FULL: dict[str, Any] = {"count": 0, "weighted": None, "weights": [], "gradients": {}, "held": {}}


class AccumulationWindow:
    """The gradients of some models, from one step to the next.

    Gradients of micro-batches add up unscaled. The micro-batch that closes the window knows how
    many there are, or how many items. It scales what has added up, and its own loss by the same
    factor. The object is the context manager of each micro-batch.
    """

    def __init__(
        self, models: Sequence[nn.Module], given: tuple[nn.Module, ...], shared: WindowSet
    ) -> None:
        self.models = tuple(models)
        self.given = given  #: the models that its blocks name: none stands for all prepared ones
        self.count = 0  #: its micro-batches, the current one included
        self.sync = False  #: it is closed, or closes with the current micro-batch: a step follows
        self.stepped = False  #: an optimizer has stepped with it
        self.inside = False  #: the current code is in its block
        self.alone = get_world_size() == 1  #: there is no other rank to average with
        self.norm: torch.Tensor | None = None  #: of the last clipped gradients
        self._shared = shared
        self._scaled = shared.precision.scaler is not None
        self._serial = 0  # of the latest batch that it has seen
        self._driver: Cursor | None = None  # the loader whose last batch closes it
        self._chunked = False  # one batch makes several micro-batches
        self.weights: list[float] = []  #: per backward pass of a micro-batch: its items so far
        self._weighted: bool | None = None
        self._backward = 0  # passes of the current micro-batch
        self._factor: float | None = None  # what earlier micro-batches left is scaled by it
        self._unsynced = contextlib.ExitStack()
        self._ids = {id(p) for p in self.parameters}
        self._joining = False  # ranks may be out of batches: gradients are averaged here
        # What earlier windows left in ``.grad``, and their gradients then.
        self._leftovers: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = []
        self._wrapped = [m for m in models if averages_gradients_itself(m)]
        self._buffered = [m for m in models if any(True for _ in m.buffers())]
        self._sends_buffers = bool(self._buffered) and not self.alone

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
        return self.sync or self._shared.sync_each_batch

    # -- micro-batches ----------------------------------------------------------------------

    def __enter__(self) -> None:
        if self.inside:
            raise RuntimeError(
                "accumulate() of these models is entered inside of itself; one block holds one "
                "micro-batch"
            )
        if self.sync or not self.count:
            self.open()
        self.count += 1
        self._backward = 0
        at_end = self._at_end()
        shared = self._shared
        self._joining = shared.announce is not None
        if shared.announce is not None:
            check_joinable(self._wrapped)
            at_end = all(end for _, end in shared.announce("enter", (shared.name_of(self), at_end)))
        self.sync = at_end or self.count >= shared.steps
        self.inside = True
        if self._wrapped and (self._joining or not self.averages):
            for model in self._wrapped:
                self._unsynced.enter_context(without_gradient_sync(model))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.inside = False
        if self._wrapped:
            self._unsynced.close()
        if self._shared.announce is not None and kind is None:
            self._shared.announce("leave", None)
        if self._sends_buffers and kind is None:
            self.end_micro_batch()

    def end_micro_batch(self) -> None:
        """Make buffers equal on all ranks if the micro-batch was the last of its window."""
        if self._sends_buffers and self.sync:
            for model in self._buffered:
                broadcast_buffers(model, self._shared.first_active)

    def enter_without_batch(self, *, at_end: bool) -> None:
        """Begin a micro-batch of other ranks, to which this rank adds zeros."""
        self._joining = True
        check_joinable(self._wrapped)
        if self.sync or not self.count:
            self.open()
            for p in self.parameters:  # this rank does not step, so no call clears the last step's
                p.grad = None
        self.count += 1
        self._backward = 0
        self.sync = at_end or self.count >= self._shared.steps

    def open(self) -> None:
        """Begin a new window of the same models."""
        if self._scaled and not self._shared.has_scaled(besides=self):
            self._shared.precision.update_scaler()
        self._begin()

    def _begin(self) -> None:
        self.count, self.sync, self.stepped = 0, False, False
        self.weights, self._weighted, self._factor = [], None, None
        self._leftovers.clear()

    def _at_end(self) -> bool:
        """Return whether the current micro-batch is the last of its loader."""
        loaders = self._shared.loaders
        if loaders.serial == self._serial and self._driver is None:
            return False  # these batches come from no prepared loader
        fresh = loaders.since(self._serial)
        if not fresh:
            # A batch is cut into pieces: only counting, or flush(), shows which one is the last.
            self._chunked = self._chunked or loaders.is_open(self._driver)
            return False
        self._serial = loaders.serial
        same = [c for c in fresh if self._driver is not None and c.loader is self._driver.loader]
        driver = same[-1] if same else fresh[-1]
        if driver is not self._driver:
            self._driver, self._chunked = driver, False
        if not self._shared.sync_with_dataloader:
            return False
        over = driver.at_end or any(c.at_end for c in fresh if c in driver.beside)
        return over and not self._chunked

    # -- gradients ----------------------------------------------------------------------------

    def add_weight(self, weight: float | None) -> int:
        """Count a backward pass and its weight; return its number in the micro-batch.

        :raises ValueError: if the window mixes sums with means, or `weight` is no count of items.
        """
        if weight is not None and not 0 <= (weight := float(weight)) < math.inf:
            raise ValueError(f"weight={weight!r}: it is the number of items the loss sums up")
        weighted = weight is not None
        if not self.weights and self._shared.steps > 1:
            self._note_leftovers()
        if weighted is not self._weighted and self._weighted is not None:
            raise ValueError(
                "a window with some losses given as backward(loss_sum, weight=n) and others as "
                "backward(loss_mean) has no right mean; use one form in all of its micro-batches"
            )
        self._weighted = weighted
        number, self._backward = self._backward, self._backward + 1
        if number == len(self.weights):
            self.weights.append(0.0)
        self.weights[number] += 1.0 if weight is None else weight
        return number

    def factor(self, number: int) -> float:
        """Return the factor for sums of backward pass `number`. Collective if weighted.

        :raises ValueError: if the same gradients hold sums that need another factor.
        """
        if self._weighted:
            total = all_reduce(self.weights[number], name="weights")
            found = get_world_size() / total if total else 0.0
        else:
            found = 1.0 / (self._shared.steps if self._shared.divide_by_steps else self.count)
        if self._factor is not None and self.count > 1 and found != self._factor:
            raise ValueError(
                "the backward passes of one micro-batch have different weights, and their "
                "gradients stand mixed in this window; add the losses up before one backward(), "
                "or use one Accumulator for each"
            )
        return found

    def scale_earlier(self, factor: float) -> None:
        """Scale what earlier micro-batches left, once."""
        if self._factor is not None:
            return
        self._factor = factor
        if self._shared.divide_by_steps and not self._weighted:
            return  # each loss has been divided
        there = [p.grad for p in self.parameters if p.grad is not None] if self.weights else []
        for optimizer, held in self._shared.held:
            if held and self.owns({id(p) for p in parameters_of(optimizer)}):
                there += (gradient for gradient in held.values() if gradient is not None)
        if factor != 1.0 and there:
            torch._foreach_mul_(there, factor)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            for p, gradient, before in self._leftovers:
                if p.grad is gradient:  # else it has been cleared since
                    gradient.add_(before, alpha=1.0 - factor)
        self._leftovers.clear()

    def _note_leftovers(self) -> None:
        """Remember what is in ``.grad`` before the window's first backward pass.

        It was not cleared after an earlier step: it stays as it is when the window is scaled.
        """
        found = ((p, p.grad) for p in self.parameters if p.grad is not None)
        self._leftovers = [(p, gradient, gradient.detach().clone()) for p, gradient in found]

    def average(self, skip: Iterable[nn.Module] = ()) -> None:
        """Average gradients over the ranks, except those that a wrapper averages. Collective."""
        if self.alone:
            return
        left_out = {p for model in skip for p in model.parameters()}
        models = [m for m in self.models if self._joining or m not in self._wrapped]
        own = dict.fromkeys(p for m in models for p in m.parameters())
        average_gradients(p for p in own if p not in left_out)

    def close(self) -> bool:
        """Close the window early on all ranks: scale and average its gradients. Collective.

        Returns False, and lets no step follow, if no rank has a backward pass in it.
        """
        waiting = bool(self.count) and not self.sync
        mine = (self._weighted, self.weights) if waiting else (None, [])
        seen = [part for part in all_gather(mine, name="flush") if part[1]]
        self.sync = bool(seen)
        if not seen:
            self.count = 0
            return False
        if len({(weighted, len(weights)) for weighted, weights in seen}) > 1:
            raise ValueError("flush(): the ranks' windows hold different kinds of backward passes")
        totals = {sum(part) for part in zip(*(weights for _, weights in seen), strict=True)}
        if len(totals) > 1:
            raise ValueError("flush(): backward passes of different weights stand mixed; see docs")
        total = totals.pop()
        self.scale_earlier(get_world_size() / total if total else 0.0)
        average_gradients(self.parameters)
        self.end_micro_batch()
        return True

    # -- saving ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return counts and this rank's gradients of a window that is not full."""
        if self.sync or not self.count:
            return dict(_FULL)
        parameters: list[torch.Tensor] = [*self.parameters]
        places = {p: str(i) for i, p in enumerate(parameters)}
        return {
            "count": self.count,
            "weighted": self._weighted,
            "weights": list(self.weights),
            "gradients": {
                place: _saved(p.grad) for p, place in places.items() if p.grad is not None
            },
            "held": {
                places[p]: None if gradient is None else _saved(gradient)
                for _, held in self._shared.held
                for p, gradient in held.items()
                if p in places
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a saved window of the same models; a full one is loaded as after its step."""
        self._begin()  # other windows go on with the scale that it was saved with
        self.sync = self.stepped = not state["count"]
        self.count, self._weighted = state["count"], state["weighted"]
        self.weights = list(state["weights"])
        parameters: list[torch.Tensor] = [*self.parameters]
        for index, gradient in state["gradients"].items():
            p = parameters[int(index)]
            p.grad = _loaded(gradient, p)
        for index, gradient in state.get("held", {}).items():
            p = parameters[int(index)]
            kept = None if gradient is None else _loaded(gradient, p)
            for optimizer, held in self._shared.held:
                if any(p is one for one in parameters_of(optimizer)):
                    held[p] = kept


def _saved(gradient: torch.Tensor) -> Any:
    """Return a copy of a gradient that a state can hold; of a sparse one, its parts."""
    gradient = gradient.detach()
    if not gradient.is_sparse:
        return gradient.clone()
    return {"indices": gradient._indices().clone(), "values": gradient._values().clone()}  # pyright: ignore[reportPrivateUsage]


def _loaded(saved: Any, parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of the gradient of `parameter` that :func:`_saved` has returned."""
    device = parameter.device
    if isinstance(saved, torch.Tensor):
        return saved.to(device, copy=True)
    indices, values = (saved[name].to(device, copy=True) for name in ("indices", "values"))
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True)


def check_joinable(models: Iterable[nn.Module]) -> None:
    """Raise ValueError for models whose forward pass needs all ranks."""
    for model in filter(averages_gradients_itself, models):
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(
                f"join_uneven_inputs(): the forward pass of {type(model).__name__} needs all "
                f"ranks, also those without a batch; use loaders with even batches"
            )
        if model.broadcast_buffers and any(True for _ in model.buffers()):
            raise ValueError(
                "join_uneven_inputs(): this DDP model sends buffers in its forward pass, which "
                "needs all ranks; wrap it with broadcast_buffers=False, or let prepare() do it"
            )


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return all parameters of all groups of `optimizer`."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def averages_gradients_itself(model: nn.Module) -> bool:
    """Return whether `model` averages its gradients over the ranks, as in DDP and FSDP."""
    return isinstance(model, DistributedDataParallel) or hasattr(
        model, "set_requires_gradient_sync"
    )


@contextlib.contextmanager
def without_gradient_sync(model: Any) -> Generator[None]:
    """In this block a backward pass of the wrapper leaves gradients as they are on this rank."""
    with contextlib.ExitStack() as stack:
        if isinstance(model, DistributedDataParallel):
            stack.enter_context(model.no_sync())
        elif hasattr(model, "set_requires_gradient_sync"):  # FSDP
            model.set_requires_gradient_sync(False)
            stack.callback(model.set_requires_gradient_sync, True)
        yield


@contextlib.contextmanager
def with_gradient_sync(model: Any) -> Generator[None]:
    """In this block a backward pass of the wrapper averages gradients, whatever was said before."""
    with contextlib.ExitStack() as stack:
        if isinstance(model, DistributedDataParallel):
            before = model.require_backward_grad_sync
            model.require_backward_grad_sync = True
            stack.callback(setattr, model, "require_backward_grad_sync", before)
            model.reducer.prepare_for_backward([])  # as at the end of its forward pass
        elif hasattr(model, "set_requires_gradient_sync"):  # FSDP
            model.set_requires_gradient_sync(True)
        yield
