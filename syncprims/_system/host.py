"""This machine: processors, devices, ports."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Mapping
from pathlib import Path

_GPU_FILES = ("nvidia*", "nvhost*", "nvgpu*", "nvmap", "dxg", "kfd")  # in /dev, of their drivers
_FIRST_PORT = 10_000  # well-known services have lower ones
_SMALLEST = 8 << 20  # bytes of a process that runs Python
_LOOKED_AT = 1 << 16  # descriptors: the system gives the lowest number that is free


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


def most_processes(files: int) -> tuple[int, str]:
    """Return how many processes this one can start, and the limit that says so.

    Each takes `files` descriptors here, and the memory of a Python that has imported nothing else.
    """
    import resource  # not there on Windows

    open_now = len(list_descriptors())
    of_files, of_processes = (
        math.inf if soft == resource.RLIM_INFINITY else soft
        for soft, _ in map(resource.getrlimit, (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    )
    found = [
        ((of_files - open_now) / files, "open files (ulimit -n)"),
        (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _SMALLEST, "memory"),
    ]
    if os.geteuid():
        found.append((of_processes, "processes of a user (ulimit -u)"))
    for path in ("/proc/sys/kernel/pid_max", "/sys/fs/cgroup/pids.max"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            found.append((int(Path(path).read_text()), f"processes ({path})"))
    most, limit = min(found)
    return int(max(most, 0)), limit


def list_descriptors() -> list[int]:
    """Return the open descriptors of this process, also where the system has no list of them."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/dev/fd")]  # noqa: PTH208 - names are all it takes
    found: list[int] = []
    for fd in range(min(os.sysconf("SC_OPEN_MAX"), _LOOKED_AT)):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            found.append(fd)
    return found


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
    """Return a TCP port of this host on which no process listens now.

    If possible, it is one that the system gives to nobody unasked until a rank listens there.
    """
    given = 29_000  # ports above it are those that torch, clusters and the system give
    with contextlib.suppress(OSError, ValueError):  # not Linux
        limits = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        given = min(given, int(limits[0]))
    for _ in range(100 if given > _FIRST_PORT else 0):
        port = _FIRST_PORT + int.from_bytes(os.urandom(4)) % (given - _FIRST_PORT)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
