"""Gradient accumulation: one step from many micro-batches equals one large batch."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from conftest import on_every_rank
from support.rank_worlds import Ranks
from support.training_models import (
    alone,
    close,
    everywhere,
    feed,
    gradient,
    in_pairs,
    new_job,
    numbers,
    ones,
    unit_model,
    with_others,
)
from torch import nn

import syncprims
from syncprims.accelerate import Accelerator
from syncprims.testing import run_world
from syncprims.training import (
    Accumulator,
    broadcast_model,
    join_uneven_inputs,
    prepare,
    unwrap_model,
)


@everywhere
@on_every_rank
def test_the_tail_of_any_iterator_weighs_what_it_holds_when_flushed() -> None:
    accumulator, model = Accumulator(4), unit_model()
    optimizer = prepare(torch.optim.SGD(model.parameters(), lr=1.0), accumulator=accumulator)
    seen: list[float] = []
    for _ in range(2):
        for _ in range(5):
            with accumulator.accumulate(model):
                accumulator.backward(model(ones()).mean())
                optimizer.step()
                optimizer.zero_grad()
        assert accumulator.flush()
        seen.append(gradient(model))
        optimizer.step()
        optimizer.zero_grad()
        with accumulator.accumulate(model):
            pass
        assert not accumulator.flush(), "nothing is left"
        assert not accumulator.is_half_full
        optimizer.step()
        seen.append(numbers(model)[0])
    assert seen == [1.0, -2.0, 1.0, -4.0]


@with_others
@on_every_rank
def test_a_rank_without_a_micro_batch_flushes_with_the_others() -> None:
    accumulator = Accumulator(4)
    model = prepare(unit_model(), accumulator=accumulator)
    if not syncprims.is_main():
        with accumulator.accumulate():
            accumulator.backward(model(ones()).sum())
    assert accumulator.flush()
    assert gradient(model) == 1.0


@with_others
@on_every_rank
def test_a_flush_refuses_weights_that_some_ranks_lack() -> None:
    accumulator, model = Accumulator(4), unit_model()
    with accumulator.accumulate(model):
        accumulator.backward(model(ones()).sum(), weight=2 if syncprims.is_main() else None)
    with pytest.raises(ValueError, match="some ranks have losses with a weight"):
        accumulator.flush()
    assert not accumulator.sync_gradients  # and no step passes


@everywhere
@on_every_rank
def test_clipping_follows_the_window_that_was_entered_last() -> None:
    """A model is in two windows: what is clipped is that of the latest micro-batch."""
    accumulator, one, other = Accumulator(2), unit_model(), unit_model()
    for micro_batch in range(4):  # the window of `one` alone is full after the second and fourth
        with accumulator.accumulate(one, other):
            pass
        with accumulator.accumulate(one):
            accumulator.backward(one(100 * ones()).mean())
            norm = float(accumulator.clip_grad_norm_(one.parameters(), 1.0))
        full = micro_batch % 2 == 1
        assert norm == (100.0 if full or micro_batch else 0.0)
        assert gradient(one) == pytest.approx(1.0 if full else 100.0, rel=1e-5)
        if full:
            one.zero_grad()
    with accumulator.accumulate(one, other):  # half full, and entered last
        accumulator.backward(one(100 * ones()).mean())
        accumulator.clip_grad_norm_(one.parameters(), 1.0)
        accumulator.clip_grad_value_(one.parameters(), 1.0)
    assert gradient(one) == 100.0


@everywhere
@pytest.mark.parametrize("held", [False, True], ids=["broken off", "held open"])
@on_every_rank
def test_an_evaluation_inside_of_training_changes_nothing(held: bool) -> None:
    accumulator, model = Accumulator(4), unit_model()
    ranks = syncprims.get_world_size()
    train = feed([torch.ones(1)] * (6 * ranks), batch_size=1)
    evaluate = feed([torch.ones(1)] * (3 * ranks), batch_size=1)
    model, train, evaluate = prepare(model, train, evaluate, accumulator=accumulator)
    synced, kept = [], []
    for step, batch in enumerate(train):
        with accumulator.accumulate(model):
            accumulator.backward(model(batch).mean())
            synced += [step] * accumulator.sync_gradients
        iterator = iter(evaluate)
        for seen, _ in enumerate(iterator):
            if seen == step % 3:
                break
        kept += [iterator] * held
    assert synced == [3, 5]


def nested(outer: Any, inner: Any) -> Iterator[Any]:
    for i, _ in enumerate(outer):
        for j, batch in enumerate(inner):
            yield (i, j), batch


def side_by_side(*loaders: Any) -> Iterator[Any]:
    for i, batches in enumerate(zip(*loaders, strict=False)):
        yield i, sum(batches)


def in_pieces(loader: Any) -> Iterator[Any]:
    for i, batch in enumerate(loader):
        for j, piece in enumerate(batch.repeat(2, 1)):
            yield (i, j), piece[None]


#: How loaders of these lengths are read, the steps, and the micro-batches that close a window.
CLOSINGS: list[tuple[Any, tuple[int, ...], int, list[Any]]] = [
    (nested, (2, 3), 2, [(0, 1), (0, 2), (1, 1), (1, 2)]),
    (side_by_side, (5, 5), 4, [3, 4]),
    (side_by_side, (5, 8), 4, [3, 4]),
    (side_by_side, (8, 5), 4, [3, 4]),
    (in_pieces, (4,), 2, [(0, 1), (1, 1), (2, 1), (3, 1)]),  # by count: not at the first piece
    (in_pieces, (2,), 3, [(1, 0)]),
]


@alone
def test_loaders_close_windows(world: Ranks) -> None:
    def closed(read: Any, lengths: tuple[int, ...], steps: int) -> list[Any]:
        accumulator, model, synced = Accumulator(steps), unit_model(), []
        loaders = [feed([torch.ones(1)] * length, batch_size=1) for length in lengths]
        model, *loaders = prepare(model, *loaders, accumulator=accumulator)
        for at, batch in read(*loaders):
            with accumulator.accumulate(model):
                accumulator.backward(model(batch).mean())
                synced += [at] * accumulator.sync_gradients
        return synced

    (found,) = world.run(lambda: [closed(*case) for *case, _ in CLOSINGS])
    for case, synced in zip(CLOSINGS, found, strict=True):
        assert synced == case[3], case


@everywhere
@on_every_rank
def test_two_accumulators_do_not_disturb_each_other() -> None:
    first, second = Accumulator(2), Accumulator(3)
    one, two = unit_model(), unit_model()
    seen = []
    for _ in range(6):
        with first.accumulate(one):
            first.backward(one(ones()).mean())
            with second.accumulate(two):
                second.backward(two(ones()).mean())
        seen.append([first.sync_gradients, second.sync_gradients])
        if second.sync_gradients:
            assert gradient(two) == 1.0
            two.zero_grad()
    no, both = [False, False], [True, True]
    wanted = [no, [True, False], [False, True], [True, False], no, both]
    assert seen == wanted


@everywhere
@on_every_rank
def test_what_was_prepared_follows_the_job_that_prepares_it_again() -> None:
    seen: list[Any] = []
    job = new_job(2)
    model, optimizer = job.prepare(
        *(model := unit_model(), torch.optim.SGD(model.parameters(), lr=1.0))
    )
    other = new_job(2)
    for owner in (job, job, other):
        owner.free_memory()
        again, same = owner.prepare(model, optimizer)
        assert same is optimizer
        assert [*map(id, owner.accumulator.optimizers)] == [id(optimizer)]
        for _ in range(2):
            with owner.accumulate(again):
                owner.backward(again(ones()).sum())
                optimizer.step()
                optimizer.zero_grad()
            seen += numbers(again)
    assert seen == [0.0, -1.0, -1.0, -2.0, -2.0, -3.0]


@with_others
@pytest.mark.parametrize("alike", [False, True])
def test_ranks_that_freeze_different_parameters_are_told(world: Ranks, alike: bool) -> None:
    """Gradients of the same length, too, which could be averaged with each other."""

    def program() -> None:
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) if alike else nn.Linear(2, 2)
        if alike:
            model[int(syncprims.is_main())].requires_grad_(False)
        else:
            model.bias.requires_grad_(syncprims.is_main())
        accumulator = Accumulator()
        with accumulator.accumulate(model):
            accumulator.backward(model(torch.ones(1, 2)).sum())

    for outcome in world.outcomes(program):
        assert isinstance(outcome, syncprims.RankMismatch)
        if alike:
            assert "rank 0: parameter 0, (2, 2), float32\n" in str(outcome)
            assert "rank 1: parameter 0, (2, 2), float32, frozen\n" in str(outcome)


@with_others
def test_running_means_are_rank_0s_after_each_step(world: Ranks) -> None:
    def program() -> list[list[float]]:
        plain = nn.BatchNorm1d(2)
        accumulator, seen = Accumulator(2), []
        model = prepare(plain, accumulator=accumulator)
        for step in range(4):
            with accumulator.accumulate(model):
                x = torch.tensor([[1.0, 2.0], [3.0, 5.0]]) * (1 + syncprims.get_rank())
                # Later also twice before its backward pass, as in adversarial training.
                accumulator.backward((model(x) + model(x) if step > 1 else model(x)).sum())
            seen += [plain.running_mean.tolist()] * accumulator.sync_gradients  # type: ignore[union-attr]
        return seen

    results = world.run(program)
    assert all(seen == results[0] for seen in results)
    assert results[0][0] == pytest.approx([2 * 0.19, 3.5 * 0.19])


@with_others
def test_running_means_are_rank_0s_after_a_flush(world: Ranks) -> None:
    def program() -> list[float]:
        plain = nn.BatchNorm1d(1, momentum=1.0)
        accumulator = Accumulator(3)
        model = prepare(plain, accumulator=accumulator)
        with accumulator.accumulate(model):
            x = torch.tensor([[1.0], [3.0]]) * (1 + syncprims.get_rank())
            accumulator.backward(model(x).sum())
        assert accumulator.flush()
        return plain.running_mean.tolist()  # type: ignore[union-attr]

    assert world.run(program) == [[2.0]] * world.ranks


@everywhere
@on_every_rank
def test_after_a_state_is_loaded_a_plain_loop_trains_as_before() -> None:
    """What a window holds that is not full is dropped."""
    accumulator = Accumulator(1)
    model, optimizer = prepare(
        *(model := unit_model(), torch.optim.SGD(model.parameters(), lr=1.0)),
        accumulator=accumulator,
    )
    with accumulator.accumulate(model):
        accumulator.backward(model(ones()).sum())
        optimizer.step()
        optimizer.zero_grad()
    accumulator.steps = 2
    with accumulator.accumulate(model):
        accumulator.backward(model(ones()).sum())
    assert accumulator.is_half_full
    accumulator.steps = 1
    accumulator.restart()
    closed, seen = accumulator.sync_gradients, numbers(model)
    for _ in range(2):  # outside of any block
        accumulator.backward(model(ones() * (1 + syncprims.get_rank())).sum())
        optimizer.step()
        optimizer.zero_grad()
        seen += numbers(model)
    mean = (syncprims.get_world_size() + 1) / 2
    assert (closed, seen) == (True, [-1.0, -1 - mean, -1 - 2 * mean])


@alone
@on_every_rank
def test_a_restart_forgets_a_step_whose_gradients_were_not_cleared() -> None:
    accumulator, model = Accumulator(), unit_model()
    optimizer = prepare(torch.optim.SGD(model.parameters(), lr=1.0), accumulator=accumulator)
    with accumulator.accumulate(model):
        accumulator.backward(model(ones()).sum())
        optimizer.step()
    accumulator.restart()
    accumulator.steps = 2
    with accumulator.accumulate(model):
        accumulator.backward(model(ones()).sum())
        optimizer.zero_grad()
    assert gradient(model) == 1.0


@alone
@on_every_rank
def test_a_loss_may_come_with_a_gradient() -> None:
    accumulator, model = Accumulator(2), unit_model()
    for several in (True, False, False, True):  # the factor of a window is that of its last loss
        with accumulator.accumulate(model):
            if several:
                accumulator.backward(model(ones(2)), gradient=torch.tensor([[1.0], [2.0]]))
            else:
                accumulator.backward(model(ones()).sum(), gradient=torch.tensor(5.0))
        if accumulator.sync_gradients:
            assert gradient(model) == 4.0
            model.zero_grad()


@alone
@on_every_rank
def test_misuse_is_told() -> None:
    accumulator, model = Accumulator(2), unit_model()
    with (
        accumulator.accumulate(model),
        pytest.raises(RuntimeError, match="inside of itself"),
        accumulator.accumulate(model),
    ):
        pass
    with accumulator.accumulate(model), pytest.raises(ValueError, match="weight"):
        accumulator.backward(model(ones()).sum(), weight=-1)
    mixed = Accumulator(2)
    with mixed.accumulate(model):
        mixed.backward(model(ones()).sum(), weight=2)
    with mixed.accumulate(model), pytest.raises(ValueError, match="use one form"):
        mixed.backward(model(ones()).sum())
    several = Accumulator(2)
    with several.accumulate(model):
        several.backward(model(ones()).sum(), weight=2)
        with pytest.raises(ValueError, match="different weights"):
            several.backward(model(ones()).sum(), weight=3)
    with pytest.raises(ValueError, match="steps=0"):
        Accumulator(0)
    with pytest.raises(TypeError):
        Accumulator(1.5)  # type: ignore[arg-type]


@in_pairs
def test_running_means_go_on_with_the_ranks_that_train(world: Ranks) -> None:
    def program() -> float:
        rank, accumulator = syncprims.get_rank(), Accumulator()
        plain = nn.BatchNorm1d(1, momentum=1.0)
        model = prepare(plain, accumulator=accumulator)
        with join_uneven_inputs(accumulator):
            for i in range(1 + rank):  # rank 0 is done first
                with accumulator.accumulate(model):
                    accumulator.backward(model(torch.full((2, 1), 5.0 * i)).sum())
        assert plain.running_mean is not None
        return float(plain.running_mean)

    assert world.run(program) == [5.0, 5.0]


@everywhere
@on_every_rank
def test_models_may_grow_after_prepare() -> None:
    accumulator, rank = Accumulator(2), syncprims.get_rank()
    model: Any = nn.ModuleList([unit_model()])
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = prepare(model, optimizer, accumulator=accumulator)

    def step() -> None:
        for _ in range(2):
            with accumulator.accumulate(model):
                x = torch.full((1, 1), float(rank + 1))
                accumulator.backward(sum(layer(x) for layer in model).sum())
                optimizer.step()
                optimizer.zero_grad()

    step()
    model.append(unit_model())
    optimizer.add_param_group({"params": model[1].parameters()})
    step()
    mean = (syncprims.get_world_size() + 1) / 2
    assert numbers(model) == [-2 * mean, -mean]


@in_pairs
def test_a_closure_may_step_many_times(world: Ranks) -> None:
    def program() -> tuple[list[float], list[float]]:
        data = torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.0, 1.0], [2.0, 2.0]]).double()
        accumulator, rank = Accumulator(), syncprims.get_rank()
        mine = data.chunk(world.ranks)[rank]
        whole, plain_model = nn.Linear(2, 1).double(), nn.Linear(2, 1).double()
        broadcast_model(whole)
        plain_model.load_state_dict(whole.state_dict())
        prepared: Any = torch.optim.LBFGS(whole.parameters(), lr=0.5, max_iter=4)
        model, prepared = prepare(whole, prepared, accumulator=accumulator)
        plain: Any = torch.optim.LBFGS(plain_model.parameters(), lr=0.5, max_iter=4)

        def ours() -> float:
            prepared.zero_grad()
            loss = (model(mine) - mine.sum(1, keepdim=True)).square().mean()
            accumulator.backward(loss)
            return float(syncprims.all_reduce(loss.detach(), "mean"))

        def theirs() -> float:
            plain.zero_grad()
            loss = (plain_model(data) - data.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return float(loss.detach())

        for _ in range(3):
            with accumulator.accumulate(model):
                prepared.step(ours)
            plain.step(theirs)
        return numbers(model), numbers(plain_model)

    for mine, wanted in world.run(program):
        assert close(mine, wanted, within=1e-8)


@alone
@on_every_rank
def test_what_is_forgotten_comes_into_no_new_window() -> None:
    new = Accumulator(2)
    model = unit_model()
    with new.accumulate(model):
        new.backward(model(100 * ones()).mean())
    new.forget()
    model = unit_model()
    with new.accumulate(model):
        new.backward(model(ones()).mean())
    first = new.sync_gradients
    with new.accumulate(model):
        new.backward(model(ones()).mean())
    assert (gradient(model), first) == (1.0, False)


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
@on_every_rank
def test_a_plain_backward_averages() -> None:
    job = new_job()
    model: Any = job.prepare(unit_model())
    seen = []
    for _ in range(2):  # without a zero_grad, gradients add up
        model(mine()).sum().backward()
        seen.append(gradient(model))
    with job.no_sync(model), job.no_sync(unit_model()):
        model(mine()).sum().backward()
    seen.append(gradient(model))
    if job.use_distributed:
        model.zero_grad()
        with model.no_sync():
            model(mine()).sum().backward()
        seen[-1] = 2 * mean_of(job.num_processes) + gradient(model)
    mean = mean_of(syncprims.get_world_size())
    rank = syncprims.get_rank()
    assert seen == [mean, 2 * mean, 2 * mean + rank + 1]


@everywhere
@on_every_rank
def test_a_plain_backward_in_a_window_averages_when_it_closes() -> None:
    job = new_job(2)
    model: Any = job.prepare(unit_model())
    seen = []
    for _ in range(2):
        with job.accumulate(model):
            (model(mine()).sum() / 2).backward()
            seen.append(gradient(model))
    rank = syncprims.get_rank()
    assert seen == [(rank + 1) / 2, mean_of(syncprims.get_world_size())]


@everywhere
@on_every_rank
def test_a_plain_backward_averages_a_model_that_a_block_has_named_until_it_is_forgotten() -> None:
    accumulator, model = Accumulator(), unit_model()
    with accumulator.accumulate(model):
        model(mine()).sum().backward()
    averaged = gradient(model)
    accumulator.forget()
    model.zero_grad()
    model(mine()).sum().backward()
    ranks, rank = syncprims.get_world_size(), syncprims.get_rank()
    assert (averaged, gradient(model)) == (mean_of(ranks), rank + 1)


@everywhere
@on_every_rank
def test_a_backward_after_its_block_belongs_to_the_window() -> None:
    accumulator, model = Accumulator(2), unit_model()
    for _ in range(2):
        with accumulator.accumulate(model):
            loss = model(mine()).mean()
        accumulator.backward(loss)
    assert gradient(model) == mean_of(syncprims.get_world_size())


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


@with_others
def test_ranks_without_batches_join_passes_outside_of_windows(world: Ranks) -> None:
    def program() -> list[float]:
        job = new_job(even_batches=False)
        model, optimizer, loader = one_batch_each_and_one_more(job)
        found = []
        for clears, own in product(("first", "last", "never"), (True, False)):
            with job.join_uneven_inputs([model]):
                for batch in loader:
                    if clears == "first":
                        optimizer.zero_grad()
                    loss = model(batch).sum()
                    loss.backward() if own else job.backward(loss)
                    if clears != "never":
                        optimizer.step()
                    if clears == "last":
                        optimizer.zero_grad()
            if clears == "never":
                optimizer.step()
            optimizer.zero_grad()
            found.append(numbers(model)[0])
        return found

    one = -4.0 - 4.0 / world.ranks
    found = world.run(program)
    assert found[0] == [number * one for number in range(1, 7)]
    assert found == [found[0]] * world.ranks


@with_others
@on_every_rank
def test_weighted_passes_outside_of_windows_cannot_be_joined() -> None:
    job = new_job(even_batches=False)
    model, _, loader = one_batch_each_and_one_more(job)
    with pytest.raises(ValueError, match="`with accumulate"), job.join_uneven_inputs([model]):
        job.backward(model(next(iter(loader))).sum(), weight=1)


def replicas(change: bool, **options: Any) -> None:
    """Take four steps; with `change`, rank 1 changes a weight by itself before the third."""
    accumulator = Accumulator(**options)
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model, optimizer = prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), accumulator=accumulator
    )
    for step in range(4):
        if change and step == 2 and syncprims.get_rank() == 1:
            with torch.no_grad():
                model[0].bias += 1
        with accumulator(model):
            accumulator.backward(model(torch.randn(4, 2)).square().sum())
            optimizer.step()
            optimizer.zero_grad()


@everywhere
def test_replicas_that_differ_are_named_at_the_next_comparison(world: Ranks) -> None:
    if world.ranks == 1:
        pytest.skip("it has nobody to differ from")

    def program() -> str:
        replicas(False, check_replicas=1)
        replicas(True)  # off
        with pytest.raises(syncprims.RankMismatch) as caught:
            replicas(True, check_replicas=2)
        syncprims.barrier("all raise, and stay in step")
        return str(caught.value)

    agreed = "no two ranks agree"
    if world.ranks > 2:
        agreed = f"ranks {[0, *range(2, world.ranks)]} agree, rank 1 differs"
    for said in world.run(program):
        assert f"after step 4, first here:\n  parameter '0.bias': {agreed}\n" in said
        assert "weight" not in said.split("\n", 2)[1]


def test_a_variable_switches_the_comparison_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCPRIMS_CHECK_REPLICAS", "3")
    with pytest.raises(syncprims.RankMismatch, match="after step 3"):
        run_world(lambda: replicas(True), 2)
    run_world(lambda: replicas(True, check_replicas=0), 2)
    with pytest.raises(ValueError, match="check_replicas=-1"):
        Accumulator(check_replicas=-1)


@pytest.mark.parametrize("weight", [None, 1])
def test_a_micro_batch_that_one_rank_skips_counts_on_none(weight: int | None) -> None:
    def train(steps: int, bad: set[tuple[int, int]]) -> tuple[list[float], int]:
        """Return the gradient of each step; `bad` has ranks and batches."""
        accumulator = Accumulator(steps)
        model, optimizer, loader = prepare(
            *(model := unit_model(), torch.optim.SGD(model.parameters(), lr=0.0)),
            feed([torch.full((1,), float(n)) for n in range(1, 11)], batch_size=1),
            accumulator=accumulator,
        )
        rank, seen = syncprims.get_rank(), []
        for number, batch in enumerate(loader):
            with accumulator(model):
                loss = model(batch).sum()
                accumulator.backward(loss, weight, skip=(rank, number) in bad)
                if accumulator.sync_gradients:
                    seen.append(gradient(model))
                optimizer.step()
                optimizer.zero_grad()
        return seen, accumulator.skipped

    def expect(batches: list[int]) -> float:
        """Return the mean of these batches, numbered on each rank; the ranks take turns."""
        values = [2 * number + 1 + rank for number in batches for rank in range(2)]
        return sum(values) / len(values)

    def program() -> None:
        assert train(2, set()) == ([expect([0, 1]), expect([2, 3]), expect([4])], 0)
        assert train(2, {(1, 1)}) == ([expect([0, 2]), expect([3, 4])], 1)
        assert train(2, {(0, 1), (1, 4)}) == ([expect([0, 2]), expect([3])], 2)
        assert train(1, {(1, 4)}) == ([expect([n]) for n in range(4)], 1)
        assert train(9, {(n % 2, n) for n in range(5)}) == ([], 5)
        loss = torch.ones((), requires_grad=True)
        with pytest.raises(ValueError, match="call it in"):
            Accumulator().backward(loss, skip=True)
        for first in (None, False, True):
            accumulator = Accumulator()
            with accumulator(unit_model()):
                accumulator.backward(loss, skip=first)
                with pytest.raises(ValueError, match="give it one loss"):
                    accumulator.backward(loss, skip=True)

    run_world(program, 2)
