"""Uneven inputs: ranks that are out of batches join the others' collectives with zeros."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from syncprims import all_gather, broadcast, get_rank, get_world_size

from .accumulation import Accumulator
from .gradient_sync import broadcast_model


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
    try:
        yield
        join.follow()
    finally:
        windows.announce, windows.first_active = None, 0
    join.take_over()


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
        sent = all_gather((event, value))
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
            elif window is not None and self._event == "backward":
                number = window.add_weight(0.0 if values[0] else None)
                if window.sync:
                    window.scale_earlier(window.factor(number))
                    window.average()
            elif window is not None:
                window.end_micro_batch()

    def take_over(self) -> None:
        """Copy the state of a rank that trained last to all ranks. Collective."""
        if len(self._active) == get_world_size():
            return
        source, accumulator = self._active[0], self._accumulator
        for window in self._windows.all():
            for model in window.models:
                broadcast_model(model, source)
        accumulator.precision.update_scaler()
        stateful: list[Any] = [*accumulator.optimizers, *accumulator.schedules]
        if accumulator.precision.scaler is not None:
            stateful.append(accumulator.precision)
        mine = [obj.state_dict() for obj in stateful]
        for obj, state in zip(stateful, broadcast(mine, source), strict=True):
            if get_rank() != source:
                obj.load_state_dict(state)
        for optimizer in accumulator.optimizers:
            optimizer.zero_grad()
