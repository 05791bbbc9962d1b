"""Accelerate's configuration objects, understood where there is an equivalent, else told.

They are known by their fields, so nothing of Accelerate needs to be installed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

#: Arguments of Accelerate's calls that have no counterpart, and what to do instead.
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
#: What they may ask for, since it is so anyway.
_USUAL = {
    "offload_state_dict": False,
    "offload_buffers": False,
    "offload_8bit_bnb": False,
    "full_state_dict": True,
    "broadcast_from_rank0": False,
}


def refuse(call: str, others: dict[str, Any]) -> None:
    """Accept of a call's arguments those that ask for what is so anyway, or for nothing.

    :raises TypeError: for others, saying what to do instead where Accelerate knows them.
    """
    for name, value in others.items():
        if name not in _INSTEAD[call]:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        only(_USUAL.get(name), value, f"{call}({name}=)", _INSTEAD[call][name])


def only(usual: Any, asked: Any, call: str, instead: str) -> None:
    """Accept an argument that asks for what is so anyway, or for nothing.

    :raises TypeError: otherwise, saying what to do instead.
    """
    if asked is not None and asked != usual:
        raise TypeError(f"{call} is not offered; instead: {instead}")


@dataclass(frozen=True)
class Settings:
    """What both arguments and configuration objects may say; see :class:`Accelerator`."""

    gradient_accumulation_steps: int = 1
    sync_with_dataloader: bool = True
    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    keep_last: int | None = None
    even_batches: bool = True
    split_batches: bool = False
    dispatch_batches: bool | None = None
    non_blocking: bool = False
    seed: int | None = None
    ddp: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None


def understood(settings: Settings, data: Any, window: Any, project: Any, handlers: Any) -> Settings:
    """Return `settings` with what the configuration objects say, where they are not None.

    :raises TypeError: if an object is of an unknown kind, or asks for what is not offered.
    :raises ValueError: if an argument and an object contradict each other.
    """
    found: dict[str, Any] = {}
    found |= _of_data(data) if data is not None else {}
    found |= _of_window(window) if window is not None else {}
    found |= _of_project(project) if project is not None else {}
    for handler in handlers or ():
        found |= _of_handler(handler)
    for field in fields(Settings):
        said, value = getattr(settings, field.name), found.get(field.name, field.default)
        if field.default not in (said, value) and said != value:
            raise ValueError(
                f"{field.name}={said!r} contradicts the configuration object, which says {value!r}"
            )
        if value == field.default:
            found.pop(field.name, None)
    return replace(settings, **found)


def _of_data(config: Any) -> dict[str, Any]:
    """Read a DataLoaderConfiguration: orders are seeded anyway, and loaders keep their place."""
    found = {name: getattr(config, name) for name in ("split_batches", "even_batches")}
    found["non_blocking"] = getattr(config, "non_blocking", False)
    found["dispatch_batches"] = getattr(config, "dispatch_batches", None)
    if getattr(config, "data_seed", None) is not None:
        found["seed"] = config.data_seed
    return found


def _of_window(plugin: Any) -> dict[str, Any]:
    """Read a GradientAccumulationPlugin: synchronizing at each batch would change no number."""
    found: dict[str, Any] = {"sync_with_dataloader": plugin.sync_with_dataloader}
    if plugin.num_steps is not None:
        found["gradient_accumulation_steps"] = plugin.num_steps
    return found


def _of_project(config: Any) -> dict[str, Any]:
    """Read a ProjectConfiguration: checkpoints are numbered on from those that are there."""
    if getattr(config, "save_on_each_node", False):
        raise TypeError(
            "ProjectConfiguration(save_on_each_node=True) is not offered: a checkpoint is one "
            "directory that all ranks see, and is complete or absent"
        )
    found = {"keep_last": config.total_limit, "logging_dir": config.logging_dir}
    if config.project_dir is not None:
        found["project_dir"] = config.project_dir
    return found


def _of_handler(handler: Any) -> dict[str, Any]:
    kind = type(handler).__name__
    asked: dict[str, Any] = handler.to_kwargs() if hasattr(handler, "to_kwargs") else {}
    if kind == "GradScalerKwargs":
        return {"scaler": asked}
    if kind == "DistributedDataParallelKwargs":
        hooks = {"comm_hook", "comm_wrapper", "comm_state_option"}
        if hooks & asked.keys():
            raise TypeError(
                "DistributedDataParallelKwargs(comm_hook=) is not offered; instead: call "
                "model.register_comm_hook() after prepare()"
            )
        return {"ddp": asked}
    told = {
        "InitProcessGroupKwargs": "set SYNCPRIMS_TIMEOUT; without, a slow rank is waited "
        "for, and a dead one is not",
        "AutocastKwargs": "use torch.autocast in the loop",
        "ProfileKwargs": "use torch.profiler.profile around the loop",
    }
    if kind == "AutocastKwargs" and not asked:
        return {}
    raise TypeError(
        f"kwargs_handlers: {kind} is not offered; instead: {told.get(kind, 'there is none')}"
    )
