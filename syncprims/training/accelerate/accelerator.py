"""The Accelerator: one object with Accelerate's names, a thin layer over the parts."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, overload

import torch
from torch import nn

import syncprims
from syncprims.training import gathering
from syncprims.training.accumulation import Accumulator, join_uneven_inputs
from syncprims.training.data import skip_first_batches
from syncprims.training.gathering import Reduction
from syncprims.training.precision import Precision
from syncprims.training.preparation import Preparation, rank_device, unwrap_model

from .config import (
    AcceleratorSettings,
    check_fixed,
    check_unsupported,
    profiler_options,
    read_configuration,
)
from .saving import Checkpointing
from .state import DistributedType, GradientState, RankCalls, set_timeout, state_of_job
from .tracking import Tracking

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
M = TypeVar("M", bound="nn.Module")
Placement = bool | list[bool] | None  #: as in Accelerate's `prepare`


class Accelerator(RankCalls, Checkpointing, Tracking):
    """One training job on this rank, with the names of Accelerate's object, on every backend.

    If `mixed_precision` is None, ``SYNCPRIMS_MIXED_PRECISION`` is used, else ``"no"``. `seed` fixes
    the order of shuffled data. With `step_schedule_per_rank` schedules advance by the number of
    ranks per step. `ddp` and `scaler` are options for DDP and the loss scaler, if there are any.
    With `dispatch_batches` rank 0 reads the data and sends the others theirs. `log_with` takes
    trackers: objects with ``log(values, step=...)``, or names (see :meth:`init_trackers`).
    Accelerate's configuration objects are accepted if there is an equivalent.

    These give what Accelerate does: `divide_by_steps` divides each loss by the number of steps at
    once; `order` ``"torch"`` or ``"seedable"`` shuffles as torch does; `dispatch_streams` lets rank
    0 read streams; `resume_loaders` False leaves a loader's place to the script when a state is
    loaded; `skip_finished` continues a state from an epoch's last batch with the next epoch;
    `save_together` False lets each rank save its part of a state, and rank 0 a model, without the
    others; `unwrap_for_hooks` gives the models inside of DDP to hooks.

    :raises ConfigurationError: if the device cannot compute in this precision.
    :raises TypeError: for what has no equivalent, saying what to do instead.
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
        dispatch_batches: bool | None = None,
        divide_by_steps: bool = False,
        order: str = "seeded",
        dispatch_streams: bool = False,
        resume_loaders: bool = True,
        skip_finished: bool = False,
        save_together: bool = True,
        unwrap_for_hooks: bool = False,
        log_with: Any = None,
        dataloader_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        project_config: Any = None,
        kwargs_handlers: Any = None,
        **others: Any,
    ) -> None:
        check_unsupported("Accelerator", others)
        settings = AcceleratorSettings(
            gradient_accumulation_steps=gradient_accumulation_steps,
            project_dir=project_dir,
            device_placement=device_placement,
            even_batches=even_batches,
            split_batches=split_batches,
            dispatch_batches=dispatch_batches,
            seed=seed,
            non_blocking=non_blocking,
            order=order,
            dispatch_streams=dispatch_streams,
            skip_finished=skip_finished,
            schedule=step_scheduler_with_optimizer,
            ddp=ddp,
            scaler=scaler,
        )
        configured = (dataloader_config, gradient_accumulation_plugin, project_config)
        read_configuration(settings, *configured, kwargs_handlers)
        if step_schedule_per_rank and not settings.split_batches:
            settings.schedule_advance = syncprims.get_world_size()
            settings.schedule_to_end = True
        set_timeout(settings.timeout)
        chosen = None if cpu else os.environ.get("ACCELERATE_TORCH_DEVICE")
        device = torch.device(chosen) if chosen else rank_device(cpu=cpu)
        self.accumulator = Accumulator(
            settings.gradient_accumulation_steps,
            precision=Precision(mixed_precision, device, scaler=settings.scaler),
            sync_with_dataloader=settings.sync_with_dataloader,
            sync_each_batch=settings.sync_each_batch,
            divide_by_steps=divide_by_steps,
        )
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.preparation = Preparation(self.accumulator, device, settings)
        self._trigger = syncprims.Trigger("accelerator")
        self._start_saving(
            settings,
            resume_loaders=resume_loaders,
            together=save_together,
            unwrap_for_hooks=unwrap_for_hooks,
        )
        self._autocast_options = settings.autocast or {}
        self._profile_options = settings.profile
        self._start_tracking(log_with)
        self.state = state_of_job(self)  #: this rank, under Accelerate's names
        self.gradient_state = GradientState(accelerator=self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        """Return this object: a copy of what holds it belongs to the same job."""
        return self

    # -- this rank ------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
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
    def distributed_type(self) -> DistributedType:
        """``NO``, ``MULTI_CPU`` or ``MULTI_GPU``, equal to Accelerate's values."""
        return self.state.distributed_type

    # -- collectives ----------------------------------------------------------------------------

    def set_trigger(self, reason: str | None = None) -> None:
        """Set this object's flag on this rank."""
        self._trigger.set(reason)

    def check_trigger(self) -> bool:
        """Return whether the flag is set on any rank, and reset it. Collective."""
        return self._trigger.check()

    def gather(self, tensor: Any, *, name: str | None = None) -> Any:
        """Return all ranks' tensors, concatenated. See :func:`gather`. Collective."""
        return gathering.gather(tensor, name=name)

    def reduce(
        self,
        tensor: Any,
        reduction: Reduction = "sum",
        scale: float = 1.0,
        *,
        name: str | None = None,
    ) -> Any:
        """Return the ``sum``, ``mean``, ``min``, ``max`` or ``prod`` over all ranks. Collective.

        The result is multiplied by `scale`. With ``none`` the tensors are returned unchanged.
        """
        return gathering.reduce(tensor, reduction, scale, name=name)

    def broadcast(self, tensor: Any, from_process: int = 0, *, name: str | None = None) -> Any:
        """Fill the tensors with those of one rank, and return them. Collective."""
        return gathering.broadcast(tensor, from_process, name=name)

    def pad_across_processes(
        self,
        tensor: Any,
        dim: int = 0,
        pad_index: float = 0,
        pad_first: bool = False,
        *,
        name: str | None = None,
    ) -> Any:
        """Return the tensors, padded to the longest of all ranks. Collective."""
        return gathering.pad_across_processes(tensor, dim, pad_index, pad_first, name=name)

    # -- training -------------------------------------------------------------------------------

    @overload
    def prepare(self, obj: T, /, *, device_placement: Placement = None) -> T: ...
    @overload
    def prepare(self, *objects: *Ts, device_placement: Placement = None) -> tuple[*Ts]: ...
    def prepare(self, *objects: Any, device_placement: Placement = None) -> Any:  # type: ignore[misc]
        """Return models, optimizers, loaders and schedules prepared, in order. Collective.

        :raises RankMismatch: on all ranks, if a model differs between them in more than its values.
        :raises TypeError: if `device_placement` differs from that of the job for any of them.
        """
        fixed = self.preparation.options.device_placement
        asked = device_placement if isinstance(device_placement, list) else [device_placement]
        for value in asked:
            instead = "Accelerator(device_placement=False), and move what is to be moved"
            call = "prepare(device_placement=) that differs from the job's"
            check_fixed(fixed, value, call, instead)
        made = self.preparation.all(objects)
        return made[0] if len(made) == 1 else made

    def prepare_model(
        self, model: M, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> M:
        """Return `model` prepared. Collective. See :meth:`prepare`."""
        instead = "freeze it first: model.requires_grad_(False) is not wrapped"
        check_fixed(False, evaluation_mode, "prepare_model(evaluation_mode=True)", instead)
        return self.prepare(model, device_placement=device_placement)

    def prepare_optimizer(self, optimizer: T, device_placement: bool | None = None) -> T:
        """Return `optimizer` prepared. See :meth:`prepare`."""
        return self.prepare(optimizer, device_placement=device_placement)

    def prepare_scheduler(self, scheduler: T) -> T:
        """Return `scheduler` prepared. See :meth:`prepare`."""
        return self.prepare(scheduler)

    def prepare_data_loader(
        self,
        data_loader: T,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: None = None,
    ) -> T:
        """Return `data_loader` prepared. Collective. See :meth:`prepare`."""
        call = "prepare_data_loader(slice_fn_for_dispatch=)"
        check_fixed(None, slice_fn_for_dispatch, call, "a collate_fn that makes lists of tensors")
        return self.prepare(data_loader, device_placement=device_placement)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return a context around one micro-batch. See :meth:`Accumulator.accumulate`."""
        return self.accumulator.accumulate(*models)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context whose backward passes leave gradients unsynchronized."""
        return self.accumulator.no_sync(model)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context whose backward passes synchronize gradients of earlier forward passes.

        See :meth:`Accumulator.sync_in_backward`.
        """
        return self.accumulator.sync_in_backward(model)

    def backward(self, loss: torch.Tensor, weight: float | None = None, **options: Any) -> None:
        """Add the gradients of `loss` to the window. See :meth:`Accumulator.backward`."""
        self.accumulator.backward(loss, weight, **options)

    def flush(self) -> bool:
        """Close a window that is not full. See :meth:`Accumulator.flush`."""
        return self.accumulator.flush()

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch closes its window. It can be set, for the next step."""
        return self.accumulator.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync: bool) -> None:
        self.accumulator.sync_gradients = sync

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
        """Unscale the gradients of `optimizer`, by default of all, if their window is closed."""
        for prepared in self.accumulator.optimizers:
            if optimizer in (None, prepared) and prepared.sync_gradients:
                prepared.unscale_gradients()

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"`` or ``"bf16"``."""
        return self.accumulator.precision.mode

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler; fp16 only."""
        return self.accumulator.precision.scaler

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        """Return a context in which forward passes compute in the job's precision.

        `autocast_handler` is Accelerate's AutocastKwargs; without, that of the job.
        """
        options = self._autocast_options
        if autocast_handler is not None:
            options = autocast_handler.to_kwargs()
        return self.accumulator.precision.autocast(**options)

    @contextlib.contextmanager
    def profile(self, profile_handler: Any = None) -> Generator[Any]:
        """Profile the block with torch's profiler, and yield it.

        `profile_handler` is Accelerate's ProfileKwargs; without, that of the job. With its
        ``output_trace_dir`` each rank writes its trace there.
        """
        options = dict(self._profile_options)
        if profile_handler is not None:
            options = profiler_options(profile_handler)
        directory = options.pop("output_trace_dir", None)
        with torch.profiler.profile(**options) as profiler:
            yield profiler
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(f"{directory}/profile_{self.process_index}.json")

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of an optimizer was skipped because of an overflow on any rank."""
        return any(optimizer.step_was_skipped for optimizer in self.accumulator.optimizers)

    def unwrap_model(
        self, model: M, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False
    ) -> M:
        """Return the model inside of its wrappers. See :func:`unwrap_model`."""
        return unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether a device map has put parts of `model` on several devices."""
        return any(len(getattr(part, "hf_device_map", ())) > 1 for part in model.modules())

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget everything that was prepared or registered; return a None for each object."""
        self.accumulator.forget()
        self.preparation.loaders.clear()
        self._registered.clear()
        gc.collect()
        return [None for _ in objects]

    clear = free_memory

    # -- data -----------------------------------------------------------------------------------

    @property
    def split_batches(self) -> bool:
        """Whether each batch is cut into one part per rank."""
        return self.preparation.options.split_batches

    @property
    def dispatch_batches(self) -> bool:
        """Whether rank 0 reads the data for all ranks."""
        return bool(self.preparation.options.dispatch_batches)

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether a loaded state has the loaders' places."""
        return self._resume_loaders

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device while training goes on."""
        return self.preparation.options.non_blocking

    @property
    def even_batches(self) -> bool:
        """Whether ranks get equally many batches; a change affects loaders prepared after it."""
        return self.preparation.options.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self.preparation.options.even_batches = even

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a view of a loader without its first batches."""
        return skip_first_batches(dataloader, num_batches)

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: Any = None, even_batches: bool | None = None
    ) -> Generator[None]:
        """In this block, ranks may have different numbers of batches. Collective.

        See :func:`join_uneven_inputs`. All prepared models join, also without `joinables`.
        `even_batches` is that of all prepared loaders until the end of the block.
        """
        del joinables
        with contextlib.ExitStack() as stack:
            for loader in self.preparation.loaders:
                even = loader.even_batches
                stack.callback(setattr, loader, "even_batches", even)
                loader.even_batches = even if even_batches is None else even_batches
            stack.enter_context(join_uneven_inputs(self.accumulator))
            yield

    def gather_for_metrics(
        self, input_data: Any, use_gather_object: bool = False, *, name: str | None = None
    ) -> Any:
        """Return all ranks' tensors, concatenated, without the items that pad the last batches."""
        cursor = self.accumulator.loaders.innermost
        real, single = (None, False) if cursor is None else (cursor.real, cursor.single)
        return gathering.gather_for_metrics(
            input_data, real, use_gather_object, single=single, name=name
        )
