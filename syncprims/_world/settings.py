"""Settings of the user: environment variables become :class:`Settings`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

from syncprims.errors import ConfigurationError
from syncprims.interface import Settings, Topology

from .launchers import LAUNCHERS, read_number

#: How files beside that of a rank's error end: one says that SIGTERM stops the rank, and one has
#: the number of the last epoch that has begun on it.
STOP_NOTE, EPOCH_NOTE = "-stopped", "-epoch"
_PREFIX = "SYNCPRIMS_"
_FIRST_PORT, _PORTS = 15000, 17000  # that are derived; systems assign those from 32768 up


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Return the settings in `environ`; an empty variable counts as unset.

    :raises ConfigurationError: if a value is not what its variable takes.
    """
    read = {
        field: convert(name, environ[name])
        for field, (name, convert) in _VARIABLES.items()
        if environ.get(name)
    }
    agent_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Settings(**read, store=_read_store(environ), agent_store=agent_store)


def find_misspelt(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables with our prefix that are never read, and the nearest that is."""
    unknown = sorted(name for name in environ if name.startswith(_PREFIX) and name not in _OURS)
    if not unknown:
        return {}
    import difflib  # slow to import

    nearest = {name: difflib.get_close_matches(name, _OURS, 1, 0.85) for name in unknown}
    return {name: best[0] if best else None for name, best in nearest.items()}


def _switch(name: str, value: str) -> bool:
    if value not in ("0", "1"):
        raise ConfigurationError(f"{name}={value!r}: it takes 0 or 1")
    return value == "1"


def _count(name: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal()):
        raise ConfigurationError(f"{name}={value!r}: it takes a whole number, or 0")
    return int(value)


def _seconds(name: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ConfigurationError(f"{name}={value!r}: it takes a number of seconds above 0")
    return seconds


def _mebibytes(name: str, value: str) -> int:
    """Return the number of bytes."""
    if not (value.isascii() and value.isdecimal() and 1 <= int(value) <= 1 << 20):
        raise ConfigurationError(f"{name}={value!r}: it takes a number of MiB from 1 up")
    return int(value) << 20


def _text(name: str, value: str) -> str:
    return value


#: By the field of `Settings`: the variable, and what its text becomes.
_VARIABLES: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "timeout": ("SYNCPRIMS_TIMEOUT", _seconds),
    "join_timeout": ("SYNCPRIMS_JOIN_TIMEOUT", _seconds),
    "warn_after": ("SYNCPRIMS_WARN_AFTER", _seconds),
    "dump_after": ("SYNCPRIMS_DUMP_AFTER", _seconds),
    "directory": ("SYNCPRIMS_DIR", _text),
    "runtime_directory": ("XDG_RUNTIME_DIR", _text),
    "pickle": ("SYNCPRIMS_PICKLE", _switch),
    "strict": ("SYNCPRIMS_STRICT", _switch),
    "heartbeat": ("SYNCPRIMS_HEARTBEAT", _seconds),
    "gloo_interfaces": ("GLOO_SOCKET_IFNAME", _text),
    "error_file": ("SYNCPRIMS_ERROR_FILE", _text),
    "trace": ("SYNCPRIMS_TRACE", _text),
    "trace_limit": ("SYNCPRIMS_TRACE_LIMIT", _mebibytes),
    "mixed_precision": ("SYNCPRIMS_MIXED_PRECISION", _text),
    "check_replicas": ("SYNCPRIMS_CHECK_REPLICAS", _count),
    "elastic": ("SYNCPRIMS_ELASTIC", _switch),
}
#: Every variable with our prefix that is read.
_OURS = (
    {name for name, _ in _VARIABLES.values()}
    | {*LAUNCHERS[0].variables}
    | {f"{_PREFIX}{name}" for name in ("BACKEND", "LAUNCHER", "RESTART", "RUN_ID")}
    | {f"{_PREFIX}SERVE_TORCH", f"{_PREFIX}SUITE"}
)


def _read_store(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return where ranks of several hosts meet, if torch's variables say it."""
    port = read_number(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else None
    address = environ.get("MASTER_ADDR")
    return (address, port) if address and port is not None else None


def derive_store(environ: Mapping[str, str], topology: Topology) -> tuple[str, int] | None:
    """Return where ranks of several hosts meet in a job of SLURM that says nothing else.

    That is on the first node, where rank 0 is, on a port that follows from the run id. None without
    such a job, and where ranks share a host: they meet there.

    :raises ConfigurationError: on rank 0, if it is on another node.
    """
    own_step = topology.launcher == "SLURM"
    names = ("SLURM_STEP_NODELIST",) if own_step else ()  # of others: what started their daemons
    names = (*names, "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environ[name] for name in names if environ.get(name)), None)
    is_started = topology.launcher not in ("none", "torch.distributed")
    if nodes is None or topology.num_nodes == 1 or not is_started:
        return None
    first, here = _find_first_node(nodes), environ.get("SLURMD_NODENAME")
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if topology.rank == 0 and not address and here not in (None, first):
        raise ConfigurationError(
            f"rank 0 is on node {here}, and the ranks of this run would meet on node {first}, the "
            f"first of {nodes}: set MASTER_ADDR={here} on all ranks, or start rank 0 on {first}"
        )
    if port:
        return address or first, read_number(environ, "MASTER_PORT")
    run = f"{topology.run_id} {environ.get('SLURM_JOB_ID')}"
    return address or first, _FIRST_PORT + zlib.crc32(run.encode()) % _PORTS


def _find_first_node(nodes: str) -> str:
    """Return the first of SLURM's node names: node007 of ``node[007-010,3],gpu1``."""
    import re  # slow to import, and only SLURM needs it

    match = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\]([^\[,]*))?", nodes)
    assert match is not None, "it matches anything"
    return f"{match[1]}{match[2] or ''}{match[3] or ''}"
