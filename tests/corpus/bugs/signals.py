"""Signals and preemption.

The flag that a handler would set on its own rank is set in the line.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from syncprims.testing import DeadlockError

from .bug import Bug, ones


class StopsAlone(Bug):
    """The rank that gets SIGTERM exits alone, and blocks the others."""

    source = "kyutai-labs/pocket-tts#277"
    rank = 1

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        for step in range(3):
            signalled = (rank, step) == (1, 1)
            if signalled:
                break
            dist.all_reduce(ones())  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        for step in range(3):
            signalled = torch.tensor(int((rank, step) == (1, 1)))
            dist.all_reduce(signalled, dist.ReduceOp.MAX)
            if signalled:
                break
            dist.all_reduce(ones())


class SignalBetweenChecks(Bug):
    """SIGTERM came between the checks of two ranks: they saved at different steps."""

    source = "Red-Hat-AI-Innovation-Team/training_hub#145"
    rank = 0

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        seen = 1 if rank == 0 else 2  # the step whose check sees the signal
        for step in range(3):
            dist.all_reduce(ones())  # bug
            if step == seen:
                dist.all_gather_object([None] * 3, f"shard {rank}")  # bug
                break

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        seen = 1 if rank == 0 else 2
        for step in range(3):
            dist.all_reduce(ones())
            stop = torch.tensor(int(step == seen))
            dist.all_reduce(stop, dist.ReduceOp.MAX)
            if stop:
                dist.all_gather_object([None] * 3, f"shard {rank}")
                break


class DeafEvaluation(Bug):
    """Evaluation did not look at the flag, and the grace period ended there."""

    source = "goodfire-ai/spd#741"
    rank = 2
    error = SystemExit

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        grace = 2
        for _ in range(4):  # evaluation
            dist.all_reduce(ones())
            grace -= rank == 2
            if grace == 0:
                sys.exit(137)  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        for _ in range(4):
            stop = torch.tensor(int(rank == 2))
            dist.all_reduce(stop, dist.ReduceOp.MAX)
            if stop:
                break
            dist.all_reduce(ones())


class ReclaimedBeforeReport(Bug):
    """A worker was reclaimed before it reported its checkpoint."""

    source = "ray-project/ray#66225"
    rank = 1
    error = DeadlockError

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        dist.all_reduce(ones())
        if rank == 1:
            sys.exit(0)
        dist.broadcast_object_list(["checkpoint"], 0)  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        dist.all_reduce(ones())
        dist.broadcast_object_list(["checkpoint"], 0)
        if rank == 1:
            return
