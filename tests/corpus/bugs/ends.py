"""Early ends."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from .bug import bug, ones


@bug("ai2cm/ace#1067", 1, "KeyError", "MemoryError")
def barrier_in_shutdown(rank: int, folder: Path) -> None:
    """A rank ran out of memory before a barrier."""
    with contextlib.suppress(KeyError):
        if rank == 1:
            raise MemoryError("out of memory")  # bug
    dist.barrier()


@bug(
    "pytorch/pytorch#124961", 2, "        if failed:\n            raise KeyError",
    "        dist.all_reduce(failed)\n        if failed:\n            return",
)  # fmt: skip
def barrier_in_finally(rank: int, folder: Path) -> None:
    """A failed rank waited at a barrier in `finally`."""
    failed = torch.tensor(int(rank == 2))
    try:
        if failed:
            raise KeyError
        dist.all_reduce(ones())  # bug
    finally:
        dist.barrier()


@bug(
    "claudiopica/HiRep#2", 2, "    if missing:\n        sys.exit(0)",
    "    dist.all_reduce(missing)\n    if missing:\n        return",
)  # fmt: skip
def exit_of_one_rank(rank: int, folder: Path) -> None:
    """A rank exited for want of a file."""
    missing = torch.tensor(int(rank == 2))
    if missing:
        sys.exit(0)
    dist.all_reduce(ones())  # bug
