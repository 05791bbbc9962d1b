"""Models and tensors whose shapes differ between ranks: all ranks raise and stay in step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from support.training_models import in_pairs, new_job, numbers
from torch import nn

import syncprims
from syncprims.training import broadcast_model, gather, pad_across_processes
from syncprims.training.gathering import broadcast

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.rank_worlds import Ranks


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
