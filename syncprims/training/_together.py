"""The Accelerator's place among the ranks, and what ranks do together, by the familiar names."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, TypeVar

import syncprims
from syncprims import Trigger

from . import gathering

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import torch

    from syncprims import World
    from syncprims._world.sequential import MainFirst

    from .preparation import Preparation

F = TypeVar("F", bound="Callable[..., Any]")


class Together:
    """The half of an Accelerator that needs no model: ranks, turns, flags and tensors."""

    preparation: Preparation

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.preparation.device

    def _start_together(self) -> None:
        self._trigger = Trigger("accelerator")

    # -- who am I -------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        """The number of ranks."""
        return syncprims.get_world_size()

    @property
    def process_index(self) -> int:
        """This rank."""
        return syncprims.get_rank()

    @property
    def local_process_index(self) -> int:
        """This rank's number on its node."""
        return syncprims.get_local_rank()

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return syncprims.is_main()

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its node."""
        return syncprims.is_local_main()

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return syncprims.is_last()

    @property
    def use_distributed(self) -> bool:
        """Whether there are other ranks."""
        return self.num_processes > 1

    @property
    def distributed_type(self) -> str:
        """``"NO"``, ``"MULTI_CPU"`` or ``"MULTI_GPU"``, equal to Accelerate's values."""
        if not self.use_distributed:
            return "NO"
        return "MULTI_CPU" if self.device.type == "cpu" else "MULTI_GPU"

    @property
    def state(self) -> World:
        """The world."""
        return syncprims.current()

    # -- together -------------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Return when every rank has arrived."""
        syncprims.barrier("wait_for_everyone")

    def main_process_first(self) -> MainFirst:
        """Return a context that rank 0 runs first."""
        return syncprims.main_first()

    def local_main_process_first(self) -> MainFirst:
        """Return a context that the first rank of each node runs first."""
        return syncprims.main_first(local=True)

    def on_main_process(self, function: F) -> F:
        """Make a function run on rank 0 only."""
        return syncprims.on_main(function)  # type: ignore[return-value]

    def on_local_main_process(self, function: F) -> F:
        """Make a function run on the first rank of each node only."""
        return syncprims.on_local_main(function)  # type: ignore[return-value]

    def on_last_process(self, function: F) -> F:
        """Make a function run on the highest rank only."""
        return syncprims.on_last(function)  # type: ignore[return-value]

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Make a function run on one rank only. With or without the function."""
        if process_index is None:
            raise ValueError("on_process takes the rank: on_process(process_index=1)")
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return syncprims.on_rank(process_index)(function)

    def on_local_process(
        self,
        function: Any = None,
        local_process_index: int | None = None,
        *,
        local_process_idx: int | None = None,
    ) -> Any:
        """Make a function run on one rank of each node only. With or without the function."""
        index = local_process_idx if local_process_index is None else local_process_index
        if index is None:
            raise ValueError("on_local_process takes the rank: local_process_index=1")
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=index)
        return syncprims.on_local_rank(index)(function)

    def print(self, *args: Any, **options: Any) -> None:
        """Print once per node."""
        syncprims.print_main(*args, local=True, **options)

    def set_trigger(self, reason: str | None = None) -> None:
        """Raise this object's flag on this rank."""
        self._trigger.set(reason)

    def check_trigger(self) -> bool:
        """Return everywhere whether any rank has raised it, then reset it. Collective."""
        return self._trigger.check()

    def gather(self, tensor: Any) -> Any:
        """Return all ranks' tensors joined. See :func:`gather`."""
        return gathering.gather(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the tensors' reduction over all ranks. See :func:`reduce`."""
        return gathering.reduce(tensor, reduction, scale)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Fill the tensors with those of one rank, and return them. See :func:`broadcast`."""
        return gathering.broadcast(tensor, from_process)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Return the tensors, filled up to the longest of all ranks."""
        return gathering.pad_across_processes(tensor, dim, pad_index, pad_first)

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Generator[Any]:
        """Give this rank's contiguous share of `inputs`. See :func:`syncprims.split`."""
        yield syncprims.split(inputs, pad=apply_padding)
