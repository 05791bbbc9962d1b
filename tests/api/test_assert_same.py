"""`assert_same`: what counts as the same value, on every backend."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import math
import types
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import on_every_rank, several

import syncprims as sp


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Config:
    name: str
    weights: Any


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))


def floats(seed: int) -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3) + seed


def trained(seed: int) -> dict[str, Any]:
    """Return the state of an optimizer."""
    layers = model(seed)
    optimizer = torch.optim.Adam(layers.parameters())
    layers[0](torch.ones(2, 3) + seed).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def records(seed: int) -> Any:
    kind = np.dtype([("flag", "i1"), ("number", "f8")], align=True)
    found = np.frombuffer(np.random.default_rng().bytes(3 * kind.itemsize), kind).copy()
    found["flag"], found["number"] = [1, 0, 1], [seed, math.nan, -0.0]
    return found


#: Functions that make equal values from equal seeds: each time new objects.
VALUES: dict[str, Callable[[int], Any]] = {
    "state_dict": lambda seed: model(seed).state_dict(),
    "optimizer": trained,
    "parameter": lambda seed: torch.nn.Parameter(floats(seed)),
    "parameters": lambda seed: list(model(seed).parameters()),
    "named parameters": lambda seed: dict(model(seed).named_parameters()),
    "dataclass": lambda seed: Config("c", [seed, floats(seed)]),
    "ordered": lambda seed: collections.OrderedDict(a=floats(seed), b=[floats(0)]),
    "default": lambda seed: collections.defaultdict(list, {"a": [floats(seed)]}),
    "read-only": lambda seed: types.MappingProxyType({"a": floats(seed)}),
    "named tuple": lambda seed: Pair(floats(seed), np.arange(3) + seed),
    "mixed": lambda seed: {"t": floats(seed), "n": [np.float32(seed), {"x": (np.ones(2), None)}]},
    "bfloat16": lambda seed: floats(seed).bfloat16(),
    "complex": lambda seed: torch.complex(floats(seed), floats(0)),
    "conjugate": lambda seed: torch.complex(floats(seed), floats(1)).conj(),
    "strided": lambda seed: floats(seed).t()[::2],
    "meta": lambda seed: torch.empty(seed + 1, device="meta"),
    "objects": lambda seed: np.array([seed, "a", floats(seed)], dtype=object),
    "records": records,
    "memory map": lambda seed: (np.ones(3) + seed).view(np.memmap),
    "bytes": lambda seed: [bytearray([seed]), bytes([seed])],
    "enum keys": lambda seed: {Color.RED: floats(seed), Color.BLUE: 1},
    "enum set": lambda seed: {Color.RED, Color.BLUE, Fraction(seed + 1, 3)},
    "types": lambda seed: [torch.float32, torch.Size([seed]), torch.device("cpu", seed), None],
    "numbers": lambda seed: [Fraction(seed, 3), range(seed), slice(seed), 1j, math.nan, -0.0],
    "namespaces": lambda seed: [argparse.Namespace(a=seed), types.SimpleNamespace(b=floats(seed))],
    "paths": lambda seed: {Path("a") / str(seed): Path("b")},
}


@on_every_rank
def test_equal_values_are_the_same_however_they_are_held() -> None:
    for name, make in VALUES.items():
        sp.assert_same(make(0), name)
        sp.assert_same([make(1), {"inner": make(2)}], f"{name} in a list")


@several()
@on_every_rank
def test_values_that_differ_on_one_rank_are_refused_on_all() -> None:
    for name, make in VALUES.items():
        with pytest.raises(sp.RankMismatch, match=f"{name} differs between ranks"):
            sp.assert_same({"value": make(int(sp.is_last()))}, name)
    sp.barrier("still in step")


#: What has no single form, and is not compared; and what the message advises.
REFUSED: dict[str, Callable[[], Any]] = {
    "to_dense": lambda: floats(0).to_sparse(),
    "dequantize": lambda: torch.quantize_per_tensor(floats(0), 0.5, 1, torch.qint8),
    "unbind": lambda: torch.nested.nested_tensor([floats(0), floats(1)]),
    "float64": lambda: np.longdouble(1) / np.arange(1, 4),
    "state_dict": lambda: model(0),
    "a list": lambda: collections.deque([floats(0)]),
}


@pytest.mark.filterwarnings("ignore")  # torch's, about layouts
@several(2)
@on_every_rank
def test_what_cannot_be_compared_is_refused_on_all_ranks() -> None:
    for advice, make in REFUSED.items():
        with pytest.raises(TypeError, match=rf"assert_same cannot compare .*{advice}"):
            sp.assert_same({"x": [make()]}, "x")
        with pytest.raises(TypeError if sp.is_last() else sp.PeerFailed, match=advice):
            sp.assert_same(make() if sp.is_last() else 0, "x")
    sp.barrier("still in step")


@several(2)
@on_every_rank
def test_zeros_of_another_sign_and_dicts_of_another_type_differ() -> None:
    pairs: list[tuple[Any, Any]] = [
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        (torch.zeros(1), -torch.zeros(1)),
        ({"a": floats(0)}, collections.OrderedDict(a=floats(0))),
        (floats(0), torch.nn.Parameter(floats(0))),
        (floats(0), floats(0).double()),
        ([floats(0)], (floats(0),)),
        (floats(0), floats(0).numpy()),
    ]
    for one, other in pairs:
        with pytest.raises(sp.RankMismatch):
            sp.assert_same({"x": other if sp.is_last() else one}, "x")
    sp.assert_same({"nan": torch.tensor([math.nan])}, "nan")
    sp.assert_same(dict([("a", floats(0)), ("b", 1)][:: 1 - 2 * sp.get_rank()]), "in any order")


class Broken(dict[str, int]):
    """Its items cannot be had."""

    def items(self) -> Any:
        raise ZeroDivisionError("no items")


@several()
@on_every_rank
def test_ranks_agree_whatever_an_object_does_when_it_is_digested() -> None:
    expected = ZeroDivisionError if sp.is_last() else sp.PeerFailed
    with pytest.raises(expected, match="no items"):
        sp.assert_same(Broken(a=1) if sp.is_last() else {"a": 1}, "broken")
    cycle: list[Any] = [0]
    cycle.append(cycle)
    with pytest.raises(TypeError, match="cannot compare"):
        sp.assert_same(cycle, "a cycle")
    pair: Any = (floats(0),)
    for _ in range(60):
        pair = (pair, pair)
    sp.assert_same(pair, "2 ** 60 times the same")
