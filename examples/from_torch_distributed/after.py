"""before.py with its barriers and rank checks replaced; DDP and Gloo stay.

    torchrun --nproc-per-node 2 after.py --directory run
    python after.py --directory run                     # one process, without changes

The weights are the same, bit for bit. The gain: if a rank fails or does not arrive, all other ranks
raise an error that names it, and the loop can be tested without torchrun (see
examples/tested_project).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncprims import (
    all_reduce,
    any_rank,
    broadcast,
    get_world_size,
    init,
    main_first,
    on_main,
    print_main,
    split,
)


def make_data(path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 8, generator=generator)
    torch.save({"x": x, "y": x.sin().sum(dim=1, keepdim=True)}, path)


def train(directory: Path, epochs: int) -> None:
    # (b) Rank 0 prepares while the others wait. If it fails, all ranks raise its error.
    with main_first(name="prepare data"):
        if not (directory / "data.pt").exists():
            directory.mkdir(parents=True, exist_ok=True)
            make_data(directory / "data.pt")
        data = torch.load(directory / "data.pt", weights_only=True)

    # (c) The share of each rank; the lowest ranks get the remainder.
    mine = split(data)
    x, y = mine["x"], mine["y"]

    # (d) All ranks use the settings of rank 0.
    settings = broadcast({"lr": float(os.environ.get("LR", "0.05"))})

    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model = DistributedDataParallel(net) if get_world_size() > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"])
    for epoch in range(epochs):
        for xs, ys in zip(x.split(16), y.split(16), strict=True):
            optimizer.zero_grad()
            loss = (model(xs) - ys).square().mean()
            loss.backward()
            optimizer.step()

        # (e) One rank prints the mean loss of all ranks.
        print_main(f"epoch {epoch}: loss {all_reduce(loss.item(), 'mean'):.4f}")

        # (f) If one rank sees a NaN, all ranks stop.
        if any_rank(not torch.isfinite(loss)):
            break

    # (g) Rank 0 saves, and the others wait. If it fails, all ranks raise.
    save(net, directory / "weights.pt")


@on_main(share=True)
def save(net: nn.Module, path: Path) -> None:
    torch.save(net.state_dict(), path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    # (a) The group that DDP needs stays. syncprims finds it, and uses shared memory instead where
    # all ranks are on one host. A single process joins no group.
    if get_world_size() > 1:
        dist.init_process_group("gloo")
    with init():
        train(options.directory, options.epochs)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
