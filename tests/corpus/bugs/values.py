"""Shapes, dtypes, sources, and work that nobody waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from syncprims.testing import UnfinishedWork

from .bug import RANKS, Bug, ones


class LengthsDiffer(Bug):
    """Each rank gathered a tensor as long as its longest text."""

    source = "pytorch/pytorch#56112"
    rank = 1

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        tokens = ones(7 if rank == 1 else 5)
        every = [torch.empty_like(tokens) for _ in range(RANKS)]
        dist.all_gather(every, tokens)  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        tokens = ones(7 if rank == 1 else 5)
        longest = torch.tensor(len(tokens))
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        padded = torch.nn.functional.pad(tokens, (0, int(longest) - len(tokens)))
        every = [torch.empty_like(padded) for _ in range(RANKS)]
        dist.all_gather(every, padded)


class DtypeOfNumpy(Bug):
    """A value of numpy made one rank's tensor a float64."""

    source = "modelscope/ms-swift#9551"
    rank = 2

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        dtype = torch.float64 if rank == 2 else torch.float32  # inferred from the value
        dist.all_reduce(torch.tensor([3.0, 4.0], dtype=dtype))  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        dist.all_reduce(torch.tensor([3.0, 4.0], dtype=torch.float64))


class SumOfShapes(Bug):
    """An all-reduce of unequal shapes gave wrong sums, or hung."""

    source = "NVIDIA/nccl#1417"
    rank = 0

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        dist.all_reduce(ones(6 if rank == 0 else 4))  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        dist.all_reduce(ones(6))


class RankOfAGroup(Bug):
    """A rank within a group was given in place of a global rank."""

    source = "vllm-project/vllm#2530"
    rank = 1
    error = ValueError

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        group = dist.new_group([1, 2])
        if rank:
            dist.gather(ones(), None, dst=0, group=group)  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        group: Any = dist.new_group([1, 2])
        if rank:
            target = dist.get_global_rank(group, 0)
            every = [ones(), ones()] if rank == target else None
            dist.gather(ones(), every, dst=target, group=group)


class DividedTooSoon(Bug):
    """Gradients were divided while their all-reduce still ran."""

    source = "OpenNMT/OpenNMT-py#2295"
    rank = 0
    error = UnfinishedWork

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        gradients = ones()
        dist.all_reduce(gradients, async_op=True)  # bug
        gradients.div_(RANKS)

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        gradients = ones()
        work = dist.all_reduce(gradients, async_op=True)
        assert work is not None
        work.wait()
        gradients.div_(RANKS)
