"""What training helpers add to a step of a bare loop: ours, Accelerate's, Lightning Fabric's.

    python bench/overhead.py

One process, CPU, one thread, a step of about 0.25 ms. All train the very same model with the same
optimizer, so that no memory lies better for one of them, and take turns after a few steps each. A
turn is taken in the thread's own processor time, beside the bare loop of the same turn; medians.
The bare loop stands there twice: what the second adds is the error of the measurement.
"""

from __future__ import annotations

import contextlib
import gc
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

    Step = Callable[[], None]

STEPS = 10  # of a turn
TURNS = 400


class Job:
    """A model, its optimizer and a batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(128, 64)

    def bare(self) -> Step:
        """Return a step of the plain loop."""
        model, optimizer, batch = self.model, self.optimizer, self.batch

        def step() -> None:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def familiar(self, accelerator: Any) -> Step:
        """Return a step with the names that Accelerate and we share."""
        model, optimizer = accelerator.prepare(self.model, self.optimizer)
        batch = self.batch

        def step() -> None:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()

        return step

    def fabric(self) -> Step:
        """Return a step with Lightning Fabric's names."""
        from lightning_fabric import Fabric
        from lightning_fabric.plugins.environments import LightningEnvironment

        made = Fabric(accelerator="cpu", devices=1, plugins=[LightningEnvironment()])
        model, optimizer = made.setup(self.model, self.optimizer)
        batch = self.batch

        def step() -> None:
            with made.no_backward_sync(model, enabled=False):
                made.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        return step

    def parts(self, accelerator: Any) -> dict[str, Step]:
        """Return plain steps with one of our helpers each."""
        plain, batch, own = self.model, self.batch, self.optimizer
        model, optimizer = accelerator.prepare(plain, own)

        def context() -> None:
            with accelerator.accumulate(model):
                plain(batch).square().mean().backward()
                own.step()
                own.zero_grad()

        def backward() -> None:
            accelerator.backward(plain(batch).square().mean())
            own.step()
            own.zero_grad()

        def step() -> None:
            plain(batch).square().mean().backward()
            optimizer.step()
            own.zero_grad()

        def zero_grad() -> None:
            plain(batch).square().mean().backward()
            own.step()
            optimizer.zero_grad()

        with accelerator.accumulate(model):  # a window to be in
            pass
        return {
            "accumulate": context,
            "backward": backward,
            "step": step,
            "zero_grad": zero_grad,
        }


def context_of(accelerator: Any) -> Step:
    """Return an empty micro-batch: what the context alone takes."""
    model = accelerator.prepare(nn.Linear(2, 2))

    def empty() -> None:
        with accelerator.accumulate(model):
            pass

    return empty


def timed(call: Step, count: int) -> float:
    """Return the microseconds of processor time that one call takes."""
    begin = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - begin) / count * 1e6


def in_turns(steps: dict[str, Step], reference: str) -> dict[str, tuple[float, float]]:
    """Return the median of each, and of what it takes beyond the reference of the same turn."""
    for step in steps.values():
        timed(step, 10 * STEPS)
    seen: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    try:
        for _ in range(TURNS):
            for name, step in steps.items():
                seen[name].append(timed(step, STEPS))
    finally:
        gc.enable()
    return {
        name: (
            statistics.median(times),
            statistics.median(a - b for a, b in zip(times, seen[reference], strict=True)),
        )
        for name, times in seen.items()
    }


def section() -> list[str]:
    """Return the figures as tables."""
    torch.set_num_threads(1)
    job = Job()
    steps = {"bare": job.bare(), "bare again": job.bare()}
    steps["syncprims"] = job.familiar(Accelerator(cpu=True))
    contexts = {"syncprims": context_of(Accelerator(gradient_accumulation_steps=4, cpu=True))}
    if find_spec("accelerate") is not None:
        from accelerate import Accelerator as Theirs

        steps["Accelerate"] = job.familiar(Theirs(cpu=True))
        contexts["Accelerate"] = context_of(Theirs(cpu=True))
    if find_spec("lightning_fabric") is not None:
        with contextlib.suppress(ImportError):
            steps["Lightning Fabric"] = job.fabric()
    whole = in_turns(steps, "bare")
    alone = in_turns(contexts, "syncprims")
    lines = [
        "",
        "## A training step",
        *head("by", "a step, us", "added, us", "added, %", "context"),
    ]
    for name, (took, more) in whole.items():
        context = f"{alone[name][0]:.2f}" if name in alone else ""
        share = f"{100 * more / whole['bare'][0]:.1f}"
        lines.append(row(name, f"{took:.0f}", f"{more:.1f}", share, context))
    parts = in_turns({"bare": job.bare(), **job.parts(Accelerator(cpu=True))}, "bare")
    lines += ["", *head("of ours alone in a bare step", "added, us")]
    lines += [row(name, f"{more:.1f}") for name, (_, more) in parts.items() if name != "bare"]
    return lines


if __name__ == "__main__":
    print("\n".join(section()))
