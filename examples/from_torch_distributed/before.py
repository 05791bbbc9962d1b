"""Usual data-parallel training with `torch.distributed` only.

    torchrun --nproc-per-node 2 before.py --directory run

after.py is the same job with syncprims. The letters mark the differences.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make_data(path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 8, generator=generator)
    torch.save({"x": x, "y": x.sin().sum(dim=1, keepdim=True)}, path)


def train(directory: Path, epochs: int) -> None:
    # (a) The ranks join. The backend depends on whether the machine has GPUs.
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    # (b) Rank 0 prepares while the others wait. If it fails, they wait for half an hour.
    if rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / "data.pt").exists():
            make_data(directory / "data.pt")
    dist.barrier()
    data = torch.load(directory / "data.pt", weights_only=True)

    # (c) Each rank takes its share; 256 must be divisible by the number of ranks.
    share = len(data["x"]) // ranks
    x, y = (data[name][rank * share : (rank + 1) * share] for name in ("x", "y"))

    # (d) All ranks use the settings of rank 0.
    settings: list[Any] = [{"lr": float(os.environ.get("LR", "0.05"))} if rank == 0 else None]
    dist.broadcast_object_list(settings)

    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=settings[0]["lr"])
    for epoch in range(epochs):
        for xs, ys in zip(x.split(16), y.split(16), strict=True):
            optimizer.zero_grad()
            loss = (model(xs) - ys).square().mean()
            loss.backward()
            optimizer.step()

        # (e) One rank prints the mean loss of all ranks.
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean /= ranks
        if rank == 0:
            print(f"epoch {epoch}: loss {mean.item():.4f}", flush=True)  # noqa: T201

        # (f) If one rank sees a NaN, all ranks stop. The flag is sent as a tensor.
        flag = torch.tensor(int(not torch.isfinite(loss)))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        if flag.item():
            break

    # (g) Rank 0 saves, and no rank may leave before it has finished. This is not barrier(): after
    # that, a thread of Gloo may still hold a tensor when Python exits, and aborts the process.
    if rank == 0:
        torch.save(model.module.state_dict(), directory / "weights.pt")
    dist.monitored_barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    train(options.directory, options.epochs)


if __name__ == "__main__":
    main()
