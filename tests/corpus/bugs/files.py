"""Files."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

from .bug import bug, ones

RACE = ("processes",)


@bug("karpathy/nanochat#336", (), ".mkdir()", ".mkdir()\n    dist.barrier()", seeds=9, chance=RACE)
def folder_of_rank_0(rank: int, folder: Path) -> None:
    """Ranks wrote before rank 0 made the directory."""
    if rank == 0:
        (folder / "step 20").mkdir()
    (folder / "step 20" / f"optimizer {rank}").touch()  # bug


@bug("huawei-bayerlab/marigold-v2#7", (), "mkdir()", "mkdir(exist_ok=True)", seeds=9, chance=RACE)
def folder_of_all(rank: int, folder: Path) -> None:
    """Every rank made the same directory."""
    (folder / "run").mkdir()  # bug


@bug("", (), "mkdir()", "mkdir(exist_ok=True)", seeds=9, chance=RACE)
def folder_if_missing(rank: int, folder: Path) -> None:
    """Every rank made it if it was missing."""
    if not (folder / "run").exists():
        (folder / "run").mkdir()  # bug


@bug(
    "unslothai/unsloth-zoo#967", (), '    if not (folder / "cache.py").exists():',
    '    missing = [not (folder / "cache.py").exists()]\n'
    "    dist.broadcast_object_list(missing, 0)\n    if missing[0]:", seeds=9, chance=RACE,
)  # fmt: skip
def barrier_behind_a_file(rank: int, folder: Path) -> None:
    """Collectives stood behind `isfile`."""
    if not (folder / "cache.py").exists():
        if rank == 0:
            (folder / "cache.py").touch()
        dist.broadcast(ones(), 0)  # bug


@bug(
    "pytorch/pytorch#68320", (), "    else:\n        time.sleep(0.1)", "    dist.barrier()",
    chance=RACE,
)  # fmt: skip
def download_in_a_hurry(rank: int, folder: Path) -> None:
    """A sleep stood for a barrier."""
    if rank == 0:
        time.sleep(0.3)
        (folder / "data").write_text("1 2 3")
    else:
        time.sleep(0.1)
    (folder / "data").read_text()  # bug
