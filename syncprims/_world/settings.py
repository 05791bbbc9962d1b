"""What the user may tune: environment variables become :class:`Settings`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncprims.errors import ConfigurationError
from syncprims.interface import Settings

from .launchers import LAUNCHERS, is_slurm_step, read_number

if TYPE_CHECKING:
    from collections.abc import Mapping

_PREFIX = "SYNCPRIMS_"
#: Every variable with our prefix that is read, without the prefix.
_OURS = {
    "BACKEND",
    "DIR",
    "ERROR_FILE",
    "HEARTBEAT",
    "JOIN_TIMEOUT",
    "MIXED_PRECISION",
    "PICKLE",
    "RUN_ID",
    "TIMEOUT",
    "TRACE",
    "TRACE_LIMIT",
    "WARN_AFTER",
    *(name.removeprefix(_PREFIX) for name in LAUNCHERS[0].variables),
}


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Return the settings in `environ`; an empty variable counts as unset.

    :raises ConfigurationError: if a value is not what its variable takes.
    """
    default = Settings()
    pickle = environ.get("SYNCPRIMS_PICKLE", "1")
    if pickle not in ("0", "1"):
        raise ConfigurationError(f"SYNCPRIMS_PICKLE={pickle!r}: it takes 0 or 1")
    return Settings(
        timeout=_read_seconds(environ, "SYNCPRIMS_TIMEOUT"),
        join_timeout=_read_seconds(environ, "SYNCPRIMS_JOIN_TIMEOUT") or default.join_timeout,
        warn_after=_read_seconds(environ, "SYNCPRIMS_WARN_AFTER") or default.warn_after,
        directory=environ.get("SYNCPRIMS_DIR") or None,
        runtime_directory=environ.get("XDG_RUNTIME_DIR") or None,
        pickle=pickle == "1",
        store=_read_store(environ),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        heartbeat=_read_seconds(environ, "SYNCPRIMS_HEARTBEAT") or default.heartbeat,
        gloo_interfaces=environ.get("GLOO_SOCKET_IFNAME") or None,
        error_file=environ.get("SYNCPRIMS_ERROR_FILE") or None,
        trace=environ.get("SYNCPRIMS_TRACE") or None,
        trace_limit=_read_mebibytes(environ, "SYNCPRIMS_TRACE_LIMIT") or default.trace_limit,
        mixed_precision=environ.get("SYNCPRIMS_MIXED_PRECISION") or None,
    )


def find_misspelt(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables with our prefix that are never read, and the nearest that is."""
    names = [name.removeprefix(_PREFIX) for name in environ if name.startswith(_PREFIX)]
    unknown = sorted(name for name in names if name not in _OURS)
    if not unknown:
        return {}
    import difflib  # slow to import

    nearest = {name: difflib.get_close_matches(name, _OURS, 1, 0.7) for name in unknown}
    return {_PREFIX + name: _PREFIX + best[0] if best else None for name, best in nearest.items()}


def _read_seconds(environ: Mapping[str, str], name: str) -> float | None:
    value = environ.get(name)
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ConfigurationError(f"{name}={value!r}: it takes a number of seconds above 0")
    return seconds


def _read_mebibytes(environ: Mapping[str, str], name: str) -> int | None:
    """Return the number of bytes."""
    value = environ.get(name)
    if not value:
        return None
    if not (value.isascii() and value.isdecimal() and 1 <= int(value) <= 1 << 20):
        raise ConfigurationError(f"{name}={value!r}: it takes a number of MiB from 1 up")
    return int(value) << 20


def _read_store(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return where ranks of several hosts meet: what torch's variables say, or SLURM's imply."""
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not (address and port):
        names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        nodes = next((environ[name] for name in names if environ.get(name)), None)
        job = environ.get("SLURM_JOB_ID", "0")
        if nodes is None or not job.isdecimal() or not is_slurm_step(environ):
            return None
        address = address or _find_first_node(nodes)
        if not port:  # one for each job on a node, below those that systems assign
            return address, 15000 + int(job) % 10000
    return address, read_number(environ, "MASTER_PORT")


def _find_first_node(nodes: str) -> str:
    """Return the first of SLURM's node names: node007 of ``node[007-010,3],gpu1``."""
    import re  # slow to import, and only SLURM needs it

    match = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\]([^\[,]*))?", nodes)
    assert match is not None, "it matches anything"
    return f"{match[1]}{match[2] or ''}{match[3] or ''}"
