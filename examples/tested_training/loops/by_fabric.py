"""A loop by Fabric, as in its documentation: ``fabric run`` and torchrun start it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader

from .data import make_dataset, make_model


def train(folder: Path, epochs: int = 2) -> float:
    """Train, save the model in `folder`, and return the mean loss of the last epoch."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp")
    fabric.launch()
    module = make_model()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(make_dataset(), batch_size=2))
    mean = 0.0
    for _ in range(epochs):
        losses: list[torch.Tensor] = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(x) - y).pow(2).mean()
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        mean = fabric.all_reduce(torch.stack(losses).mean()).item()
        fabric.print(f"loss {mean:.3f}")
    fabric.save(folder / "model.pt", {"model": model})
    fabric.barrier()
    torch.distributed.destroy_process_group()
    return mean
