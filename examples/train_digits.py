"""Learn handwritten digits with a small residual network, on any number of ranks.

    python examples/train_digits.py
    syncprims run -n 2 examples/train_digits.py
    torchrun --nproc-per-node 2 examples/train_digits.py

After an interruption, it continues from its last checkpoint.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from syncprims import main_first, print_main, progress
from syncprims.accelerate import Accelerator, DataLoaderConfiguration
from syncprims.training import set_seed


def train(options: argparse.Namespace) -> float:
    data = DataLoaderConfiguration(split_batches=True, use_stateful_dataloader=True, data_seed=7)
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        mixed_precision=options.mixed_precision,
        dataloader_config=data,  # a micro-batch has 64 items on any number of ranks
    )
    set_seed(7)
    learn, held_out = digits(options.cache)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3, weight_decay=0.05)
    steps = options.epochs * math.ceil(len(learn) / 128)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps + 1)
    model, optimizer, schedule, loader, checks = accelerator.prepare(
        net,
        optimizer,
        schedule,
        DataLoader(learn, batch_size=64, shuffle=True, drop_last=True),
        DataLoader(held_out, batch_size=64),
    )
    history = History()
    accelerator.register_for_checkpointing(history)
    if (options.checkpoint / "done").exists():
        accelerator.load_state(options.checkpoint)
        print_main(f"continues after epoch {history.epoch}, {history.best:.2%} correct")

    while history.epoch < options.epochs:
        model.train()
        for image, label in progress(loader, leave=False):
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(image), label)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

        right = evaluate(accelerator, model, checks)
        history.add(right)
        print_main(f"epoch {history.epoch:2d}: loss {loss.item():.3f}, {right:.2%} correct")
        accelerator.save_state(options.checkpoint)
        accelerator.save(True, options.checkpoint / "done")
        accelerator.wait_for_everyone()
        if history.worse_for >= options.patience:
            accelerator.set_trigger()  # on any rank
        if accelerator.check_trigger():  # all ranks stop after the same epoch
            print_main(f"stopped: no better for {options.patience} epochs")
            break
        if history.epoch == options.pause_after:
            break
    print_main(f"best {history.best:.2%} correct of {len(held_out)} held out")
    return history.best


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]
) -> float:
    """Return the share of correct answers. No item counts twice."""
    model.eval()
    hits = [
        accelerator.gather_for_metrics(model(image).argmax(dim=1) == label)
        for image, label in loader
    ]
    return float(torch.cat(hits).float().mean())


class Net(nn.Module):
    """Two residual blocks on 8 x 8 pixels."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(4 * width, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        for block in self.blocks:
            x = functional.max_pool2d(block(x), 2)
        scores: torch.Tensor = self.head(x.flatten(1))
        return scores


class Block(nn.Module):
    """A block that adds the output of two convolutions to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.inner(x)
        return found


class History:
    """The results so far; saved and loaded with the rest."""

    def __init__(self) -> None:
        self.epoch = 0
        self.best = 0.0
        self.worse_for = 0

    def add(self, right: float) -> None:
        self.epoch += 1
        self.worse_for = 0 if right > self.best else self.worse_for + 1
        self.best = max(self.best, right)

    def state_dict(self) -> dict[str, float]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, float]) -> None:
        vars(self).update(state)


def digits(cache: Path) -> tuple[TensorDataset, TensorDataset]:
    """Return the digits of scikit-learn, 1,437 to train and 360 held out; rank 0 prepares them."""
    with main_first(name="prepare digits"):
        if not cache.exists():
            from sklearn.datasets import load_digits

            pixels, labels = load_digits(return_X_y=True)
            cache.parent.mkdir(parents=True, exist_ok=True)
            image = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
            torch.save({"image": image, "label": torch.tensor(labels)}, cache)
            print_main(f"prepared {len(labels)} digits in {cache}")
        data = torch.load(cache, weights_only=True)
    order = torch.randperm(len(data["label"]), generator=torch.Generator().manual_seed(0))
    return (
        TensorDataset(data["image"][order[360:]], data["label"][order[360:]]),
        TensorDataset(data["image"][order[:360]], data["label"][order[:360]]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    here = Path(__file__).parent / ".cache"
    parser.add_argument("--cache", type=Path, default=here / "train_digits.pt")
    parser.add_argument("--checkpoint", type=Path, default=here / "train_digits")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--patience", type=int, default=6)
    parser.add_argument("--pause-after", type=int, help="leave after this epoch, to continue later")
    parser.add_argument("--mixed-precision", default="bf16")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
