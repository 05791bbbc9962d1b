"""The familiar object with the familiar names, a thin face over the parts."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, overload

from syncprims import get_world_size

from . import gathering
from ._familiar import Settings, only, refuse, understood
from ._saving import Checkpointing
from ._together import Together
from ._trackers import Trackers
from .accumulation import Accumulator
from .data import PreparedLoader, skip_first_batches
from .devices import rank_device
from .joining import join_uneven_inputs
from .precision import Precision
from .preparation import Preparation, unwrap_model
from .schedule import PreparedScheduler

if TYPE_CHECKING:
    import os
    from collections.abc import Generator, Iterable
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
M = TypeVar("M", bound="nn.Module")
Placement = bool | list[bool] | None  #: as Accelerate's `prepare` takes it


class Accelerator(Together, Trackers, Checkpointing):
    """One job on this rank: what Accelerate's object of this name offers, on every backend.

    `mixed_precision` None is ``SYNCPRIMS_MIXED_PRECISION``, else ``"no"``. `seed` fixes the order
    of shuffled data. `step_schedule_per_rank` advances schedules by the number of ranks per step.
    `ddp` and `scaler` are options for DDP and the loss scaler, where there are any. With
    `dispatch_batches` rank 0 reads the data and sends the others theirs. `log_with` takes trackers,
    objects with ``log(values, step=...)``. Accelerate's configuration objects are understood where
    there is an equivalent.

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
        log_with: Any = None,
        dataloader_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        project_config: Any = None,
        kwargs_handlers: Any = None,
        **others: Any,
    ) -> None:
        refuse("Accelerator", others)
        said = understood(
            Settings(
                gradient_accumulation_steps, True, project_dir, None, None,
                even_batches, split_batches, dispatch_batches, non_blocking, seed, ddp, scaler,
            ),
            dataloader_config, gradient_accumulation_plugin, project_config, kwargs_handlers,
        )  # fmt: skip
        device = rank_device(cpu=cpu)
        self.accumulator = Accumulator(
            said.gradient_accumulation_steps,
            precision=Precision(mixed_precision, device, scaler=said.scaler),
            sync_with_dataloader=said.sync_with_dataloader,
        )
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.preparation = Preparation(
            self.accumulator,
            device,
            device_placement=device_placement,
            even_batches=said.even_batches,
            split_batches=said.split_batches,
            dispatch_batches=bool(said.dispatch_batches),
            seed=said.seed,
            non_blocking=said.non_blocking,
            schedule=step_scheduler_with_optimizer,
            schedule_advance=get_world_size() if step_schedule_per_rank else 1,
            ddp=said.ddp,
        )
        self._prepared: list[Any] = []  # loaders and schedules
        self._start_together()
        self._start_tracking(log_with)
        self._start_saving(said.project_dir, said.logging_dir, said.keep_last)

    # -- training -------------------------------------------------------------------------------

    @overload
    def prepare(self, obj: T, /, *, device_placement: Placement = None) -> T: ...
    @overload
    def prepare(self, *objects: *Ts, device_placement: Placement = None) -> tuple[*Ts]: ...
    def prepare(self, *objects: Any, device_placement: Placement = None) -> Any:  # type: ignore[misc]
        """Return models, optimizers, loaders and schedules prepared, in order. Collective.

        :raises RankMismatch: on all ranks, if a model differs between them in more than its values.
        :raises TypeError: if `device_placement` is for some of them another than the job's.
        """
        usual = self.preparation.device_placement
        asked = device_placement if isinstance(device_placement, list) else [device_placement]
        for one in asked:
            instead = "Accelerator(device_placement=False), and move what is to be moved"
            only(usual, one, "prepare(device_placement=) that differs from the job's", instead)
        made = self.preparation.all(objects)
        self._prepared += [
            obj
            for obj in made
            if isinstance(obj, PreparedLoader | PreparedScheduler)
            and not any(obj is known for known in self._prepared)
        ]
        return made[0] if len(made) == 1 else made

    def prepare_model(
        self, model: M, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> M:
        """Return `model` prepared. Collective. See :meth:`prepare`."""
        instead = "freeze it first: model.requires_grad_(False) is not wrapped"
        only(False, evaluation_mode, "prepare_model(evaluation_mode=True)", instead)
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
        only(None, slice_fn_for_dispatch, call, "a collate_fn that makes lists of tensors")
        return self.prepare(data_loader, device_placement=device_placement)

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

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        """Return a context that computes in the job's precision."""
        asked = autocast_handler.to_kwargs() if autocast_handler is not None else {}
        only({}, asked, "autocast(autocast_handler=)", "use torch.autocast in the loop")
        return self.accumulator.precision.autocast()

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer's last step met an overflow, on some rank."""
        return any(optimizer.step_was_skipped for optimizer in self.accumulator.optimizers)

    def unwrap_model(
        self, model: M, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False
    ) -> M:
        """Return the model inside of its wrappers. See :func:`unwrap_model`."""
        return unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether a part of `model` has been spread over several devices by a map."""
        return any(len(getattr(part, "hf_device_map", ())) > 1 for part in model.modules())

    def trigger_sync_in_backward(self, model: nn.Module) -> None:
        """Raise TypeError: what a backward pass synchronizes is settled before its forward pass."""
        instead = "run the last forward pass of a window outside of no_sync()"
        only(None, model, "trigger_sync_in_backward()", instead)

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of everything prepared; return a None for each of `objects`."""
        self.accumulator.forget()
        self._prepared.clear()
        self._registered.clear()
        import gc

        gc.collect()
        return [None for _ in objects]

    clear = free_memory

    # -- data -----------------------------------------------------------------------------------

    @property
    def split_batches(self) -> bool:
        """Whether each batch is cut into one part per rank."""
        return self.preparation.split_batches

    @property
    def dispatch_batches(self) -> bool:
        """Whether rank 0 reads for all."""
        return self.preparation.dispatch_batches

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device behind the training."""
        return self.preparation.non_blocking

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

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return all ranks' tensors joined, less what only fills the last batches up."""
        loaders = self.accumulator.loaders
        return gathering.gather_for_metrics(
            input_data, loaders, use_gather_object=use_gather_object
        )

    # -- state ----------------------------------------------------------------------------------

    def stateful(self) -> dict[str, Any]:
        """Return what has a state that is the same on all ranks, by name."""
        named: dict[str, Any] = {}
        if self.scaler is not None:
            named["precision"] = self.accumulator.precision
        for name, model in self._named_models().items():
            named[name] = unwrap_model(model, keep_fp32_wrapper=True)
        for i, optimizer in enumerate(self.accumulator.optimizers):
            named[f"optimizer_{i}"] = optimizer
        schedules = [obj for obj in self._prepared if not isinstance(obj, PreparedLoader)]
        named |= {f"scheduler_{i}": schedule for i, schedule in enumerate(schedules)}
        return {**named, **self._registered}

    def _named_models(self) -> dict[str, nn.Module]:
        """Return the prepared models by the names that they are saved under."""
        return {f"model_{i}": model for i, model in enumerate(self.accumulator.models)}

    def rank_stateful(self) -> dict[str, Any]:
        """Return what has a state of this rank's own: open windows, and places in the data."""
        loaders = [obj for obj in self._prepared if isinstance(obj, PreparedLoader)]
        named: dict[str, Any] = {f"loader_{i}": loader for i, loader in enumerate(loaders)}
        return {"accumulator": self.accumulator, **named}
