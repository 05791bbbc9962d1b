"""What training helpers add to a step of a bare loop: ours, Accelerate's, Lightning Fabric's.

    python bench/overhead.py

One process, CPU, one thread. A step of the loop takes about 0.2 ms. All take turns in short
stretches, so that a slower minute slows them all; medians, and each beside the bare loop of the
same turn.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from table import head, row
from torch import nn

from syncprims.training import Accelerator

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 200  # of a turn
TURNS = 40


def job() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """Return a model, its optimizer and a batch: one step takes about 0.2 ms."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(128, 64)


def bare() -> Callable[[], None]:
    model, optimizer, batch = job()

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def familiar(accelerator: Any) -> Callable[[], None]:
    """Return a step with the names that Accelerate and we share."""
    plain, optimizer, batch = job()
    model, optimizer = accelerator.prepare(plain, optimizer)

    def step() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    return step


def fabric() -> Callable[[], None]:
    from lightning_fabric import Fabric

    made = Fabric(accelerator="cpu", devices=1)
    plain, optimizer, batch = job()
    model, optimizer = made.setup(plain, optimizer)

    def step() -> None:
        with made.no_backward_sync(model, enabled=False):
            made.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def context_of(accelerator: Any) -> Callable[[], None]:
    """Return an empty micro-batch: what the context alone takes."""
    model = accelerator.prepare(nn.Linear(2, 2))

    def empty() -> None:
        with accelerator.accumulate(model):
            pass

    return empty


def timed(call: Callable[[], None], count: int) -> float:
    """Return the microseconds of one call."""
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count * 1e6


def section() -> list[str]:
    """Return the figures as a table."""
    torch.set_num_threads(1)
    ours = Accelerator(cpu=True)
    steps = {"bare": bare(), "syncprims": familiar(ours)}
    contexts = {"syncprims": context_of(Accelerator(gradient_accumulation_steps=4, cpu=True))}
    if find_spec("accelerate") is not None:
        from accelerate import Accelerator as Theirs

        steps["Accelerate"] = familiar(Theirs(cpu=True))
        contexts["Accelerate"] = context_of(Theirs(cpu=True))
    if find_spec("lightning_fabric") is not None:
        with contextlib.suppress(ImportError):
            steps["Lightning Fabric"] = fabric()
    seen: dict[str, list[float]] = {name: [] for name in steps}
    added: dict[str, list[float]] = {name: [] for name in steps}
    entered: dict[str, list[float]] = {name: [] for name in contexts}
    for _ in range(TURNS):
        for name, step in steps.items():
            seen[name].append(timed(step, STEPS))
            added[name].append(seen[name][-1] - seen["bare"][-1])
        for name, empty in contexts.items():
            entered[name].append(timed(empty, 5 * STEPS))
    lines = [
        "",
        "## A training step",
        *head("by", "a step, us", "added, us", "added, %", "context"),
    ]
    for name in steps:
        whole, more = statistics.median(seen[name]), statistics.median(added[name])
        share = 100 * more / statistics.median(seen["bare"])
        alone = f"{statistics.median(entered[name]):.2f}" if name in entered else ""
        lines.append(row(name, f"{whole:.0f}", f"{more:.1f}", f"{share:.1f}", alone))
    return lines


if __name__ == "__main__":
    print("\n".join(section()))
