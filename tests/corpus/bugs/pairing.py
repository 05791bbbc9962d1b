"""Wrong pairs."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from .bug import bug, ones


@bug("alan-turing-institute/autocast#381", 0, "        dist.barrier()  # bug\n", "")
def save_on_rank_0(rank: int, folder: Path) -> None:
    """A save with a barrier ran on rank 0."""
    if rank == 0:
        (folder / "last.ckpt").touch()
        dist.barrier()  # bug
    dist.barrier()


@bug(
    "speechbrain/speechbrain#2633", 0,
    '        dist.barrier()  # bug\n        (folder / "tokens").touch()\n'
    "    if rank > 0:\n        dist.barrier()\n",
    '        (folder / "tokens").touch()\n    dist.barrier()\n    if rank > 0:\n',
    chance=("processes",),
)  # fmt: skip
def tokenizer_barrier(rank: int, folder: Path) -> None:
    """A barrier inside of `if main` came too early."""
    if rank == 0:
        dist.barrier()  # bug
        (folder / "tokens").touch()
    if rank > 0:
        dist.barrier()
        (folder / "tokens").read_text()


@bug(
    "vllm-project/speculators#324", 1, "        if mean",
    "        dist.all_reduce(mean)\n        if mean",
)  # fmt: skip
def save_of_the_best(rank: int, folder: Path) -> None:
    """Ranks saved, with a barrier, their best losses."""
    losses = [2.0, 1.0, 3.0] if rank == 1 else [2.0, 2.5, 1.0]
    best = 9.0
    for loss in losses:
        mean = ones(1) * loss
        if mean.item() < best:
            best = mean.item()
            dist.barrier()  # bug
        dist.barrier()
