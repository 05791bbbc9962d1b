"""Loops and timeouts."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from .bug import bug, ones, wrapped


@bug("lifeiteng/vall-e#93", 2, "2 if rank == 2 else 3", "2")
def validation_beside_training(rank: int, folder: Path) -> None:
    """A rank validated while the others still trained."""
    model = wrapped()
    for _ in range(2 if rank == 2 else 3):
        loss = model(ones()).sum()
        loss.backward()  # bug
    dist.all_reduce(ones(1))


@bug(
    "Lightning-AI/pytorch-lightning#379", 1, "        if accuracy",
    "        dist.all_reduce(accuracy, dist.ReduceOp.MIN)\n        if accuracy",
)  # fmt: skip
def early_stopping(rank: int, folder: Path) -> None:
    """A rank stopped early by itself."""
    for epoch in range(3):
        dist.all_reduce(ones())  # bug
        accuracy = torch.tensor(0.3 * epoch + 0.4 * (rank == 1))
        if accuracy > 0.5:
            break


@bug("mlcommons/algorithmic-efficiency#412", 0, " if rank == 0 else 0", "")
def resumed_alone(rank: int, folder: Path) -> None:
    """After a restart, only rank 0 resumed."""
    (folder / "step").write_text("2")
    start = int((folder / "step").read_text()) if rank == 0 else 0
    for _ in range(start, 4):
        dist.all_reduce(ones())  # bug


@bug("hiyouga/LlamaFactory#360", 0, "seconds=0.2", "seconds=60", chance=("processes",))
def longer_than_the_timeout(rank: int, folder: Path) -> None:
    """Rank 0 tokenized for longer than the timeout."""
    group = dist.new_group(timeout=timedelta(seconds=0.2))
    if rank == 0:
        time.sleep(0.4)
    dist.barrier(group)  # bug
