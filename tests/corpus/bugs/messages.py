"""Messages and pipelines."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from .bug import bug, ones


@bug(
    "NVIDIA/nccl#479", (0, 1), "dist.send, dist.recv",
    "(dist.send, dist.recv) if rank else (dist.recv, dist.send)", ranks=5,
)  # fmt: skip
def both_send_first(rank: int, folder: Path) -> None:
    """Two ranks sent before they received."""
    first, then = dist.send, dist.recv
    if rank < 2:
        first(ones(), 1 - rank)  # bug
        then(ones(), 1 - rank)


@bug("", 1, "rank + 1 if rank == 1 else ", "", ranks=4)
def other_neighbour(rank: int, folder: Path) -> None:
    """In a ring, a rank mistook its neighbour."""
    work = dist.isend(ones(), (rank + 1) % 4)
    dist.recv(ones(), (rank + 1 if rank == 1 else rank - 1) % 4)  # bug
    assert work is not None
    work.wait()


@bug(
    "tdrussell/diffusion-pipe#409", (0, 1, 2),
    "        dist.send(ones(3), 2)  # bug\n        dist.send(ones(), 1)\n",
    "        dist.send(ones(), 1)\n        dist.send(ones(3), 2)\n", ranks=5,
)  # fmt: skip
def target_before_activations(rank: int, folder: Path) -> None:
    """A stage sent targets before activations."""
    if rank == 0:
        dist.send(ones(3), 2)  # bug
        dist.send(ones(), 1)
    if rank == 1:
        dist.recv(ones(), 0)
        dist.send(ones(), 2)
    if rank == 2:
        dist.recv(ones(), 1)
        dist.recv(ones(3), 0)


@bug("", 2, "4 if rank == 2 else ", "")
def more_micro_batches(rank: int, folder: Path) -> None:
    """The last stage awaited more micro-batches."""
    stage = PipelineStage(nn.Linear(2, 2), rank, 3, torch.device("cpu"))
    batches = 4 if rank == 2 else 2
    schedule = ScheduleGPipe(stage, batches)
    schedule.step(*[torch.ones(batches, 2)] * (rank == 0))  # bug


@bug("pytorch/pytorch#117486", 1, "[2, 1, 1] if rank == 1 else ", "")
def splits_of_another_size(rank: int, folder: Path) -> None:
    """A rank's `all_to_all_single` had other splits."""
    sizes = [2, 1, 1] if rank == 1 else [1, 1, 1]
    dist.all_to_all_single(ones(sum(sizes)), ones(3), sizes, [1, 1, 1])  # bug
