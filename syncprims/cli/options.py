"""The options of a run, one table for the command line and for files; and what is to be started."""

from __future__ import annotations

import argparse
import difflib
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from syncprims._world.launchers import list_rank_variables
from syncprims.errors import ConfigurationError, install

from .console import CommandParser

RANKS, BACKEND, DEVICES, SCRIPT_ENVIRONMENT, NODES, SCRIPT = (
    "number of ranks",
    "backend",
    "processors and devices",
    "settings of the script",
    "several nodes (started by torchrun)",
    "the script",
)


class Option(NamedTuple):
    """One option: ``--the-key VALUE`` on a command line, ``the_key: value`` in a file."""

    read: Callable[[object], Any]  #: returns the value of what was written, or raises InvalidValue
    section: str
    help: str
    metavar: str | None = None  #: None: it is a switch
    short: tuple[str, ...] = ()


def flag_of(key: str) -> str:
    """Return the flag of an option on the command line."""
    return "--" + key.replace("_", "-")


# -- reading one value -------------------------------------------------------------------------


class InvalidValue(argparse.ArgumentTypeError, ValueError):
    """What was written is not a value of the option; argparse shows the text."""


def number(kind: type[int] | type[float], least: float, what: str) -> Callable[[object], Any]:
    """Return a reader of numbers from `least` up."""

    def read(value: object) -> int | float:
        try:
            number = kind(str(value))
        except ValueError:
            number = least - 1
        if not number >= least:
            raise InvalidValue(f"{value!r} is not {what} from {least} up")
        return number

    return read


def one_of(*choices: str) -> Callable[[object], str]:
    """Return a reader of one of these words."""

    def read(value: object) -> str:
        choice = "no" if value is False else str(value)  # YAML reads a bare `no` as false
        if choice not in choices:
            raise InvalidValue(f"{value!r} is not one of {', '.join(choices)}")
        return choice

    return read


def word(value: object) -> str:
    """Read a word that is not empty."""
    if not isinstance(value, str) or not value:
        raise InvalidValue(f"{value!r} is not a word")
    return value


def words(value: object) -> tuple[str, ...]:
    """Read a list of words, as a script gets them."""
    if not isinstance(value, (list, tuple)):
        raise InvalidValue(f"{value!r} is not a list")
    items: list[object] = list(value)  # pyright: ignore[reportUnknownArgumentType]
    for item in items:
        # YAML reads a bare `no` as false and some words as dates: their text would be another one.
        if isinstance(item, bool) or not isinstance(item, (str, int, float)):
            raise InvalidValue(f"{item!r} in it is not a word; put quotes around each word")
    return tuple(map(str, items))


def switch(value: object) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise InvalidValue(f"{value!r} is neither true nor false")
    return value


def device_ids(value: object) -> tuple[str, ...]:
    """Read ``all``, or ids separated by commas; a file may have a list of them, or one number."""
    if isinstance(value, int):
        value = str(value)
    parts = tuple(value.split(",")) if isinstance(value, str) else words(value)
    ids = tuple(part.strip() for part in parts)
    if isinstance(value, bool) or not all(ids) or ("all" in ids and len(ids) > 1):
        raise InvalidValue(f"{value!r} is neither 'all' nor ids with commas between, as in 0,1")
    if len(set(ids)) < len(ids):
        raise InvalidValue(f"{value!r} names a device twice")
    return ids


def span(value: object) -> tuple[int, int]:
    """Read ``2:4``."""
    least, _, most = str(value).partition(":")
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise InvalidValue(f"{value!r} is not MIN:MAX, as in 2:4")
    return int(least), int(most)


def address(value: object) -> tuple[str, int]:
    """Read ``host:port``; an IPv6 address is in brackets."""
    host, colon, port = str(value).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidValue(f"{value!r} is not host:port, as in node0:29500")
    return host, int(port)


SECONDS = number(float, 1e-3, "a number of seconds")


# -- the table ---------------------------------------------------------------------------------


def _option(*about: Any, default: Any = None, **more: Any) -> Any:
    option = Option(*about, **more)
    return field(default=default if option.metavar else False, metadata={"option": option})


