"""One window: the micro-batches whose gradients make one step, for one set of models."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncprims import all_gather, all_reduce, get_world_size

from .averaging import average_gradients, share_buffers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from .accumulation import Accumulator
    from .tracking import Cursor


class Window:
    """The gradients of some models, from one step to the next.

    Micro-batches add up unscaled. The one that closes the window knows how many it holds, or how
    many items, so it scales what is there, and then its own loss alike. Entered once per
    micro-batch.
    """

    def __init__(
        self, models: Sequence[nn.Module], given: tuple[nn.Module, ...], accumulator: Accumulator
    ) -> None:
        self.models = tuple(models)
        self.given = given  #: the models that its blocks name: none, for all that are prepared
        self.count = 0  #: micro-batches in it, with the current one
        self.sync = False  #: it is closed, or closes with the current micro-batch: steps may pass
        self.begun = False  #: something has been added to it
        self.spent = False  #: an optimizer has stepped with it
        self.inside = False  #: the current code is in its block
        self.alone = get_world_size() == 1  #: nobody is to be averaged with
        self.norm: torch.Tensor | None = None  #: of the last clipped gradients
        self._accumulator = accumulator
        self._loaders = accumulator.loaders
        self._scaled = accumulator.precision.scaler is not None
        self._serial = 0
        self._driver: Cursor | None = None
        self._chunked = False  # one batch has made several micro-batches
        self._weights: list[float] = []  # per backward of a micro-batch: its items so far
        self._weighted: bool | None = None
        self._backward = 0  # of the current micro-batch
        self._factor: float | None = None  # what is there has been scaled by it
        self._held = contextlib.ExitStack()
        self._ids = {id(p) for p in self.parameters}
        self._joining = False  # ranks may be out of batches: gradients are averaged here
        self._wrapped = [m for m in models if syncs_itself(m)]
        self._buffered = [m for m in models if any(True for _ in m.buffers())]
        self._shares = bool(self._buffered) and not self.alone  # something is due at the end

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters of all models, each once; looked up each time, for models may grow."""
        return list(dict.fromkeys(p for m in self.models for p in m.parameters()))

    def holds(self, ids: Collection[int]) -> bool:
        """Tell whether these are the ids of some parameters of these models."""
        if self._ids.isdisjoint(ids):
            self._ids = {id(p) for p in self.parameters}
        return not self._ids.isdisjoint(ids)

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
        accumulator = self._accumulator
        self._joining = accumulator.meet is not None
        if self._joining:
            self._refuse_unjoinable()
            said = accumulator.tell(self, "enter", at_end)
            at_end = all(end for _, end in said)
        self.sync = at_end or self.count >= accumulator.steps
        self.inside = True
        if self._wrapped and (self._joining or not self.sync):
            for model in self._wrapped:
                self._held.enter_context(without_sync(model))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.inside = False
        if self._wrapped:
            self._held.close()
        if self._accumulator.meet is not None and kind is None:
            self._accumulator.tell(self, "leave", None)
        if self._shares and kind is None:
            self.leave()

    def leave(self) -> None:
        """End a micro-batch: after a step's last one, buffers are the same on all ranks."""
        if self._shares and self.sync:
            self.share_buffers()

    def follow(self, at_end: bool) -> None:
        """Begin a micro-batch of others, to which this rank adds nothing."""
        self._joining = True
        self._refuse_unjoinable()
        if self.sync or not self.count:
            self.open()
            for p in self.parameters:  # nobody steps here, so nobody clears the last step's
                p.grad = None
        self.count += 1
        self._backward = 0
        self.sync = self.count >= self._accumulator.steps or at_end

    def _refuse_unjoinable(self) -> None:
        """Refuse models whose very forward pass needs all ranks."""
        for model in self._wrapped:
            if not isinstance(model, DistributedDataParallel):
                raise ValueError(
                    f"join_uneven_inputs(): the forward pass of {type(model).__name__} needs all "
                    f"ranks, also those without a batch; use loaders with even batches"
                )
            if forward_syncs_buffers(model):
                raise ValueError(
                    "join_uneven_inputs(): this DDP model sends buffers in its forward pass, which "
                    "needs all ranks; wrap it with broadcast_buffers=False, or let prepare() do it"
                )

    def open(self) -> None:
        """Begin anew."""
        if self._scaled:
            self._accumulator.opens(self)
        self.count, self.sync, self.begun, self.spent = 0, False, False, False
        self._weights, self._weighted, self._factor = [], None, None
        self._backward = 0

    def share_buffers(self) -> None:
        """Leave the first rank's running means and counts on all ranks."""
        for model in self._buffered:
            share_buffers(model, self._accumulator.first)

    def _at_end(self) -> bool:
        """Tell whether the current micro-batch is the last of its loader."""
        loaders = self._loaders
        if loaders.serial == self._serial and self._driver is None:
            return False  # nobody's loader gives these batches
        fresh = loaders.since(self._serial)
        if not fresh:
            # A batch cut into pieces: only counting, or flush(), tells which is the last one.
            self._chunked = self._chunked or loaders.is_open(self._driver)
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

    def weigh(self, weight: float | None) -> int:
        """Take note of a backward pass and its weight; return its number in the micro-batch.

        :raises ValueError: if the window mixes sums with means, or `weight` is no count of items.
        """
        if weight is not None and not 0 <= (weight := float(weight)) < math.inf:
            raise ValueError(f"weight={weight!r}: it is the number of items the loss sums up")
        weighted = weight is not None
        if weighted is not self._weighted and self._weighted is not None:
            raise ValueError(
                "a window with some losses given as backward(loss_sum, weight=n) and others as "
                "backward(loss_mean) has no right mean; use one form in all of its micro-batches"
            )
        self._weighted = weighted
        number, self._backward = self._backward, self._backward + 1
        if number == len(self._weights):
            self._weights.append(0.0)
        self._weights[number] += 1.0 if weight is None else weight
        self.begun = True
        return number

    def factor(self, number: int) -> float:
        """Return what sums of backward pass `number` are scaled by. Collective if weighted.

        :raises ValueError: if sums that need other factors stand in the same gradients already.
        """
        if self._weighted:
            total = all_reduce(self._weights[number])
            found = get_world_size() / total if total else 0.0
        else:
            found = 1.0 / self.count
        if self._factor is not None and self.count > 1 and found != self._factor:
            raise ValueError(
                "the backward passes of one micro-batch have different weights, and their "
                "gradients stand mixed in this window; add the losses up before one backward(), "
                "or use one Accumulator for each"
            )
        return found

    def settle(self, factor: float, aside: Iterable[torch.Tensor]) -> None:
        """Scale what earlier micro-batches left, once."""
        if self._factor is None:
            self._factor = factor
            self._scale(factor, aside)

    def _scale(self, factor: float, aside: Iterable[torch.Tensor]) -> None:
        there = [p.grad for p in self.parameters if p.grad is not None] if self.begun else []
        there += aside
        if factor != 1.0 and there:
            torch._foreach_mul_(there, factor)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

    def average(self, skip: Iterable[nn.Module] = ()) -> None:
        """Average over the ranks what no wrapper averages by itself. Collective."""
        if self.alone:
            return
        left_out = {p for model in skip for p in model.parameters()}
        own = dict.fromkeys(
            p
            for m in self.models
            if self._joining or m not in self._wrapped
            for p in m.parameters()
        )
        average_gradients(p for p in own if p not in left_out)

    def close(self, aside: Sequence[torch.Tensor]) -> bool:
        """Close it early, on all ranks: scale and average what there is. Collective.

        Returns False, and lets no step through, where there is nothing on any rank.
        """
        waiting = bool(self.count) and not self.sync
        mine = (self._weighted, self._weights) if waiting else (None, [])
        seen = [part for part in all_gather(mine) if part[1]]
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
        self._factor = get_world_size() / total if total else 0.0
        self._scale(self._factor, aside)
        if not self.alone:
            average_gradients(self.parameters)
            self.share_buffers()
        return True

    # -- saving ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a window that is not full holds: counts, and this rank's gradients."""
        if self.sync or not self.count:
            return {"count": 0, "weighted": None, "weights": [], "gradients": {}}
        gradients = {
            str(i): p.grad.detach().clone()
            for i, p in enumerate(self.parameters)
            if p.grad is not None
        }
        return {
            "count": self.count,
            "weighted": self._weighted,
            "weights": list(self._weights),
            "gradients": gradients,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a window of the same models; one that was full is as after its step."""
        self.open()
        self.sync = self.spent = not state["count"]
        self.count, self._weighted = state["count"], state["weighted"]
        self._weights, self.begun = list(state["weights"]), bool(state["weights"])
        for index, gradient in state["gradients"].items():
            parameter = self.parameters[int(index)]
            parameter.grad = gradient.to(parameter.device, copy=True)


def syncs_itself(model: nn.Module) -> bool:
    """Tell whether `model` averages its gradients itself: DDP's and FSDP's wrappers do."""
    return isinstance(model, DistributedDataParallel) or hasattr(
        model, "set_requires_gradient_sync"
    )


def forward_syncs_buffers(model: Any) -> bool:
    """Tell whether DDP copies buffers before each forward pass of `model`."""
    asked = getattr(model, "forward_sync_buffers", getattr(model, "broadcast_buffers", False))
    return bool(asked) and any(True for _ in model.buffers())


@contextlib.contextmanager
def without_sync(model: Any) -> Any:
    """Let a wrapped model's backward leave its gradients alone, in this block."""
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
