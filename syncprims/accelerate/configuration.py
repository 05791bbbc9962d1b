"""Configuration objects and enumerations, and what is said about those that are not offered.

Accelerate's own objects are taken, too: they have the same fields and methods.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any

import torch

from .state import DistributedType as DistributedType

#: What to do instead, by a part of the name of what is not offered, without ``_``, in lower case.
_INSTEAD = {
    "deepspeed": "wrap the model by DeepSpeed itself before prepare(), or use torch's fully_shard",
    "fsdp": "apply torch's fully_shard() to the model before prepare()",
    "fullysharded": "apply torch's fully_shard() to the model before prepare()",
    "megatron": "there is none",
    "tensorparallel": "apply torch's parallelize_module() to the model before prepare()",
    "torchtp": "apply torch's parallelize_module() to the model before prepare()",
    "parallelism": "wrap the model with torch's own means before prepare()",
    "contextparallel": "wrap the model with torch's own means before prepare()",
    "dynamo": "call torch.compile(model) before or after prepare()",
    "fp8": "there is none; use mixed_precision='bf16'",
    "recipe": "there is none; use mixed_precision='bf16'",
    "xla": "there is none: syncprims does not run on TPUs",
    "fulloffload": "load the model where it is to be computed, by load_checkpoint_in_model()",
    "offload": "leave it out: load_checkpoint_in_model() reads weights straight into the model",
    "devicemap": "load_checkpoint_in_model(model, checkpoint, device_map=...)",
    "maxmemory": "load_checkpoint_in_model(model, checkpoint, device_map=...)",
    "balancedmemory": "load_checkpoint_in_model(model, checkpoint, device_map=...)",
    "dispatch": "load_checkpoint_in_model(model, checkpoint, device_map=...)",
    "dummy": "there is no DeepSpeed here; make an optimizer and a schedule of torch",
    "tracker": "Accelerator(log_with=...) takes any object with log(values, step=...)",
    "quantiz": "quantize the model by bitsandbytes itself before prepare()",
    "bnb": "quantize the model by bitsandbytes itself before prepare()",
    "lomo": "step the optimizer yourself",
    "basicconfig": "leave it out: there is no file of options",
    "pippy": "use torch.distributed.pipelining",
    "rngtypes": "call synchronize_rng_states() where ranks are to draw the same numbers",
    "keepinfp32": "cast parts of the model first, without dtype=: each keeps its own",
    "fullstatedict": "leave it out: tensors spread over ranks are cut from whole ones",
    "broadcastfromrank0": "leave it out: every rank reads for itself",
}


def _instead_of(name: str) -> str:
    plain = name.lower().replace("_", "")
    return next((way for part, way in _INSTEAD.items() if part in plain), "")


def not_offered(module: str, name: str) -> Exception:
    """Return the error for a name of Accelerate's that is not here: it says what to do instead."""
    instead = "" if name.startswith("__") else _instead_of(name)
    if not instead:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return ImportError(f"{module}.{name} is not offered; instead: {instead}")


def check_fixed(fixed: Any, value: Any, call: str, instead: str) -> None:
    """Check that `value` is None, or the one value that there is here.

    :raises TypeError: otherwise, saying what to do instead.
    """
    if value is not None and value != fixed:
        raise TypeError(f"{call} is not offered; instead: {instead}")


def check_unsupported(call: str, arguments: dict[str, Any]) -> None:
    """Check that arguments without an equivalent ask for nothing: they are None or False.

    :raises TypeError: otherwise; for an argument of Accelerate's it says what to do instead.
    """
    for name, value in arguments.items():
        instead = _instead_of(name)
        if not instead:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        check_fixed(name == "full_state_dict", value, f"{call}({name}=)", instead)


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
        return {name: v for name, v in super().to_dict().items() if not name.startswith("comm_")}

    def register_comm_hook(self, model: Any) -> None:
        """Make a model in DDP communicate by `comm_hook`, wrapped in `comm_wrapper`, if it is set.

        :raises ValueError: if one of them has another value than it can have.
        """
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        kind = str(DDPCommunicationHookType(self.comm_hook))
        wrapper = str(DDPCommunicationHookType(self.comm_wrapper))
        if wrapper not in ("no", "fp16", "bf16"):
            raise ValueError(f"comm_wrapper={wrapper!r}: it is 'no', 'fp16' or 'bf16'")
        if kind == "no":
            return
        state: Any = None
        if kind in ("fp16", "bf16"):
            hook = getattr(default_hooks, f"{kind}_compress_hook")
        else:
            hook = getattr(powerSGD_hook, kind.replace("power_sgd", "powerSGD_hook"))
            state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option)
        if wrapper != "no":
            hook = getattr(default_hooks, f"{wrapper}_compress_wrapper")(hook)
        model.register_comm_hook(state, hook)


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

    def build(self) -> torch.profiler.profile:
        """Return the profiler."""
        options = self.to_kwargs()
        options.pop("output_trace_dir", None)
        if names := options.pop("activities", None):
            kinds = torch.profiler.ProfilerActivity
            options["activities"] = [getattr(kinds, name.upper()) for name in names]
        if schedule := options.pop("schedule_option", None):
            options["schedule"] = torch.profiler.schedule(**schedule)
        return torch.profiler.profile(**options)


_HANDLERS = {
    kind.__name__
    for kind in (AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs,
                 InitProcessGroupKwargs, ProfileKwargs)
}  # fmt: skip


def handlers_by_kind(handlers: Any) -> dict[str, Any]:
    """Return the handlers by the names of their classes.

    :raises TypeError: if one is of a kind that is not offered.
    :raises ValueError: if two are of one kind.
    """
    kinds: dict[str, Any] = {}
    for handler in handlers or ():
        kind = type(handler).__name__
        if kind not in _HANDLERS:
            raise TypeError(f"kwargs_handlers: {kind} is not offered; instead: there is none")
        if kind in kinds:
            raise ValueError(f"kwargs_handlers: there are two of {kind}; pass one")
        kinds[kind] = handler
    return kinds


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
    """Where a job saves and logs. `iteration` is the least number of the next checkpoint."""

    project_dir: Any = None
    logging_dir: Any = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def set_directories(self, project_dir: Any = None) -> None:
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
        return [kind.value for kind in cls]


class RNGType(StrEnum):
    """Random number generators."""

    TORCH = "torch"
    CUDA = "cuda"
    GENERATOR = "generator"


class LoggerType(StrEnum):
    """Trackers."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
