"""Calls in another order, or of another group."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from syncprims.testing import DeadlockError

from .bug import RANKS, Bug, ones


class OrderOfASet(Bug):
    """Outputs were reduced in the order of a set, which differs between processes."""

    source = "NVIDIA/nvalchemi-toolkit#143"
    rank = 1

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        names = sorted({"energy", "forces"}, reverse=rank == 1)  # as a set may be ordered there
        for name in names:
            if name == "energy":
                dist.all_reduce(ones(1))  # bug
            else:
                dist.all_gather_object([None] * RANKS, name)  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        for name in sorted({"energy", "forces"}):
            if name == "energy":
                dist.all_reduce(ones(1))
            else:
                dist.all_gather_object([None] * RANKS, name)


class GroupsInAnotherOrder(Bug):
    """Ranks used two groups in different orders, and each waited in another one."""

    source = "run-ai/runai-model-streamer#165"
    rank = 1
    error = DeadlockError

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1, 2])]
        for group in reversed(groups) if rank == 1 else groups:
            if rank < 2 or group is groups[1]:
                dist.broadcast(ones(), 0, group=group)  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1, 2])]
        for group in groups:
            if rank < 2 or group is groups[1]:
                dist.broadcast(ones(), 0, group=group)


class OnlyItsOwnGroup(Bug):
    """Each rank made only its own group, so unlike groups met."""

    source = "pytorch/pytorch#25390"
    rank = 2
    ranks = 4

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        pair = [0, 1] if rank < 2 else [2, 3]
        group = dist.new_group(pair)  # bug
        dist.all_reduce(ones(), group=group)

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        dist.all_reduce(ones(), group=groups[rank // 2])


class BothSendFirst(Bug):
    """Two ranks sent to each other before they received."""

    source = "NVIDIA/nccl#479"
    rank = 1
    error = DeadlockError

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        if rank < 2:
            dist.send(ones(), 1 - rank)  # bug
            dist.recv(ones(), 1 - rank)

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        if rank < 2:
            first, then = (dist.send, dist.recv) if rank else (dist.recv, dist.send)
            first(ones(), 1 - rank)
            then(ones(), 1 - rank)
