"""Loops that end at another step on some ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from .bug import Bug, ones, wrapped


class UnevenStream(Bug):
    """With streams of unequal lengths, ranks waited in `backward`."""

    source = "pytorch/pytorch#141069"
    rank = 1

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        model = wrapped()
        for _ in range(2 if rank == 1 else 3):
            loss = model(ones()).sum()
            loss.backward()  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        model = wrapped()
        for step in range(3):
            left = torch.tensor(int(step < (2 if rank == 1 else 3)))
            dist.all_reduce(left, dist.ReduceOp.MIN)
            if not left:
                break
            model(ones()).sum().backward()


class ValidationBesideTraining(Bug):
    """A rank ran out of batches and validated, while the others still trained."""

    source = "lifeiteng/vall-e#93"
    rank = 2

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        model = wrapped()
        for _ in range(2 if rank == 2 else 3):
            loss = model(ones()).sum()
            loss.backward()  # bug
        dist.all_reduce(ones(1))  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        model = wrapped()
        for step in range(4):
            left = torch.tensor(int(step < (2 if rank == 2 else 3)))
            dist.all_reduce(left, dist.ReduceOp.MIN)
            if not left:
                break
            model(ones()).sum().backward()
        dist.all_reduce(ones(1))


class EarlyStopping(Bug):
    """A rank met the condition of early stopping by itself."""

    source = "Lightning-AI/pytorch-lightning#379"
    rank = 1

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        for epoch in range(3):
            dist.all_reduce(ones())  # bug
            accuracy = 0.3 * epoch + 0.4 * (rank == 1)
            if accuracy > 0.5:
                break

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        for epoch in range(3):
            dist.all_reduce(ones())
            accuracy = torch.tensor(0.3 * epoch + 0.4 * (rank == 1))
            dist.all_reduce(accuracy, dist.ReduceOp.MIN)
            if accuracy > 0.5:
                break


class StoppedOnMain(Bug):
    """The hook that stops training ran on the main rank only."""

    source = "speechbrain/speechbrain#2051"
    rank = 0

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        limit = 3
        for epoch in range(3):
            if epoch >= limit:
                break
            dist.all_reduce(ones())  # bug
            if rank == 0:
                limit = 1

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        limit = torch.tensor(3)
        for epoch in range(3):
            if epoch >= limit:
                break
            dist.all_reduce(ones())
            if rank == 0:
                limit.fill_(1)
            dist.broadcast(limit, 0)
