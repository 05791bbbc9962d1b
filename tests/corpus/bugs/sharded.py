"""FSDP2, DTensor, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from .bug import bug, ones

dcp: Any = checkpoint


def sharded() -> nn.Sequential:
    """Return a model of two layers, each of which gathers its weights."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


@bug("PrimeIntellect-ai/prime-rl#2515", 1, "2 if rank == 1 else 3", "2")
def validation_to_the_end(rank: int, folder: Path) -> None:
    """Ranks validated FSDP2 on unequally many batches."""
    model = sharded()
    for _ in range(2 if rank == 1 else 3):
        model(ones(6))  # bug


@bug("pytorch/pytorch#152964", 1, "if images:", "if True:")
def batch_without_images(rank: int, folder: Path) -> None:
    """Without images, a rank skipped a sharded model."""
    vision, language = sharded(), sharded()
    images = rank != 1
    if images:
        vision(ones(6))  # bug
    language(ones(6))


@bug("pytorch/pytorch#148756", 0, "if rank == 0:", "if True:")
def full_tensor_on_rank_0(rank: int, folder: Path) -> None:
    """Rank 0 alone asked for the full tensor."""
    weight = distribute_tensor(torch.ones(6, 2), init_device_mesh("cpu", (3,)), [Shard(0)])
    if rank == 0:
        weight.full_tensor()  # bug


@bug("", 2, "Replicate() if rank == 2 else ", "")
def other_placement(rank: int, folder: Path) -> None:
    """A rank placed a DTensor in another way."""
    placement = Replicate() if rank == 2 else Shard(0)
    distribute_tensor(torch.ones(6, 2), init_device_mesh("cpu", (3,)), [placement])  # bug


@bug("", 0, "if rank == 0:", "if True:")
def checkpoint_on_rank_0(rank: int, folder: Path) -> None:
    """Rank 0 alone called `dcp.save`."""
    if rank == 0:
        dcp.save({"weight": ones()}, checkpoint_id=folder / "step 1")  # bug


@bug("TensorAuto/OpenTau#396", 1, "49 if rank == 1 else ", "")
def folder_of_the_second(rank: int, folder: Path) -> None:
    """Ranks named their checkpoint by the clock."""
    second = 49 if rank == 1 else 50
    weight = distribute_tensor(torch.ones(6, 2), init_device_mesh("cpu", (3,)), [Shard(0)])
    dcp.save({"weight": weight}, checkpoint_id=folder / f"{second}")
    dcp.load({"weight": weight}, checkpoint_id=folder / f"{second}")  # bug


@bug(
    "KempnerInstitute/KempnerForge#104", (), "dist.barrier()  # bug", "saved.result()",
    chance=("threads", "processes"),
)  # fmt: skip
def barrier_beside_a_save(rank: int, folder: Path) -> None:
    """A barrier met those of an asynchronous save."""
    saved = dcp.async_save({"weight": ones()}, checkpoint_id=folder / "step 1")
    dist.barrier()  # bug
    saved.result()
