"""Accelerate's arguments and configuration objects: accepted if there is an equivalent.

Objects are recognised by their fields, so Accelerate need not be installed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import Any

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
        "rng_types": "the order of data follows from seed=, and random numbers are left to each "
        "rank",
    },
    "load_checkpoint_in_model": {
        "offload_folder": "leave it out: nothing is offloaded here; a dtype is dtype=",
        "offload_state_dict": "leave it out: weights are read straight into the model",
        "offload_buffers": "leave it out: nothing is offloaded here",
        "offload_8bit_bnb": "leave it out: nothing is offloaded here",
        "keep_in_fp32_modules": "leave dtype= out, and cast parts of the model before: each keeps "
        "its own",
        "full_state_dict": "leave it out: tensors spread over ranks are cut from whole ones",
        "broadcast_from_rank0": "leave it out: every rank reads for itself",
    },
}
#: Values of these arguments that describe what is always so here.
_ALWAYS = {
    "offload_state_dict": False,
    "offload_buffers": False,
    "offload_8bit_bnb": False,
    "full_state_dict": True,
    "broadcast_from_rank0": False,
}


def check_unsupported(call: str, arguments: dict[str, Any]) -> None:
    """Check that arguments without an equivalent ask for nothing, or for what is always so.

    :raises TypeError: otherwise; for an argument of Accelerate's it says what to do instead.
    """
    for name, value in arguments.items():
        if name not in _INSTEAD[call]:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        check_fixed(_ALWAYS.get(name), value, f"{call}({name}=)", _INSTEAD[call][name])


def check_fixed(fixed: Any, value: Any, call: str, instead: str) -> None:
    """Check that `value` is None, or the one value that there is here.

    :raises TypeError: otherwise, saying what to do instead.
    """
    if value is not None and value != fixed:
        raise TypeError(f"{call} is not offered; instead: {instead}")


@dataclass(kw_only=True)
class Settings(JobOptions):
    """All options that arguments and configuration objects may give, with their defaults."""

    gradient_accumulation_steps: int = 1
    sync_with_dataloader: bool = True
    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    keep_last: int | None = None
    scaler: dict[str, Any] | None = None


def read_configuration(
    settings: Settings, data: Any, window: Any, project: Any, handlers: Any
) -> Settings:
    """Return `settings` with the values of the configuration objects, if these are not None.

    :raises TypeError: if an object is of an unknown kind, or asks for what is not offered.
    :raises ValueError: if an argument and an object contradict each other.
    """
    found: dict[str, Any] = {}
    found |= _read_data(data) if data is not None else {}
    found |= _read_accumulation(window) if window is not None else {}
    found |= _read_project(project) if project is not None else {}
    for handler in handlers or ():
        found |= _read_handler(handler)
    for field in fields(Settings):
        given, value = getattr(settings, field.name), found.get(field.name, field.default)
        if field.default not in (given, value) and given != value:
            raise ValueError(
                f"{field.name}={given!r} contradicts the configuration object, which says {value!r}"
            )
        if value == field.default:
            found.pop(field.name, None)
    return replace(settings, **found)


def _read_data(config: Any) -> dict[str, Any]:
    """Read a DataLoaderConfiguration. Here orders are always seeded, and loaders stateful."""
    found = {name: getattr(config, name) for name in ("split_batches", "even_batches")}
    found["non_blocking"] = getattr(config, "non_blocking", False)
    found["dispatch_batches"] = getattr(config, "dispatch_batches", None)
    if getattr(config, "data_seed", None) is not None:
        found["seed"] = config.data_seed
    return found


def _read_accumulation(plugin: Any) -> dict[str, Any]:
    """Read a GradientAccumulationPlugin. To synchronize at each batch would change no number."""
    found: dict[str, Any] = {"sync_with_dataloader": plugin.sync_with_dataloader}
    if plugin.num_steps is not None:
        found["gradient_accumulation_steps"] = plugin.num_steps
    return found


def _read_project(config: Any) -> dict[str, Any]:
    """Read a ProjectConfiguration. Checkpoints are numbered from those in the directory."""
    if getattr(config, "save_on_each_node", False):
        raise TypeError(
            "ProjectConfiguration(save_on_each_node=True) is not offered: a checkpoint is one "
            "directory that all ranks see, and is complete or absent"
        )
    found = {"keep_last": config.total_limit, "logging_dir": config.logging_dir}
    if config.project_dir is not None:
        found["project_dir"] = config.project_dir
    return found


def _read_handler(handler: Any) -> dict[str, Any]:
    kind = type(handler).__name__
    options: dict[str, Any] = handler.to_kwargs() if hasattr(handler, "to_kwargs") else {}
    if kind == "GradScalerKwargs":
        return {"scaler": options}
    if kind == "DistributedDataParallelKwargs":
        if {"comm_hook", "comm_wrapper", "comm_state_option"} & options.keys():
            raise TypeError(
                "DistributedDataParallelKwargs(comm_hook=) is not offered; instead: call "
                "model.register_comm_hook() after prepare()"
            )
        return {"ddp": options}
    if kind == "AutocastKwargs" and not options:
        return {}
    instead = {
        "InitProcessGroupKwargs": "set SYNCPRIMS_TIMEOUT; without, a slow rank is waited "
        "for, and a dead one is not",
        "AutocastKwargs": "use torch.autocast in the loop",
        "ProfileKwargs": "use torch.profiler.profile around the loop",
    }
    raise TypeError(
        f"kwargs_handlers: {kind} is not offered; instead: {instead.get(kind, 'there is none')}"
    )
