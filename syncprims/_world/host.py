"""This machine: processors, devices, shared memory, file systems, ports."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


_GPU_FILES = ("nvidia*", "nvhost*", "nvgpu*", "nvmap", "dxg", "kfd")  # in /dev, of their drivers


def count_processors() -> int:
    """Return how many processors this process may keep busy, by its affinity and its quota."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        allowed = os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        allowed = min(allowed, -(-int(limit) // int(period)))  # of a container, rounded up
    return max(1, allowed)


def find_visible_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """Return the ids of the CUDA devices that a rank would see; None if unknown."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [part.strip() for part in named.split(",") if part.strip() not in ("", "-1")]
    try:
        found = os.listdir("/proc/driver/nvidia/gpus")  # noqa: PTH208 - names are all it takes
        return [str(number) for number in range(len(found))]
    except OSError:
        # Without that directory a container, WSL or a board may still have some; ROCm has its own.
        return None if any(next(Path("/dev").glob(name), None) for name in _GPU_FILES) else []


def find_shared_memory() -> Path:
    """Return the directory of shared memory, or of temporary files where there is none."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def count_free_bytes(path: Path) -> int | None:
    """Return how many bytes the file system of `path` has free; None if unknown."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def find_file_system(path: Path) -> str | None:
    """Return the type of the file system that `path` is on, or would be; None if unknown."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    where, innermost, found = Path(os.path.realpath(path)), "", None
    for line in lines:
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), before.split(" ")[4])
        if where.is_relative_to(point) and len(point) >= len(innermost):
            innermost, found = point, after.split(" ")[0]
    return found


def free_port() -> int:
    """Return a TCP port of this host on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
