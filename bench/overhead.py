"""What training helpers add to a step of a bare loop: ours, Accelerate's, Lightning Fabric's.

    python bench/measure.py --only training

One process, CPU, one thread. A step of the loop takes about 0.2 ms. All take turns in short
stretches, so that a slower minute slows them all; medians, and each beside the bare loop of the
same turn.
"""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from catalogue import OURS
from table import Seen, head, row, short, span

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from scale import Scale
    from torch import nn

BARE = "a bare loop"
STEPS = 200  # of a turn


def job() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """Return a model, its optimizer and a batch: one step takes about 0.2 ms."""
    import torch
    from torch import nn

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
    from torch import nn

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


def measure(scale: Scale) -> dict[str, Any]:
    """Return the microseconds of a step, what helpers add to it, and of the context alone."""
    import torch

    torch.set_num_threads(1)
    seen = Seen()
    steps, contexts = _libraries(seen)
    for turn in range(scale.turns):
        print(f"training steps: turn {turn + 1} of {scale.turns}", file=sys.stderr, flush=True)
        bare_time = 0.0
        for name, step in steps.items():
            spent = timed(step, STEPS)
            bare_time = spent if name == BARE else bare_time
            more = {} if name == BARE else {"added": [spent - bare_time]}
            seen.add(1, name, {"step": [spent], **more})
        for name, empty in contexts.items():
            seen.add(1, name, {"context": [timed(empty, 5 * STEPS)]})
    return seen.stored()


def _libraries(seen: Seen) -> tuple[dict[str, Callable[[], None]], dict[str, Callable[[], None]]]:
    """Return the step and the empty context of every library that is installed."""
    from syncprims.training import Accelerator

    steps = {BARE: bare(), OURS: familiar(Accelerator(cpu=True))}
    contexts = {OURS: context_of(Accelerator(gradient_accumulation_steps=4, cpu=True))}
    if find_spec("accelerate") is not None:
        from accelerate import Accelerator as Theirs

        steps["Accelerate"] = familiar(Theirs(cpu=True))
        contexts["Accelerate"] = context_of(Theirs(cpu=True))
    else:
        seen.lack(1, "Accelerate", ("step", "added", "context"), "not installed: accelerate")
    try:
        steps["Lightning Fabric"] = fabric()
    except (ImportError, RuntimeError) as error:  # absent, or it lacks something of its own
        seen.lack(1, "Lightning Fabric", ("step", "added"), f"not installed: {error}")
    return steps, contexts


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the figures as a section of the results."""
    seen = Seen.restored(data)
    found = [
        "",
        "## A training step",
        "",
        "One process, one thread, a small model; each beside the bare loop of the same turn.",
        *head("by", "a step, us", "range", "added, us", "added, %", "empty context, us"),
    ]
    whole = seen.median(1, BARE, "step") or 1.0
    for name in dict.fromkeys(library for _, library, _ in seen.names()):
        step, more, alone = (seen.median(1, name, what) for what in ("step", "added", "context"))
        cells = ["", ""] if more is None else [short(more), f"{100 * more / whole:.1f}"]
        times = span(seen.figures(1, name, "step"))
        found.append(row(name, short(step or 0.0), times, *cells, short(alone) if alone else ""))
    return found
