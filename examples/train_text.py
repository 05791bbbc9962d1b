"""Train a small GPT on the licence and documentation of Python, on any number of ranks.

Batches hold paragraphs of any length, so ranks and micro-batches have different numbers of tokens.
Every token still has the same weight.

    python examples/train_text.py
    syncprims run -n 2 examples/train_text.py
"""

from __future__ import annotations

import argparse
import math
import os
import pydoc_data.topics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from syncprims import print_main
from syncprims.accelerate import Accelerator, DataLoaderConfiguration
from syncprims.training import set_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    Batch = dict[str, torch.Tensor]

CONTEXT = 128  # bytes: the longest piece of text
IGNORED = -100  # a target that is not a token


def train(options: argparse.Namespace) -> float:
    accelerator = Accelerator(
        gradient_accumulation_steps=4,
        mixed_precision=options.mixed_precision,
        dataloader_config=DataLoaderConfiguration(
            split_batches=True, use_stateful_dataloader=True, data_seed=1
        ),
    )
    set_seed(1)
    pieces = paragraphs()
    learn, held_out = Texts(pieces[: -len(pieces) // 10]), Texts(pieces[-len(pieces) // 10 :])
    model = GPT(width=options.width, layers=options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: rate(s, options.steps))
    model, optimizer, schedule, loader, checks = accelerator.prepare(
        model,
        optimizer,
        schedule,
        DataLoader(learn, batch_size=8, shuffle=True, collate_fn=collate),
        DataLoader(held_out, batch_size=8, collate_fn=collate),
    )
    print_main(f"{len(learn)} paragraphs, {sum(p.numel() for p in model.parameters())} parameters")

    step = 0
    while step < options.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss, tokens = summed_loss(model, batch)
                accelerator.backward(loss, weight=tokens)  # the mean over all tokens of all ranks
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
            if accelerator.sync_gradients and step % options.every == 0:
                print_main(f"step {step:4d}: held-out {evaluate(accelerator, model, checks):.3f}")
            if step == options.steps:
                break
    final = evaluate(accelerator, model, checks)
    print_main(f"held-out loss {final:.3f} nats per byte; it writes:")
    print_main(accelerator.unwrap_model(model).write("Python is ", 120))
    return final


def summed_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    """Return the sum of the losses of the tokens in a batch, and their number."""
    scores = model(batch["bytes"])
    loss = functional.cross_entropy(
        scores.flatten(0, 1), batch["next"].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return loss, int((batch["next"] != IGNORED).sum())


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader[Any]) -> float:
    """Return the mean loss per token over the batches of all ranks."""
    model.eval()
    found = [summed_loss(model, batch) for batch in loader]
    model.train()
    mine = torch.tensor([[float(loss), float(tokens)] for loss, tokens in found]).sum(dim=0)
    loss, tokens = accelerator.reduce(mine).tolist()
    return float(loss / tokens)


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a short warm-up, then a cosine decay."""
    warm = min(20, steps // 10 + 1)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, steps - warm))))


# -- the text --------------------------------------------------------------------------------------


def paragraphs() -> list[bytes]:
    """Return the paragraphs of texts that ship with Python, in a shuffled order."""
    texts = [str(text) for text in pydoc_data.topics.topics.values()]
    licence = Path(os.__file__).with_name("LICENSE.txt")
    texts += [licence.read_text()] if licence.exists() else []
    pieces = [part.strip().encode() for text in texts for part in text.split("\n\n")]
    long_enough = [piece[: CONTEXT + 1] for piece in pieces if len(piece) > 20]
    order = torch.randperm(len(long_enough), generator=torch.Generator().manual_seed(0))
    return [long_enough[i] for i in order.tolist()]


class Texts(Dataset[bytes]):
    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> bytes:
        return self.pieces[index]


def collate(pieces: Sequence[bytes]) -> Batch:
    """Return a batch of texts; the shorter ones are padded with ignored targets."""
    longest = max(map(len, pieces)) - 1
    batch = {
        "bytes": torch.zeros(len(pieces), longest, dtype=torch.long),
        "next": torch.full((len(pieces), longest), IGNORED),
    }
    for row, piece in enumerate(pieces):
        ids = torch.tensor(list(piece))
        batch["bytes"][row, : len(ids) - 1] = ids[:-1]
        batch["next"][row, : len(ids) - 1] = ids[1:]
    return batch


# -- the model: a GPT over bytes -------------------------------------------------------------------


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.place = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.token.weight  # shared
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.place.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        scores: torch.Tensor = self.head(self.norm(x))
        return scores

    @torch.no_grad()
    def write(self, start: str, count: int) -> str:
        """Return `start` and the `count` most likely bytes after it."""
        ids = torch.tensor([list(start.encode())], device=self.head.weight.device)
        for _ in range(count):
            scores = self(ids[:, -CONTEXT:])[:, -1]
            ids = torch.cat([ids, scores.argmax(dim=-1, keepdim=True)], dim=1)
        return bytes(ids[0].tolist()).decode(errors="replace")


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        parts = self.mix(self.before(x)).view(n, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
        thought: torch.Tensor = x + self.think(self.between(x))
        return thought


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--mixed-precision", default="no")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
