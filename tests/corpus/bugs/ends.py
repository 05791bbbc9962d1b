"""Exceptions and early ends of one rank, and cleanup that makes calls."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from syncprims.testing import DeadlockError

from .bug import Bug, ones


class BarrierInShutdown(Bug):
    """A rank ran out of memory; the others hung in their shutdown's barrier."""

    source = "ai2cm/ace#1067"
    rank = 1
    error = MemoryError

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        if rank == 1:
            raise MemoryError("out of memory")  # bug
        dist.barrier()

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        with contextlib.suppress(MemoryError):
            if rank == 1:
                raise MemoryError("out of memory")
        dist.barrier()


class BarrierInFinally(Bug):
    """A rank that had failed waited at a barrier in `finally`."""

    source = "pytorch/pytorch#124961"
    rank = 2

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        try:
            if rank == 2:
                raise KeyError("batch")
            dist.all_reduce(ones())  # bug
        finally:
            dist.barrier()  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        failed = torch.tensor(0)
        try:
            if rank == 2:
                raise KeyError("batch")
        except KeyError:
            failed.fill_(1)
        dist.all_reduce(failed)
        if not failed:
            dist.all_reduce(ones())


class OutOfMemorySkipped(Bug):
    """A rank caught its out-of-memory error and skipped the batch."""

    source = "facebookresearch/fairseq#708"
    rank = 1

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        for step in range(2):
            try:
                if (rank, step) == (1, 1):
                    raise MemoryError
                dist.all_reduce(ones())  # bug
            except MemoryError:
                continue

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        for step in range(2):
            fits = torch.tensor(int((rank, step) != (1, 1)))
            dist.all_reduce(fits, dist.ReduceOp.MIN)
            if fits:
                dist.all_reduce(ones())


class ExitOfOneRank(Bug):
    """A rank exited for want of a file; the others went on."""

    source = "claudiopica/HiRep#2"
    rank = 2
    error = DeadlockError

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        if rank == 2:
            sys.exit(0)
        dist.all_reduce(ones())  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        missing = torch.tensor(int(rank == 2))
        dist.all_reduce(missing)
        if not missing:
            dist.all_reduce(ones())
