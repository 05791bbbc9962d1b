"""States of a rank under Accelerate's names: its place, its device, and the calls of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch

import syncprims
from syncprims._world.runtime import get_world
from syncprims._world.sequential import MainFirst
from syncprims.training import Accumulator, rank_device
from syncprims.training.optimizer import delegated

from .unsupported import check_fixed, check_unsupported, instead_of

R = TypeVar("R")

_STATE = "accelerate.state"  # among the world's extras: what all states of a rank share
_JOB = "accelerate.job"  # the accumulator of the latest Accelerator


class DistributedType(str, Enum):  # noqa: UP042 - a StrEnum prints differently
    """Accelerate's names for kinds of jobs. A job here has one of the first three."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


def _answer(function: Callable[[], R], meaning: str) -> R:
    """Return a property that is what `function` returns."""
    return cast("R", property(lambda _: function(), doc=meaning))


class RankCalls:
    """Which rank this is, and the calls that ranks make together: of a state and of a job."""

    device: torch.device  #: the device of this rank

    if not TYPE_CHECKING:  # else every name would have a type

        def __getattr__(self, name: str) -> NoReturn:
            what = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError("; ".join(filter(None, (what, instead_of(name)))))

    @property
    def distributed_type(self) -> DistributedType:
        """``NO``, ``MULTI_CPU`` or ``MULTI_GPU``."""
        if not self.use_distributed:
            return DistributedType.NO
        on_cpu = self.device.type == "cpu"
        return DistributedType.MULTI_CPU if on_cpu else DistributedType.MULTI_GPU

    num_processes: int = _answer(syncprims.get_world_size, "The number of ranks.")
    process_index: int = _answer(syncprims.get_rank, "This rank.")
    local_process_index: int = _answer(syncprims.get_local_rank, "This rank's number on its node.")
    is_main_process: bool = _answer(syncprims.is_main, "Whether this is rank 0.")
    is_local_main_process: bool = _answer(
        syncprims.is_local_main, "Whether it is first on its node."
    )
    is_last_process: bool = _answer(syncprims.is_last, "Whether this is the highest rank.")

    @property
    def use_distributed(self) -> bool:
        """Whether there are other ranks."""
        return syncprims.get_world_size() > 1

    on_main_process: Callable[..., Any] = staticmethod(syncprims.on_main)
    on_local_main_process: Callable[..., Any] = staticmethod(syncprims.on_local_main)
    on_last_process: Callable[..., Any] = staticmethod(syncprims.on_last)

    def wait_for_everyone(self) -> None:
        """Return when every rank has arrived."""
        syncprims.barrier("wait_for_everyone")

    def main_process_first(self) -> MainFirst:
        """Return a context whose body rank 0 runs before the others."""
        return syncprims.main_first()

    def local_main_process_first(self) -> MainFirst:
        """Return a context whose body the first rank of each node runs before the others."""
        return syncprims.main_first(local=True)

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Make a function run on one rank only. With or without the function."""
        if process_index is None:
            raise ValueError("on_process takes the rank: on_process(process_index=1)")
        decorator = syncprims.on_rank(process_index)
        return decorator if function is None else decorator(function)

    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Make a function run on one rank of each node only. With or without the function."""
        if local_process_index is None:
            raise ValueError("on_local_process takes the rank: local_process_index=1")
        decorator = syncprims.on_local_rank(local_process_index)
        return decorator if function is None else decorator(function)

    def print(self, *args: object, **options: object) -> None:
        """Print once per node."""
        syncprims.print_main(*args, local=True, **options)

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Generator[Any]:
        """Yield this rank's contiguous part of `inputs`. See :func:`syncprims.split`."""
        yield syncprims.split(inputs, pad=apply_padding)


class _SharedState:
    """What all states of a rank have in common: empty before the first one."""

    def __get__(self, *_: object) -> Any:
        return syncprims.current().extras.get(_STATE, {})


