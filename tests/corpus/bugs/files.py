"""Races on files."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist

from .bug import RANKS, Bug, ones


class FolderOfRank0(Bug):
    """Only rank 0 made the directory into which every rank saves its part."""

    source = "karpathy/nanochat#336"
    rank = 1
    error = FileNotFoundError
    seeds = 9

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        if rank == 0:
            (folder / "step 20").mkdir()
        (folder / "step 20" / f"optimizer {rank}").touch()  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        (folder / "step 20").mkdir(exist_ok=True)
        (folder / "step 20" / f"optimizer {rank}").touch()


class FolderOfAll(Bug):
    """Every rank made the run's directory, and all but the first failed."""

    source = "huawei-bayerlab/marigold-v2#7"
    rank = 1
    error = FileExistsError
    seeds = 9

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        (folder / "run").mkdir()  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        if rank == 0:
            (folder / "run").mkdir()
        dist.barrier()


class LatestPointer(Bug):
    """A save returned before rank 0 had written its `latest` pointer."""

    source = "KempnerInstitute/KempnerForge#49"
    rank = 2
    error = FileNotFoundError
    seeds = 9

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        dist.all_gather_object([None] * RANKS, f"shard {rank}")
        if rank == 0:
            (folder / "latest").write_text("step 3")
        (folder / "latest").read_text()  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        dist.all_gather_object([None] * RANKS, f"shard {rank}")
        if rank == 0:
            (folder / "latest").write_text("step 3")
        dist.barrier()
        (folder / "latest").read_text()


class BarrierBehindAFile(Bug):
    """Collectives stood behind `isfile`, and a later rank skipped them."""

    source = "unslothai/unsloth-zoo#967"
    rank = 2
    seeds = 9

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        if not (folder / "cache.py").exists():
            if rank == 0:
                (folder / "cache.py").touch()
            dist.broadcast(ones(), 0)  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        if rank == 0 and not (folder / "cache.py").exists():
            (folder / "cache.py").touch()
        dist.broadcast(ones(), 0)


class CleanupByAll(Bug):
    """All ranks removed the old checkpoint, and slower ones did not find it."""

    source = "PrimeIntellect-ai/prime-rl#1716"
    rank = 2
    error = FileNotFoundError
    seeds = 9

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        (folder / "step 1").mkdir(exist_ok=True)
        dist.barrier()
        shutil.rmtree(folder / "step 1")  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        (folder / "step 1").mkdir(exist_ok=True)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder / "step 1")


class DownloadInAHurry(Bug):
    """Rank 0 downloaded the data, and the others slept for six seconds."""

    source = "pytorch/pytorch#68320"
    rank = 1
    error = FileNotFoundError
    seeds = 9

    @staticmethod
    def bug(rank: int, folder: Path) -> None:
        if rank == 0:
            (folder / "data").write_text("1 2 3")
        (folder / "data").read_text()  # bug

    @staticmethod
    def mended(rank: int, folder: Path) -> None:
        if rank == 0:
            (folder / "data").write_text("1 2 3")
        dist.barrier()
        (folder / "data").read_text()
