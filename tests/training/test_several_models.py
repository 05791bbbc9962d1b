"""Every gradient of a prepared model is averaged before anything reads it, whoever named it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import on_every_rank
from support.rank_worlds import Ranks
from support.training_models import close, everywhere, numbers, unit_model, with_others
from torch import nn

import syncprims
from syncprims.testing import run_world
from syncprims.training import Accumulator, average_gradients, join_uneven_inputs, prepare


def one(value: float) -> torch.Tensor:
    return torch.full((1, 1), float(value))


def slope(p: Any) -> float:
    assert p.grad is not None
    return float(p.grad.sum())


class Sum(nn.Module):
    """Two models that a loss passes, one after the other: each gradient is the mean of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.unet = unit_model(), unit_model()


def prepared_sum(accumulator: Accumulator) -> tuple[nn.Linear, nn.Linear, Callable[[float], Any]]:
    text, unet = prepare(unit_model(), unit_model(), accumulator=accumulator)
    return text, unet, lambda x: (text(one(x)) + unet(one(x))).sum()


@everywhere
@pytest.mark.parametrize("weighted", [False, True])
@on_every_rank
def test_a_model_that_a_window_does_not_name_is_averaged_at_once(weighted: bool) -> None:
    """It is scaled at the end, as the others, and its optimizer waits for that."""
    accumulator, rank, ranks = Accumulator(3), syncprims.get_rank(), syncprims.get_world_size()
    text, unet, loss = prepared_sum(accumulator)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (text, unet)]
    optimizers = list(prepare(*optimizers, accumulator=accumulator))
    mean = (ranks - 1) / 2  # of the ranks' numbers
    for micro_batch in (1, 2, 3):
        with accumulator.accumulate(unet):
            accumulator.backward(loss(rank), weight=1 if weighted else None)
            if micro_batch < 3:
                assert [slope(text.weight), slope(unet.weight)] == [
                    micro_batch * mean,
                    micro_batch * rank,
                ]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert close(numbers(text) + numbers(unet), [-mean, -mean], 1e-6)


@with_others
@on_every_rank
def test_a_model_that_only_some_ranks_reach_is_averaged_on_all() -> None:
    accumulator, rank = Accumulator(2), syncprims.get_rank()
    text, unet, loss = prepared_sum(accumulator)
    for alone in (True, False):
        with accumulator.accumulate(unet):
            accumulator.backward(loss(1.0) if rank == 1 else unet(one(1.0)).sum())
        if alone:
            assert slope(text.weight) == 1 / syncprims.get_world_size()
    assert slope(text.weight) == 1 / syncprims.get_world_size()


@with_others
def test_buffers_of_a_model_that_no_window_names_are_mains(world: Ranks) -> None:
    def program() -> list[float]:
        accumulator = Accumulator()
        text, unet = prepare(nn.BatchNorm1d(1), unit_model(), accumulator=accumulator)
        with accumulator.accumulate(unet):
            x = torch.arange(3.0).reshape(3, 1) * (1 + syncprims.get_rank())
            accumulator.backward(unet(text(x)).sum())
        return [float(b) for b in text.buffers()]

    seen = world.run(program)
    assert seen == [seen[0]] * world.ranks


@with_others
@pytest.mark.parametrize("frozen", ["for the last micro-batch", "later"])
@on_every_rank
def test_a_frozen_parameter_that_holds_a_gradient_is_averaged(frozen: str) -> None:
    accumulator, rank, ranks = Accumulator(2), syncprims.get_rank(), syncprims.get_world_size()
    model = prepare(Sum(), accumulator=accumulator)
    for last in (False, True):
        if last:
            model.text.requires_grad_(False)
        with accumulator.accumulate(model):
            accumulator.backward((model.text(one(rank)) + model.unet(one(rank))).sum())
    model.text.requires_grad_(frozen == "later")
    assert [slope(model.text.weight), slope(model.unet.weight)] == [
        (ranks - 1) / 4,
        (ranks - 1) / 2,
    ]


@with_others
@on_every_rank
def test_a_frozen_parameter_with_a_gradient_on_one_rank_is_averaged() -> None:
    model = Sum()
    model.text.requires_grad_(False)
    if syncprims.get_rank() == 1:
        model.text.weight.grad = one(4.0)
    average_gradients(model.parameters())
    assert slope(model.text.weight) == 4 / syncprims.get_world_size()
    assert model.unet.weight.grad is None


