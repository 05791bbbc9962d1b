"""Models that average themselves, in FSDP2 or DDP, give the numbers that they give alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.process_groups import with_gloo
from support.rank_worlds import Kind, Ranks
from support.torch_programs import FSDP2_TRAINS_ON_CPUS
from torch import nn

import syncprims
from syncprims.testing import run_world
from syncprims.training import Accumulator, Precision, prepare

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch's own, of what is new in it
    pytest.mark.skipif(not FSDP2_TRAINS_ON_CPUS, reason="FSDP2 of this torch needs devices"),
]
WRAPS = ["fsdp", "ddp", "hand", "fsdp and ddp"]


def parts(wrap: str, accumulator: Accumulator | None) -> list[Any]:
    """Return models that are one after the other, wrapped, and prepared if there is a job."""
    from torch.distributed.fsdp import fully_shard

    made: list[Any] = []
    for seed, kind in enumerate(["fsdp", "ddp"] if wrap == "fsdp and ddp" else [wrap]):
        torch.manual_seed(seed)
        model: Any = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
        if kind == "fsdp":  # in torch's usual form: layers, and a root with the rest
            for layer in (model[0], model):
                fully_shard(layer)
        elif kind == "hand" or accumulator is None:
            model = nn.parallel.DistributedDataParallel(model)
        if accumulator is not None:
            ddp = {"bucket_cap_mb": 1} if kind == "ddp" else None
            model = prepare(model, accumulator=accumulator, ddp=ddp)
        made.append(model)
    return made


def whole(p: Any) -> list[float]:
    full = getattr(p, "full_tensor", lambda: p)().detach().double()
    return full.reshape(-1).tolist()  # type: ignore[no-any-return]


def loss_of(models: list[Any], micro_batch: int, count: int) -> torch.Tensor:
    """Return the summed loss of so many items of this rank."""
    rank = syncprims.get_rank()
    x = torch.arange(3.0 * count).reshape(count, 3).add(7 * micro_batch + 3 * rank).sin()
    for model in models:
        x = model(x)
    return x.square().sum()


def alone(wrap: str, steps: int, micro_batches: int, how: set[str]) -> list[float]:
    """Train by torch alone: each window is one backward pass of the sum of its losses."""
    models, ranks = parts(wrap, None), syncprims.get_world_size()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for first in range(0, micro_batches, steps):
        window = range(first, min(first + steps, micro_batches))
        counts = [1 + (n + syncprims.get_rank()) % 2 if "weight" in how else 2 for n in window]
        losses = [loss_of(models, n, count) for n, count in zip(window, counts, strict=True)]
        items = syncprims.all_reduce(sum(counts)) / ranks
        if "overflow" in how and first == 0:
            continue  # the step is skipped
        (sum(losses, torch.zeros(())) / items).backward()  # type: ignore[no-untyped-call]
        for model, optimizer in zip(models, optimizers, strict=True):
            if "clip" in how:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return [x for model in models for p in model.parameters() for x in whole(p)]


def together(wrap: str, steps: int, micro_batches: int, how: set[str]) -> list[float]:
    """Train by the library."""
    scaler = Precision("fp16", scaler={"init_scale": 8.0}) if "overflow" in how else None
    accumulator = Accumulator(steps, precision=scaler)
    models = parts(wrap, accumulator)
    if scaler is not None:
        for model in models:  # only the scaler, for numbers of one precision
            vars(getattr(model, "module", model)).pop("forward", None)
    plain = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    optimizers: Any = [prepare(optimizer, accumulator=accumulator) for optimizer in plain]

    def step() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            if "clip" in how:
                accumulator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

    for n in range(micro_batches):
        with accumulator.accumulate(*models[: 1 if "unnamed" in how else 2]):
            count = 1 + (n + syncprims.get_rank()) % 2 if "weight" in how else 2
            loss = loss_of(models, n, count)
            if "overflow" in how and n == 0 and syncprims.is_main():
                loss = loss * float("inf")
            if "weight" in how:
                accumulator.backward(loss, weight=count)
            else:
                accumulator.backward(loss / count)
            step()
    if accumulator.flush():
        step()
    return [x for model in models for p in model.parameters() for x in whole(p)]


HOW: list[set[str]] = [set(), {"weight"}, {"clip"}, {"weight", "clip"}, {"overflow"}, {"unnamed"}]
CASES = [(steps, count, how) for steps, count, how in product((1, 2, 3), (6, 5), HOW)]


def compared(wrap: str) -> Callable[[], None]:
    def program() -> None:
        syncprims.current().open_process_group()
        for case in CASES:
            mine, wanted = together(wrap, *case), alone(wrap, *case)
            apart = max(abs(a - b) for a, b in zip(mine, wanted, strict=True))
            assert apart < 1e-5, (case, apart)

    return program


@pytest.mark.parametrize("wrap", WRAPS)
def test_windows_of_models_that_average_themselves(wrap: str) -> None:
    run_world(compared(wrap), 2, torch=True, timeout=200)


@pytest.mark.parametrize("wrap", WRAPS)
def test_windows_of_models_that_average_themselves_on_gloo(wrap: str, meeting_place: Path) -> None:
    def in_a_world() -> None:
        with syncprims.init():
            compared(wrap)()

    ranks = Ranks(Kind("torch", 2), meeting_place)
    ranks.run_alone(with_gloo(in_a_world, meeting_place.parent))
