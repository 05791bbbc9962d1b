"""A call that some ranks skip."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from .bug import RANKS, Bug, ones, wrapped


class MetricOnRank0(Bug):
    """A metric's `compute` ran on rank 0 only, and waited for the others."""

    source = "Lightning-AI/torchmetrics#938"
    rank = 0

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        every = [ones() for _ in range(RANKS)]
        if rank == 0:
            dist.all_gather(every, ones())  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        every = [ones() for _ in range(RANKS)]
        dist.all_gather(every, ones())


class BatchSkipped(Bug):
    """A rank skipped a batch without valid samples; the others waited in `backward`."""

    source = "NVIDIA-NeMo/Automodel#2468"
    rank = 1

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        model = wrapped()
        for step in range(3):
            if (rank, step) == (1, 2):
                continue
            loss = model(ones()).sum()
            loss.backward()  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        model = wrapped()
        for step in range(3):
            valid = torch.tensor(int((rank, step) != (1, 2)))
            dist.all_reduce(valid, dist.ReduceOp.MIN)
            if valid:
                model(ones()).sum().backward()


class EmptyMetrics(Bug):
    """A stage without metrics returned early; the others hung for 13 minutes."""

    source = "bo-ke/llm-internal-medicine#45"
    rank = 2

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        metrics = {} if rank == 2 else {"norm": 0.5}
        every = [metrics] * RANKS
        if metrics:
            dist.all_gather_object(every, metrics)  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        metrics = {} if rank == 2 else {"norm": 0.5}
        every = [metrics] * RANKS
        dist.all_gather_object(every, metrics)


class OtherMetrics(Bug):
    """Ranks logged dicts of different keys, and the reductions never ended."""

    source = "Lightning-AI/pytorch-lightning#19106"
    rank = 1

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        metrics = {"loss": ones(1)}
        if rank == 1:
            metrics["rare class"] = ones(1)
        for value in metrics.values():
            dist.all_reduce(value)  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        metrics = {"loss": ones(1), "rare class": torch.tensor([float(rank == 1)])}
        for value in metrics.values():
            dist.all_reduce(value)


class ValidationOnRank0(Bug):
    """Rank 0 validated with the DDP model, and all ranks hung."""

    source = "pytorch/pytorch#54059"
    rank = 0

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        model = wrapped(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
        if rank == 0:
            model(torch.ones(4, 2))  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        model = wrapped(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
        if rank == 0:
            model.module(torch.ones(4, 2))


class StepsOfAProgressBar(Bug):
    """A progress bar that only rank 0 had counted the steps: it evaluated alone."""

    source = "huggingface/transformers#31532"
    rank = 0

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        shown = 0
        for _ in range(2):
            shown += rank == 0  # the bar is disabled elsewhere
            if shown == 2:
                dist.all_gather_object([None] * RANKS, "predictions")  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        for step in range(1, 3):
            if step == 2:
                dist.all_gather_object([None] * RANKS, "predictions")