@with_others
@on_every_rank
def test_no_step_uses_gradients_of_one_rank() -> None:
    accumulator = Accumulator(2)
    model, other = prepare(unit_model(), unit_model(), accumulator=accumulator)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1.0)
    both = prepare(both, accumulator=accumulator)
    with accumulator.accumulate(model):
        accumulator.backward(model(one(1.0)).sum())
    accumulator.sync_gradients = True  # what is half full is said to be complete
    said = "gradients of this rank alone: those of Linear have not been averaged"
    calls: list[Callable[[], object]] = [
        both.step,
        lambda: accumulator.clip_grad_norm_(model.parameters(), 1.0),
        lambda: accumulator.clip_grad_value_(model.parameters(), 1.0),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=said):
            call()
    with accumulator.no_sync(model):
        both.step()  # each rank its own
    average_gradients(model.parameters())
    both.step()
    assert numbers(model) == [-2.0]


@everywhere
def test_a_step_in_a_backward_pass_is_refused_on_several_ranks(world: Ranks) -> None:
    def program() -> list[float]:
        accumulator = Accumulator()
        model = unit_model()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = prepare(model, optimizer, accumulator=accumulator)
        model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())  # type: ignore[no-untyped-call]
        with accumulator.accumulate(model):
            accumulator.backward(model(one(1.0)).sum())
        return numbers(model)

    outcomes = world.outcomes(program)
    if world.ranks == 1:
        assert outcomes == [[-1.0]]
    else:
        assert all("a backward pass is running" in str(one) for one in outcomes)


@everywhere
@on_every_rank
def test_a_parameter_of_no_model_is_scaled_with_its_optimizer() -> None:
    """Here each rank has the same loss, since nobody averages such a parameter."""
    accumulator, model, factor = Accumulator(4), unit_model(), nn.Parameter(torch.zeros(1, 1))
    optimizer = torch.optim.SGD([*model.parameters(), factor], lr=1.0)
    model, optimizer = prepare(model, optimizer, accumulator=accumulator)
    for _ in range(4):
        with accumulator.accumulate(model):
            accumulator.backward((model(one(1.0)) + factor).sum())
            optimizer.step()
    assert [*numbers(model), factor.item()] == [-1.0, -1.0]


# -- gradients that are not plain ------------------------------------------------------------------

needs_wide = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no gradients of another dtype"
)


@with_others
@needs_wide
@on_every_rank
def test_a_gradient_keeps_its_dtype() -> None:
    model: Any = unit_model().bfloat16()
    model.weight.grad_dtype = torch.float32
    accumulator, rank = Accumulator(), syncprims.get_rank()
    with accumulator.accumulate(model):
        if rank == 0:  # the others have none
            accumulator.backward(model(one(1.0).bfloat16()).sum() * 0)
            model.weight.grad += 1.001
        else:
            accumulator.backward(torch.zeros(1, requires_grad=True).sum())
    average_gradients(model.parameters())
    assert model.weight.grad.dtype == torch.float32
    assert syncprims.all_gather(slope(model.weight)) == [slope(model.weight)] * (
        syncprims.get_world_size()
    )


@everywhere
@on_every_rank
def test_sums_of_half_precision_do_not_overflow() -> None:
    """Each loss is divided first; a shorter last window has its own mean all the same."""
    accumulator, seen = Accumulator(16), list[float]()
    model = prepare(unit_model().half(), accumulator=accumulator)
    for micro_batches in (16, 8):
        for _ in range(micro_batches):
            with accumulator.accumulate(model):
                accumulator.backward(model(one(8192.0).half()).sum())
        if micro_batches == 8:
            assert accumulator.flush()
        seen.append(slope(model.weight))
        model.weight.grad = None
    assert seen == [8192.0, 8192.0]


@with_others
@on_every_rank
def test_sparse_gradients_keep_the_rows_of_all_ranks() -> None:
    """Rows of zeros, too, which an optimizer moves; a rank without rows has a sparse gradient."""
    rank, ranks = syncprims.get_rank(), syncprims.get_world_size()
    words: Any = nn.Embedding(6, 1, sparse=True)
    nn.init.ones_(words.weight)
    if rank == 0:
        (words(torch.tensor([0, 4])) * torch.tensor([[0.0], [2.0]])).sum().backward()
    elif rank == 1:
        words(torch.tensor([4, 5])).sum().backward()
    whole = copy.deepcopy(words)
    whole.weight.grad = torch.sparse_coo_tensor(
        torch.tensor([[0, 4, 5]]), torch.tensor([[0.0], [3.0], [1.0]]) / ranks, (6, 1),
        check_invariants=False,
    )  # fmt: skip
    average_gradients(words.parameters())
    assert words.weight.grad.coalesce().indices().tolist() == [[0, 4, 5]]
    for model in (words, whole):
        optimizer: Any = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        optimizer.step()
        model.weight.grad = whole.weight.grad * 0
        optimizer.step()
    assert close(numbers(words), numbers(whole), 1e-6)


