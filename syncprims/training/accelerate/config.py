"""Accelerate's arguments and configuration objects: accepted if there is an equivalent.

Objects are recognised by their fields, so Accelerate need not be installed.
"""

from __future__ import annotations

import os
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch

from syncprims.training.preparation import JobOptions

#: Arguments of Accelerate's calls that have no equivalent, and what to do instead.
_INSTEAD = {
    "Accelerator": {
        "deepspeed_plugin": "wrap the model yourself before prepare()",
        "deepspeed_plugins": "wrap the models yourself before prepare()",
        "fsdp_plugin": "apply torch's fully_shard() to the model before prepare()",
        "torch_tp_plugin": "apply torch's parallelize_module() to the model before prepare()",
        "megatron_lm_plugin": "there is none",
        "parallelism_config": "wrap the model with torch's own means before prepare()",
        "dynamo_backend": "call torch.compile(model) before or after prepare()",
        "dynamo_plugin": "call torch.compile(model) before or after prepare()",
        "rng_types": "the order of data follows from seed=; random numbers are each rank's own",
    },
    "load_checkpoint_in_model": {
        "offload_folder": "leave it out: nothing is offloaded here; a dtype is dtype=",
        "offload_state_dict": "leave it out: weights are read straight into the model",
        "offload_buffers": "leave it out: nothing is offloaded here",
        "offload_8bit_bnb": "leave it out: nothing is offloaded here",
        "keep_in_fp32_modules": "cast parts of the model first, without dtype=: each keeps its own",
        "full_state_dict": "leave it out: tensors spread over ranks are cut from whole ones",
        "broadcast_from_rank0": "leave it out: every rank reads for itself",
    },
}


def check_unsupported(call: str, arguments: dict[str, Any]) -> None:
    """Check that arguments without an equivalent ask for nothing, or for what is always so.

    None and False ask for nothing, except for `full_state_dict`, which is always True.

    :raises TypeError: otherwise; for an argument of Accelerate's it says what to do instead.
    """
    for name, value in arguments.items():
        if name not in _INSTEAD[call]:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        check_fixed(name == "full_state_dict", value, f"{call}({name}=)", _INSTEAD[call][name])


def check_fixed(fixed: Any, value: Any, call: str, instead: str) -> None:
    """Check that `value` is None, or the one value that there is here.

    :raises TypeError: otherwise, saying what to do instead.
    """
    if value is not None and value != fixed:
        raise TypeError(f"{call} is not offered; instead: {instead}")


@dataclass(kw_only=True)
class AcceleratorSettings(JobOptions):
    """All options that arguments and configuration objects may give, with their defaults."""

    gradient_accumulation_steps: int = 1
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    keep_last: int | None = None
    scaler: dict[str, Any] | None = None
    timeout: Any = None  #: of all calls, as a timedelta
    profile: dict[str, Any] = field(default_factory=dict[str, Any])


def read_configuration(
    settings: AcceleratorSettings, data: Any, window: Any, project: Any, handlers: Any
) -> None:
    """Set in `settings` what the configuration objects say, if these are not None.

    Here orders are always seeded, and loaders stateful. Checkpoints are numbered from those in the
    directory.

    :raises TypeError: if an object is of an unknown kind, or asks for what is not offered.
    :raises ValueError: if an argument and an object contradict each other.
    """
    found: dict[str, Any] = {}
    if data is not None:
        found |= {"split_batches": data.split_batches, "even_batches": data.even_batches}
        found |= {name: getattr(data, name, None) for name in ("non_blocking", "dispatch_batches")}
        found["seed"] = getattr(data, "data_seed", None)
    if window is not None:
        found["sync_with_dataloader"] = window.sync_with_dataloader
        found["sync_each_batch"] = window.sync_each_batch
        found["gradient_accumulation_steps"] = window.num_steps
    if project is not None:
        if getattr(project, "save_on_each_node", False):
            raise TypeError(
                "ProjectConfiguration(save_on_each_node=True) is not offered: a checkpoint is one "
                "directory that all ranks see, and is complete or absent"
            )
        found |= {name: getattr(project, name) for name in ("logging_dir", "project_dir")}
        found["keep_last"] = project.total_limit
    for handler in handlers or ():
        read = _read_handler(handler)
        if read.keys() & found.keys():
            raise ValueError(
                f"kwargs_handlers: there are two of {type(handler).__name__}; pass one"
            )
        found |= read
    defaults = {one.name: one.default for one in fields(settings)}
    for name, value in found.items():
        given, default = getattr(settings, name), defaults[name]
        if value is None or value == default:
            continue
        if given not in (default, value) and default is not MISSING:
            raise ValueError(
                f"{name}={given!r} contradicts the configuration object, which says {value!r}"
            )
        setattr(settings, name, value)


def _read_handler(handler: Any) -> dict[str, Any]:
    kind = type(handler).__name__
    options: dict[str, Any] = handler.to_kwargs() if hasattr(handler, "to_kwargs") else {}
    if kind == "GradScalerKwargs":
        return {"scaler": options}
    if kind == "DistributedDataParallelKwargs":
        return {"ddp": options, "ddp_hook": getattr(handler, "register_comm_hook", None)}
    if kind == "InitProcessGroupKwargs":
        return {"timeout": getattr(handler, "timeout", None)}
    if kind == "AutocastKwargs":
        return {"autocast": options}
    if kind == "ProfileKwargs":
        return {"profile": profiler_options(handler)}
    raise TypeError(f"kwargs_handlers: {kind} is not offered; instead: there is none")


def profiler_options(handler: Any) -> dict[str, Any]:
    """Return the options of torch's profiler in a ProfileKwargs, and its directory of traces."""
    options: dict[str, Any] = handler.to_kwargs()
    if names := options.pop("activities", None):
        kinds = torch.profiler.ProfilerActivity
        options["activities"] = [getattr(kinds, name.upper()) for name in names]
    if schedule := options.pop("schedule_option", None):
        options["schedule"] = torch.profiler.schedule(**schedule)
    return options
