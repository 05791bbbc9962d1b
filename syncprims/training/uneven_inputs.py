"""Unequal numbers of batches: ranks without one join the others' collectives with zeros."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import nn

from syncprims import all_gather, broadcast, get_rank, get_world_size

from . import accumulation
from .accumulation import AccumulationWindow, Accumulator, averager_of, parameters_of
from .gradient_sync import averages_gradients_itself, broadcast_model, gradient_sync


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
    averager = averager_of(accumulator)
    averager.announce = join.announce
    with contextlib.ExitStack() as stack:
        for model in filter(averages_gradients_itself, accumulator.models):
            stack.enter_context(gradient_sync(model, False))
            check = model.register_forward_pre_hook(
                lambda model, _: accumulation.check_joinable([model])
            )
            stack.callback(check.remove)
        stack.callback(averager.end_join)
        yield
        join.follow()
    join.take_over()


class _Join:
    """The facts that ranks exchange at each event of a micro-batch."""

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator, self._averager = accumulator, averager_of(accumulator)
        self._active = list(range(get_world_size()))
        self._event = ""

    def announce(self, event: str, value: object) -> list[Any]:
        """Send this rank's event; return the values of the ranks that still train. Collective.

        :raises RuntimeError: on all ranks, if their events differ.
        """
        sent = all_gather((event, value), name="join_uneven_inputs")
        active = [rank for rank, (other, _) in enumerate(sent) if other != "done"]
        events = {sent[rank][0] for rank in active}
        if len(events) > 1:
            raise RuntimeError(f"ranks with batches make different calls: {sorted(events)}")
        if active:
            self._active, self._averager.first_active = active, active[0]
            self._event = events.pop()
        return [sent[rank][1] for rank in active]

    def follow(self) -> None:
        """Join the others' micro-batches with zeros until no rank trains any more."""
        models, window = self._accumulator.models, None
        while values := self.announce("done", None):
            value = values[0]
            if self._event == "enter":
                window = self._enter([models[number] for number in value[0]])
                window.begin_micro_batch(at_end=all(at_end for _, at_end in values))
            elif self._event == "gradients":
                self._averager.average_announced(values, joins=True)
            elif window is not None and self._event == "backward":
                window.count_pass(0.0 if value else None)
                if window.sync:
                    window.close_factor()
                self._averager.begin_pass()
                self._averager.end_pass()
                window.average()
            elif window is not None:
                window.end_micro_batch()

    def _enter(self, models: list[nn.Module]) -> AccumulationWindow:
        """Return the window in which the other ranks begin a micro-batch."""
        window = self._accumulator.accumulate(*models)
        accumulation.check_joinable(window.models)
        if window.sync or not window.count:
            for p in window.parameters:
                p.grad = None  # this rank does not step, so no call clears the last step's
        return window

    def take_over(self) -> None:
        """Copy the state of a rank that trained last to all ranks. Collective."""
        if len(self._active) == get_world_size():
            return
        source, accumulator = self._active[0], self._accumulator
        for model in accumulator.models:
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
        # Those of a window that is not full are each rank's own sums, and wait for the rest of it.
        half = {p for w in accumulator.entered if w.is_half_full for p in w.parameters}
        every = [p for optimizer in accumulator.optimizers for p in parameters_of(optimizer)]
        used = [p for p in every if p not in half]
        left: list[torch.Tensor | None] = broadcast([p.grad for p in used], source)
        if get_rank() not in self._active:
            for p, gradient in zip(used, left, strict=True):
                p.grad = gradient