@with_others
@pytest.mark.parametrize("way", ["assigned", "added"])
@on_every_rank
def test_parameters_that_came_after_prepare_are_averaged(way: str) -> None:
    accumulator, rank = Accumulator(), syncprims.get_rank()
    model = prepare(nn.Sequential(unit_model()), accumulator=accumulator)
    if way == "assigned":
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    else:
        model.requires_grad_(False).append(unit_model().requires_grad_(True))
    accumulator.backward(model(one(rank)).sum())
    seen = syncprims.all_gather([slope(p) for p in model.parameters() if p.requires_grad])
    assert seen == [seen[0]] * syncprims.get_world_size()


@with_others
@pytest.mark.parametrize("joining", [False, True])
@on_every_rank
def test_a_pass_leaves_models_in_no_sync_alone(joining: bool) -> None:
    accumulator, rank, ranks = Accumulator(2), syncprims.get_rank(), syncprims.get_world_size()
    text, unet, loss = prepared_sum(accumulator)
    with contextlib.ExitStack() as stack:
        if joining:
            stack.enter_context(join_uneven_inputs(accumulator))
        stack.enter_context(accumulator.no_sync(text))
        if joining:
            loss(rank).backward()
        else:
            for _ in range(2):
                with accumulator.accumulate(unet):
                    accumulator.backward(loss(rank))
        assert [slope(text.weight), slope(unet.weight)] == [rank, (ranks - 1) / 2]


@with_others
@on_every_rank
def test_what_passes_in_no_sync_have_left_is_averaged_by_the_next_one() -> None:
    """Also of models that it does not reach: a loss may be there in some micro-batches only."""
    accumulator, rank, ranks = Accumulator(), syncprims.get_rank(), syncprims.get_world_size()
    text, unet, loss = prepared_sum(accumulator)
    optimizer = torch.optim.SGD([text.weight, unet.weight], lr=1.0)
    optimizer = prepare(optimizer, accumulator=accumulator)
    with accumulator.no_sync(text), accumulator.no_sync(unet):
        accumulator.backward(loss(rank))
    accumulator.backward(unet(one(rank)).sum())
    optimizer.step()
    mean = (ranks - 1) / 2
    assert close(numbers(text) + numbers(unet), [-mean, -2 * mean], 1e-6)


def test_windows_that_would_scale_sums_twice_or_miss_them_are_refused() -> None:
    def program() -> None:
        accumulator = Accumulator(2)
        shared, first, second = prepare(*[unit_model() for _ in range(3)], accumulator=accumulator)
        with accumulator.accumulate(first):
            accumulator.backward(first(shared(one(1))).sum())
        with (
            pytest.raises(RuntimeError, match="passes of two windows reach Linear, and none"),
            accumulator.accumulate(second),
        ):
            accumulator.backward(second(shared(one(1))).sum())
        with (
            accumulator.accumulate(first),
            pytest.raises(RuntimeError, match=r"name all in one block, accumulate\(a, b\)"),
            accumulator.accumulate(second),
        ):
            pass

    run_world(program, 2, kind="threads")


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("flushed", [False, True])
def test_an_optimizer_of_no_known_model_follows_the_last_window(
    outside: bool, flushed: bool
) -> None:
    def program() -> tuple[list[float], list[int]]:
        accumulator, head = Accumulator(4 if flushed else 2), unit_model()
        model = prepare(unit_model(), accumulator=accumulator)
        plain = [torch.optim.SGD(one.parameters(), lr=1.0) for one in (model, head)]
        optimizers: list[Any] = list(prepare(*plain, accumulator=accumulator))
        nn.init.ones_(model.weight)
        nn.init.ones_(head.weight)

        def step() -> None:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        for x in (1.0, 3.0):
            with accumulator.accumulate(model):
                accumulator.backward(head(model(one(x))).sum())
                if not outside:
                    step()
            if outside:
                step()
        if flushed:
            accumulator.flush()
            step()
        return numbers(model) + numbers(head), [one.steps_taken for one in optimizers]

    assert run_world(program, 1, kind="threads") == [([-1.0, -1.0], [1, 1])]
