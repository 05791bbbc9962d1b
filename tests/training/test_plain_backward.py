"""``loss.backward()``: gradients are averaged over the ranks on every backend, as in DDP."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.training_models import (
    everywhere,
    feed,
    gradient,
    in_pairs,
    new_job,
    numbers,
    unit_model,
    with_others,
)
from torch import nn

import syncprims
from syncprims.training import unwrap_model

if TYPE_CHECKING:
    from support.rank_worlds import Ranks

    from syncprims.accelerate import Accelerator


def mine() -> torch.Tensor:
    """Return an input that differs between ranks: its mean over two ranks is 1.5."""
    return torch.full((1, 1), syncprims.get_rank() + 1.0)


def one_batch_each_and_one_more(job: Accelerator) -> tuple[Any, Any, Any]:
    """Return a prepared model, optimizer and loader. Rank 0 has two batches, the others one."""
    plain: Any = unit_model()
    data: Any = feed([torch.full((1,), 4.0)] * (job.num_processes + 1), batch_size=1)
    prepared: tuple[Any, Any, Any] = job.prepare(
        plain, torch.optim.SGD(plain.parameters(), lr=1.0), data
    )
    return prepared


def mean_of(ranks: int) -> float:
    return (ranks + 1) / 2


@everywhere
def test_buffers_are_mains_after_a_backward_outside_of_any_block(world: Ranks) -> None:
    def program() -> list[float]:
        job = new_job()
        plain = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
        model, optimizer = job.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        for step in range(2):
            batch = torch.tensor([[1.0], [3.0]]) * (step + 1) + 10 * syncprims.get_rank()
            job.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        return [buffer.item() for buffer in unwrap_model(model).buffers()]

    first, *others = world.run(program)
    assert first[0] == pytest.approx(0.1 * (0.9 * 2 + 4))  # of main's batches alone
    assert others == [first] * (world.ranks - 1)


@everywhere
def test_a_plain_backward_averages(world: Ranks) -> None:
    def program() -> list[float]:
        job = new_job()
        model: Any = job.prepare(unit_model())
        seen = []
        for _ in range(2):  # without a zero_grad, gradients add up
            model(mine()).sum().backward()
            seen.append(gradient(model))
        with job.no_sync(model):
            model(mine()).sum().backward()
        seen.append(gradient(model))
        if job.use_distributed:
            model.zero_grad()
            with model.no_sync():
                model(mine()).sum().backward()
            seen[-1] = 2 * mean_of(job.num_processes) + gradient(model)
        return seen

    mean = mean_of(world.ranks)
    for rank, seen in enumerate(world.run(program)):
        assert seen == [mean, 2 * mean, 2 * mean + rank + 1]


@everywhere
def test_a_plain_backward_in_a_window_averages_when_it_closes(world: Ranks) -> None:
    def program() -> list[float]:
        job = new_job(2)
        model: Any = job.prepare(unit_model())
        seen = []
        for _ in range(2):
            with job.accumulate(model):
                (model(mine()).sum() / 2).backward()
                seen.append(gradient(model))
        return seen

    for rank, seen in enumerate(world.run(program)):
        assert seen == [(rank + 1) / 2, mean_of(world.ranks)]


@with_others
def test_copies_of_a_prepared_model_are_plain_models(world: Ranks) -> None:
    def program() -> list[float]:
        job = new_job()
        model: Any = unwrap_model(job.prepare(unit_model()))
        seen = []
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            if syncprims.is_main():  # no other rank takes part
                with getattr(other, "no_sync", contextlib.nullcontext)():
                    pass
                other(mine()).sum().backward()
                seen.append(gradient(other))
        frozen = model.requires_grad_(False)
        assert not any(p.requires_grad for p in frozen.parameters())
        return seen

    assert world.run(program)[0] == [1.0, 1.0]


@in_pairs
def test_a_pass_that_fails_leaves_no_trace(world: Ranks) -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *_: torch.Tensor) -> Any:
            raise OSError("broken")

    def program() -> float:
        job = new_job()
        model: Any = job.prepare(nn.ModuleList([unit_model()]))
        inner = model[0] if isinstance(model, nn.ModuleList) else model.module[0]
        if not isinstance(model, nn.ModuleList):
            return 1.5  # DDP does not survive a failed pass
        try:
            (Broken.apply(inner(mine())) + inner(mine())).sum().backward()  # type: ignore[no-untyped-call]
        except OSError:
            inner.zero_grad()
        inner(mine()).sum().backward()
        return gradient(inner)

    assert world.run(program) == [1.5, 1.5]


@everywhere
def test_losses_divided_by_steps_at_once(world: Ranks) -> None:
    """As in Accelerate: also in the tail, which holds fewer micro-batches."""

    def program() -> tuple[list[float], float]:
        job = new_job(4)
        plain: Any = unit_model()
        model, optimizer, loader = job.prepare(
            plain,
            torch.optim.SGD(plain.parameters(), lr=1.0),
            feed([torch.ones(1)] * (5 * syncprims.get_world_size()), batch_size=1),
        )
        seen = []
        for batch in loader:
            with job.accumulate(model):
                job.backward(model(batch).mean())
                seen.append(gradient(model))
                optimizer.step()
                optimizer.zero_grad()
        return seen, numbers(model)[0]

    assert world.run(program) == [([0.25, 0.5, 0.75, 1.0, 0.25], -1.25)] * world.ranks


@with_others
def test_ranks_without_batches_join_passes_outside_of_windows(world: Ranks) -> None:
    def program() -> list[float]:
        job = new_job(even_batches=False)
        model, optimizer, loader = one_batch_each_and_one_more(job)
        found = []
        for clears in (True, False):
            for own in (True, False):
                with job.join_uneven_inputs([model]):
                    for batch in loader:
                        loss = model(batch).sum()
                        loss.backward() if own else job.backward(loss)
                        if clears:
                            optimizer.step()
                            optimizer.zero_grad()
                if not clears:
                    optimizer.step()
                optimizer.zero_grad()
                found.append(numbers(model)[0])
        return found

    one = -4.0 - 4.0 / world.ranks
    found = world.run(program)
    assert found[0] == [one, 2 * one, 3 * one, 4 * one]
    assert found == [found[0]] * world.ranks


@with_others
def test_weighted_passes_outside_of_windows_cannot_be_joined(world: Ranks) -> None:
    def program() -> None:
        job = new_job(even_batches=False)
        model, _, loader = one_batch_each_and_one_more(job)
        with (
            pytest.raises(ValueError, match="needs `with accumulate"),
            job.join_uneven_inputs([model]),
        ):
            job.backward(model(next(iter(loader))).sum(), weight=1)

    world.run(program)
