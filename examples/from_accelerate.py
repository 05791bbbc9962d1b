"""A script for Hugging Face Accelerate, ported by changing one line: its import.

Everything below the imports is unchanged: prepare, accumulate, clip, autocast, gathered metrics,
and saving and loading the state. Here both libraries do the same arithmetic, so the numbers are the
same. docs/how-to/from-accelerate.md lists the differences.

    python examples/from_accelerate.py
    syncprims run -n 2 examples/from_accelerate.py          # no torchrun, no port, no Gloo
    torchrun --nproc-per-node 2 examples/from_accelerate.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from syncprims.accelerate import Accelerator  # before: from accelerate import Accelerator

EPOCHS, BATCH = 4, 10


class Progress:
    """The state that the loop needs to continue."""

    def __init__(self) -> None:
        self.epoch = 0
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, object]:
        return {"epoch": self.epoch, "losses": self.losses}

    def load_state_dict(self, state: dict[str, object]) -> None:
        vars(self).update(state)


def spirals() -> tuple[TensorDataset, TensorDataset]:
    """Return points on two spirals, with the number of their spiral: 480 to train, 90 held out."""
    generator = torch.Generator().manual_seed(0)
    turn = 3 * torch.rand(570, generator=generator) + 0.5
    label = torch.arange(570) % 2
    angle = turn * 2 + label * torch.pi
    point = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1)
    point += 0.1 * torch.randn(570, 2, generator=generator)
    return TensorDataset(point[:480], label[:480]), TensorDataset(point[480:], label[480:])


def train(accelerator: Accelerator, options: argparse.Namespace) -> None:
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    learn, held_out = spirals()
    model, optimizer, schedule, loader, checks = accelerator.prepare(
        model,
        optimizer,
        schedule,
        DataLoader(learn, batch_size=BATCH),
        DataLoader(held_out, batch_size=BATCH),
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if options.resume:
        accelerator.load_state(options.project)
        accelerator.print(f"continues after epoch {progress.epoch}")

    while progress.epoch < EPOCHS:
        model.train()
        total = torch.zeros((), device=accelerator.device)
        for point, label in loader:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = functional.cross_entropy(model(point), label)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if accelerator.sync_gradients:
                    schedule.step()
                optimizer.zero_grad()
            total += loss.detach()
        progress.epoch += 1
        progress.losses.append(float(accelerator.reduce(total, "mean")) / len(loader))
        if options.stop_after == progress.epoch:
            accelerator.save_state(options.project)
            return

    hits = evaluate(accelerator, model, checks)
    if accelerator.is_main_process:
        norm = sum(float(p.detach().double().square().sum()) for p in model.parameters()) ** 0.5
        found = {"norm": norm, "right": int(hits.sum()), "of": len(hits)}
        print(json.dumps({"losses": progress.losses, **found}))  # noqa: T201
    accelerator.wait_for_everyone()


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]
) -> torch.Tensor:
    """Return correct predictions as booleans. No item of an incomplete last batch counts twice."""
    model.eval()
    return torch.cat(
        [
            accelerator.gather_for_metrics(model(point).argmax(dim=1) == label)
            for point, label in loader
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--project", type=Path, default=Path(__file__).parent / ".cache" / "moved")
    parser.add_argument("--stop-after", type=int, help="save the state after this epoch and leave")
    parser.add_argument("--resume", action="store_true", help="continue from the saved state")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    accelerator = Accelerator(
        gradient_accumulation_steps=4,
        mixed_precision="bf16",
        cpu=options.cpu,
        step_scheduler_with_optimizer=False,  # the loop steps it, once per update
    )
    train(accelerator, options)


if __name__ == "__main__":
    main()
