"""`split`: contiguous, balanced shares of the same type; the source is unchanged."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from support.rank_worlds import Ranks

import syncprims as sp

# Shares for numbers of ranks that no test starts.
from syncprims._data.partition import split


def shares(items: Any, count: int, *, pad: bool = False) -> list[Any]:
    return [split(items, index, count, pad=pad) for index in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("length", [0, 1, 5, 8, 17])
def test_shares_cover_everything_once_and_differ_by_one(length: int, count: int) -> None:
    items = list(range(length))
    parts = shares(items, count)
    assert [item for part in parts for item in part] == items
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)  # extras go to the lowest
    if length:
        padded = shares(items, count, pad=True)
        assert {len(part) for part in padded} == {-(-length // count)}
        assert [part[: len(own)] for part, own in zip(padded, parts, strict=True)] == parts
        assert {x for p, own in zip(padded, parts, strict=True) for x in p[len(own) :]} <= {
            items[-1]
        }


def test_types_are_kept() -> None:
    assert shares((1, 2, 3), 2) == [(1, 2), (3,)]
    assert shares((1, 2, 3), 2, pad=True) == [(1, 2), (3, 3)]
    assert shares((1,), 3, pad=True) == [(1,), (1,), (1,)]
    assert shares(range(0, 10, 2), 2) == [range(0, 6, 2), range(6, 10, 2)]
    assert shares(range(3), 2, pad=True) == [range(2), [2, 2]]  # a range holds nothing twice
    array = np.arange(6).reshape(3, 2)
    first, second = shares(array, 2, pad=True)
    assert first.tolist() == [[0, 1], [2, 3]]
    assert second.tolist() == [[4, 5], [4, 5]]
    first, second = shares(torch.arange(3), 2, pad=True)
    assert (first.tolist(), second.tolist()) == ([0, 1], [2, 2])
    assert shares([], 2, pad=True) == [[], []]


def test_dicts_are_split_by_value_and_not_mutated() -> None:
    items = OrderedDict(x=[1, 2, 3], y=np.arange(3))
    first, second = shares(items, 2)
    assert type(first) is OrderedDict
    assert first["x"] == [1, 2]
    assert second["x"] == [3]
    assert second["y"].tolist() == [2]
    assert items["x"] == [1, 2, 3]
    with pytest.raises(ValueError, match="'a': 1, 'b': 2"):
        split({"a": [1], "b": [1, 2]}, 0, 2)


def test_select_is_used_where_there_is_one() -> None:
    class Dataset:
        def __len__(self) -> int:
            return 3

        def select(self, indices: Any) -> list[int]:
            return [10 * i for i in indices]

    assert shares(Dataset(), 2) == [[0, 10], [20]]
    assert shares(Dataset(), 2, pad=True) == [[0, 10], [20, 20]]


@pytest.mark.parametrize(
    "items", ["text", b"bytes", 5, {1, 2}, {1: 2}.keys(), np.array(3), iter([1])]
)
def test_what_has_no_order_or_length_is_refused(items: Any) -> None:
    with pytest.raises(TypeError, match="split"):
        split(items, 0, 2)


def test_split_uses_this_ranks_share(world: Ranks) -> None:
    parts = world.run(lambda: sp.split(list("abcdefg")))
    assert "".join(item for part in parts for item in part) == "abcdefg"
    assert parts == shares(list("abcdefg"), world.ranks)
