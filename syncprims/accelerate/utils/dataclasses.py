"""Configuration objects, and enumerations."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any

from syncprims.training.accelerate.state import DistributedType as DistributedType


class KwargsHandler:
    """Options for a constructor of torch."""

    def to_dict(self) -> dict[str, Any]:
        """Return all options."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if default[name] != value}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of ``torch.autocast``."""

    enabled: bool = True
    cache_enabled: bool | None = None


class DDPCommunicationHookType(StrEnum):
    """How DDP communicates."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of DDP, used where a model is wrapped in it."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict[str, Any])

    def to_dict(self) -> dict[str, Any]:
        """Return the options of DDP's constructor."""
        hooks = ("comm_hook", "comm_wrapper", "comm_state_option")
        return {name: value for name, value in super().to_dict().items() if name not in hooks}

    def register_comm_hook(self, model: Any) -> None:
        """Make a model in DDP communicate by `comm_hook`, wrapped in `comm_wrapper`, if it is set.

        :raises ValueError: if one of them has another value than it can have.
        """
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        kinds = DDPCommunicationHookType
        hooks: dict[DDPCommunicationHookType, Any] = {
            kinds.FP16: default_hooks.fp16_compress_hook,
            kinds.BF16: default_hooks.bf16_compress_hook,
            kinds.POWER_SGD: powerSGD_hook.powerSGD_hook,
            kinds.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
        }
        wrappers: dict[DDPCommunicationHookType, Any] = {
            kinds.FP16: default_hooks.fp16_compress_wrapper,
            kinds.BF16: default_hooks.bf16_compress_wrapper,
        }
        chosen, wrapper = kinds(self.comm_hook), kinds(self.comm_wrapper)
        if wrapper not in (kinds.NO, *wrappers):
            raise ValueError(f"comm_wrapper={wrapper.value!r}: it is 'no', 'fp16' or 'bf16'")
        if chosen is kinds.NO:
            return
        hook, state = hooks[chosen], None
        if chosen in (kinds.POWER_SGD, kinds.BATCHED_POWER_SGD):
            state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option)
        model.register_comm_hook(state, hook if wrapper is kinds.NO else wrappers[wrapper](hook))


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of the loss scaler."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options of the start: the timeout becomes that of all calls."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of torch's profiler."""

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Any = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None


@dataclass
class DataLoaderConfiguration:
    """How loaders are prepared."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients add up."""

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class ProjectConfiguration:
    """Where a job saves and logs."""

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the project's directory, and the logging directory if there is none."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)


class ComputeEnvironment(StrEnum):
    """Where a job runs."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class PrecisionType(StrEnum):
    """Precisions."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"

    @classmethod
    def list(cls) -> list[str]:
        """Return all values."""
        return [one.value for one in cls]


class RNGType(StrEnum):
    """Random number generators."""

    TORCH = "torch"
    CUDA = "cuda"
    GENERATOR = "generator"


class LoggerType(StrEnum):
    """Trackers."""

    ALL = "all"
    JSONL = "jsonl"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
