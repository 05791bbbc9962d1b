"""Backward passes that a script runs itself: ``loss.backward()`` averages gradients, as in DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportPrivateUsage]


class BackwardWatch:
    """Calls ``average(models)`` at the end of each backward pass that reaches watched models.

    A pass that the library runs pauses it.
    """

    def __init__(self, average: Callable[[list[nn.Module]], None]) -> None:
        self.paused = False
        self._average = average
        self._models: list[nn.Module] = []
        self._handles: list[Any] = []
        self._pass = -1  # the number that torch has given to the current pass
        self._reached: set[int] = set()  # places of the models that it has reached

    def add(self, model: nn.Module) -> None:
        """Watch `model`, also those of its parameters that are frozen now."""
        if any(model is known for known in self._models):
            return
        place = len(self._models)
        self._models.append(model)

        def note(_: torch.Tensor) -> None:
            if not self.paused:
                self._note(place)

        for p in model.parameters():
            if p.is_floating_point() or p.is_complex():
                needed = p.requires_grad
                p.requires_grad_(True)  # torch takes hooks for such parameters only
                self._handles.append(p.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]
                p.requires_grad_(needed)

    def clear(self) -> None:
        """Watch nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._models.clear()

    def _note(self, place: int) -> None:
        # A failed pass never ended: the number of the pass shows that, and an empty set would not.
        number = torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]
        if number != self._pass:
            self._pass, self._reached = number, set()
            _engine.queue_callback(self._end)
        self._reached.add(place)

    def _end(self) -> None:
        reached, self._pass = sorted(self._reached), -1
        self._average([self._models[place] for place in reached if place < len(self._models)])
