"""A loop by Accelerate, as in its documentation: ``accelerate launch`` runs it."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from .data import make_dataset, make_model


def train(folder: Path, epochs: int = 2) -> float:
    """Train, save the model in `folder`, and return the mean loss of the last epoch."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make_dataset(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    mean = 0.0
    for _ in range(epochs):
        losses: list[torch.Tensor] = []
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - y).pow(2)
                accelerator.backward(loss.mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach()))
        mean = torch.cat(losses).mean().item()
        accelerator.print(f"loss {mean:.3f}")
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.save(state, folder / "model.pt")
    accelerator.end_training()
    return mean
