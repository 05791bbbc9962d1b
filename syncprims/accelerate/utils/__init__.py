"""Functions and configuration objects that scripts import from Accelerate's utils."""

from __future__ import annotations

from typing import Any

from syncprims.training import load_checkpoint_in_model as load_checkpoint_in_model

from . import imports as _imports
from .dataclasses import AutocastKwargs as AutocastKwargs
from .dataclasses import ComputeEnvironment as ComputeEnvironment
from .dataclasses import DataLoaderConfiguration as DataLoaderConfiguration
from .dataclasses import DDPCommunicationHookType as DDPCommunicationHookType
from .dataclasses import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from .dataclasses import DistributedType as DistributedType
from .dataclasses import GradientAccumulationPlugin as GradientAccumulationPlugin
from .dataclasses import GradScalerKwargs as GradScalerKwargs
from .dataclasses import InitProcessGroupKwargs as InitProcessGroupKwargs
from .dataclasses import KwargsHandler as KwargsHandler
from .dataclasses import LoggerType as LoggerType
from .dataclasses import PrecisionType as PrecisionType
from .dataclasses import ProfileKwargs as ProfileKwargs
from .dataclasses import ProjectConfiguration as ProjectConfiguration
from .dataclasses import RNGType as RNGType
from .imports import compare_versions as compare_versions
from .imports import is_bf16_available as is_bf16_available
from .imports import is_cuda_available as is_cuda_available
from .imports import is_fp16_available as is_fp16_available
from .imports import is_mps_available as is_mps_available
from .imports import is_torch_version as is_torch_version
from .imports import (
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
)
from .imports import is_weights_only_available as is_weights_only_available
from .imports import is_xpu_available as is_xpu_available
from .memory import clear_device_cache as clear_device_cache
from .memory import find_executable_batch_size as find_executable_batch_size
from .memory import release_memory as release_memory
from .operations import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
from .operations import DistributedOperationException as DistributedOperationException
from .operations import broadcast as broadcast
from .operations import broadcast_object_list as broadcast_object_list
from .operations import concatenate as concatenate
from .operations import convert_to_fp32 as convert_to_fp32
from .operations import copy_tensor_to_devices as copy_tensor_to_devices
from .operations import find_batch_size as find_batch_size
from .operations import gather as gather
from .operations import gather_object as gather_object
from .operations import honor_type as honor_type
from .operations import is_namedtuple as is_namedtuple
from .operations import is_torch_tensor as is_torch_tensor
from .operations import listify as listify
from .operations import pad_across_processes as pad_across_processes
from .operations import recursively_apply as recursively_apply
from .operations import reduce as reduce
from .operations import send_to_device as send_to_device
from .operations import slice_tensors as slice_tensors
from .other import extract_model_from_parallel as extract_model_from_parallel
from .other import is_compiled_module as is_compiled_module
from .other import is_peft_model as is_peft_model
from .other import load as load
from .other import patch_environment as patch_environment
from .other import save as save
from .other import str_to_bool as str_to_bool
from .other import tqdm as tqdm
from .other import wait_for_everyone as wait_for_everyone
from .random import set_seed as set_seed
from .random import synchronize_rng_state as synchronize_rng_state
from .random import synchronize_rng_states as synchronize_rng_states

_INSTEAD = {
    "deepspeed": "wrap the model by DeepSpeed itself before prepare(), or use torch's fully_shard",
    "fsdp": "apply torch's fully_shard() to the model before prepare()",
    "fullysharded": "apply torch's fully_shard() to the model before prepare()",
    "megatron": "there is none",
    "tensorparallel": "apply torch's parallelize_module() to the model before prepare()",
    "parallelism": "wrap the model with torch's own means before prepare()",
    "dynamo": "call torch.compile(model) before or after prepare()",
    "fp8": "there is none; use mixed_precision='bf16'",
    "recipe": "there is none; use mixed_precision='bf16'",
    "xla": "there is none: syncprims does not run on TPUs",
    "offload": "load the model where it is to be computed, by load_checkpoint_in_model()",
    "devicemap": "load_checkpoint_in_model(model, checkpoint, device_map=...)",
    "maxmemory": "load_checkpoint_in_model(model, checkpoint, device_map=...)",
    "balancedmemory": "load_checkpoint_in_model(model, checkpoint, device_map=...)",
    "dummy": "there is no DeepSpeed here; make an optimizer and a schedule of torch",
    "contextparallel": "wrap the model with torch's own means before prepare()",
    "tracker": "Accelerator(log_with=...) takes any object with log(values, step=...)",
    "quantiz": "quantize the model by bitsandbytes itself before prepare()",
    "dispatch": "load_checkpoint_in_model(model, checkpoint, device_map=...)",
    "bnb": "quantize the model by bitsandbytes itself before prepare()",
    "lomo": "step the optimizer yourself",
    "basicconfig": "leave it out: there is no file of options",
    "pippy": "use torch.distributed.pipelining",
}


def not_offered(module: str, name: str) -> Exception:
    """Return the error for a name of Accelerate's that is not here: it says what to do instead."""
    if name.startswith("__"):
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    plain = name.lower().replace("_", "")
    instead = next((way for word, way in _INSTEAD.items() if word in plain), "")
    if not instead:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return ImportError(f"{module}.{name} is not offered; instead: {instead}")


def __getattr__(name: str) -> Any:
    found = _imports.question(name)
    if found is None:
        raise not_offered(__name__, name)
    return found
