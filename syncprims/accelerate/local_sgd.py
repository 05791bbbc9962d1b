"""Local SGD: ranks step alone, and average their models every few steps."""

from __future__ import annotations

from typing import Any

from torch import nn

from syncprims import all_reduce, get_world_size


class LocalSGD:
    """In this block each rank steps by itself; every `local_sgd_steps` the models are averaged.

    Call :meth:`step` after each step of the optimizer, on all ranks equally often.
    """

    def __init__(
        self, accelerator: Any, model: nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        self.enabled = enabled and get_world_size() > 1
        self.num_steps = 0
        self.local_sgd_steps = local_sgd_steps
        self._model = model
        self._no_sync = accelerator.no_sync(model)

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._no_sync.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.enabled:
            self._no_sync.__exit__(kind, error, trace)
            if kind is None:  # after an error the other ranks do not come
                self._average()

    def step(self) -> None:
        """Count a step, and average the models if it is the last of its round. Collective then."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        for p in self._model.parameters():
            p.data.copy_(all_reduce(p.data, "mean"))