@dataclass(frozen=True)
class Options:
    """The values of a run's options, from flags or a file."""

    # fmt: off
    ranks: int | None = _option(number(int, 1, "a number of ranks"), RANKS,
        "how many ranks to start; with several nodes, on each (default: one for each of --gpus)",
        "N", short=("-n", "-np"))
    max_restarts: int = _option(number(int, 0, "a number of restarts"), RANKS,
        "how often to start all ranks again after one has failed; with --elastic, how many "
        "replacements to start (default: 0)", "N", default=0)
    restart_window: float = _option(SECONDS, RANKS,
        "count only the restarts of so many last seconds against --max-restarts (default: all)",
        "SECONDS", default=math.inf)
    elastic: tuple[int, int] | None = _option(span, RANKS,
        "start MAX ranks, and go on after losses while at least MIN of them live; the script calls "
        "reform()", "MIN:MAX")
    grace: float = _option(SECONDS, RANKS,
        "seconds that the ranks have to stop after SIGTERM or Ctrl-C (default: 30)", "SECONDS",
        default=30.0)
    log_dir: str | None = _option(word, RANKS,
        "add what each rank prints to the file rank-N.log in this directory, too", "DIR")
    json: bool = _option(switch, RANKS,
        "print each line as a JSON object, with time, rank, host, restart and stream")
    backend: str | None = _option(word, BACKEND,
        "where the ranks meet: file (shared memory of one host, no torch), torch, gloo, nccl, "
        "single, or a plug-in's (default: $SYNCPRIMS_BACKEND, else nccl with --gpus, else torch "
        "with several nodes, else file)", "NAME")
    timeout: float | None = _option(SECONDS, BACKEND,
        "seconds after which waiting for other ranks is an error ($SYNCPRIMS_TIMEOUT)",
        "SECONDS")
    gpus: tuple[str, ...] | None = _option(device_ids, DEVICES,
        "CUDA devices that the ranks see, as 0,1 or all; at least one for each rank "
        "($CUDA_VISIBLE_DEVICES)", "IDS")
    cpu: bool = _option(switch, DEVICES, "hide all CUDA devices from the ranks")
    threads: int | None = _option(number(int, 1, "a number of threads"), DEVICES,
        "threads of the math libraries in each rank (default: $OMP_NUM_THREADS, else the "
        "processors divided by the ranks)", "N")
    mixed_precision: str | None = _option(one_of("no", "bf16", "fp16"), SCRIPT_ENVIRONMENT,
        "what syncprims.training computes in: no, bf16 or fp16 ($SYNCPRIMS_MIXED_PRECISION)",
        "MODE")
    serve_torch: bool = _option(switch, SCRIPT_ENVIRONMENT,
        "serve the script's torch.distributed, whatever backend it asks for: calls that differ and "
        "ranks that are lost raise errors that name them ($SYNCPRIMS_SERVE_TORCH)")
    trace: str | None = _option(word, SCRIPT_ENVIRONMENT,
        "record every round of every rank in this directory ($SYNCPRIMS_TRACE)", "DIR")
    nodes: int = _option(number(int, 1, "a number of nodes"), NODES,
        "number of machines; run the command on each", "N", default=1)
    node_rank: int | None = _option(number(int, 0, "a number of a node"), NODES,
        "which of them this is, from 0 (default: torchrun numbers them as they join)", "K")
    rendezvous: tuple[str, int] | None = _option(address, NODES,
        "where they meet: an address of node 0, and a free port there", "HOST:PORT")
    module: bool = _option(switch, SCRIPT, "the script is a module, as in python -m", short=("-m",))
    script: str | None = _option(word, SCRIPT, "the script to run", "SCRIPT")
    args: tuple[str, ...] = _option(words, SCRIPT, "the arguments of the script", "ARGS",
        default=())
    # fmt: on


