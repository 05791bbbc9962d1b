"""A whole training: schedule, validation, early stop, a CSV file, and a run that continues.

    python examples/whole_training.py
    syncprims run -n 4 examples/whole_training.py --directory run

All files are in the directory. After SIGTERM, start the same command again: it goes on after the
last step, and ends with the files of a run that was not interrupted.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from syncprims import Trigger, all_reduce, barrier, is_main, print_main, split
from syncprims.training import Accumulator, Checkpoints, prepare, save_model, set_seed

BATCH = 64  # of all ranks together


class Progress:
    """What the loop knows: saved and loaded with the rest."""

    def __init__(self) -> None:
        self.step = 0
        self.rows: list[dict[str, float]] = []  # one for each epoch

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    @property
    def since_best(self) -> int:
        """The number of epochs since the one with the lowest loss."""
        losses = [row["loss"] for row in self.rows]
        return len(losses) - 1 - losses.index(min(losses)) if losses else 0


def train(options: argparse.Namespace) -> None:
    set_seed(7)
    learn, held_out = spirals(1200, seed=1), spirals(300, seed=2)
    accumulator, progress = Accumulator(1), Progress()
    model: Any = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    model.append(nn.Linear(64, 3))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader: Any = DataLoader(learn, batch_size=BATCH, shuffle=True)
    total = options.epochs * len(loader)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(
        optimizer,  # up in 20 steps, then down along a cosine
        lambda step: min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * step / total)),
    )
    model, optimizer, loader, schedule = prepare(
        model, optimizer, loader, schedule, accumulator=accumulator, seed=7, split_batches=True
    )

    everything = {
        "model": model, "optimizer": optimizer, "schedule": schedule, "data": loader,
        "progress": progress,
    }  # fmt: skip
    checkpoints = Checkpoints(options.directory, keep_last=2)
    if checkpoints.latest() is not None:
        checkpoints.load(everything)
        print_main(f"continues after step {progress.step}")
    stop = Trigger("stop")
    stop.set_on_signal()  # SIGTERM on any rank

    for epoch in range(loader.state_dict()["epoch"], options.epochs):
        if progress.since_best >= options.patience:  # of equal numbers, so equal on all ranks
            print_main(f"no better for {options.patience} epochs")
            break
        model.train()
        for x, y in loader:
            with accumulator.accumulate(model):
                loss_sum = functional.cross_entropy(model(x), y, reduction="sum")
                accumulator.backward(loss_sum, weight=len(y))  # the mean over all items
                accumulator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            progress.step += 1
            if progress.step == options.stop_at:
                stop.set("--stop-at")
            if stop.check():  # the same answer on all ranks, after the same step
                checkpoints.save(progress.step, everything)
                print_main(f"stopped after step {progress.step}: {stop.reason}")
                barrier("stopped", device=True)  # no rank ends while a device computes
                return

        row = {"epoch": epoch, **validate(model, held_out), "lr": schedule.get_last_lr()[0]}
        progress.rows.append(row)
        print_main(f"epoch {epoch:2d}: loss {row['loss']:.4f}, {row['right']:.1%} right")
        if progress.since_best == 0:
            save_model(model, options.directory / "best")  # all ranks call it
        if is_main():
            write_csv(progress.rows, options.directory / "epochs.csv")
        checkpoints.save(progress.step, everything)


@torch.no_grad()
def validate(model: nn.Module, data: TensorDataset) -> dict[str, float]:
    """Return the mean loss and the share of right answers over all ranks' shares of the data."""
    model.eval()
    x, y = data[list(split(range(len(data))))]  # this rank's share
    scores = model(x)
    loss_sum = functional.cross_entropy(scores, y, reduction="sum")
    sums = {"loss": loss_sum.item(), "right": (scores.argmax(1) == y).sum().item()}
    return {key: value / len(data) for key, value in all_reduce(sums, name="validation").items()}


def write_csv(rows: list[dict[str, float]], path: Path) -> None:
    """Write all rows again: after a restart, no epoch is there twice."""
    new = path.with_suffix(".new")
    with new.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    os.replace(new, path)  # noqa: PTH105 - as pages write it


def spirals(count: int, seed: int) -> TensorDataset:
    """Return points of three spirals, each with the number of its spiral."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.arange(count) % 3
    radius = torch.rand(count, generator=generator)
    noise = torch.randn(count, generator=generator)
    angle = 5 * radius + arm * 2 * math.pi / 3 + 0.25 * noise
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1), arm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("run"))
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--patience", type=int, default=6)
    parser.add_argument("--stop-at", type=int, help="stop after this step, as SIGTERM does")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
