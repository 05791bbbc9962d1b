"""The options of a run: one table, for the command line and for files."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from .console import CommandParser

RANKS, BACKEND, DEVICES, SCRIPT_ENVIRONMENT, NODES, SCRIPT, ACCELERATE = (
    "number of ranks",
    "backend",
    "processors and devices",
    "settings of the script",
    "several nodes (started by torchrun)",
    "the script",
    "known from accelerate launch",
)


class Option(NamedTuple):
    """One option: ``--the-key VALUE`` on a command line, ``the_key: value`` in a file."""

    key: str
    read: Callable[[object], Any]  #: returns the value of what was written, or raises InvalidValue
    section: str
    help: str
    metavar: str | None = None  #: None: it is a switch
    short: tuple[str, ...] = ()
    also: tuple[str, ...] = ()  #: flags of accelerate launch with the same meaning
    note: str = ""  #: why it changes nothing here
    example: str = "false"  #: how a file shows it while it is not set

    @property
    def flag(self) -> str:
        """The flag on the command line."""
        return "--" + self.key.replace("_", "-")


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


def no_compiler(value: object) -> str:
    """Read ``no``: any other compiler belongs in the script."""
    if str(value).lower() != "no":
        raise InvalidValue(f"{value!r}: write `model = torch.compile(model)` in the script")
    return "no"


SECONDS = number(float, 1e-3, "a number of seconds")


# -- the table ---------------------------------------------------------------------------------


def _option(read: Callable[[object], Any], section: str, help: str, *rest: Any, **more: Any) -> Any:
    default = False if read is switch else () if read is words else None
    return field(default=default, metadata={"option": (read, section, help, *rest), "more": more})


@dataclass(frozen=True)
class Options:
    """The values of a run's options, from flags or a file; None: not set."""

    # fmt: off
    ranks: int | None = _option(number(int, 1, "a number of ranks"), RANKS,
        "how many ranks to start; with several nodes, on each (default: one for each of --gpus)",
        "N", ("-n", "-np"), example="4")
    max_restarts: int | None = _option(number(int, 0, "a number of restarts"), RANKS,
        "how often to start all ranks again after one has failed; with --elastic, how many "
        "replacements to start (default: 0)", "N", example="0")
    elastic: tuple[int, int] | None = _option(span, RANKS,
        "start MAX ranks, and go on after losses while at least MIN of them live; the script calls "
        "reform()", "MIN:MAX", example='"2:4"')
    backend: str | None = _option(word, BACKEND,
        "where the ranks meet: file (shared memory of one host, no torch), torch, gloo, nccl, "
        "single, or a plug-in's (default: $SYNCPRIMS_BACKEND, else nccl with --gpus, else torch "
        "with several nodes, else file)", "NAME", example='"file"')
    timeout: float | None = _option(SECONDS, BACKEND,
        "seconds after which waiting for other ranks is an error ($SYNCPRIMS_TIMEOUT)",
        "SECONDS", example="600")
    gpus: tuple[str, ...] | None = _option(device_ids, DEVICES,
        "CUDA devices that the ranks see, as 0,1 or all; at least one for each rank "
        "($CUDA_VISIBLE_DEVICES)", "IDS", also=("--gpu-ids",), example='"0,1"')
    cpu: bool = _option(switch, DEVICES, "hide all CUDA devices from the ranks")
    threads: int | None = _option(number(int, 1, "a number of threads"), DEVICES,
        "threads of the math libraries in each rank (default: $OMP_NUM_THREADS, else the "
        "processors divided by the ranks)",
        "N", also=("--num-cpu-threads-per-process",), example="4")
    mixed_precision: str | None = _option(one_of("no", "bf16", "fp16"), SCRIPT_ENVIRONMENT,
        "what syncprims.training computes in: no, bf16 or fp16 ($SYNCPRIMS_MIXED_PRECISION)",
        "MODE", example='"bf16"')
    serve_torch: bool = _option(switch, SCRIPT_ENVIRONMENT,
        "serve the script's torch.distributed, whatever backend it asks for: calls that differ and "
        "ranks that are lost raise errors that name them ($SYNCPRIMS_SERVE_TORCH)")
    trace: str | None = _option(word, SCRIPT_ENVIRONMENT,
        "record every round of every rank in this directory ($SYNCPRIMS_TRACE)", "DIR",
        example='"trace"')
    nodes: int | None = _option(number(int, 1, "a number of nodes"), NODES,
        "number of machines; run the command on each", "N", also=("--num-machines",), example="2")
    node_rank: int | None = _option(number(int, 0, "a number of a node"), NODES,
        "which of them this is, from 0 (default: torchrun numbers them as they join)", "K",
        also=("--machine-rank",), example="0")
    rendezvous: tuple[str, int] | None = _option(address, NODES,
        "where they meet: an address of node 0, and a free port there", "HOST:PORT",
        example='"node0:29500"')
    module: bool = _option(switch, SCRIPT, "the script is a module, as in python -m", short=("-m",))
    script: str | None = _option(word, SCRIPT, "the script to run", "SCRIPT",
        example='"train.py"')
    args: tuple[str, ...] = _option(words, SCRIPT, "the arguments of the script", "ARGS",
        example='["--lr", "0.1"]')
    num_processes: int | None = _option(number(int, 1, "a number of ranks"), ACCELERATE,
        "ranks on all nodes together", "N")
    multi_gpu: bool = _option(switch, ACCELERATE, "the same as --gpus all")
    main_process_ip: str | None = _option(word, ACCELERATE, "the host in --rendezvous", "HOST")
    main_process_port: int | None = _option(number(int, 0, "a port"), ACCELERATE,
        "the port in --rendezvous", "PORT")
    rdzv_backend: str | None = _option(one_of("static", "c10d"), ACCELERATE,
        "static needs --node-rank, c10d does not", "NAME")
    dynamo_backend: str | None = _option(no_compiler, ACCELERATE, "changes nothing: only no",
        "NAME", note="the script compiles its model, if any")
    debug: bool = _option(switch, ACCELERATE, "changes nothing",
        note="shapes and calls are compared on every run")
    quiet: bool = _option(switch, ACCELERATE, "changes nothing", short=("-q",),
        note="only the rank that failed first is shown in any case")
    same_network: bool = _option(switch, ACCELERATE, "changes nothing",
        note="--rendezvous is the address in any network")
    main_training_function: str | None = _option(word, ACCELERATE, "changes nothing", "NAME",
        note="the script is run, as python runs it")
    # fmt: on


