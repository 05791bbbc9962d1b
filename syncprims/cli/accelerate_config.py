"""The flags and the file of ``accelerate launch``: translated, or refused with an alternative."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from syncprims.errors import ConfigurationError

from .options import BY_KEY, FLAG_OPTIONS

_SHARDED = (
    "syncprims trains by plain data parallelism and shards no model; keep torch's own FSDP or "
    "DeepSpeed in the script, with syncprims for what is around it, and start it without this"
)
_XLA = "there is no TPU backend"

#: Flags and file keys of accelerate without an equivalent, with the reason and what to do instead.
#: A name that ends with ``_`` is a prefix.
REFUSED = (
    ("use_fsdp fsdp_ use_deepspeed deepspeed_ zero_stage zero3_ offload_", _SHARDED),
    ("use_megatron_lm megatron_lm_ use_parallelism_config parallelism_config_", _SHARDED),
    ("parallelism_config", _SHARDED),
    ("dynamo_", "write `model = torch.compile(model)` in the script"),
    ("fp8_", "mixed precision is no, bf16 or fp16 here"),
    (
        "gradient_accumulation_steps",
        "it belongs to the script: Accelerator(gradient_accumulation_steps=N), or Accumulator(N)",
    ),
    ("gradient_clipping", "it belongs to the script: clip_grad_norm_(parameters, N)"),
    ("tpu tpu_ no_tpu_cluster vm downcast_bf16", _XLA),
    ("use_xpu ipex_", "choose the device in the script"),
    ("aws_", "there is no SageMaker launcher; run `syncprims run` in the job itself"),
    ("mpirun_", "start the ranks by mpirun itself: its variables are understood"),
    ("enable_cpu_affinity", "bind the ranks by taskset, numactl or torchrun's --numa-binding"),
    ("no_python", "the script is a Python script, or with -m a module"),
    ("env", "set the variable before the command: NAME=VALUE syncprims run ..."),
    (
        "tee t log_dir role rdzv_conf monitor_interval",
        "it is torchrun's: start the script by torchrun, which syncprims works under",
    ),
)

#: Values by which accelerate's flags and files turn a thing off.
_OFF: tuple[object, ...] = ([], False, None, "", "no", "NO")

#: Our key for every key of accelerate's file that has one.
_OWN_KEYS = {"use_cpu": "cpu"} | {
    flag[2:].replace("-", "_"): option.key
    for option in FLAG_OPTIONS
    for flag in (option.flag, *option.also)
}
_PLAIN_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU")


def refusal(key: str) -> str:
    """Return why `key` has no equivalent and what to do instead; empty if it is unknown."""
    for names, answer in REFUSED:
        for name in names.split():
            if key == name or (name.endswith("_") and key.startswith(name)):
                return answer
    return ""


def suggest(key: str, known: Sequence[str]) -> str:
    """Return ``; did you mean X?`` for a known name that is near to `key`, else ``;``."""
    names = {name.lstrip("-"): name for name in known}  # or all flags are alike in their dashes
    found = difflib.get_close_matches(key.lstrip("-"), names, n=1, cutoff=0.7)
    return f"; did you mean {names[found[0]]}?" if found else ";"


def _no_equivalent(what: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"{what} has no equivalent here: {why}")


def explain_flag(written: str) -> ConfigurationError:
    """Return the error for a flag that `syncprims run` does not have."""
    flag = written.partition("=")[0]
    if why := refusal(flag.lstrip("-").replace("-", "_")):
        return _no_equivalent(flag, why)
    hint = suggest(flag.replace("_", "-"), [option.flag for option in FLAG_OPTIONS])
    return ConfigurationError(f"there is no flag {flag}{hint} `syncprims run --help` has them all")


# -- the file ----------------------------------------------------------------------------------


def convert_file(values: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the values of accelerate's file under our keys, and those of any other file as is.

    :raises ConfigurationError: naming the key that has no equivalent, or that is unknown.
    """
    if values.keys().isdisjoint(("compute_environment", "distributed_type", "num_machines")):
        return values
    kind = str(values.get("distributed_type") or "NO")
    if kind not in _PLAIN_TYPES:
        why = f"{_XLA if kind in ('XLA', 'TPU') else _SHARDED}. Understood are: "
        raise _no_equivalent(f"{path}: distributed_type: {kind}", why + ", ".join(_PLAIN_TYPES))
    where = values.get("compute_environment")
    if where not in (None, "LOCAL_MACHINE"):
        raise _no_equivalent(f"{path}: compute_environment: {where}", refusal("aws_"))
    converted: dict[str, Any] = {}
    for key, value in values.items():
        if key in ("compute_environment", "distributed_type") or value is None:
            continue
        if own := _OWN_KEYS.get(key):
            if value is not False and (key, value) != ("num_processes", -1):
                converted[own] = value
        elif not (why := refusal(key)):
            known = ["compute_environment", "distributed_type", *_OWN_KEYS]
            raise ConfigurationError(
                f"{path}: there is no key {key!r}{suggest(key, known)} the file looks like "
                f"accelerate's, whose keys are understood or answered, and this is none of them"
            )
        elif not _is_off(value):
            raise _no_equivalent(f"{path}: {key}", why)
    if converted.get("cpu"):
        converted.pop("gpus", None)  # accelerate writes gpu_ids: all in any case
    elif kind == "MULTI_GPU":
        converted.setdefault("gpus", "all")
    return converted


def _is_off(value: object) -> bool:
    parts: list[object] = list(value.values()) if isinstance(value, dict) else [value]  # pyright: ignore[reportUnknownArgumentType]
    return all(part in _OFF for part in parts)


def notes(values: Mapping[str, object]) -> list[str]:
    """Return a line for every option of accelerate that is set and changes nothing."""
    options = [BY_KEY[key] for key, value in values.items() if value]
    return [f"{option.flag} changes nothing: {option.note}" for option in options if option.note]
