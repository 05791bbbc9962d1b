"""Values."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from .bug import RANKS, bug, ones, wrapped


@bug("pytorch/pytorch#56112", 1, "ones(n)", "nn.functional.pad(ones(n), (0, 7 - n))")
def lengths_differ(rank: int, folder: Path) -> None:
    """Ranks gathered tensors of different lengths."""
    n = 7 if rank == 1 else 5
    tokens = ones(n)
    every = [torch.empty_like(tokens) for _ in range(RANKS)]
    dist.all_gather(every, tokens)  # bug


@bug("modelscope/ms-swift#9551", 2, "torch.float64 if rank == 2 else ", "")
def dtype_of_numpy(rank: int, folder: Path) -> None:
    """A value of numpy made a tensor float64."""
    dtype = torch.float64 if rank == 2 else torch.float32  # inferred from the value
    dist.all_reduce(torch.tensor([3.0, 4.0], dtype=dtype))  # bug


@bug("vllm-project/vllm#2530", (), "dst=0", "dst=1")
def rank_of_a_group(rank: int, folder: Path) -> None:
    """A group's rank was given for a global one."""
    group = dist.new_group([1, 2])
    if rank:
        every = [ones(), ones()] if rank == 1 else None
        dist.gather(ones(), every, dst=0, group=group)  # bug


@bug("", 2, "1 if rank == 2 else ", "")
def another_source(rank: int, folder: Path) -> None:
    """A rank broadcast from another source."""
    source = 1 if rank == 2 else 0
    dist.broadcast(ones(), source)  # bug


@bug("OpenNMT/OpenNMT-py#2295", (), "async_op=True", "async_op=False")
def divided_too_soon(rank: int, folder: Path) -> None:
    """Gradients were divided during their all-reduce."""
    gradients = ones()
    dist.all_reduce(gradients, async_op=True)  # bug
    gradients.div_(RANKS)


@bug("pytorch/pytorch#102438", 1, "3 if rank == 1 else ", "")
def model_of_another_size(rank: int, folder: Path) -> None:
    """A rank gave DDP a model of another size."""
    layers = 3 if rank == 1 else 2
    wrapped(*[nn.Linear(2, 2) for _ in range(layers)])  # bug


class Twig(nn.Module):
    """Two layers, of which a rank may drop one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        for layer in self.layers[:depth]:
            x = layer(x)
        return x.sum()


@bug(
    "catalyst-team/catalyst#1110", 1, "DistributedDataParallel(Twig()",
    "DistributedDataParallel(Twig(), find_unused_parameters=True",
)  # fmt: skip
def dropped_layer(rank: int, folder: Path) -> None:
    """A rank dropped a layer by chance."""
    model = nn.parallel.DistributedDataParallel(Twig())
    for _ in range(2):
        loss = model(ones(), 1 if rank == 1 else 2)  # bug
        loss.backward()