class LaunchPlan(NamedTuple):
    """What to start on this machine."""

    options: Options
    ranks: int  #: on this machine
    command: list[str]  #: of one rank
    variables: dict[str, str]  #: to set for all ranks
    torchrun: list[str]  #: the command that starts torchrun instead; empty on one node

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of torchrun, and what the ranks' environments have in common.

        An outer launcher's variables describe this process, not the ranks.
        """
        outer = list_rank_variables() - {"SYNCPRIMS_RUN_ID"}
        return {**{k: v for k, v in environ.items() if k not in outer}, **self.variables}


OPTIONS: dict[str, Option] = {one.name: one.metadata["option"] for one in fields(Options)}
#: What to do in place of the names that `accelerate launch`, its file and torchrun have. In braces
#: are keys of ours. A name that ends with * represents all that begin so.
_ELSEWHERE = {
    "give {ranks}, which counts the ranks of one node": "num_processes nproc_per_node",
    "give {nodes}, or {elastic}": "num_machines nnodes",
    "give {node_rank}": "machine_rank",
    "give {rendezvous}": "main_process_* master_* rdzv_endpoint",
    "give {gpus} or {cpu}": "multi_gpu gpu_ids use_cpu distributed_type",
    "give {mixed_precision}, which knows bf16 and no fp8": "fp8_*",
    "give {threads}": "num_cpu_threads_per_process",
    "give {grace}": "shutdown_timeout",
    "give {log_dir}": "tee t redirects r",
    "give --config FILE": "config_file",
    "give it to the Accelerator in the script": "gradient_accumulation_steps",
    "call clip_grad_norm_() in the script": "gradient_clipping",
    "call torch.compile(model) in the script": "dynamo_*",
    "apply torch's fully_shard() to the model in the script": "use_fsdp fsdp_*",
    "wrap the model by DeepSpeed in the script": "use_deepspeed deepspeed_* zero* offload_*",
    "use Megatron-LM itself in the script": "use_megatron_lm megatron_lm_*",
    "wrap the model with torch's own means in the script": "use_parallelism* parallelism_*",
    "leave it out: calls of all ranks always compare shapes": "debug",
    "leave it out: it has no effect here": "same_network rdzv_backend role monitor_interval quiet q"
    " rdzv_id standalone main_training_function",
    "give a file with the keys of `syncprims run`: this one is accelerate's": "compute_environment",
    "start the script by torchrun": "local_* logs_specs duplicate_* event_log_handler rdzv_conf"
    " signals_to_handle start_method virtual_* numa_* enable_cpu_affinity no_python run_path",
    "start the script by mpirun, or by SageMaker's own tools": "mpirun_* aws_* sagemaker_* ec2_*"
    " iam_* image_uri profile region base_job_name *_version additional_args",
    "syncprims does not run on TPUs": "tpu* no_tpu_cluster vm env downcast_bf16 command*",
}
#: The module that parses a file with this suffix; imported when it is read.
_PARSERS = {".yaml": "yaml", ".yml": "yaml", ".toml": "tomllib", ".json": "json"}


# -- on the command line -------------------------------------------------------------------------


def add_options(parser: CommandParser) -> None:
    """Add all options of a run, and the script at the end."""
    parser.set_defaults(explain_flag=_explain_flag)
    parser.add_argument(
        "--config", metavar="FILE", help="read options from a file: *.yaml, *.toml, *.json"
    )
    groups: dict[str, Any] = {}
    for key, option in OPTIONS.items():
        if key in ("script", "args"):
            continue
        if option.section not in groups:
            groups[option.section] = parser.add_argument_group(option.section)
        about: dict[str, Any] = {"dest": key, "default": argparse.SUPPRESS, "action": "store_true"}
        if option.metavar is not None:
            about |= {"action": "store", "metavar": option.metavar, "type": option.read}
        about["help"] = option.help.replace("%", "%%")
        names = [*option.short, flag_of(key)]
        underscored = [f"--{key}"] if "_" in key else []
        action = groups[option.section].add_argument(*names, *underscored, **about)
        action.option_strings = names  # the help shows our spelling only
    parser.add_argument(
        "line",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT [ARGS...]",
        help="the script to run; all that follows belongs to it",
    )


def values_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values of a parsed command line by key; only those that were given."""
    values = {key: value for key, value in vars(options).items() if key in OPTIONS}
    line = options.line[1:] if options.line[:1] == ["--"] else options.line
    if line:
        values["script"], values["args"] = line[0], tuple(line[1:])
    return values


def _explain(name: str, spell: Callable[[str], str]) -> str:
    """Return what to give in place of an unknown flag or key, as an error goes on."""
    name = name.replace("-", "_")
    for instead, names in _ELSEWHERE.items():
        if any(fnmatchcase(name, pattern) for pattern in names.split()):
            ours = {k: f"{spell(k)} {o.metavar or ''}".rstrip() for k, o in OPTIONS.items()}
            return ": " + instead.format(**ours)
    near = difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.7)
    hint = f" did you mean {spell(near[0])}?" if near else ""
    return f";{hint} docs/command-line.md has them all"


def _explain_flag(written: str) -> ConfigurationError:
    flag = written.partition("=")[0]
    return ConfigurationError(f"there is no flag {flag}{_explain(flag.lstrip('-'), flag_of)}")


# -- in a file -----------------------------------------------------------------------------------


def read_file(path: str) -> dict[str, Any]:
    """Return the values in the file, by key; only those that it sets.

    :raises ConfigurationError: if the file cannot be read, or a key or value is wrong; naming the
        file, each unknown key, and the nearest known key.
    """
    values: dict[str, Any] = {}
    found = _parse(Path(path))
    if unknown := [key for key in found if key not in OPTIONS]:
        lines = [f"{path}: there is no key {key!r}{_explain(key, str)}" for key in unknown]
        raise ConfigurationError("\n".join(lines))
    for key, value in found.items():
        try:
            if value is not None:
                values[key] = OPTIONS[key].read(value)
        except ValueError as error:
            raise ConfigurationError(f"{path}: {key}: {error}") from None
    return values


def _parse(path: Path) -> dict[str, Any]:
    if path.suffix not in _PARSERS:
        raise ConfigurationError(f"{path}: such a file is called *.yaml, *.toml or *.json")
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        what = f"{path} cannot be read: {error}"
        raise ConfigurationError(f"{what}; docs/command-line.md shows such a file") from error
    try:
        parser = importlib.import_module(_PARSERS[path.suffix])
        read = parser.safe_load if path.suffix in (".yaml", ".yml") else parser.loads
        values: object = read(text)
    except ImportError:
        what = f"{path}: reading YAML needs a package: {install('config')}"
        raise ConfigurationError(f"{what}. A file *.toml needs none") from None
    except Exception as error:  # each parser raises errors of its own
        raise ConfigurationError(f"{path} is not valid {path.suffix[1:]}: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path}: it has to be keys with values, as in `ranks: 4`")
    return {str(key).replace("-", "_"): value for key, value in values.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