class PartialState(RankCalls):
    """This rank: its place and its device. The first one starts the world.

    All states of a rank are the same one. With `cpu` no accelerator is used. `timeout`, a
    timedelta, becomes that of all calls. With a `backend`, whichever it is, ``torch.distributed``
    has its default group.

    :raises TypeError: for other options, with an alternative.
    """

    backend: str | None
    debug = fork_launched = False
    initialized = True
    _shared_state = _SharedState()

    def __init__(self, cpu: bool = False, **options: Any) -> None:
        world = get_world()
        self.__dict__ = world.extras.setdefault(_STATE, {})
        if (timeout := options.pop("timeout", None)) is not None:
            world.set_timeout(timeout.total_seconds())
        # The program uses the group itself, as transformers' Trainer does.
        if "backend" in options and world.world_size > 1:
            world.open_process_group()
        check_unsupported(type(self).__name__, {**options, "backend": None})
        if not self.__dict__:
            self.device: torch.device = rank_device(cpu=cpu)
            self.backend = world.backend_name if world.world_size > 1 else None
            self.mixed_precision = "no"

    def __repr__(self) -> str:
        names = ("num_processes", "process_index", "local_process_index", "device")
        lines = [f"{name.replace('_', ' ').capitalize()}: {getattr(self, name)}" for name in names]
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return "\n".join([f"Distributed environment: {self.distributed_type}{backend}", *lines, ""])

    def destroy_process_group(self, group: object = None) -> None:
        """Do nothing: the world, and a process group with it, end with the program."""

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        syncprims.current().extras.pop(_STATE, None)


class AcceleratorState(PartialState):
    """This rank, and the precision of its latest job. There are no plugins."""

    deepspeed_plugin = deepspeed_plugins = dynamo_plugin = device_mesh = None
    fsdp_plugin = megatron_lm_plugin = torch_tp_plugin = parallelism_config = None
    is_fsdp2 = False

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"


def is_initialized() -> bool:
    """Return whether an Accelerator has been made on this rank. Starts the world."""
    return _JOB in syncprims.current().extras


def state_of_job(accumulator: Accumulator, device: torch.device) -> AcceleratorState:
    """Return the state with the device and the precision of a job, which is now the latest."""
    state = AcceleratorState(cpu=device.type == "cpu")
    state.device, state.mixed_precision = device, accumulator.precision.mode
    syncprims.current().extras[_JOB] = accumulator
    return state


class GradientState:
    """The window and the loader that the latest job, or that of the accumulator `job`, is in.

    :raises TypeError: for a plugin: an Accelerator takes it.
    """

    initialized = True
    adjust_scheduler = is_xla_gradients_synced = False

    def __init__(self, gradient_accumulation_plugin: None = None, *, job: Any = None) -> None:
        plugin, instead = gradient_accumulation_plugin, "give it to the Accelerator"
        check_fixed(None, plugin, "GradientState(gradient_accumulation_plugin=)", instead)
        job = job or syncprims.current().extras.get(_JOB)
        if job is None:
            raise RuntimeError("make an Accelerator before a GradientState")
        # Not the Accelerator, which has this object: a cycle would keep the workers of its loaders.
        self._job: Accumulator = job

    sync_gradients: bool = delegated("_job.sync_gradients", "Whether a step is due.", settable=True)
    num_steps: int = delegated("_job.steps", "Micro-batches per step.")
    sync_with_dataloader: bool = delegated(
        "_job.sync_with_dataloader", "Whether the last batch of a loader closes a window."
    )

    @property
    def active_dataloader(self) -> Any:
        """The prepared loader that the current code iterates, if it is in one."""
        cursor = self._job.loaders.innermost
        return None if cursor is None else cursor.loader

    @property
    def dataloader_references(self) -> list[Any]:
        """The prepared loaders that the current code iterates, outermost first, after a None."""
        return [None, *(cursor.loader for cursor in self._job.loaders.open)]

    @property
    def in_dataloader(self) -> bool:
        """Whether the current code iterates a prepared loader."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the latest batch of that loader is its last."""
        cursor = self._job.loaders.innermost
        return cursor is not None and cursor.at_end

    @property
    def remainder(self) -> int:
        """The number of items in all ranks' latest batches that are not padding.

        0 if there is no padding, -1 outside of prepared loaders.
        """
        cursor = self._job.loaders.innermost
        if cursor is None:
            return -1
        return sum(real for _, real in cursor.items or ())

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The options of accumulation, which transformers reads."""
        job = self._job
        names = ("sync_with_dataloader", "sync_each_batch")
        return {"num_steps": job.steps} | {name: getattr(job, name) for name in names}

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self._job.sync_gradients = sync_gradients  # as transformers' Trainer does

    @classmethod
    def _reset_state(cls) -> None:
        """Do nothing: each job has a state of its own."""
