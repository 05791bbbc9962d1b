"""What one rank knows of itself and its machine."""

from __future__ import annotations

import os
import platform
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncprims._world.host import (
    count_free_bytes,
    count_processors,
    find_file_system,
    find_shared_memory,
    find_visible_gpus,
)
from syncprims._world.world import get_meeting_place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncprims import World

#: Packages of which all ranks should have the same release.
COMPARED = ("syncprims", "torch", "numpy")


def own_facts(world: World, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what this rank knows of itself, in values that JSON can hold."""
    meeting_place = get_meeting_place(world)
    place = Path(meeting_place) if meeting_place.startswith("/") else None
    memory = find_shared_memory()
    return {
        "rank": world.rank,
        "node": world.node_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "machine": _machine(),
        "memory": f"{memory.stat().st_dev}:{memory.stat().st_ino}",
        "launcher": world.topology.launcher,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in COMPARED},
        "processors": count_processors(),
        "allowed": sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else None,
        "load": os.getloadavg()[0],
        "threads": _threads(environ),
        "gpus": find_visible_gpus(environ),
        "meeting_place": meeting_place,
        "file_system": find_file_system(place) if place else None,
        "room": count_free_bytes(_existing(place) if place else memory),
        "shared_memory": {"path": str(memory), "free": count_free_bytes(memory)},
    }


def _machine() -> str:
    """Return an identifier of this kernel, which containers of one machine share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _threads(environ: Mapping[str, str]) -> int | None:
    """Return how many threads the math libraries start by ``OMP_NUM_THREADS``; None if not set."""
    count = environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(count) if count.isdecimal() and int(count) > 0 else None
