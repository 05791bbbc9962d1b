"""Ranks that run out of batches before others: they go on meeting, with zeros, to the end."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from syncprims import all_gather, broadcast, get_rank, get_world_size

from .averaging import share_model

if TYPE_CHECKING:
    from collections.abc import Generator

    from .accumulation import Accumulator


@contextlib.contextmanager
def join_uneven_inputs(accumulator: Accumulator) -> Generator[None]:
    """Let ranks train on unequal numbers of micro-batches in this block.

    A rank that is done adds zeros to the others' steps, and takes their models, optimizers and
    schedules over at the end. Unweighted losses are averaged over all ranks, those that are done
    included; with ``backward(loss, weight=n)`` every item counts alike. Collective.

    Models in DDP are averaged by this library in here, after the backward pass.

    :raises ValueError: for models whose forward pass needs all ranks: in FSDP, or in a DDP that
        copies buffers before it.
    """
    if get_world_size() == 1:
        yield
        return
    joining = _Joining(accumulator)
    accumulator.meet = joining.meet
    try:
        yield
        joining.follow()
    finally:
        accumulator.meet, accumulator.first = None, 0
    joining.take_over()


class _Joining:
    """What ranks tell each other at each turn of a micro-batch."""

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator
        self._active = list(range(get_world_size()))

    def meet(self, turn: str, what: Any) -> list[Any]:
        """Tell the others which turn this rank takes; return what those that still train say.

        :raises RuntimeError: on all ranks, if they take different turns.
        """
        said = all_gather((turn, what))
        active = [rank for rank, (other, _) in enumerate(said) if other != "done"]
        turns = {said[rank][0] for rank in active}
        if len(turns) > 1:
            raise RuntimeError(f"ranks that train take different turns: {sorted(turns)}")
        if active:
            self._active, self._accumulator.first = active, active[0]
        self.turn = turns.pop() if turns else "done"
        return [said[rank][1] for rank in active]

    def follow(self) -> None:
        """Go on with zeros until nobody trains any more."""
        window = None
        while True:
            said = self.meet("done", None)
            if self.turn == "done":
                return
            if self.turn == "enter":
                window = self._accumulator.window_named(said[0][0])
                window.follow(all(at_end for _, at_end in said))
            elif window is not None and self.turn == "backward":
                self._accumulator.follow(window, weighted=said[0])
            elif window is not None:
                window.leave()

    def take_over(self) -> None:
        """Leave what the last to train has on all ranks."""
        if len(self._active) == get_world_size():
            return
        source, accumulator = self._active[0], self._accumulator
        for window in accumulator.windows:
            for model in window.models:
                share_model(model, source)
        accumulator.precision.settle()
        stateful: list[Any] = [*accumulator.optimizers, *accumulator.schedules]
        if accumulator.precision.scaler is not None:
            stateful.append(accumulator.precision)
        mine = [obj.state_dict() for obj in stateful]
        for obj, state in zip(stateful, broadcast(mine, source), strict=True):
            if get_rank() != source:
                obj.load_state_dict(state)
        for optimizer in accumulator.optimizers:
            optimizer.zero_grad()
