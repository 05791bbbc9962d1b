"""Measure what training helpers add to a bare step: ours, and those of Accelerate and Fabric.

    python bench/measure.py --only training

One process, CPU, one thread, a step of about 0.25 ms. All libraries train the same model object
with the same optimizer, so that the memory layout is the same for all. They take turns of a few
steps each. A turn is measured in processor time of the thread, and compared with the bare loop of
the same turn. The results are medians. The bare loop runs twice: the difference is the error of the
measurement.
"""

from __future__ import annotations

import gc
import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from catalogue import OURS
from table import Seen, head, row, short, span

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from scale import Scale

    Step = Callable[[], None]

BARE, AGAIN = "a bare loop", "a bare loop, again"
STEPS = 10  # per turn
PARTS = "of ours in a bare step: "


class Job:
    """A model, its optimizer and a batch."""

    def __init__(self) -> None:
        import torch
        from torch import nn

        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(128, 64)

    def bare(self) -> Step:
        """Return a step of the bare loop."""
        model, optimizer, batch = self.model, self.optimizer, self.batch

        def step() -> None:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def familiar(self, accelerator: Any) -> Step:
        """Return a step that uses names common to Accelerate and syncprims."""
        model, optimizer = accelerator.prepare(self.model, self.optimizer)
        batch = self.batch

        def step() -> None:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()

        return step

    def fabric(self) -> Step:
        """Return a step that uses the names of Lightning Fabric."""
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
        """Return bare steps that each use one of our helpers."""
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

        with accelerator.accumulate(model):  # an open accumulation window
            pass
        return {
            "accumulate": context,
            "backward": backward,
            "step": step,
            "zero_grad": zero_grad,
        }


def context_of(accelerator: Any) -> Step:
    """Return an empty micro-batch, to measure the context alone."""
    from torch import nn

    model = accelerator.prepare(nn.Linear(2, 2))

    def empty() -> None:
        with accelerator.accumulate(model):
            pass

    return empty


def timed(call: Step, count: int) -> float:
    """Return the processor time of one call in microseconds."""
    begin = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - begin) / count * 1e6


def in_turns(seen: Seen, operation: str, steps: dict[str, Step], turns: int) -> None:
    """Store the time of each step, and its difference to the bare loop of the same turn."""
    for step in steps.values():
        timed(step, 10 * STEPS)
    gc.collect()
    gc.disable()
    try:
        for _ in range(turns):
            spent = {name: timed(step, STEPS) for name, step in steps.items()}
            for name, time_ in spent.items():
                seen.add(1, name, {operation: [time_]})
                if BARE in spent and name != BARE:
                    seen.add(1, name, {"added": [time_ - spent[BARE]]})
    finally:
        gc.enable()


def measure(scale: Scale) -> dict[str, Any]:
    """Return the microseconds of a step, of the added time, and of the context alone."""
    import torch

    from syncprims.accelerate import Accelerator

    print(f"training steps: {scale.turns} turns", file=sys.stderr, flush=True)
    torch.set_num_threads(1)
    seen, job = Seen(), Job()
    in_turns(seen, "step", _steps(seen, job), scale.turns)
    contexts = {OURS: context_of(Accelerator(gradient_accumulation_steps=4, cpu=True))}
    if find_spec("accelerate") is not None:
        from accelerate import Accelerator as Theirs

        contexts["Accelerate"] = context_of(Theirs(cpu=True))
    in_turns(seen, "context", contexts, scale.turns)
    alone = Seen()
    parts = {PARTS + name: step for name, step in job.parts(Accelerator(cpu=True)).items()}
    in_turns(alone, "step", {BARE: job.bare(), **parts}, scale.turns)
    for name in parts:
        seen.add(1, name, {"added": alone.figures(1, name, "added")})
    return seen.stored()


def _steps(seen: Seen, job: Job) -> dict[str, Step]:
    """Return the step of every library that is installed."""
    from syncprims.accelerate import Accelerator

    steps = {BARE: job.bare(), AGAIN: job.bare(), OURS: job.familiar(Accelerator(cpu=True))}
    if find_spec("accelerate") is not None:
        from accelerate import Accelerator as Theirs

        steps["Accelerate"] = job.familiar(Theirs(cpu=True))
    else:
        seen.lack(1, "Accelerate", ("step", "added", "context"), "not installed: accelerate")
    try:
        steps["Lightning Fabric"] = job.fabric()
    except (ImportError, RuntimeError) as error:  # not installed, or a dependency is missing
        seen.lack(1, "Lightning Fabric", ("step", "added"), f"not installed: {error}")
    return steps


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the section of the results page."""
    seen = Seen.restored(data)
    found = [
        "",
        "## A training step",
        "",
        "One process, one thread, one small model for all, in processor time. Each is compared",
        "with the bare loop of the same turn. The second bare loop shows the measurement error.",
        *head("by", "a step, us", "range", "added, us", "added, %", "empty context, us"),
    ]
    whole = seen.median(1, BARE, "step") or 1.0
    for name in dict.fromkeys(library for _, library, _ in seen.names()):
        step, more, alone = (seen.median(1, name, what) for what in ("step", "added", "context"))
        cells = ["", ""] if more is None else [short(more), f"{100 * more / whole:.1f}"]
        times = seen.figures(1, name, "step")
        shown = [short(step), span(times)] if step is not None else ["", ""]
        found.append(row(name, *shown, *cells, short(alone) if alone else ""))
    return found
