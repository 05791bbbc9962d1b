"""Helpers for tests of `syncprims.training`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from conftest import KINDS
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from syncprims.accelerate import Accelerator

#: Every behaviour of training is tested on these. The contract of backends has separate tests.
TRAINED = [k for k in KINDS if str(k) in ("single-1", "file-2", "file-4", "gloo-2", "torch-2")]
everywhere = pytest.mark.parametrize("kind", TRAINED, ids=str, indirect=True)
with_others = pytest.mark.parametrize(
    "kind", [k for k in TRAINED if k.ranks > 1], ids=str, indirect=True
)
in_pairs = pytest.mark.parametrize(
    "kind", [k for k in TRAINED if k.ranks == 2], ids=str, indirect=True
)
alone = pytest.mark.parametrize("kind", TRAINED[:1], ids=str, indirect=True)


#: How batches reach the ranks.
WAYS: dict[str, Any] = {
    "dealt": {},
    "split": {"split_batches": True},
    "sent": {"dispatch_batches": True},
    "split and sent": {"split_batches": True, "dispatch_batches": True},
}


class Stream(IterableDataset[int]):
    """A stream of numbers that every rank may read."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class Sized(Stream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return self.length


def unit_model() -> nn.Linear:
    """Return a model whose gradient is the mean of its inputs."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def small_model(seed: int = 0) -> nn.Sequential:
    """Return a model in float64; the same seed gives the same model."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def ones(count: int = 1) -> torch.Tensor:
    return torch.ones(count, 1)


def gradient(model: nn.Module) -> float:
    """Return the one gradient of :func:`unit_model`."""
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    return float(parameter.grad)


def numbers(model: nn.Module) -> list[float]:
    """Return all parameters."""
    return [float(x) for p in model.parameters() for x in p.detach().reshape(-1)]


def close(seen: Iterable[float], wanted: Iterable[float], within: float = 1e-12) -> bool:
    return all(abs(a - b) <= within for a, b in zip(seen, wanted, strict=True))


def feed(data: Any, **options: Any) -> Any:
    """Return a loader over a sequence or an iterable."""
    return DataLoader(data, **options)


def rows(count: int) -> torch.utils.data.TensorDataset:
    """Return rows of three features and a target, in float64."""
    x = torch.arange(count * 3, dtype=torch.float64).reshape(count, 3).sin()
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def items(batches: Sequence[Any]) -> list[list[int]]:
    """Return the batches of a loader of numbers as lists."""
    return [batch.tolist() for batch in batches]


def new_job(
    steps: int = 1,
    mixed_precision: str | None = None,
    *,
    scaler: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    stateful: bool = True,
    seed: int | None = None,
    cpu: bool = True,
    project_dir: Any = None,
    step_scheduler: bool = True,
    **data: bool,
) -> Accelerator:
    """Return an Accelerator on the CPU with the parts' own order of data, and these options."""
    from syncprims.accelerate import Accelerator, utils

    config = utils.DataLoaderConfiguration(use_stateful_dataloader=stateful, data_seed=seed, **data)
    handlers = [utils.GradScalerKwargs(**(scaler or {}))]
    return Accelerator(
        gradient_accumulation_steps=steps,
        mixed_precision=mixed_precision,
        cpu=cpu,
        project_dir=project_dir,
        step_scheduler_with_optimizer=step_scheduler,
        dataloader_config=config,
        kwargs_handlers=[*handlers, utils.DistributedDataParallelKwargs(**(ddp or {}))],
    )
