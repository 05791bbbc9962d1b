"""The encoding of objects: exact types, no code execution, and damage is detected."""

from __future__ import annotations

import collections
import contextlib
import enum
import math
import random
import threading
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest

from syncprims import EncodingError

# Damaged bytes, which no rank sends.
from syncprims._data.codec import decode, encode


class Color(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")

SAFE: list[Any] = [
    None, True, False, 0, -1, 255, 256, -(2**200), 1.5, -0.0, math.inf, 1j, "", "\ud800é", b"",
    [], (), {}, set(), frozenset(), [[[]]], {"a": {"b": (1, [2])}}, {(1, 2): {3}},
    Path("a/b"), np.float64(2), np.int8(-3), np.bool_(True), np.datetime64("2026-01-01"),
]  # fmt: skip


@pytest.mark.parametrize("value", SAFE, ids=repr)
def test_safe_values_come_back_exactly_without_pickle(value: Any) -> None:
    again = decode(encode(value, allow_pickle=False), allow_pickle=False)
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize("value", [Color.RED, Point(1, 2), collections.Counter("aab"), (1).__add__])
def test_a_subclass_is_another_type_and_needs_pickle(value: Any) -> None:
    again = decode(encode(value))
    assert type(again) is type(value)
    assert again == value
    with pytest.raises(EncodingError, match="SYNCPRIMS_PICKLE=0 forbids"):
        encode([value], allow_pickle=False)
    with pytest.raises(EncodingError, match="a pickle arrived"):
        decode(encode(value), allow_pickle=False)


def test_cycles_and_depth_are_left_to_pickle() -> None:
    cycle: list[Any] = [1]
    cycle.append(cycle)
    with pytest.raises(EncodingError):
        encode(cycle, allow_pickle=False)
    deep: Any = 0
    for _ in range(300):
        deep = [deep]
    assert decode(encode(deep)) == deep


class Holder:
    """Only pickle can send it."""


@pytest.mark.parametrize(("obj", "part"), [
    (threading.Lock(), "_thread.lock"), ({"a": [1, lambda: 1]}, "builtins.function"),
    ((0, {threading.Lock()}), "_thread.lock"),
])  # fmt: skip
def test_the_part_that_cannot_travel_is_named(obj: object, part: str) -> None:
    with pytest.raises(EncodingError, match=f"^a {part} cannot travel between ranks: pickle says "):
        encode(obj)


def test_the_part_that_needs_pickle_is_named() -> None:
    with pytest.raises(EncodingError, match=r"^a test_codec\.Holder can only travel as a"):
        encode({"a": [1, Holder()]}, allow_pickle=False)


def test_dicts_keep_their_order() -> None:
    assert list(decode(encode({"b": {"z", "y", "x"}, "a": 1}))) == ["b", "a"]


def test_arrays_of_every_layout() -> None:
    base = np.arange(24.0).reshape(2, 3, 4)
    for array in (base.T, base[:, ::-1], base[..., 0], np.asfortranarray(base), base[:0]):
        again = decode(encode(array, allow_pickle=False))
        assert np.array_equal(again, array)
        assert again.shape == array.shape
        assert again.flags.writeable
    record = np.zeros(2, dtype=[("a", "i4"), ("b", "f8")])
    assert decode(encode(record)).dtype == record.dtype


def test_damage_is_an_error_and_never_anything_else() -> None:
    whole = encode({"list": [1, 2.5, None], "text": "héllo", "array": np.arange(5), "p": Path("x")})
    chance = random.Random(0)
    for length in range(len(whole)):
        with pytest.raises(EncodingError):
            decode(whole[:length], allow_pickle=False)
    for _ in range(3000):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        with contextlib.suppress(EncodingError):
            decode(bytes(damaged), allow_pickle=False)
    with pytest.raises(EncodingError, match="follow"):
        decode(whole + b"x")
    with pytest.raises(EncodingError, match="deeper"):
        decode(b"l\x01\0\0\0\0\0\0\0" * 100_000)


def test_shared_containers_do_not_blow_up() -> None:
    value: list[Any] = [0]
    for _ in range(60):
        value = [value, value]
    assert len(encode(value)) < 10_000
    again = decode(encode(value))
    assert again[0] is again[1]
    root: dict[str, Any] = {"children": []}
    for _ in range(2):
        root["children"].append({"parent": root})
    again = decode(encode(root))
    assert again["children"][1]["parent"] is again
    with pytest.raises(EncodingError):
        encode(root, allow_pickle=False)


def test_foreign_byte_orders_and_paths() -> None:
    array = np.arange(3, dtype=">f8")
    again = decode(encode(array, allow_pickle=False), allow_pickle=False)
    assert again.dtype == array.dtype
    assert again.tolist() == [0, 1, 2]
    path = PurePosixPath("a/b")
    assert type(decode(encode(path, allow_pickle=False))) is PurePosixPath


def test_repeats_that_would_blow_up_are_refused_where_pickle_cannot_help() -> None:
    pair: Any = (1,)
    for _ in range(60):
        pair = (pair, pair)
    again = decode(encode(pair))
    assert again[0] is again[1]  # compared by value, it would take for ever
    with pytest.raises(EncodingError, match="10000 times"):
        encode(pair, allow_pickle=False)
    twice = ["x"]
    assert decode(encode([twice, twice], allow_pickle=False)) == [["x"], ["x"]]
