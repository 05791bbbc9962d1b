"""Numbers and arrays of one shape, call after call: they pass through slots, in one round."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import random
import re
import time
import weakref
from typing import Any, get_args

import numpy as np
import pytest
import torch
from conftest import on_every_rank, several
from support.rank_worlds import Ranks

import syncprims as sp

# Equal encodings are equal types; the layouts are slowed down.
from syncprims._data import codec, layouts, reduction
from syncprims._world.runtime import get_world
from syncprims.interface import Label, Mark, Note

KINDS: list[Any] = [3, -2, 0.5, True, 1 << 70, np.float64(0.25), np.True_, np.int64(2**62), 1 + 2j]


def rounds_of(call: Any) -> int:
    """Return how many rounds a call takes, when it has been made before."""
    call()
    board = get_world().rounds.board
    before = board.posted
    call()
    return board.posted - before


@several()
@on_every_rank
def test_numbers_of_all_kinds_meet() -> None:
    rank, n = sp.get_rank(), sp.get_world_size()
    pairs = itertools.combinations_with_replacement(KINDS, 2)
    for number, pair in enumerate(pairs):
        one, other = pair[:: 1 - number % 2 * 2]
        mine = other if rank == n - 1 else one
        total = (n - 1) * reduction.detached(one) + reduction.detached(other)
        found = sp.all_reduce(mine)
        assert found == total
        assert not isinstance(found, np.generic)  # reduced as Python's, whichever rank has it
        assert sp.all_reduce([1, mine]) == [n, total]
        got = sp.all_reduce({"a": mine, "b": 0.5}, "mean")
        assert got == {"a": total / n, "b": 0.5}
        assert type(sp.broadcast(mine, n - 1)) is type(other)


@several()
@on_every_rank
def test_numbers_keep_their_kinds_and_bits() -> None:
    rank, n = sp.get_rank(), sp.get_world_size()
    for value in (-0.0, 1 << 62, -(1 << 63), 2.0**-1074, (1, 2.5), [0.5], {"x": 1, "y": 2.5}):
        got: Any = sp.broadcast(value if rank == 0 else None)
        assert repr(got) == repr(value)
    assert sp.all_reduce((1 << 63) - 1) == n * ((1 << 63) - 1)
    assert sp.all_reduce((1 << 62), "prod") == (1 << 62) ** n
    assert type(sp.all_reduce(rank)) is int
    assert sp.all_reduce((rank, 1.0), "max") == (n - 1, 1.0)


@several()
@on_every_rank
def test_one_line_may_broadcast_another_kind_of_value_each_time() -> None:
    """A receiver expects what its line brought last. The source decides."""
    n = sp.get_world_size()
    values: list[Any] = [1.0, 2, {"a": 1.0}, {"b": 1}, None, "text", 1 << 70, (1, 2.0), [[]]]
    values += [np.ones(1), np.ones((2, 2), "f4"), np.ones(100_000), np.ones(500_000), np.ones(0)]
    values += [torch.ones(3), torch.ones(3, dtype=torch.bfloat16), {"a": torch.ones(2)}]
    values += [True, np.float32(1), np.int8(1), {"a": np.float64(1), "b": False}]
    values += [(torch.ones(2), 3), [np.ones(2), np.ones((1, 2), "f4")], {"a": [np.ones(2)]}]
    dice = random.Random(5)
    place = np.zeros((2, 2), "f4")
    sources = range(n)
    for value in [*values, *dice.choices(values, k=12)]:
        out = place if isinstance(value, np.ndarray) and value.shape == (2, 2) else None
        for src in sources:
            mine = value if sp.get_rank() == src else None
            got: Any = sp.broadcast(mine, src, out=out)
            assert type(got) is type(value)
            if isinstance(value, np.ndarray | torch.Tensor):
                assert got.dtype == value.dtype
                assert got.shape == value.shape
                assert (got == value).all()
            else:
                assert str(got) == str(value)
            assert out is None or got is out


@several()
@on_every_rank
def test_each_rank_may_gather_another_value() -> None:
    rank, n = sp.get_rank(), sp.get_world_size()
    kinds: list[Any] = [1.0, 7, [1.0] * 20, {"a": 1}, (1, 2.0), None, "text", 1 << 70, True]
    kinds += [np.ones(3), np.ones(300), np.ones(3000), torch.ones(3), np.ones(0), np.float32(1)]
    kinds += [(np.ones(3), 1), {"a": torch.ones(2), "b": torch.zeros(2)}, [np.ones(190)] * 7]
    dice = random.Random(7)
    for step in range(40):
        values = dice.choices(kinds, k=1 if step % 3 == 0 else n) * n
        found = sp.all_gather(values[rank])
        assert found[rank] is values[rank]
        assert list(map(repr, found)) == list(map(repr, values[:n]))
        assert sp.all_gather(rank) == list(range(n))


@several()
def test_values_that_differ_in_structure_are_a_mismatch_on_all(world: Ranks) -> None:
    def program() -> list[str]:
        last, said = sp.get_rank() == sp.get_world_size() - 1, []
        values: list[Any] = [1.0, [1.0], [1.0, 2], (1.0,), {"a": 1.0}, {"b": 1.0}]
        values += [np.ones(1), np.ones(2), np.ones(1, "f4"), torch.ones(1), np.ones(3000)]
        values += [[1.0] * 20, np.ones(30), torch.ones(200)]  # of other sizes in memory
        values += [{"a": np.ones(1)}, {"a": torch.ones(1), "b": 1}, [np.ones(150), np.ones(150)]]
        values += [{"a": [1.0]}, np.ones((1000, 2)), [np.ones((1000, 2))] * 2]
        values += [{"w": np.zeros((2, 3))}, {"w": np.zeros((2, 4))}]
        pairs = list(itertools.permutations(values, 2))
        for one, other in pairs if sp.get_world_size() == 2 else [*pairs[::5], *pairs[-2:]]:
            with pytest.raises(sp.RankMismatch, match="differ in kind, shape or dtype") as caught:
                sp.all_reduce(other if last else one)
            said.append(str(caught.value))
        assert sp.all_reduce(1) == sp.get_world_size()  # still in step
        return said

    first, *others = world.run(program)
    assert all(other == first for other in others)
    said = r"at value\['w'\]:\n  rank 0: .*\(2, 4\).*\n(.*\n)*.*\(2, 3\)"
    assert re.search(said, first[-1])


@several()
@on_every_rank
def test_keys_may_differ_in_order() -> None:
    rank, n = sp.get_rank(), sp.get_world_size()
    mine = {"a": 1.0, "b": rank} if rank % 2 else {"b": rank, "a": 1.0}
    assert sp.all_reduce(mine) == {"a": n, "b": n * (n - 1) / 2}
    one, other = torch.full((190,), float(rank)), np.full(190, rank)
    pair = {"a": one, "b": other} if rank % 2 else {"b": other, "a": one}
    total: Any = sp.all_reduce(pair)
    assert total["a"].tolist() == total["b"].tolist() == [n * (n - 1) / 2] * 190


@several()
@on_every_rank
def test_arrays_in_a_container_are_reduced_as_each_alone() -> None:
    rank = sp.get_rank()
    made = torch.Generator().manual_seed(rank)
    tensor = torch.randn(6, 4, generator=made)
    parts: dict[str, Any] = {
        "a": tensor, "b": tensor.t()[1], "c": tensor.bfloat16(), "d": tensor[0, 0].half(),
        "e": tensor.int(), "f": tensor > 0, "g": tensor.double().numpy(), "h": rank + 0.5,
        "i": tensor.numpy()[::2, 1], "j": tensor[1].clone().requires_grad_(), "k": rank,
        "l": np.array(math.nan if rank else 1.0), "m": tensor.numpy().astype(">f8"),
    }  # fmt: skip
    for op in get_args(reduction.Op):
        alone: dict[str, Any] = {name: sp.all_reduce(parts[name], op) for name in parts}
        for whole in (sp.all_reduce(parts, op), sp.all_reduce(list(parts.values()), op)):
            found: Any = whole.values() if isinstance(whole, dict) else whole
            for part, one in zip(found, alone.values(), strict=True):
                assert type(part) is type(one)
                assert codec.encode(part) == codec.encode(one)
                assert not getattr(part, "requires_grad", False)
    with pytest.raises(TypeError, match=r"value\['x'\] is complex"):
        sp.all_reduce({"n": 1, "x": tensor[0].to(torch.complex64)}, "max")
    with pytest.raises(TypeError, match="out was given, and what arrived is a list"):
        sp.all_reduce([tensor, 1], out=tensor)
    assert sp.all_reduce({"a": tensor[0, 0] * 0 + 1, "n": 1 << 62}, "max")["n"] == 1 << 62
    assert sp.all_reduce([tensor[0], 1 << 63])[1] == sp.get_world_size() << 63


@several(2)
@on_every_rank
def test_tensors_of_one_shape_are_alike_whatever_their_history() -> None:
    rank = sp.get_rank()
    for size in (3, 370, 3000, 100_000):
        plain = torch.full((size,), float(rank))
        leaf = plain.clone().requires_grad_()
        frozen = torch.nn.Parameter(plain, requires_grad=False)
        mine = [leaf, torch.nn.Parameter(plain), frozen, plain.clone()[::1]]
        for one, other in itertools.product(mine, mine):
            total = sp.all_reduce(one if rank else other)
            assert not total.requires_grad
            assert total.tolist() == [1.0] * size
        sent = sp.broadcast(leaf, 1)
        assert sent.requires_grad
        assert sent.tolist() == [1.0] * size
    place = torch.zeros(3)
    version = place._version
    assert sp.all_reduce(torch.ones(3), out=place) is place
    assert place._version > version
    assert sp.broadcast(torch.ones(3), out=place) is place
    with pytest.raises(ValueError, match="items of out share memory"):
        sp.all_reduce(torch.ones(3), out=torch.zeros(1).expand(3))
    assert sp.all_reduce(1) == sp.get_world_size()  # still in step


class Labelled(torch.Tensor):
    """A tensor of a user's own type, whose items are torch's."""


@several()
@on_every_rank
def test_an_array_may_travel_otherwise_than_on_the_other_ranks() -> None:
    is_last = sp.get_rank() == sp.get_world_size() - 1
    for size in (3, 500, 100_000):
        plain = torch.ones(size)
        for own in (plain.as_subclass(Labelled), torch.nn.Parameter(plain)):
            mine = own if is_last else plain
            for value in (mine, [mine], {"a": mine, "b": 1}):
                total: Any = sp.all_reduce(value)
                part = total if value is mine else total["a" if isinstance(value, dict) else 0]
                assert type(part) is torch.Tensor
                assert part.tolist() == [sp.get_world_size()] * size
        many = 1 << 70 if is_last else 1  # an int that no slot holds
        array, number = sp.all_reduce((np.ones(size), many))
        assert array.tolist() == [sp.get_world_size()] * size
        assert number == sp.get_world_size() - 1 + (1 << 70)


@several(2)
@on_every_rank
def test_an_array_that_cannot_be_filled_is_the_error_of_one_rank() -> None:
    ones, array = torch.ones(3), np.ones(3)
    refused: list[Any] = [
        torch.zeros(3, device="meta"),
        torch.zeros(3).to_sparse(),
        torch.zeros(1).expand(3),
    ]
    several_times = np.lib.stride_tricks.as_strided(np.zeros(1), (3,), (0,))
    large, read_only = np.ones(10_000), np.zeros(10_000)
    read_only.flags.writeable = False
    cases: list[Any] = [(ones, out) for out in (*refused, [0.0] * 3)]
    cases += [(array, several_times), (array, np.zeros(4)), (array, np.zeros(3, "f4"))]
    cases += [(large, read_only), (large, np.ones(9_999)), (large, np.ones(10_000, "f4"))]
    for value, out in cases:
        place = out if sp.is_main() else None
        for call in (sp.all_reduce, sp.broadcast):
            errors = ValueError, TypeError, RuntimeError
            with pytest.raises(errors) if sp.is_main() else contextlib.nullcontext():
                call(value, out=place)
            assert sp.all_reduce(1) == 2  # still in step


@several()
@on_every_rank
def test_a_container_may_hold_a_tensor_without_a_size_in_bytes() -> None:
    words = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    value = {"words": words.to_sparse(), "more": torch.ones(2)}
    for found in (sp.broadcast(value, src=0), sp.all_gather([value])[0][0]):
        assert found["words"].is_sparse
        assert torch.equal(found["words"].to_dense(), words)


@several()
@on_every_rank
def test_a_value_that_changes_during_the_call_gives_one_result() -> None:
    value: Any = {"a": [np.zeros(3)], "b": [0]}

    board = get_world().rounds.board
    post = board.post

    def post_and_change(note: Note) -> None:
        post(note)
        value["a"][0] += 1
        value["b"][0] = 5

    board.post = post_and_change  # type: ignore[method-assign]
    try:
        total = sp.all_reduce(value)
    finally:
        board.post = post  # type: ignore[method-assign]
    assert total["a"][0].tolist() == [0] * 3
    assert total["b"] == [0]


@several(2)
def test_dtypes_that_torch_only_stores(world: Ranks) -> None:
    names = ["int1", "uint4", "bits8", "float4_e2m1fn_x2", "bfloat16", "float8_e4m3fn"]
    names = [name for name in names if hasattr(torch, name)]  # some are new

    def program() -> None:
        for name, size in itertools.product(names, (4, 3000)):
            octets = torch.full((size,), 56, dtype=torch.uint8)
            value = octets.view(getattr(torch, name))
            for src in (0, 1):
                got = sp.broadcast(value if src == sp.get_rank() else None, src)
                assert got is not None
                assert got.dtype == value.dtype
                assert got.view(torch.uint8).equal(octets)
            for got in sp.all_gather(value):
                assert got.view(torch.uint8).equal(octets)
            if name in ("bfloat16", "float8_e4m3fn"):
                assert sp.all_reduce(value, "max").view(torch.uint8).equal(octets)
            else:
                with pytest.raises(TypeError, match="torch does not compute with"):
                    sp.all_reduce(value)
        assert sp.all_reduce(1) == 2  # still in step

    world.run(program)


@several(2)
@on_every_rank
def test_a_column_of_one_item_or_none() -> None:
    """It is contiguous, and its step is not 1."""
    for dtype in (torch.bfloat16, torch.float32):
        value, out = torch.ones(1, 2, dtype=dtype)[:, 0], torch.zeros(1, 2, dtype=dtype)[:, 0]
        assert sp.all_reduce(value, out=out) is out
        assert out.item() == 2
        assert sp.broadcast(value, out=out).item() == 1
        assert [one.item() for one in sp.all_gather([value, value])[1]] == [1, 1]
        empty = torch.ones(0, 2, dtype=dtype)[:, 0]
        found = [sp.all_reduce(empty), sp.broadcast(empty, 1), *sp.all_gather(empty)]
        assert [(one.dtype, one.shape) for one in found] == [(dtype, (0,))] * 4


@several(2)
@on_every_rank
def test_a_tensor_without_its_memory_is_an_error_on_all() -> None:
    for size in (3, 3000):
        value = torch.ones(size)
        if sp.is_main():
            value.untyped_storage().resize_(0)
        with pytest.raises((ValueError, sp.PeerFailed), match="has been freed"):
            sp.all_reduce(value)
    assert sp.all_reduce(1) == 2


@several(2)
def test_no_object_of_the_user_is_kept(world: Ranks) -> None:
    class Key:
        pass

    def program() -> None:
        key = Key()
        gone = weakref.ref(key)
        with pytest.raises(TypeError):
            sp.all_reduce({key: "text"})
        del key
        gc.collect()
        assert gone() is None

    world.run(program)


@several()
@on_every_rank
def test_a_ranks_settings_of_numpy_do_not_matter_and_stay() -> None:
    n = sp.get_world_size()
    action: Any = "raise" if sp.is_main() else "ignore"
    with np.errstate(all=action):
        for kind in (np.float16, np.float32, np.float64):
            huge = np.full(3, np.finfo(kind).max)
            expected = huge if n == 1 else np.full(3, np.inf, kind)
            assert np.array_equal(sp.all_reduce(huge), expected)
            large = np.full(3, np.finfo(kind).max / 16)  # its square is not finite
            assert np.array_equal(sp.all_reduce(large), large * n)
            odd = np.array([np.inf, -np.inf, np.nan], kind)
            assert np.isnan(sp.all_reduce(odd * (1 if sp.is_main() else -1))[2])
        assert np.geterr() == dict.fromkeys(("divide", "over", "under", "invalid"), action)


@several()
@on_every_rank
def test_a_slow_reader_never_reads_the_next_call() -> None:
    """One rank is slow to read, and the others write the values of later calls."""
    rank, n = sp.get_rank(), sp.get_world_size()
    dice, slow = random.Random(3), random.Random(rank)  # the same on all; everybody's own
    trigger = sp.Trigger(lag=1)
    for layout in (layouts.NumberLayout, layouts.ArrayLayout):
        _delay(layout, "read", slow)
    _delay(layouts.NumberLayout, "_reduce", slow)
    _delay(layouts.ArrayLayout, "_rows_at", slow)
    for step in range(60):
        size = dice.choice([1, 100, 500, 3000, 40_000, 150_000])
        kind, src = dice.choice(["float", "sum", "from", "number", "flag"]), dice.randrange(n)
        array = np.full(size, step + rank, "f4")
        if kind == "float":
            assert sp.all_reduce(float(step + rank)) == n * step + n * (n - 1) / 2
        elif kind == "sum":
            assert set(sp.all_reduce(array).tolist()) == {n * step + n * (n - 1) / 2}
        elif kind == "from":
            assert set(sp.broadcast(array, src).tolist()) == {step + src}
        elif kind == "number":
            assert sp.broadcast(step + rank, src) == step + src
        else:
            assert not trigger.check()  # leaves a round to be collected by the next call


def _delay(kind: Any, name: str, slow: random.Random) -> None:
    method = getattr(kind, name)

    def late(self: Any, *args: Any) -> Any:
        time.sleep(0.002 if slow.random() < 0.3 else 0)  # the fault, not a wait
        return method(self, *args)

    setattr(kind, name, late)


@several()
@on_every_rank
def test_a_value_of_a_known_shape_takes_one_round() -> None:
    numbers = {"loss": 1.0, "n": 3}
    small, middle = np.ones(1024, "f4"), np.ones(16_384, "f4")
    into = np.empty_like(small)
    calls: list[Any] = [
        lambda: sp.all_reduce(1.0),
        lambda: sp.all_reduce(numbers, "mean"),
        lambda: sp.broadcast(numbers),
        lambda: sp.broadcast([None, "text", numbers]),
        lambda: sp.all_reduce(torch.ones(100)),
        lambda: sp.all_reduce({"loss": torch.tensor(0.5), "n": 3}, "mean"),
        lambda: sp.broadcast((np.ones(3), torch.ones(3))),
    ]
    board = get_world().rounds.board
    if board.engine is None:  # else these pass through it, between rounds
        calls += [
            lambda: sp.all_reduce(small, out=into),
            lambda: sp.broadcast(small),
            lambda: sp.all_reduce(middle),
            lambda: sp.broadcast(middle),
        ]
    for number, call in enumerate(calls):
        assert rounds_of(call) == 1, number


def test_a_label_keeps_what_it_says_about_data() -> None:
    for data in (b"", b"\0", b"a\0b=c", bytes(range(256))):
        for label in (Label("kind"), Label("kind", "näme\udcff", 3, "op", "file.py:7", data)):
            found = Label.decode(label.encode())
            assert (found, found.site, found.data) == (label, label.site, label.data)
            assert Note.decode(Note(label, Mark.YES, b"x").encode()).label.data == label.data
