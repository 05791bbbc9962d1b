"""Where the figures come from: the machine, and the versions of what was measured."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import syncprims as sp

PACKAGES = ("numpy", "mpich", "mpi4py", "torch", "accelerate")


def described() -> list[str]:
    """Return how to read the results, and what they were measured on."""
    versions = [f"syncprims {sp.version()}", f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    versions.append(" ".join(part for part in platform.libc_ver() if part))
    system = f"{platform.system()} {platform.release()}"
    place = f"{os.cpu_count()} x {_processor()}{_memory()}, {system}"
    return [
        f"Made by `make bench` on {place}, with {', '.join(v for v in versions if v)}.",
        "",
        "Trust the ratios: the peers ran in turn with ours, in the same minutes.",
        "",
        "MPICH runs with its defaults, by `mpiexec -n RANKS` through mpi4py: no binding to",
        "processors; its ranks spin while they wait. Gloo and Accelerate run under torchrun. One",
        "math thread per rank for everybody.",
    ]


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def _memory() -> str:
    with suppress(OSError, ValueError):
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return f", {size / 2**30:.0f} GiB of memory"
    return ""
