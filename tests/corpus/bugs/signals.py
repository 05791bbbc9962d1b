"""Signals, which reach processes only."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from .bug import bug, ones

PROCESSES = ("processes",)
VOTE = "        dist.all_reduce(stop, dist.ReduceOp.MAX)\n        if stop:"


def flag() -> torch.Tensor:
    """Return a flag that SIGTERM sets, on this rank alone."""
    stop = torch.tensor(0)
    signal.signal(signal.SIGTERM, lambda *_: stop.fill_(1))
    return stop


@bug("kyutai-labs/pocket-tts#277", 1, "        if stop:", VOTE, kinds=PROCESSES)
def stops_alone(rank: int, folder: Path) -> None:
    """The rank that got SIGTERM exited alone."""
    stop = flag()
    for step in range(3):
        if (rank, step) == (1, 1):
            signal.raise_signal(signal.SIGTERM)
        if stop:
            break
        dist.all_reduce(ones())  # bug


@bug("Red-Hat-AI-Innovation-Team/training_hub#145", 0, "        if stop:", VOTE, kinds=PROCESSES)
def signal_between_checks(rank: int, folder: Path) -> None:
    """Ranks saw SIGTERM at different steps."""
    stop = flag()
    for step in range(4):
        dist.all_reduce(ones())  # bug
        if step == (1 if rank == 0 else 2):
            signal.raise_signal(signal.SIGTERM)
        if stop:
            dist.all_gather_object([None] * 3, f"shard {rank}")
            break


@bug("goodfire-ai/spd#741", 2, "        if False:", VOTE, kinds=PROCESSES)
def deaf_evaluation(rank: int, folder: Path) -> None:
    """SIGKILL came after a grace period in evaluation."""
    stop = flag()
    for step in range(4):  # evaluation
        if (rank, step) == (2, 1):
            signal.raise_signal(signal.SIGTERM)
        if False:
            break
        if (rank, step) == (2, 3):
            signal.raise_signal(signal.SIGKILL)
        dist.all_reduce(ones() + stop)  # bug


@bug(
    "Lightning-AI/pytorch-lightning#20825", 0, "lambda *_: sys.exit(0)", "signal.SIG_IGN",
    kinds=PROCESSES,
)  # fmt: skip
def exit_in_the_handler(rank: int, folder: Path) -> None:
    """A handler of SIGTERM raised on one rank."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    for step in range(3):
        if (rank, step) == (0, 1):
            signal.raise_signal(signal.SIGTERM)
        dist.all_reduce(ones())  # bug


@bug("", 1, "dist.barrier()", "None", kinds=PROCESSES)
def barrier_in_the_handler(rank: int, folder: Path) -> None:
    """A handler of SIGTERM called a barrier."""
    signal.signal(signal.SIGTERM, lambda *_: dist.barrier())  # bug
    for step in range(3):
        if (rank, step) == (1, 1):
            signal.raise_signal(signal.SIGTERM)
        dist.all_reduce(ones())
