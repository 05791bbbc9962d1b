"""One call that prepares models, optimizers, loaders and schedules for this rank."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypedDict, TypeVar, TypeVarTuple, Unpack, overload

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from syncprims import current, get_local_rank, get_world_size
from syncprims._data.arrays import own_device
from syncprims._world.runtime import get_world

from .accumulation import Accumulator, averager_of
from .data.loader import PreparedLoader, prepare_data_loader
from .gradient_sync import (
    WrappedModel,
    averages_gradients_itself,
    broadcast_model,
    has_process_group,
)
from .optimizer import PreparedOptimizer, PreparedScheduler
from .precision import remove_autocast
from .private_names import NAMES

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
M = TypeVar("M", bound=nn.Module)


#: DDP's option to copy buffers before each forward pass, which torch 2.13 has renamed.
_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers"
)


_WRAPPERS = (DistributedDataParallel, nn.DataParallel)


def rank_device(*, cpu: bool = False) -> torch.device:
    """Return this rank's device, and make it the current one; the CPU if there is no accelerator.

    Which one, :func:`syncprims.interface.own_device_index` decides. With `cpu` no accelerator is
    asked for, nor initialized.
    """
    available = not cpu and torch.accelerator.is_available()
    found = torch.accelerator.current_accelerator() if available else None
    if found is None:
        return torch.device("cpu")
    device: torch.device = own_device(found.type, get_local_rank())
    module = getattr(torch, device.type)
    if hasattr(module, "set_device"):  # whatever asks torch for the current device agrees
        module.set_device(device)
    return device


class _NoSync:
    """The method ``no_sync()`` of a prepared model, as DDP has it. In a copy it does nothing."""

    def __init__(self, accumulator: Accumulator, model: nn.Module) -> None:
        self._accumulator = accumulator
        self._model = model

    def __call__(self) -> AbstractContextManager[None]:
        return self._accumulator.no_sync(self._model)

    def __reduce__(self) -> Any:
        return functools.partial, (contextlib.nullcontext,)


@dataclass
class Preparation:
    """Prepares the objects of one job: for one device, one accumulator, with the same options."""

    accumulator: Accumulator
    device: torch.device
    _: KW_ONLY
    device_placement: bool = True  #: models and batches are moved to the device
    #: Returns options of :func:`prepare_data_loader`.
    loader_options: Callable[[], dict[str, Any]] = dict
    schedule_options: dict[str, Any] = field(default_factory=dict)  #: of :class:`PreparedScheduler`
    autocast_options: dict[str, Any] = field(default_factory=dict)  #: of :meth:`Precision.apply`
    ddp_options: dict[str, Any] = field(default_factory=dict)
    loaders: list[PreparedLoader[Any]] = field(default_factory=list[PreparedLoader[Any]])

    def __post_init__(self) -> None:
        # For DDP on devices, which averages gradients while they are computed. With a group of ours
        # it would be slower than the average at the step.
        if get_world_size() > 1 and get_world().backend.has_process_group:
            current().open_process_group()

    def model(self, model: nn.Module, *, wrap: bool = True) -> nn.Module:
        """Return `model` on the device, with rank 0's values, in the job's precision. Collective.

        If ``torch.distributed`` has a group of all ranks, as on the torch backend, it is wrapped in
        DDP on a device, and with :attr:`ddp_options` also on the CPU, unless `wrap` is false.

        :raises RankMismatch: on all ranks, if the models differ in more than their values.
        """
        if model in self.accumulator.models:
            return model
        wrapped = averages_gradients_itself(model)
        is_spread = getattr(model, "hf_device_map", None) is not None  # over several devices
        if self.device_placement and not wrapped and not is_spread:
            model.to(self.device)
        if not wrapped:
            broadcast_model(model)
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        self.accumulator.precision.apply(inner, **self.autocast_options)
        wrap = wrap and (self.device.type != "cpu" or bool(self.ddp_options))
        trained = wrap and any(p.requires_grad for p in model.parameters())
        grouped = has_process_group() and distributed.get_world_size() == get_world_size() > 1
        if trained and not wrapped and grouped:
            # The window broadcasts buffers after each step: then ranks agree when they evaluate,
            # and a model may run twice before its backward pass.
            options: dict[str, Any] = {_BUFFERS: False, **self.ddp_options}
            if self.device.type == "cuda":
                options.setdefault("device_ids", [self.device.index])
            model = WrappedModel(model, **options)
        # In DDP's own no_sync() the average after a plain backward pass would go on.
        is_ddp = isinstance(model, DistributedDataParallel)
        if get_world_size() > 1 and (is_ddp or not hasattr(model, "no_sync")):
            object.__setattr__(model, "no_sync", _NoSync(self.accumulator, model))
        self.accumulator.models.append(model)
        averager_of(self.accumulator).watch(model)
        return model

    def loader(self, loader: DataLoader[Any]) -> PreparedLoader[Any]:
        """Return a loader of this rank's batches. Collective."""
        prepared = prepare_data_loader(
            loader,
            device=self.device if self.device_placement else None,
            loaders=self.accumulator.loaders,
            **self.loader_options(),
        )
        if prepared not in self.loaders:
            self.loaders.append(prepared)
        return prepared

    def optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Return `optimizer` wrapped: it steps and clears only when a window is closed."""
        accumulator = self.accumulator
        if not isinstance(optimizer, PreparedOptimizer):
            prepared = PreparedOptimizer(optimizer, accumulator)
        elif optimizer in accumulator.optimizers:
            return optimizer
        else:  # another accumulator's, or forgotten here
            prepared = optimizer
            prepared._follow(accumulator)  # pyright: ignore[reportPrivateUsage]
        accumulator.optimizers.append(prepared)
        if accumulator.check_replicas is None:
            accumulator.check_replicas = current().settings.check_replicas
        return prepared

    def scheduler(self, scheduler: object) -> PreparedScheduler:
        """Return `scheduler` wrapped: by default it advances once per optimizer step."""
        optimizers, schedules = self.accumulator.optimizers, self.accumulator.schedules
        prepared = scheduler
        if not isinstance(prepared, PreparedScheduler):
            prepared = PreparedScheduler(scheduler, optimizers, **self.schedule_options)
        if prepared not in schedules:
            schedules.append(prepared)
        return prepared

    def all(self, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return `objects` prepared, in their order; objects of other kinds stay as they are.

        Models come first. Moving a model keeps its parameters, so an optimizer made before it still
        has them.
        """
        current()  # starts the world, and with it the group that models are wrapped for
        made = [self.model(obj) if isinstance(obj, nn.Module) else obj for obj in objects]
        for index, obj in enumerate(objects):
            if isinstance(obj, Optimizer):
                made[index] = self.optimizer(obj)
            elif isinstance(obj, DataLoader):
                made[index] = self.loader(obj)
        return tuple(self.scheduler(one) if _is_scheduler(one) else one for one in made)


