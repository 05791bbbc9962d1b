"""The familiar object with the familiar names, a thin face over the parts."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, overload

import syncprims
from syncprims import Trigger

from . import gathering
from ._saving import Saving
from .accumulation import Accumulator
from .data import PreparedLoader, skip_first_batches
from .devices import rank_device
from .joining import join_uneven_inputs
from .precision import Precision
from .preparation import Preparation, unwrap_model
from .schedule import PreparedScheduler

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Iterable
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from syncprims.turns import MainFirst

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
M = TypeVar("M", bound="nn.Module")
F = TypeVar("F", bound="Callable[..., Any]")


class Accelerator(Saving):
    """One job on this rank: what Accelerate's object of this name offers, on every backend.

    `mixed_precision` None is ``SYNCPRIMS_MIXED_PRECISION``, else ``"no"``. `seed` fixes the order
    of shuffled data. `step_schedule_per_rank` advances schedules by the number of ranks per step.
    `ddp` and `scaler` are options for DDP and the loss scaler, where there are any.

    :raises ConfigurationError: if the device cannot compute in this precision.
    """

    def __init__(
        self,
        gradient_accumulation_steps: int = 1,
        mixed_precision: str | None = None,
        cpu: bool = False,
        project_dir: str | os.PathLike[str] | None = None,
        step_scheduler_with_optimizer: bool = True,
        even_batches: bool = True,
        seed: int | None = None,
        *,
        device_placement: bool = True,
        split_batches: bool = False,
        non_blocking: bool = False,
        step_schedule_per_rank: bool = False,
        ddp: dict[str, Any] | None = None,
        scaler: dict[str, Any] | None = None,
    ) -> None:
        device = rank_device(cpu=cpu)
        self.accumulator = Accumulator(
            gradient_accumulation_steps, precision=Precision(mixed_precision, device, scaler=scaler)
        )
        self.project_dir = None if project_dir is None else Path(project_dir)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.preparation = Preparation(
            self.accumulator,
            device,
            device_placement=device_placement,
            even_batches=even_batches,
            split_batches=split_batches,
            seed=seed,
            non_blocking=non_blocking,
            schedule=step_scheduler_with_optimizer,
            schedule_advance=syncprims.get_world_size() if step_schedule_per_rank else 1,
            ddp=ddp,
        )
        self._trigger = Trigger("accelerator")
        self._prepared: list[Any] = []  # loaders and schedules
        self._start_saving()

    # -- who am I -------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.preparation.device

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

    # -- training -------------------------------------------------------------------------------

    @overload
    def prepare(self, obj: T, /) -> T: ...
    @overload
    def prepare(self, *objects: *Ts) -> tuple[*Ts]: ...
    def prepare(self, *objects: Any) -> Any:  # type: ignore[misc]
        """Return models, optimizers, loaders and schedules prepared, in order. Collective."""
        made = self.preparation.all(objects)
        self._prepared += [
            obj
            for obj in made
            if isinstance(obj, PreparedLoader | PreparedScheduler)
            and not any(obj is known for known in self._prepared)
        ]
        return made[0] if len(made) == 1 else made

    prepare_model = prepare_optimizer = prepare_scheduler = prepare_data_loader = prepare

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return a context around one micro-batch. See :meth:`Accumulator.accumulate`."""
        return self.accumulator.accumulate(*models)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context whose backward passes leave gradients unsynchronized."""
        return self.accumulator.no_sync(model)

    def backward(self, loss: torch.Tensor, weight: float | None = None, **options: Any) -> None:
        """Add the gradients of `loss` to the window. See :meth:`Accumulator.backward`."""
        self.accumulator.backward(loss, weight, **options)

    def flush(self) -> bool:
        """Close a window that is not full. See :meth:`Accumulator.flush`."""
        return self.accumulator.flush()

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch closes its window."""
        return self.accumulator.sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per step."""
        return self.accumulator.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.accumulator.steps = steps

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
    ) -> torch.Tensor:
        """Clip by norm, at the end of a window. See :meth:`Accumulator.clip_grad_norm_`."""
        return self.accumulator.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float
    ) -> None:
        """Clip by value, at the end of a window."""
        self.accumulator.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of `optimizer`, or of all, at the end of their windows."""
        for prepared in self.accumulator.optimizers:
            window = prepared.window()
            if optimizer in (None, prepared) and (window is None or window.sync):
                prepared.ready()

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"`` or ``"bf16"``."""
        return self.accumulator.precision.mode

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16."""
        return self.accumulator.precision.scaler

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context that computes in the job's precision."""
        return self.accumulator.precision.autocast()

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer's last step met an overflow, on some rank."""
        return any(optimizer.step_was_skipped for optimizer in self.accumulator.optimizers)

    def unwrap_model(self, model: M, keep_fp32_wrapper: bool = True) -> M:
        """Return the model inside of its wrappers. See :func:`unwrap_model`."""
        return unwrap_model(model, keep_fp32_wrapper)

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of everything prepared; return a None for each of `objects`."""
        self.accumulator.forget()
        self._prepared.clear()
        import gc

        gc.collect()
        return [None for _ in objects]

    clear = free_memory

    # -- data -----------------------------------------------------------------------------------

    @property
    def even_batches(self) -> bool:
        """Whether ranks get equally many batches; counts for loaders prepared from now on."""
        return self.preparation.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self.preparation.even_batches = even

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a view of a loader without its first batches."""
        return skip_first_batches(dataloader, num_batches)

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: Any = None, even_batches: bool | None = None
    ) -> Generator[None]:
        """Let ranks run out of batches before others, in this block. Collective.

        See :func:`join_uneven_inputs`; `joinables` need not be named. `even_batches` is that of all
        prepared loaders until the end of the block.
        """
        del joinables  # all prepared models join
        loaders = [obj for obj in self._prepared if isinstance(obj, PreparedLoader)]
        before = [(loader, loader.even_batches) for loader in loaders]
        for loader in loaders if even_batches is not None else ():
            loader.even_batches = bool(even_batches)
        try:
            with join_uneven_inputs(self.accumulator):
                yield
        finally:
            for loader, even in before:
                loader.even_batches = even

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

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return all ranks' tensors joined, less what only fills the last batches up."""
        loaders = self.accumulator.loaders
        return gathering.gather_for_metrics(
            input_data, loaders, use_gather_object=use_gather_object
        )

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the tensors' reduction over all ranks. See :func:`reduce`."""
        return gathering.reduce(tensor, reduction, scale)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Fill the tensors with those of one rank, and return them."""
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

    # -- state ----------------------------------------------------------------------------------

    def stateful(self) -> dict[str, Any]:
        """Return what has a state that is the same on all ranks, by name."""
        named: dict[str, Any] = {}
        if self.scaler is not None:
            named["precision"] = self.accumulator.precision
        for i, model in enumerate(self.accumulator.models):
            named[f"model_{i}"] = unwrap_model(model, keep_fp32_wrapper=True)
        for i, optimizer in enumerate(self.accumulator.optimizers):
            named[f"optimizer_{i}"] = optimizer
        schedules = [obj for obj in self._prepared if not isinstance(obj, PreparedLoader)]
        named |= {f"scheduler_{i}": schedule for i, schedule in enumerate(schedules)}
        return {**named, **self._registered}

    def rank_stateful(self) -> dict[str, Any]:
        """Return what has a state of this rank's own: open windows, and places in the data."""
        loaders = [obj for obj in self._prepared if isinstance(obj, PreparedLoader)]
        named: dict[str, Any] = {f"loader_{i}": loader for i, loader in enumerate(loaders)}
        return {"accumulator": self.accumulator, **named}
