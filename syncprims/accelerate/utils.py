"""Functions and configuration objects that scripts import from Accelerate's utils and top level."""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from importlib.metadata import version as version_of
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.torch_version import TorchVersion

import syncprims
from syncprims import training
from syncprims.training import PreparedLoader, unwrap_model
from syncprims.training import gathering as _gathering
from syncprims.training import set_seed as set_seed
from syncprims.training.checkpoints.save_model import FIRST_FILES as _FIRST_FILES
from syncprims.training.checkpoints.save_model import save_object
from syncprims.training.gathering import broadcast as broadcast
from syncprims.training.gathering import pad_across_processes as pad_across_processes
from syncprims.training.pytree import as_mapping_type, batch_length
from syncprims.training.pytree import to_device as _to_device

from .state import DistributedType as DistributedType
from .unsupported import check_unsupported, not_offered

Directory = str | os.PathLike[str] | None  #: of a project, or of its logs
DistributedOperationException = syncprims.RankMismatch
find_batch_size = batch_length

# -- options, for which Accelerate's own objects are taken, too ------------------------------------


class KwargsHandler:
    """Options for a constructor of torch."""

    def to_kwargs(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        defaults = vars(type(self)())
        return {name: value for name, value in vars(self).items() if value != defaults[name]}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of ``torch.autocast``."""

    enabled: bool = True
    cache_enabled: bool | None = None


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
    """Options of the start: the `timeout`, a timedelta, becomes that of all calls.

    :raises TypeError: for another `backend` than the default, and for an `init_method`.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        asked = {"backend": self.backend, "init_method": self.init_method}
        check_unsupported(type(self).__name__, {k: v for k, v in asked.items() if v != "nccl"})


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of DDP, used where a model is wrapped in it.

    :raises TypeError: for a communication hook: a model that is in DDP takes it.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: Any = "no"
    comm_wrapper: Any = "no"
    comm_state_option: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        hooks = {name: value for name, value in vars(self).items() if name.startswith("comm_")}
        check_unsupported(type(self).__name__, hooks)


@dataclass
class DataLoaderConfiguration:
    """Options for the preparation of loaders."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Options for the accumulation of gradients."""

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class ProjectConfiguration:
    """The directories of a job. `iteration` is the least number of the next checkpoint."""

    project_dir: Directory = None
    logging_dir: Directory = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def set_directories(self, project_dir: Directory = None) -> None:
        """Set the project's directory, and the logging directory if there is none."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of a compiler. An Accelerator compiles no model, so it accepts no backend."""

    backend: object = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None


class LoggerType(StrEnum):
    """Trackers."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"


# -- collectives over nested tensors, and helpers for them ----------------------------------------


def gather(tensor: object) -> Any:
    """Return all ranks' tensors, concatenated. On one rank, `tensor` itself. Collective."""
    return tensor if syncprims.get_world_size() == 1 else _gathering.gather(tensor)


def gather_object(object: Any) -> Any:
    """Return the items of all ranks' lists in one list. On one rank, `object` itself. Collective.

    :raises TypeError: on all ranks, if a rank's object is not iterable.
    """
    if syncprims.get_world_size() == 1:
        return object
    return [item for part in syncprims.all_gather(object) for item in part]


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Fill the list with that of one rank, and return it. Collective."""
    if syncprims.get_world_size() > 1:
        object_list[:] = syncprims.broadcast(list(object_list), from_process)
    return object_list


def reduce(tensor: object, reduction: _gathering.Reduction = "mean", scale: float = 1.0) -> Any:
    """Return the tensors' ``mean``, ``sum``, ``max`` or the like over all ranks. Collective."""
    return _gathering.reduce(tensor, reduction, scale)


def send_to_device(
    tensor: object,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Return `tensor` with its tensors on `device`, except under the keys in `skip_keys`."""
    skipped = [skip_keys] if isinstance(skip_keys, str) else skip_keys or []
    if isinstance(tensor, Mapping) and skipped:
        moved = {
            key: part if key in skipped else send_to_device(part, device, non_blocking, skipped)
            for key, part in tensor.items()
        }
        return as_mapping_type(tensor, moved)
    return _to_device(tensor, torch.device(device), non_blocking=non_blocking)


# -- what is installed, and what the device can do ------------------------------------------------

#: The files of a model, in the order in which they are looked for.
SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME = _FIRST_FILES

_PACKAGES = {"bnb": "bitsandbytes", "lomo": "lomo_optim"}  #: whose names differ from the question's
#: What else Accelerate answers by ``is_..._available()``.
_TOPICS = """4bit_bnb 8bit_bnb aim amdsmi bitsandbytes_multi_backend boto3 clearml comet_ml datasets
    deepspeed dvclive fp8 hpu import_timer matplotlib megatron_lm mlflow mlu msamp musa neuron npu
    numpy pandas peft pippy pynvml pytest rich rocm sagemaker schedulefree sdaa swanlab tensorboard
    timm torch_xla torchao torchdata torchdata_stateful_dataloader torchvision tqdm trackio
    transformer_engine transformer_engine_mxfp8 transformers triton wandb xccl"""


#: Answers to questions about the device, and about what torch and this library always have.
_ANSWERS: dict[str, Callable[[], bool]] = {
    "cuda": torch.cuda.is_available,
    "mps": torch.backends.mps.is_available,
    "xpu": torch.xpu.is_available,
    "bf16": lambda: not torch.accelerator.is_available() or torch.cuda.is_bf16_supported(),
    "torch_distributed": torch.distributed.is_available,
    **dict.fromkeys(("fp16", "weights_only"), lambda: True),
}


def find_name(module: str, name: str) -> Any:
    """Return a name of Accelerate's that `module` has from elsewhere, or that is not offered.

    Accelerate's modules have the names of those that they import, and programs import these there.

    :raises AttributeError: if Accelerate has no such name, as far as is known here.
    """
    package = __name__.rpartition(".")[0]
    for other in ("state", "utils", "logging", "accelerator", "data_loader", "tracking"):
        found = getattr(sys.modules.get(f"{package}.{other}"), "__dict__", {})
        if name in found and not name.startswith("_"):
            return found[name]
    if not (name.startswith("is_") and name.endswith("_available")):
        return not_offered(module, name, PreparedLoader if name.startswith("DataLoader") else ())
    topic = name.removeprefix("is_").removesuffix("_available")
    if topic not in {*_ANSWERS, *_PACKAGES, *_TOPICS.split()}:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    package = _PACKAGES.get(topic, topic).removesuffix("_stateful_dataloader")
    answer = _ANSWERS.get(topic) or (lambda: find_spec(package) is not None)

    def is_available(*_: object, **__: object) -> bool:
        return answer()

    return is_available


def __getattr__(name: str) -> Any:
    return find_name(__name__, name)


def compare_versions(library_or_version: object, operation: str, requirement_version: str) -> bool:
    """Return whether a version, or that of an installed library, is ``>=`` or the like another.

    :raises KeyError: if `operation` is not a comparison.
    """
    known = {">": "gt", ">=": "ge", "==": "eq", "!=": "ne", "<=": "le", "<": "lt"}
    found = str(library_or_version)
    if not found[0].isdigit():
        found = version_of(found)
    return bool(getattr(operator, known[operation])(TorchVersion(found), requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether torch's version is ``>=`` or the like another."""
    return compare_versions(torch.__version__, operation, version)


# -- memory, released and not exceeded ------------------------------------------------------------


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Return unused memory of the device to the system."""
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available() and hasattr(torch.cuda, "empty_cache"):
        torch.cuda.empty_cache()


def release_memory(*objects: object) -> list[None]:
    """Free unused memory, and return a None for each object: assign them to its names."""
    clear_device_cache(garbage_collection=True)
    return [None for _ in objects]


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Return whether an error says that memory was exceeded."""
    texts = (" out of memory.", "CUDNN_STATUS_NOT_SUPPORTED", "can't allocate memory")
    text = str(exception)
    return isinstance(exception, torch.OutOfMemoryError | MemoryError) or (
        isinstance(exception, RuntimeError) and any(part in text for part in texts)
    )


def find_executable_batch_size(
    function: Any = None, starting_batch_size: int = 128, reduce_batch_size_fn: Any = None
) -> Any:
    """Call ``function(batch_size, ...)`` with smaller sizes, by default 0.9 times, until it fits.

    The next call begins with the size that fitted. All ranks go on with the same size: if it did
    not fit on one, all try the next. This does not help if a rank runs out of memory while the
    others wait for it in a collective.

    :raises RuntimeError: if no size fits.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal starting_batch_size
        size = starting_batch_size
        while size > 0:
            clear_device_cache(garbage_collection=True)
            try:
                result, fits = function(size, *args, **kwargs), 1
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
                result, fits = None, 0
            if (syncprims.get_world_size() == 1 or syncprims.all_reduce(fits, "min")) and fits:
                starting_batch_size = size
                return result
            size = int(size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise RuntimeError("No executable batch size found, reached zero.")

    return call


# -- helpers of scripts ---------------------------------------------------------------------------


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True,
    recursive: bool = False,
) -> Any:  # fmt: skip
    """Return the model inside of its wrappers."""
    del recursive
    return unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)


def is_peft_model(model: torch.nn.Module) -> bool:
    """Return whether the model, inside of its wrappers, is one of peft."""
    kinds = type(unwrap_model(model)).__mro__
    return any(f"{k.__module__}.{k.__name__}" == "peft.peft_model.PeftModel" for k in kinds)


def wait_for_everyone() -> None:
    """Return when every rank has arrived."""
    syncprims.barrier("wait_for_everyone")


def save(
    obj: object,
    f: str | os.PathLike[str],
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Write `obj` to the file `f` on rank 0, or on the first rank of each node."""
    if syncprims.is_local_main() if save_on_each_node else syncprims.is_main():
        save_object(obj, f, safe=safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Return the contents of a file of torch. No code in it is run."""
    kwargs["weights_only"] = True
    return torch.load(f, map_location=map_location, **kwargs)


def str_to_bool(value: str, to_bool: bool = False) -> int:
    """Return 1 or 0 for words such as yes and no, or, with `to_bool`, True or False.

    :raises ValueError: for other words.
    """
    if value.lower() in ("y", "yes", "t", "true", "on", "1"):
        return True if to_bool else 1
    if value.lower() in ("n", "no", "f", "false", "off", "0"):
        return False if to_bool else 0
    raise ValueError(f"{value!r} is neither yes nor no")


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return tqdm's bar; unless `main_process_only` is False, on the first rank of each node.

    :raises ValueError: if the first argument is a bool, as in old scripts.
    """
    if args and isinstance(args[0], bool):
        raise ValueError(f"tqdm({args[0]}, ...): write it as main_process_only={args[0]}")
    if not main_process_only:
        from tqdm.auto import tqdm as bar

        return bar(*args, **kwargs)
    kwargs |= dict(zip(("iterable", "desc", "total", "leave"), args, strict=False))
    return syncprims.progress(local=True, **kwargs)


# -- random states made equal on all ranks --------------------------------------------------------


def synchronize_rng_states(
    rng_types: Sequence[Any], generator: torch.Generator | None = None
) -> None:
    """Give these generators of all ranks the states of rank 0's. Collective.

    :raises ValueError: for an unknown kind, and for ``"generator"`` without one.
    """
    for given in rng_types:
        kind = getattr(given, "value", given)
        if kind == "generator" and generator is not None:
            generator.set_state(syncprims.broadcast(generator.get_state()))
        elif kind in ("torch", "cuda"):
            module: Any = torch if kind == "torch" else torch.cuda
            module.set_rng_state(syncprims.broadcast(module.get_rng_state()))
        else:
            takes = "'torch', 'cuda', or 'generator' with a generator"
            raise ValueError(f"synchronize_rng_states({given!r}): it takes {takes}")


# -- ranks on this machine, and models without memory or with weights of files --------------------


def notebook_launcher(
    function: Callable[..., object],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    **others: object,
) -> None:
    """Run ``function(*args)`` on `num_processes` ranks of this machine; with 1 or None, here.

    Each rank is a process on the file backend, so no port is used. Arguments about ports,
    rendezvous and nodes are accepted if they ask for one node.

    :raises TypeError: for an argument that Accelerate's function does not have, either.
    :raises ValueError: if there is a world here already, or more nodes than one are asked for.
    """
    known = "use_port master_addr node_rank num_nodes rdzv_backend rdzv_endpoint rdzv_conf rdzv_id"
    known += " max_restarts monitor_interval log_line_prefix_template"
    if unknown := others.keys() - set(known.split()):
        raise TypeError(f"notebook_launcher has no argument {min(unknown)!r}")
    if others.get("num_nodes", 1) != 1:
        raise ValueError("notebook_launcher starts ranks on one machine; use torchrun for several")
    if others.get("max_restarts", 0):
        raise ValueError("notebook_launcher does not restart; use syncprims run --max-restarts")
    if num_processes is None or num_processes <= 1:
        function(*args)
        return
    variables = {"ACCELERATE_MIXED_PRECISION": mixed_precision.lower()}
    _start(lambda: function(*args), num_processes, variables)


def debug_launcher(
    function: Callable[..., object], args: tuple[Any, ...] = (), num_processes: int = 2
) -> None:
    """Run ``function(*args)`` on `num_processes` ranks of this machine, without accelerators."""
    _start(lambda: function(*args), num_processes, {"ACCELERATE_USE_CPU": "yes"})


def _start(function: Callable[[], object], ranks: int, variables: dict[str, str]) -> None:
    from syncprims.testing import run_world  # a room of its own

    def rank() -> None:
        os.environ.update(variables)
        function()

    run_world(rank, ranks, kind="processes", timeout=None)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | str | int | torch.device | None = None,
    offload_folder: None = None,
    dtype: torch.dtype | str | None = None,
    *,
    strict: bool = True,
    allow_links: bool = False,
    **others: object,
) -> None:
    """Load weights. See :func:`syncprims.training.load_checkpoint_in_model`.

    Other arguments of Accelerate's function are accepted if they ask for the behaviour of this one.

    :raises TypeError: for a feature that is not offered, such as offloading, with an alternative.
    """
    check_unsupported("load_checkpoint_in_model", {"offload_folder": offload_folder, **others})
    training.load_checkpoint_in_model(
        model, checkpoint, device_map, dtype, strict=strict, allow_links=allow_links
    )


@contextlib.contextmanager
def init_on_device(device: Any, include_buffers: bool | None = None) -> Generator[None]:
    """In this block the parameters of new models are on `device`.

    With `include_buffers`, so are their buffers, which a file of weights need not have.
    """
    if include_buffers:
        with torch.device(device):
            yield
        return

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.device == torch.device(device):
            return None  # it stays: another module may share it
        return type(parameter)(parameter.to(device), parameter.requires_grad)

    with register_module_parameter_registration_hook(move):
        yield


def init_empty_weights(include_buffers: bool | None = None) -> AbstractContextManager[Any]:
    """Return a context in which models are made without memory for their parameters.

    With `include_buffers`, without memory for their buffers, too.
    """
    return init_on_device("meta", include_buffers)