class PrepareOptions(TypedDict, total=False):
    """The options of :func:`prepare`."""

    device: torch.device | None
    device_placement: bool
    ddp: dict[str, Any] | None
    even_batches: bool
    split_batches: bool
    seed: int | None
    non_blocking: bool
    dispatch_batches: bool | None


@overload
def prepare(obj: T, /, *, accumulator: Accumulator, **options: Unpack[PrepareOptions]) -> T: ...
@overload
def prepare(
    *objects: *Ts, accumulator: Accumulator, **options: Unpack[PrepareOptions]
) -> tuple[*Ts]: ...
def prepare(  # type: ignore[misc]
    *objects: Any,
    accumulator: Accumulator,
    device: torch.device | None = None,
    device_placement: bool = True,
    ddp: dict[str, Any] | None = None,
    even_batches: bool = True,
    split_batches: bool = False,
    seed: int | None = None,
    non_blocking: bool = False,
    dispatch_batches: bool | None = None,
) -> Any:
    """Return the objects prepared for this rank, in their order. Collective.

    Models, optimizers, loaders and schedules, in any order; a single object is returned without a
    tuple. Without `device_placement` models and batches are not moved to the device. `ddp` has
    options for DDP, where models are wrapped in it. The other options are those of
    :func:`prepare_data_loader`.
    """
    options = {
        "even_batches": even_batches,
        "split_batches": split_batches,
        "seed": seed,
        "non_blocking": non_blocking,
        "dispatch_batches": dispatch_batches,
    }
    preparation = Preparation(
        accumulator,
        device or rank_device(),
        device_placement=device_placement,
        loader_options=lambda: options,
        ddp_options=ddp or {},
    )
    made = preparation.all(objects)
    return made[0] if len(made) == 1 else made


def unwrap_model(model: M, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False) -> M:
    """Return the model inside of data-parallel wrappers and of `torch.compile`.

    If `keep_fp32_wrapper` is False, autocast is removed from it, too: also from the model that is
    being trained, which is the same object. With `keep_torch_compile` a compiled model is returned
    compiled; a wrapper inside of it is taken out of the object that `torch.compile` made.
    """
    found: Any = model
    if keep_torch_compile and isinstance(wrapper := _compiled(model), _WRAPPERS):
        NAMES.set(model, "OptimizedModule._orig_mod", unwrap_model(wrapper, keep_fp32_wrapper))
    inner: Any = model
    while isinstance(inner, nn.Module):
        found = inner
        if isinstance(found, _WRAPPERS):
            inner = found.module
        else:
            inner = None if keep_torch_compile else _compiled(found)
    if not keep_fp32_wrapper:
        for part in (found, _compiled(found) or found):
            remove_autocast(part)
    return found  # type: ignore[no-any-return]


def _compiled(model: object) -> Any:
    """Return the model that `torch.compile` has made this of; None for others."""
    return NAMES.of(model, "OptimizedModule._orig_mod", None)


def _is_scheduler(obj: object) -> bool:
    """Return whether `obj` is a schedule, of torch or with the same methods."""
    if isinstance(obj, LRScheduler | nn.Module | Optimizer | DataLoader):
        return isinstance(obj, LRScheduler)
    return all(hasattr(obj, name) for name in ("optimizer", "step", "state_dict"))
