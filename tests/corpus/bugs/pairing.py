"""Equal calls that are paired wrongly, in silence."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from syncprims import UnequalCallSites

from .bug import Bug, ones


class SaveOnRank0(Bug):
    """A save that ends in a barrier ran on rank 0 only."""

    source = "alan-turing-institute/autocast#381"
    rank = 0
    error = UnequalCallSites

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        if rank == 0:
            (folder / "last.ckpt").touch()
            dist.barrier()  # bug
        dist.barrier()  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        if rank == 0:
            (folder / "last.ckpt").touch()
        dist.barrier()
        dist.barrier()


class TokenizerBarrier(Bug):
    """A barrier inside of `if main` released the others too early."""

    source = "speechbrain/speechbrain#2633"
    rank = 0
    error = UnequalCallSites

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        if rank == 0:
            dist.barrier()  # bug
            (folder / "tokens").touch()
        else:
            dist.barrier()  # bug
            (folder / "tokens").read_text()

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        if rank == 0:
            (folder / "tokens").touch()
        dist.barrier()
        (folder / "tokens").read_text()


class SaveOfTheBest(Bug):
    """Each rank saved, with a barrier, when its own loss was the best so far."""

    source = "vllm-project/speculators#324"
    rank = 1
    error = UnequalCallSites

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        losses = [2.0, 1.0, 3.0] if rank == 1 else [2.0, 2.5, 1.0]
        best = 9.0
        for loss in losses:
            if loss < best:
                best = loss
                dist.barrier()  # bug
            dist.barrier()  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        losses = [2.0, 1.0, 3.0] if rank == 1 else [2.0, 2.5, 1.0]
        best = 9.0
        for loss in losses:
            mean = ones(1) * loss
            dist.all_reduce(mean)
            if mean.item() < best:
                best = mean.item()
                dist.barrier()
            dist.barrier()


class BarrierWithoutOne(Bug):
    """A barrier left out one rank, whose next barrier released the others."""

    source = "pytorch/pytorch#138322"
    rank = 2
    error = UnequalCallSites

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        if rank != 2:
            dist.barrier()  # bug
        dist.barrier()  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        dist.barrier()
        dist.barrier()
