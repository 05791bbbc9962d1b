"""One call that makes models, optimizers, loaders and schedules ready for this rank."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar, TypeVarTuple, overload

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from syncprims import current, get_world_size

from .accumulation import Accumulator
from .averaging import share_model
from .data import PreparedLoader, prepare_data_loader
from .devices import rank_device
from .precision import plain_forward
from .schedule import PreparedScheduler
from .window import syncs_itself

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
M = TypeVar("M", bound=nn.Module)


#: DDP's word for copying buffers before each forward pass, which torch 2.13 has renamed.
_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers"
)


class Preparation:
    """What is common to the objects of one job: its device, accumulator, and how data is dealt."""

    def __init__(
        self,
        accumulator: Accumulator,
        device: torch.device | None = None,
        *,
        device_placement: bool = True,
        even_batches: bool = True,
        split_batches: bool = False,
        dispatch_batches: bool = False,
        seed: int | None = None,
        non_blocking: bool = False,
        schedule: bool = True,
        schedule_advance: int = 1,
        ddp: dict[str, Any] | None = None,
    ) -> None:
        self.accumulator = accumulator
        self.device = device or rank_device()
        self.device_placement = device_placement
        self.even_batches = even_batches
        self.split_batches = split_batches
        self.dispatch_batches = dispatch_batches
        self.seed = seed
        self.non_blocking = non_blocking
        self.schedule = schedule  #: schedules follow the optimizers' steps
        self.schedule_advance = schedule_advance
        self.ddp = ddp or {}
        # There models come in DDP, which averages while gradients are computed.
        current().open_process_group()

    def model(self, model: nn.Module) -> nn.Module:
        """Return `model` on the device, as rank 0 has it, computing in the job's precision.

        On the torch backend, and where the program runs a ``torch.distributed`` group of all ranks,
        it comes wrapped in DDP. Collective.

        :raises RankMismatch: on all ranks, if the models differ in more than their values.
        """
        if any(model is known for known in self.accumulator.models):
            return model
        if self.device_placement and not _is_placed(model):
            model.to(self.device)
        trained = any(p.requires_grad for p in model.parameters())
        if not syncs_itself(model):
            share_model(model)
        self.accumulator.precision.apply(
            model.module if isinstance(model, DistributedDataParallel) else model
        )
        if trained and not syncs_itself(model) and _is_grouped():
            model = self._wrapped(model)
        self.accumulator.models.append(model)
        return model

    def _wrapped(self, model: nn.Module) -> nn.Module:
        # Buffers are shared after each step, by us: then ranks agree when they evaluate, and a
        # model may run twice before its backward pass.
        options: dict[str, Any] = {_BUFFERS: False, **self.ddp}
        if self.device.type == "cuda":
            options.setdefault("device_ids", [self.device.index])
        return DistributedDataParallel(model, **options)

    def loader(self, loader: DataLoader[Any]) -> PreparedLoader[Any]:
        """Return a loader of this rank's batches. Collective."""
        return prepare_data_loader(
            loader,
            device=self.device if self.device_placement else None,
            even_batches=self.even_batches,
            split_batches=self.split_batches,
            dispatch_batches=self.dispatch_batches,
            seed=self.seed,
            loaders=self.accumulator.loaders,
            non_blocking=self.non_blocking,
        )

    def scheduler(self, scheduler: Any) -> Any:
        """Return `scheduler`, advancing once per step of its optimizer if it is to follow that."""
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        advance = self.schedule_advance if self.schedule else 1
        return PreparedScheduler(scheduler, self.accumulator, advance, follow=self.schedule)

    def all(self, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return `objects` prepared, in their order; what is none of these kinds stays.

        Models come first: moving one keeps its parameters, so an optimizer made before stays right.
        """
        current()  # the world runs, and with it the group that models are wrapped for
        made: dict[int, Any] = {}
        for index, obj in enumerate(objects):
            if isinstance(obj, nn.Module):
                made[index] = self.model(obj)
        for index, obj in enumerate(objects):
            if isinstance(obj, Optimizer):
                made[index] = self.accumulator.prepare_optimizer(obj)
            elif isinstance(obj, DataLoader):
                made[index] = self.loader(obj)  # pyright: ignore[reportUnknownArgumentType]
        for index, obj in enumerate(objects):
            if index not in made:
                made[index] = self.scheduler(obj) if _is_scheduler(obj) else obj
        return tuple(made[index] for index in range(len(objects)))


@overload
def prepare(obj: T, /, *, accumulator: Accumulator, **options: Any) -> T: ...
@overload
def prepare(*objects: *Ts, accumulator: Accumulator, **options: Any) -> tuple[*Ts]: ...
def prepare(*objects: Any, accumulator: Accumulator, **options: Any) -> Any:  # type: ignore[misc]
    """Return the objects prepared for this rank, in their order; a single one bare. Collective.

    Models, optimizers, loaders and schedules, in any order; `options` are :class:`Preparation`'s.
    """
    made = Preparation(accumulator, **options).all(objects)
    return made[0] if len(made) == 1 else made


def unwrap_model(model: M, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False) -> M:
    """Return the model inside of DDP and of what is compiled.

    With `keep_fp32_wrapper` False its autocast is taken off, too: of the very model in training.
    With `keep_torch_compile` what is compiled inside of DDP is returned compiled.
    """
    found: Any = model
    while True:
        if isinstance(found, DistributedDataParallel):
            found = found.module
        elif hasattr(found, "_orig_mod") and not keep_torch_compile:
            found = found._orig_mod
        else:
            break
    if not keep_fp32_wrapper:
        for part in (found, getattr(found, "_orig_mod", found)):
            plain_forward(part)
    return found  # type: ignore[no-any-return]


def _is_grouped() -> bool:
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() == get_world_size() > 1
    )


def _is_placed(model: nn.Module) -> bool:
    """Tell whether somebody has spread the model over devices already."""
    return getattr(model, "hf_device_map", None) is not None or syncs_itself(model)


def _is_scheduler(obj: Any) -> bool:
    """Tell whether `obj` is a schedule, torch's or one that quacks like it."""
    if isinstance(obj, LRScheduler):
        return True
    return hasattr(obj, "optimizer") and hasattr(obj, "step") and hasattr(obj, "state_dict")
