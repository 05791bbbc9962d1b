"""The origin of the figures: the machine, and the versions of the libraries."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import syncprims as sp

PACKAGES = (
    "numpy", "mpich", "mpi4py", "torch", "accelerate", "lightning-fabric", "safetensors",
)  # fmt: skip


def state() -> dict[str, str]:
    """Return the commit, the versions and the machine, on which the figures depend."""
    versions = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    versions.append(" ".join(part for part in platform.libc_ver() if part))
    system = f"{platform.system()} {platform.release()}"
    return {
        "commit": _commit(),
        "versions": ", ".join(version for version in versions if version),
        "machine": f"{os.cpu_count()} x {_processor()}{_memory()}, {system}",
    }


def _commit() -> str:
    """Return the commit of the checkout, or the installed version of syncprims."""
    with suppress(OSError, subprocess.CalledProcessError):
        changed = _git("status", "--porcelain", "--", "syncprims", "backends")
        return _git("describe", "--always", "--tags") + (", changed" if changed else "")
    return sp.version()


def _git(*words: str) -> str:
    root = Path(__file__).parents[1]
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


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