OPTIONS = tuple(
    Option(one.name, *one.metadata["option"], **one.metadata["more"]) for one in fields(Options)
)
BY_KEY = {option.key: option for option in OPTIONS}
#: All but the script and its arguments, which have no flag.
FLAG_OPTIONS = tuple(option for option in OPTIONS if option.key not in ("script", "args"))


def plain_value(key: str, value: Any) -> Any:
    """Return a value as a file or a command line has it."""
    if key == "rendezvous":
        host, port = value
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if key == "elastic":
        return "{}:{}".format(*value)
    return ",".join(value) if key == "gpus" else value


# -- on the command line -------------------------------------------------------------------------


def add_options(parser: CommandParser) -> None:
    """Add all options of a run, and the script at the end."""
    action = parser.add_argument(
        "--config", "--config-file", "--config_file", metavar="FILE",
        help="read options from a file: *.yaml, *.toml, *.json",
    )  # fmt: skip
    action.option_strings = ["--config"]
    groups: dict[str, Any] = {}
    for option in FLAG_OPTIONS:
        if option.section not in groups:
            groups[option.section] = parser.add_argument_group(option.section)
        about: dict[str, Any] = {"action": "store_true"}
        if option.metavar is not None:
            about = {"metavar": option.metavar, "type": option.read}
        names = [*option.short, option.flag, *option.also]
        underscored = [f"--{name[2:].replace('-', '_')}" for name in names if "-" in name[2:]]
        action = groups[option.section].add_argument(
            *names,
            *underscored,
            dest=option.key,
            default=argparse.SUPPRESS,
            help=option.help.replace("%", "%%"),
            **about,
        )
        action.option_strings = [*option.short, option.flag]  # the help shows our spelling only
    parser.add_argument(
        "line",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT [ARGS...]",
        help="the script to run; all that follows belongs to it",
    )


def values_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values of a parsed command line by key; only those that were given."""
    values = {key: value for key, value in vars(options).items() if key in BY_KEY}
    line = options.line[1:] if options.line[:1] == ["--"] else options.line
    if line:
        values["script"], values["args"] = line[0], tuple(line[1:])
    return values
