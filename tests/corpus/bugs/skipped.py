"""Skipped calls."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from .bug import RANKS, bug, ones, wrapped


@bug("Lightning-AI/torchmetrics#938", 0, "if rank == 0:", "if True:")
def metric_on_rank_0(rank: int, folder: Path) -> None:
    """A metric's `compute` ran on rank 0 only."""
    every = [ones() for _ in range(RANKS)]
    if rank == 0:
        dist.all_gather(every, ones())  # bug


@bug("NVIDIA-NeMo/Automodel#2468", 1, "continue", "batch *= 0")
def batch_skipped(rank: int, folder: Path) -> None:
    """A rank skipped a batch without valid samples."""
    model = wrapped()
    for step in range(3):
        batch = ones()
        if (rank, step) == (1, 2):
            continue
        loss = model(batch).sum()
        loss.backward()  # bug


@bug("bo-ke/llm-internal-medicine#45", 2, "if metrics:", "if True:")
def empty_metrics(rank: int, folder: Path) -> None:
    """A stage without metrics returned early."""
    metrics = {} if rank == 2 else {"norm": 0.5}
    every = [metrics] * RANKS
    if metrics:
        dist.all_gather_object(every, metrics)  # bug


@bug("Lightning-AI/pytorch-lightning#19106", 1, "if rank == 1:", "if True:")
def other_metrics(rank: int, folder: Path) -> None:
    """Ranks logged dicts of different keys."""
    metrics = {"loss": ones(1)}
    if rank == 1:
        metrics["rare class"] = ones(1)
    for value in metrics.values():
        dist.all_reduce(value)  # bug


@bug("pytorch/pytorch#54059", 0, "model(", "model.module(")
def validation_on_rank_0(rank: int, folder: Path) -> None:
    """Rank 0 validated with the DDP model."""
    model = wrapped(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    if rank == 0:
        model(torch.ones(4, 2))  # bug
