"""What `prepare` returns, to type checkers too, and what it refuses on all ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, assert_type

import pytest
import torch
from conftest import on_every_rank
from support.rank_worlds import Ranks
from support.training_models import alone, in_pairs, new_job, numbers, rows
from torch import nn
from torch.utils.data import DataLoader

import syncprims
from syncprims.training import (
    Accumulator,
    broadcast_model,
    gather,
    pad_across_processes,
    prepare,
    unwrap_model,
)
from syncprims.training.gathering import broadcast


class Net(torch.nn.Linear):
    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.forward(x)


@alone
@on_every_rank
def test_types_survive_prepare() -> None:
    accelerator, net = new_job(), Net(3, 1)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters()), DataLoader(rows(4), batch_size=2)
    )
    assert_type(model, Net)
    assert_type(optimizer, torch.optim.AdamW)
    assert_type(loader, DataLoader[tuple[torch.Tensor, ...]])
    assert_type(accelerator.unwrap_model(model), Net)
    assert_type(unwrap_model(model), Net)
    single = prepare(Net(1, 1), accumulator=Accumulator())
    assert_type(single, Net)
    one, two = prepare(Net(1, 1), 3, accumulator=Accumulator())
    assert_type((one, two), tuple[Net, int])
    assert isinstance(model, Net)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(loader, DataLoader)
    with torch.no_grad():
        assert model.twice(torch.zeros(1, 3)).item() == 2 * net.bias.item()


class Optimizer(torch.optim.SGD):
    """It has modes, as schedule-free ones do, and a way of its own to clear gradients."""

    mode, cleared = "", 0

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none)


@alone
@on_every_rank
def test_a_prepared_optimizer_is_the_optimizer() -> None:
    net, accumulator = Net(3, 1), Accumulator(2)
    inner = torch.optim.AdamW(net.parameters(), lr=0.5)
    steps = torch.optim.lr_scheduler.StepLR(inner, 1)
    model, optimizer, schedule = prepare(net, inner, steps, accumulator=accumulator)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert prepare(optimizer, accumulator=accumulator) is optimizer
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # accepts it as its own
    called: list[int] = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    for _ in range(4):
        with accumulator.accumulate(model):
            accumulator.backward(model(torch.ones(1, 3)).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert len(called) == optimizer.state_dict()["state"][0]["step"] == 2
    assert optimizer.state is inner.state
    optimizer.state = defaultdict(dict)
    optimizer.param_groups = [{**group, "lr": 0.1} for group in inner.param_groups]
    optimizer.defaults = {**inner.defaults, "lr": 0.2}
    assert not inner.state
    assert (inner.param_groups[0]["lr"], inner.defaults["lr"]) == (0.1, 0.2)
    schedule.gamma = 0.5
    assert schedule.gamma == steps.gamma == 0.5


@alone
@on_every_rank
def test_what_an_optimizer_does_in_its_own_way_is_left_to_it() -> None:
    net, accumulator = Net(3, 1), Accumulator()
    own = Optimizer(net.parameters())
    prepared: Any = prepare(own, accumulator=accumulator)
    other: Any = prepare(torch.optim.SGD(net.parameters()), accumulator=accumulator)
    for mode in ("train", "eval"):
        getattr(prepared, mode)()
        getattr(other, mode)()
        assert own.mode == mode
    for optimizer in (prepared, other):
        for to_none in (True, False):
            with accumulator.accumulate(net):
                accumulator.backward(net(torch.ones(1, 3)).sum())
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
            assert (net.bias.grad is None) == to_none
    assert own.cleared == 2


def frozen(layer: nn.Linear, *, bias: bool) -> nn.Linear:
    assert layer.bias is not None
    layer.bias.requires_grad_(not bias)
    return layer


#: What each of two ranks builds, and what all are told.
MODELS: list[tuple[Callable[[int], nn.Module], str]] = [
    (lambda r: nn.Linear(2, 2 + r), r"0: parameter 'weight', \(2, 2\).*\n.*1: .*\(3, 2\), float32"),
    (lambda r: nn.Linear(2 + r, 3 - r, bias=False), r"\(3, 2\), float32\n.*\(2, 3\)"),
    (lambda r: nn.Linear(2, 2, dtype=(torch.float32, torch.float64)[r]), r"float64"),
    (lambda r: nn.Sequential(nn.Linear(2, 2), *[nn.ReLU(), nn.Linear(2, 2)][: 2 * r]),
     r"rank 0: nothing more\n  rank 1: parameter '2.weight'"),
    (lambda r: nn.BatchNorm1d(2, track_running_stats=bool(r)), r"buffer 'running_mean'"),
    (lambda r: nn.ModuleDict({"ab"[r]: nn.Linear(2, 2)}), r"'a.weight'.*\n.*'b.weight'"),
    (lambda r: frozen(nn.Linear(2, 2), bias=bool(r)), r"'bias', \(2,\), float32, frozen"),
]  # fmt: skip


@in_pairs
def test_a_model_that_differs_between_ranks_is_told_on_all(world: Ranks) -> None:
    def program() -> list[str]:
        rank = syncprims.get_rank()
        said: list[str] = []
        for build, _ in MODELS:
            job, model = new_job(), build(rank)
            before = numbers(model)
            with pytest.raises(syncprims.RankMismatch) as told:
                job.prepare(model)
            assert numbers(model) == before
            said.append(str(told.value))
        with pytest.raises(syncprims.RankMismatch):
            broadcast_model(nn.Linear(1, 1 + rank))
        syncprims.barrier("still in step")
        model = new_job().prepare(nn.Linear(2, 2))
        assert syncprims.all_gather(numbers(model))[0] == numbers(model)
        return said

    first, second = world.run(program)
    assert first == second
    for (_, expected), text in zip(MODELS, first, strict=True):
        assert re.search(expected, text), text
        assert text.endswith("Build the same model on every rank.")


#: What each of two ranks lets be filled, and what all are told.
TREES: list[tuple[Callable[[int], Any], str]] = [
    (lambda r: torch.zeros(2, dtype=(torch.float32, torch.int64)[r]), r"\(2,\), float32\n.*int64"),
    (lambda r: torch.zeros(1 + r), r"0: tensor: \(1,\), float32\n.*1: tensor: \(2,\)"),
    (lambda r: torch.zeros(1, dtype=(torch.complex64, torch.float32)[r]), r"complex64"),
    (lambda r: {"ab"[r]: torch.zeros(1)}, r"tensor\['a'\]: .*\n.*tensor\['b'\]: "),
    (lambda r: [torch.zeros(1)] * (1 + r), r"nothing more\n.*tensor\[1\]"),
    (lambda r: [None, torch.zeros(1)][r], r"NoneType\n.*float32"),
]


@in_pairs
def test_a_broadcast_into_something_else_is_told_on_all(world: Ranks) -> None:
    def program() -> list[str]:
        rank = syncprims.get_rank()
        said: list[str] = []
        for make, _ in TREES:
            with pytest.raises(syncprims.RankMismatch) as told:
                broadcast(make(rank))
            said.append(str(told.value))
        with pytest.raises(TypeError, match=r"tensor\['n'\] is of type int; syncprims.broadcast"):
            broadcast({"n": 5 + rank, "t": torch.zeros(1)})
        with pytest.raises(ValueError, match="7"):
            broadcast(torch.zeros(1), from_process=7)
        return said

    first, second = world.run(program)
    assert first == second
    for (_, expected), text in zip(TREES, first, strict=True):
        assert re.search(expected, text), text


class Pair(NamedTuple):
    one: Any
    other: Any


@dataclass
class Held:
    one: Any
    other: Any = None


@in_pairs
def test_a_broadcast_fills_by_name_and_place(world: Ranks) -> None:
    def program() -> list[Any]:
        rank = syncprims.get_rank()

        def part(number: int) -> torch.Tensor:
            return torch.full((1,), number if rank == 1 else -1)

        by_name = {"a": part(0), "b": part(1)}
        if rank == 0:
            by_name = dict(reversed(by_name.items()))
        tree = [by_name, Pair(part(2), (part(3),)), Held(part(4)), *map(part, range(5, 13))]
        assert broadcast(tree, from_process=1) is tree
        held = [by_name["a"], by_name["b"], tree[1].one, tree[1].other[0], tree[2].one, *tree[3:]]
        return [int(tensor) for tensor in held]

    assert world.run(program) == [list(range(13))] * 2


@in_pairs
def test_padding_of_unlike_structures_is_a_mismatch(world: Ranks) -> None:
    def program() -> list[Any]:
        rank = syncprims.get_rank()
        a, b = torch.ones(2), torch.ones(2, 3)
        cases: list[Any] = [[a, b][rank], [[a], [a, a]][rank], [{"x": a}, {"y": a}][rank]]
        for case in cases:
            with pytest.raises(syncprims.RankMismatch, match="rank 1"):
                pad_across_processes(case)
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
        for call in (pad_across_processes, gather):
            with pytest.raises(TypeError, match="nested"):
                call(nested)
        found: list[Any] = pad_across_processes(torch.ones(1 + rank)).tolist()
        return found

    assert world.run(program) == [[1.0, 0.0], [1.0, 1.0]]


def test_a_misspelt_option_is_refused() -> None:
    options: Any = {"sede": 7}
    with pytest.raises(TypeError, match="sede"):
        prepare(nn.Linear(1, 1), accumulator=Accumulator(), **options)
