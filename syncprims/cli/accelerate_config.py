"""What people bring from ``accelerate launch``: its flags and its file, translated or answered."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from syncprims.errors import ConfigurationError

from .options import BY_KEY, FAMILIAR, OPTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SHARDED = (
    "syncprims trains by plain data parallelism and shards no model; keep torch's own FSDP or "
    "DeepSpeed in the script, with syncprims for what is around it, and start it without this"
)
_TORCHRUN = "it is torchrun's: start the script by torchrun, which syncprims works under"
_XLA = "there is no TPU backend"

#: Flags, and keys of accelerate's file, that have no equivalent; why, and what to do instead. A
#: name that ends with ``_`` is the beginning of many.
REFUSED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("use_deepspeed", "deepspeed_", "zero_stage", "zero3_", "offload_"), _SHARDED),
    (("use_fsdp", "fsdp_", "use_megatron_lm", "megatron_lm_"), _SHARDED),
    (("use_parallelism_config", "parallelism_config", "parallelism_config_"), _SHARDED),
    (("dynamo_",), "write `model = torch.compile(model)` in the script"),
    (("fp8_",), "mixed precision is no, bf16 or fp16 here"),
    (
        ("gradient_accumulation_steps",),
        "it belongs to the script: Accelerator(gradient_accumulation_steps=N), or Accumulator(N)",
    ),
    (("gradient_clipping",), "it belongs to the script: clip_grad_norm_(parameters, N)"),
    (("tpu", "tpu_", "no_tpu_cluster", "vm", "downcast_bf16"), _XLA),
    (("use_xpu", "ipex_"), "choose the device in the script"),
    (("aws_",), "there is no SageMaker launcher; run `syncprims run` in the job itself"),
    (("mpirun_",), "start the ranks by mpirun itself: its variables are understood"),
    (
        ("enable_cpu_affinity",),
        "bind the ranks by taskset or numactl, or torchrun's --numa-binding",
    ),
    (("no_python",), "the script is a Python script, or with -m a module"),
    (("env",), "set the variable before the command: NAME=VALUE syncprims run ..."),
    (("tee", "log_dir", "role", "rdzv_conf", "monitor_interval"), _TORCHRUN),
)
_SHORT = {"-t": "tee"}

#: Values by which accelerate's flags and files say that they want nothing of the kind.
_NOTHING: tuple[object, ...] = ({}, [], False, None, "", "no", "NO")

#: What accelerate's file has beside keys that are flags, too.
_FILE_ONLY = ("compute_environment", "distributed_type", "use_cpu")
_PLAIN_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU")


def is_accelerates(said: Mapping[str, object]) -> bool:
    """Tell whether a file was written by ``accelerate config``."""
    return any(key in said for key in ("compute_environment", "distributed_type", "num_machines"))


def refusal(key: str) -> str:
    """Return why there is no such thing here and what to do instead; empty if nobody knows it."""
    for family, answer in REFUSED:
        for name in family:
            if key == name or (name.endswith("_") and key.startswith(name)):
                return answer
    return ""


def nearest(key: str, known: Sequence[str]) -> str:
    """Return a question that names what was perhaps meant."""
    found = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


# -- the command line --------------------------------------------------------------------------


def _spellings() -> dict[str, tuple[str, bool]]:
    """Return for every flag the one that the parser knows, and whether a value follows it."""
    known = {"-h": ("-h", False), "--help": ("--help", False), "--config": ("--config", True)}
    known["--config-file"] = known["--config"]
    for option in OPTIONS:
        if option.key not in ("script", "args"):
            mine = option.flag, option.metavar is not None
            names = (option.flag, *option.also, *([option.short] if option.short else []))
            known |= dict.fromkeys(names, mine)
    return known


_FLAGS = _spellings()


def translate(line: Sequence[str], more: Mapping[str, tuple[str, bool]] | None = None) -> list[str]:
    """Return a command line of ``syncprims run`` in our own spelling, up to the script.

    Long flags may be written with ``_`` for ``-``, as in accelerate. What follows the script is its
    own and left alone. `more` has flags that are known beside those of a run.

    :raises ConfigurationError: for a flag that has no equivalent, saying what to do instead, and
        for one that nobody knows, naming the nearest.
    """
    known = {**_FLAGS, **(more or {})}
    ours: list[str] = []
    rest = list(line)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        said = rest.pop(0)
        name, equals, value = said.partition("=")
        if not name.startswith("--"):  # -n4
            name, equals, value = said[:2], "=" if said[2:] else "", said[2:].removeprefix("=")
        else:
            name = name.replace("_", "-")
        if name not in known:
            if name == "--dynamo-backend" and (value or "".join(rest[:1])) in ("no", "NO"):
                rest = rest[not equals :]
                continue
            raise _unknown(said.partition("=")[0], name, list(known))
        mine, takes_value = known[name]
        if not takes_value:
            if equals:
                raise ConfigurationError(f"{name} takes no value, and {said!r} gives it one")
            ours.append(mine)
        elif equals:
            ours.append(f"{mine}={value}")
        elif rest:
            ours.append(f"{mine}={rest.pop(0)}")
        else:
            raise ConfigurationError(f"{name} needs a value: {name} {_metavar(mine)}")
    return ours + rest


def _metavar(flag: str) -> str:
    option = BY_KEY.get(flag[2:].replace("-", "_"))
    return (option.metavar if option else None) or "FILE"


def _unknown(said: str, name: str, known: Sequence[str]) -> ConfigurationError:
    key = _SHORT.get(name, name.removeprefix("--").replace("-", "_"))
    why = refusal(key)
    if why:
        return ConfigurationError(f"{said} has no equivalent here: {why}")
    guess = nearest(name, known) or ";"
    return ConfigurationError(f"there is no flag {said}{guess} `syncprims run --help` has them all")


# -- the file ----------------------------------------------------------------------------------


def from_file(said: Mapping[str, object], where: str) -> dict[str, Any]:
    """Return what accelerate's file says, under our keys.

    :raises ConfigurationError: naming the key that has no equivalent, or that nobody knows.
    """
    ours: dict[str, Any] = {}
    kind = str(said.get("distributed_type") or "NO")
    if kind not in _PLAIN_TYPES:
        raise ConfigurationError(
            f"{where}: distributed_type: {kind} has no equivalent here: "
            f"{_XLA if kind in ('XLA', 'TPU') else _SHARDED}. Understood are: "
            f"{', '.join(_PLAIN_TYPES)}"
        )
    if said.get("compute_environment") not in (None, "LOCAL_MACHINE"):
        raise ConfigurationError(
            f"{where}: compute_environment: {said['compute_environment']} has no equivalent here: "
            f"{refusal('aws_')}"
        )
    for key, value in said.items():
        if key in ("compute_environment", "distributed_type") or value is None:
            continue
        if key == "use_cpu":
            key = "cpu"
        own = _own_key(key)
        if own is not None:
            if value is not False and (key, value) != ("num_processes", -1):
                ours[own] = value
        elif not (why := refusal(key)):
            known = [*_FILE_ONLY, *(option.key for option in OPTIONS), "gpu_ids", "num_machines"]
            raise ConfigurationError(
                f"{where}: there is no key {key!r}{nearest(key, known) or ';'} the file looks like "
                f"accelerate's, whose keys are understood or answered, and this is none of them"
            )
        elif not _says_nothing(value):
            raise ConfigurationError(f"{where}: {key} has no equivalent here: {why}")
    if kind == "MULTI_GPU" and "gpus" not in ours and not ours.get("cpu"):
        ours["gpus"] = "all"
    if ours.get("cpu"):
        ours.pop("gpus", None)  # accelerate writes gpu_ids: all in any case
    return ours


def _says_nothing(value: object) -> bool:
    if isinstance(value, dict):
        parts: list[object] = list(value.values())  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
        return all(part in _NOTHING for part in parts)
    return value in _NOTHING


def _own_key(key: str) -> str | None:
    if key in BY_KEY and key not in ("script", "args"):
        return key
    flag = "--" + key.replace("_", "-")
    return next((option.key for option in OPTIONS if flag in option.also), None)


def notes(said: Mapping[str, object]) -> list[str]:
    """Return a line for everything that was said and changes nothing."""
    return [
        f"{BY_KEY[key].flag} changes nothing: {BY_KEY[key].note}"
        for key, value in said.items()
        if BY_KEY[key].note and BY_KEY[key].section == FAMILIAR and value
    ]
