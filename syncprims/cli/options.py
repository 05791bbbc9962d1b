"""What a run may be told: one table, for the command line and for files alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS, PLACE, DEVICES, TRAINING, NODES, SCRIPT, FAMILIAR = (
    "how many ranks",
    "where they meet",
    "processors and devices",
    "what the script is told",
    "several nodes (handed over to torchrun)",
    "the script",
    "known from accelerate launch",
)


class Options(NamedTuple):
    """What a run is told, by flags or a file; None is what nobody has said."""

    ranks: int | None = None  #: on each node
    backend: str | None = None
    threads: int | None = None  #: of each rank
    gpus: tuple[str, ...] | None = None  #: ids, or just ``all``
    cpu: bool = False
    mixed_precision: str | None = None
    timeout: float | None = None
    trace: str | None = None
    nodes: int | None = None
    node_rank: int | None = None
    rendezvous: tuple[str, int] | None = None
    max_restarts: int | None = None
    module: bool = False
    script: str | None = None
    args: tuple[str, ...] = ()
    num_processes: int | None = None  #: on all nodes together
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = None
    multi_gpu: bool = False
    debug: bool = False
    quiet: bool = False
    same_network: bool = False
    main_training_function: str | None = None


class Option(NamedTuple):
    """One thing to tell a run: ``--the-key VALUE`` in a line, ``the_key: value`` in a file."""

    key: str
    read: Callable[[object], Any]  #: its value from what was written; else ValueError says why not
    section: str
    help: str
    metavar: str | None = None  #: None: it is a switch
    short: str | None = None
    also: tuple[str, ...] = ()  #: flags of accelerate launch that say the same
    choices: tuple[str, ...] = ()
    note: str = ""  #: why it changes nothing here

    @property
    def flag(self) -> str:
        """The flag, as people write it."""
        return "--" + self.key.replace("_", "-")


# -- reading one value -------------------------------------------------------------------------


def whole(least: int, what: str) -> Callable[[object], int]:
    """Return a reader of whole numbers from `least` up."""

    def read(said: object) -> int:
        try:
            number = int(str(said))
        except ValueError:
            number = least - 1
        if number < least or isinstance(said, bool):
            raise ValueError(f"{said!r} is not {what} from {least} up")
        return number

    return read


def one_of(*choices: str) -> Callable[[object], str]:
    """Return a reader of one of these words."""

    def read(said: object) -> str:
        word = "no" if said is False else str(said)  # YAML takes a bare `no` for false
        if word not in choices:
            raise ValueError(f"{said!r} is not one of {', '.join(choices)}")
        return word

    return read


def word(said: object) -> str:
    """Read a word that is not empty."""
    if not isinstance(said, str) or not said:
        raise ValueError(f"{said!r} is not a word")
    return said


def words(said: object) -> tuple[str, ...]:
    """Read a list of words, as a script gets them."""
    if not isinstance(said, (list, tuple)):
        raise ValueError(f"{said!r} is not a list")
    items: list[object] = list(said)  # pyright: ignore[reportUnknownArgumentType]
    for item in items:
        if isinstance(item, (list, dict)) or item is None:
            raise ValueError(f"{item!r} in it is not a word")
    return tuple(str(item) for item in items)


def switch(said: object) -> bool:
    """Read true or false."""
    if not isinstance(said, bool):
        raise ValueError(f"{said!r} is neither true nor false")
    return said


def seconds(said: object) -> float:
    """Read a number of seconds above 0."""
    try:
        number = float(str(said))
    except ValueError:
        number = 0.0
    if not number > 0 or isinstance(said, bool):
        raise ValueError(f"{said!r} is not a number of seconds above 0")
    return number


def gpus(said: object) -> tuple[str, ...]:
    """Read ``all``, or ids with commas between; a file may have a list of them, or one number."""
    if isinstance(said, int):
        said = str(said)
    parts = tuple(said.split(",")) if isinstance(said, str) else words(said)
    ids = tuple(part.strip() for part in parts)
    if isinstance(said, bool) or not all(ids) or ("all" in ids and len(ids) > 1):
        raise ValueError(f"{said!r} is neither 'all' nor ids with commas between, as in 0,1")
    if len(set(ids)) < len(ids):
        raise ValueError(f"{said!r} names a device twice")
    return ids


def address(said: object) -> tuple[str, int]:
    """Read ``host:port``; an IPv6 address stands in brackets."""
    host, colon, port = str(said).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{said!r} is not host:port, as in node0:29500")
    return host, int(port)


# -- the table ---------------------------------------------------------------------------------

OPTIONS: tuple[Option, ...] = (
    Option("ranks", whole(1, "a number of ranks"), RANKS,
           "how many ranks to start; with several nodes, on each (default: one for each of --gpus)",
           "N", "-n"),
    Option("backend", word, PLACE,
           "where the ranks meet: file (shared memory of one host, no torch), torch, gloo, nccl, "
           "single, or a plug-in's (default: $SYNCPRIMS_BACKEND, else nccl with --gpus, else torch "
           "with several nodes, else file)", "NAME"),
    Option("timeout", seconds, PLACE,
           "seconds after which a wait for other ranks is an error ($SYNCPRIMS_TIMEOUT)",
           "SECONDS"),
    Option("gpus", gpus, DEVICES,
           "CUDA devices that the ranks see, as 0,1 or all; at least one for each rank "
           "($CUDA_VISIBLE_DEVICES)", "IDS", also=("--gpu-ids",)),
    Option("cpu", switch, DEVICES, "let the ranks see no CUDA device"),
    Option("threads", whole(1, "a number of threads"), DEVICES,
           "threads of the math libraries in each rank (default: $OMP_NUM_THREADS, else the "
           "processors shared out, so that ranks times threads does not exceed them)",
           "N", also=("--num-cpu-threads-per-process",)),
    Option("mixed_precision", one_of("no", "bf16", "fp16"), TRAINING,
           "what syncprims.training computes in: no, bf16 or fp16 ($SYNCPRIMS_MIXED_PRECISION)",
           "MODE", choices=("no", "bf16", "fp16")),
    Option("trace", word, TRAINING,
           "record every round of every rank in this directory ($SYNCPRIMS_TRACE)", "DIRECTORY"),
    Option("nodes", whole(1, "a number of nodes"), NODES,
           "machines that take part; run the command on each", "N", also=("--num-machines",)),
    Option("node_rank", whole(0, "a number of a node"), NODES,
           "which of them this is, from 0 (default: torchrun counts them as they come)", "K",
           also=("--machine-rank",)),
    Option("rendezvous", address, NODES,
           "where they meet: an address of node 0, and a free port there", "HOST:PORT"),
    Option("max_restarts", whole(0, "a number of restarts"), NODES,
           "start all ranks again, up to so often, when one has failed (default: 0)", "N"),
    Option("module", switch, SCRIPT, "the script is a module, as in python -m", short="-m"),
    Option("script", word, SCRIPT, "the script to run", "SCRIPT"),
    Option("args", words, SCRIPT, "what the script is given", "ARGS"),
    Option("num_processes", whole(1, "a number of ranks"), FAMILIAR, "ranks on all nodes together",
           "N"),
    Option("multi_gpu", switch, FAMILIAR, "the same as --gpus all"),
    Option("main_process_ip", word, FAMILIAR, "the host in --rendezvous", "HOST"),
    Option("main_process_port", whole(0, "a port"), FAMILIAR, "the port in --rendezvous", "PORT"),
    Option("rdzv_backend", one_of("static", "c10d"), FAMILIAR,
           "static takes --node-rank, c10d does without", "NAME", choices=("static", "c10d")),
    Option("debug", switch, FAMILIAR, "changes nothing",
           note="shapes and calls are compared on every run"),
    Option("quiet", switch, FAMILIAR, "changes nothing", short="-q",
           note="only the rank that failed first is shown in any case"),
    Option("same_network", switch, FAMILIAR, "changes nothing",
           note="--rendezvous says all there is to say"),
    Option("main_training_function", word, FAMILIAR, "changes nothing", "NAME",
           note="the script is run, as python runs it"),
)  # fmt: skip

BY_KEY = {option.key: option for option in OPTIONS}
