"""The Accelerator: one object with Accelerate's names, a thin layer over the parts."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import gc
import os
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, TypeVarTuple, cast, overload

import torch
from torch import nn
from torch.amp import GradScaler

import syncprims
from syncprims import training
from syncprims._world.runtime import get_world
from syncprims.training import Accumulator, gathering
from syncprims.training import PreparedOptimizer as AcceleratedOptimizer
from syncprims.training import PreparedScheduler as AcceleratedScheduler
from syncprims.training.optimizer import delegated
from syncprims.training.preparation import Preparation

from . import utils
from .data_loader import loader_options, skip_first_batches
from .saving import Checkpointing
from .state import AcceleratorState, GradientState, RankCalls, state_of_job
from .tracking import Tracking
from .unsupported import check_fixed, check_unsupported, check_variables, instead_of
from .utils import DataLoaderConfiguration, GradientAccumulationPlugin

__all__ = [
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "Accelerator",
    "GradientAccumulationPlugin",
]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
M = TypeVar("M", bound="nn.Module")
P = ParamSpec("P")
R = TypeVar("R")
Placement = bool | list[bool] | None  #: as in Accelerate's `prepare`


def _of_accumulator(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a method of a job that calls one of its accumulator's."""

    def call(job: Accelerator, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(job.accumulator, *args, **kwargs)

    return functools.update_wrapper(call, method)


class _Trigger(syncprims.Trigger):
    """A trigger that a true check clears."""

    _stays = False


class Accelerator(RankCalls, Checkpointing, Tracking):
    """One training job on this rank, with the names of Accelerate's object, on every backend.

    The arguments are Accelerate's, in their order. If `mixed_precision` is None,
    ``ACCELERATE_MIXED_PRECISION`` or ``SYNCPRIMS_MIXED_PRECISION`` is used, else ``"no"``.
    `log_with` takes trackers: objects with ``log(values, step=...)``, or names (see
    :meth:`init_trackers`). Accelerate's own configuration objects are accepted, too.

    A value that is set has its effect: an attribute that would have none cannot be set.

    :raises AttributeError: if such an attribute is set.
    :raises ConfigurationError: if the device cannot compute in this precision.
    :raises TypeError: for an argument, or a variable of ``accelerate launch``, without an
        equivalent, with an alternative.
    :raises ValueError: if an argument and a configuration object contradict each other.
    """

    autocast_handler: utils.AutocastKwargs | None
    ddp_handler: utils.DistributedDataParallelKwargs | None
    init_handler: utils.InitProcessGroupKwargs | None
    scaler_handler: utils.GradScalerKwargs | None
    is_fsdp2 = is_composable_parallelism_enabled = fp8_enabled = has_lomo_optimizer = False
    deepspeed_plugin = parallelism_config = torch_device_mesh = None

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: Any = None,
        *,
        log_with: object = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Iterable[object] | None = None,
        **others: object,
    ) -> None:
        check_unsupported("Accelerator", others)
        check_variables(os.environ)
        if split_batches:  # as there, where only the configuration object has it since 1.15
            text = "split_batches is ignored; pass DataLoaderConfiguration(split_batches=True)"
            warnings.warn(f"Accelerator({split_batches=}): {text}", stacklevel=2)
        data = dataloader_config or DataLoaderConfiguration()
        window = _window(gradient_accumulation_plugin, gradient_accumulation_steps)
        vars(self).update(_named_handlers(kwargs_handlers))
        if self.init_handler is not None and self.init_handler.timeout is not None:
            get_world().set_timeout(self.init_handler.timeout.total_seconds())
        device = _device(cpu)
        mode = getattr(mixed_precision, "value", mixed_precision)  # of an enumeration
        mode = mode or os.environ.get("ACCELERATE_MIXED_PRECISION")
        self.accumulator: Accumulator = Accumulator(
            window.num_steps or gradient_accumulation_steps,
            precision=training.Precision(mode, device, scaler=_options(self.scaler_handler)),
            sync_with_dataloader=window.sync_with_dataloader,
            sync_each_batch=window.sync_each_batch,
            divide_by_steps=True,
        )
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.preparation: Preparation = Preparation(
            self.accumulator, device, device_placement=device_placement
        )
        self.dataloader_config = data
        self._trigger = _Trigger("accelerator")
        self._start_saving(project_dir, project_config)
        self._start_tracking(log_with)
        #: This rank, under Accelerate's names.
        self.state: AcceleratorState = state_of_job(self.accumulator, device)
        self.gradient_state: GradientState = GradientState(job=self.accumulator)
        self.step = 0  #: of the script, if it counts here; what is set after it, a program sets

    def __setattr__(self, name: str, value: Any) -> None:
        there = getattr(type(self), name, None)
        has_effect = name in vars(self) or callable(there) or getattr(there, "fset", None)
        is_own = type(self) is not Accelerator and not hasattr(Accelerator, name)
        if has_effect or is_own or "step" not in vars(self):
            super().__setattr__(name, value)
        elif isinstance(now := getattr(self, name, self), list):
            now[:] = value
        elif now is self or now != value:
            what = f"setting {name!r} of an Accelerator to {value!r} would have no effect"
            instead = instead_of(name) or "make it with this value, or keep your own data elsewhere"
            raise AttributeError(f"{what}; {instead}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        """Return this object: a copy of what holds it belongs to the same job."""
        return self

    # -- this rank, and collectives -------------------------------------------------------------

    device: torch.device = delegated("preparation.device", "The device of this rank.")

    @property
    def multi_device(self) -> bool:
        """Whether there are other ranks, on accelerators."""
        return self.use_distributed and self.device.type != "cpu"

    def set_trigger(self, reason: str | None = None) -> None:
        """Set this object's flag on this rank."""
        self._trigger.set(reason)

    def check_trigger(self) -> bool:
        """Return whether the flag is set on any rank, and reset it. Collective."""
        return self._trigger.check()

    gather: Final = staticmethod(gathering.gather)
    reduce: Final = staticmethod(gathering.reduce)
    pad_across_processes: Final = staticmethod(gathering.pad_across_processes)

    def gather_for_metrics(
        self, input_data: object, use_gather_object: bool = False, *, name: str | None = None
    ) -> Any:
        """Return all ranks' tensors, concatenated, without the items that pad the last batches."""
        cursor = self.accumulator.loaders.innermost
        return gathering.gather_for_metrics(input_data, cursor, use_gather_object, name=name)

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
        asked = device_placement if isinstance(device_placement, list) else [device_placement]
        for value in asked:
            instead = "make an Accelerator(device_placement=False), and move objects yourself"
            call = "prepare(device_placement=) that differs from the job's"
            check_fixed(self.device_placement, value, call, instead)
        self._take_options()
        prepared = self.preparation.all(objects)
        for model in prepared if self.use_distributed else ():
            # As in DDP, which is not used on the CPU. Not a submodule: names in states stay.
            if isinstance(model, nn.Module) and not hasattr(model, "module"):
                object.__setattr__(model, "module", _inside(model))
        return prepared[0] if len(prepared) == 1 else prepared

    def _take_options(self) -> None:
        """Give the preparation the options of this job, which a program may have changed."""
        follows, whole = self.step_scheduler_with_optimizer, self.split_batches
        advance = self.num_processes if follows and not whole else 1
        options = {"advance": advance, "follow": follows, "to_end": not whole}
        self.preparation.schedule_options = options
        self.preparation.autocast_options = _options(self.autocast_handler)
        self.preparation.ddp_options = _options(self.ddp_handler)

    def prepare_model(
        self, model: M, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> M:
        """Return `model` prepared. Collective. See :meth:`prepare`.

        With `evaluation_mode` it is not wrapped in DDP.
        """
        if evaluation_mode:
            self._take_options()
            return cast("M", self.preparation.model(model, wrap=False))
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
        instead = "use a collate_fn that makes lists of tensors"
        check_fixed(None, slice_fn_for_dispatch, call, instead)
        return self.prepare(data_loader, device_placement=device_placement)

    accumulate: Final = _of_accumulator(Accumulator.accumulate)
    backward: Final = _of_accumulator(Accumulator.backward)
    flush: Final = _of_accumulator(Accumulator.flush)
    no_sync: Final = _of_accumulator(Accumulator.no_sync)
    trigger_sync_in_backward: Final = _of_accumulator(Accumulator.sync_in_backward)
    clip_grad_norm_: Final = _of_accumulator(Accumulator.clip_grad_norm_)
    clip_grad_value_: Final = _of_accumulator(Accumulator.clip_grad_value_)

    sync_gradients: bool = delegated(
        "accumulator.sync_gradients",
        "Whether the current micro-batch closes its window. It can be set, for the next step.",
        settable=True,
    )
    gradient_accumulation_steps: int = delegated(
        "accumulator.steps", "Micro-batches per step.", settable=True
    )

    def unscale_gradients(self, optimizer: object = None) -> None:
        """Unscale the gradients of `optimizer`, by default of all, if their window is closed."""
        for prepared in self.accumulator.optimizers:
            if optimizer in (None, prepared) and prepared.sync_gradients:
                prepared.unscale_gradients()

    mixed_precision: str = delegated("accumulator.precision.mode", "``no``, ``fp16`` or ``bf16``.")
    scaler: GradScaler | None = delegated("accumulator.precision.scaler", "Of fp16.", settable=True)
    # Programs ask for these, and empty them.
    _models: list[nn.Module] = delegated("accumulator.models")
    _optimizers: list[AcceleratedOptimizer] = delegated("accumulator.optimizers")
    _schedulers: list[AcceleratedScheduler] = delegated("accumulator.schedules")
    _dataloaders: list[Any] = delegated("preparation.loaders")

    @property
    def native_amp(self) -> bool:
        """Whether forward passes autocast."""
        return self.mixed_precision != "no"

    @staticmethod
    def maybe_context_parallel(**_: object) -> AbstractContextManager[None]:
        """Return a context that does nothing: the sequences are not spread over ranks."""
        return contextlib.nullcontext()

    def autocast(self, autocast_handler: object = None) -> AbstractContextManager[Any]:
        """Return a context in which forward passes compute in the job's precision.

        `autocast_handler` is an AutocastKwargs; without, that of the job.
        """
        options = _options(autocast_handler or self.autocast_handler)
        return self.accumulator.precision.autocast(**options)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of an optimizer was skipped because of an overflow on any rank."""
        return any(optimizer.step_was_skipped for optimizer in self.accumulator.optimizers)

    @staticmethod
    def unwrap_model(
        model: M, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> M:
        """Return the model inside of its wrappers. See :func:`syncprims.training.unwrap_model`."""
        return training.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def free_memory(self, *objects: object) -> list[None]:
        """Forget everything that was prepared or registered; return a None for each object."""
        self.accumulator.forget()
        self.preparation.loaders.clear()
        self._registered.clear()
        gc.collect()
        return [None for _ in objects]

    clear = free_memory

    # -- data -----------------------------------------------------------------------------------

    @property
    def dataloader_config(self) -> Any:
        """The options for loaders. If you set it, later preparations use the new options."""
        return self._data

    @dataloader_config.setter
    def dataloader_config(self, data: object) -> None:
        self._data = data
        self.preparation.loader_options = functools.partial(loader_options, data)

    device_placement: bool = delegated("preparation.device_placement", settable=True)
    even_batches: bool = delegated("_data.even_batches", settable=True)
    split_batches: bool = delegated("_data.split_batches")
    dispatch_batches: bool | None = delegated("_data.dispatch_batches")
    non_blocking: bool = delegated("_data.non_blocking")
    use_stateful_dataloader: bool = delegated("_data.use_stateful_dataloader")
    use_seedable_sampler: bool = delegated("_data.use_seedable_sampler")

    skip_first_batches: Final = staticmethod(skip_first_batches)

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: object = None, even_batches: bool | None = None
    ) -> Generator[None]:
        """In this block, ranks may have different numbers of batches. Collective.

        See :func:`join_uneven_inputs`. All prepared models join, also without `joinables`.
        `even_batches` is that of all prepared loaders until the end of the block.
        """
        with contextlib.ExitStack() as stack:
            for loader in self.preparation.loaders:
                even = loader.even_batches
                stack.callback(setattr, loader, "even_batches", even)
                loader.even_batches = even if even_batches is None else even_batches
            stack.enter_context(training.join_uneven_inputs(self.accumulator))
            yield


def _inside(model: nn.Module) -> nn.Module:
    """Return an object with all attributes of `model` but ``module``, also those set later.

    If it were `model` itself, a loop that unwraps as long as there is a ``module`` would not end.
    """
    kind = type(model)

    def refuse(_: object) -> Any:
        raise AttributeError("module")

    def reduce(inner: nn.Module, _: object) -> Any:  # a file of it needs no code of ours
        state = {name: value for name, value in vars(inner).items() if name != "module"}
        return copyreg.__newobj__, (kind,), state  # type: ignore[attr-defined]

    about = {name: vars(kind).get(name) for name in ("__module__", "__doc__")}
    own = {
        "module": property(refuse),
        "__reduce_ex__": reduce,
        "__class__": property(lambda _: kind),
    }
    made: Any = type(kind.__name__, (nn.Module,), about | own)
    made.__bases__ = (kind,)  # only now: else `__init_subclass__` of the class would run
    inner: nn.Module = object.__new__(made)
    object.__setattr__(inner, "__dict__", vars(model))
    return inner


_HANDLERS = {
    "AutocastKwargs": "autocast_handler",
    "DistributedDataParallelKwargs": "ddp_handler",
    "GradScalerKwargs": "scaler_handler",
    "InitProcessGroupKwargs": "init_handler",
}


def _named_handlers(handlers: Iterable[object] | None) -> dict[str, Any]:
    """Return the handlers by the names of an Accelerator's attributes; None where there is none.

    :raises TypeError: if one is of a kind that is not offered.
    :raises ValueError: if two are of one kind.
    """
    named: dict[str, Any] = dict.fromkeys(_HANDLERS.values())
    for handler in handlers or ():
        kind = type(handler).__name__
        if kind not in _HANDLERS:
            raise TypeError(f"kwargs_handlers: {kind} is not offered; {instead_of(kind)}")
        if named[_HANDLERS[kind]] is not None:
            raise ValueError(f"kwargs_handlers: there are two of {kind}; pass one")
        ours = getattr(utils, kind)  # which checks what Accelerate's own has
        named[_HANDLERS[kind]] = handler if isinstance(handler, ours) else ours(**_options(handler))
    return named


def _window(plugin: Any, steps: int) -> Any:
    """Return the options of accumulation: `plugin`, or what the environment says.

    :raises ValueError: if `plugin` and `steps` contradict each other.
    """
    if plugin is None:
        variable = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
        return GradientAccumulationPlugin(int(variable) if variable else None)
    if steps not in (1, plugin.num_steps or steps):
        what = f"gradient_accumulation_steps={steps}, and the plugin says {plugin.num_steps}"
        raise ValueError(f"{what}; pass one")
    return plugin


def _device(cpu: bool) -> torch.device:
    """Return the device that the arguments or the environment choose, else this rank's."""
    cpu = cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    chosen = None if cpu else os.environ.get("ACCELERATE_TORCH_DEVICE")
    return torch.device(chosen) if chosen else training.rank_device(cpu=cpu)


def _options(handler: Any) -> dict[str, Any]:
    return {} if handler is None else utils.KwargsHandler.to_kwargs(handler)
