"""This machine: processors, devices, ports."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

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


def free_port() -> int:
    """Return a TCP port of this host on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
