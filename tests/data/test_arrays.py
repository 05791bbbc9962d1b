"""Arrays of every dtype and size between ranks, on every backend."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import on_every_rank, several
from support.rank_worlds import Kind, Ranks

import syncprims as sp

# Equal encodings are equal types; the pieces are made small.
from syncprims._data import codec, transport

DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
#: Items of 8 bytes: around what a note holds, and around pieces of the shared memory.
SIZES = [0, 1, 191, 192, 193, 1000, 4095, 65_536, 262_143, 262_144, 262_145, 1_100_000]
OPS: tuple[Any, ...] = ("sum", "mean", "min", "max", "prod")


class Pair(NamedTuple):
    first: Any
    second: Any


def noise(rank: int, shape: Any, dtype: str = "f8") -> Any:
    random = np.random.default_rng([rank, 7]).standard_normal(shape)
    return (random * 3).astype(dtype) if dtype != "?" else random > 0


def expected(parts: list[Any], op: str) -> Any:
    """Return what one rank would find by itself, in the order of ranks."""
    dtype = parts[0].dtype
    if op == "mean" and dtype.kind in "biu":
        wide: Any = np.dtype("f8")
    elif dtype.kind == "b" and op in ("sum", "prod"):
        wide = np.dtype("i8")
    else:
        wide = np.dtype("f4") if dtype == "f2" else dtype
    function = {"min": np.minimum, "max": np.maximum, "prod": np.multiply}.get(op, np.add)
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = function(total, part.astype(wide))
    if op == "mean":
        total = total / len(parts)
    return total.astype(np.dtype("f2") if dtype == "f2" else wide)


def same(one: Any, other: Any) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and bool(one.tobytes() == other.tobytes())


@on_every_rank
def test_every_dtype_and_op_to_the_bit() -> None:
    ranks = range(sp.get_world_size())
    with np.errstate(all="ignore"):
        for dtype in DTYPES:
            parts = [noise(rank, (37, 91), dtype) for rank in ranks]
            mine = parts[sp.get_rank()].copy()
            for op in OPS:
                got = sp.all_reduce(mine, op)
                assert same(got, expected(parts, op)), (dtype, op)
                assert same(mine, parts[sp.get_rank()])
            src = ranks[-1]
            assert same(sp.broadcast(mine, src), parts[src])


@several()
@on_every_rank
def test_every_size_with_and_without_out() -> None:
    ranks = range(sp.get_world_size())
    for size in SIZES:
        parts = [noise(rank, size) for rank in ranks]
        mine = parts[sp.get_rank()]
        total = expected(parts, "sum")
        assert same(sp.all_reduce(mine), total)
        out = np.empty(size)
        assert sp.all_reduce(mine, out=out) is out
        assert same(out, total)
        for src in ranks:
            assert same(sp.broadcast(mine if src == sp.get_rank() else None, src), parts[src])
        into = np.empty(size)
        got: Any = sp.broadcast(mine if sp.is_main() else None, out=into)
        assert got is into
        assert same(into, parts[0])
        assert sp.all_reduce(mine, out=mine) is mine  # in place
        assert same(mine, total)


@several()
@on_every_rank
def test_arrays_of_every_layout() -> None:
    base = np.rint(noise(0, (300, 200)) * 100) + sp.get_rank()  # whole: exact in any order
    layouts: list[Any] = [
        base.T,
        base[::2, ::3],
        np.asfortranarray(base),
        base[:, :1],
        base.astype(">f8"),
        base.reshape(10, 30, 200),
        np.broadcast_to(base[0], (50, 200)),
    ]
    for array in layouts:
        sent = sp.broadcast(array, sp.get_world_size() - 1)
        assert np.array_equal(sent, array - sp.get_rank() + sp.get_world_size() - 1)
        everywhere = sp.all_gather(array)
        assert np.array_equal(sp.all_reduce(array, "max"), np.max(everywhere, axis=0))
        if sent is not array:
            sent[...] = 0  # what arrives is one's own, also to write to
    for out in (np.zeros((200, 300)).T, np.zeros((300, 400))[:, ::2]):
        assert sp.broadcast(base, out=out) is out
        assert np.array_equal(out, base - sp.get_rank())
        assert sp.all_reduce(base, "min", out=out) is out
        assert np.array_equal(out, base - sp.get_rank())


@several()
@on_every_rank
def test_an_out_that_lies_over_the_value() -> None:
    memory = noise(sp.get_rank(), 100_001)
    wanted = expected(sp.all_gather(memory[:-1].copy()), "sum")
    out = memory[1:]
    assert sp.all_reduce(memory[:-1], out=out) is out
    assert same(out.copy(), wanted)


@several()
@on_every_rank
def test_trees_with_arrays_large_and_small() -> None:
    n, rank = sp.get_world_size(), sp.get_rank()
    tree: dict[str, Any] = {
        "weights": [noise(rank, (100, 100), "f4"), noise(rank, 3)],
        "loss": 0.5 * rank,
        "steps": rank,
        "pair": Pair(noise(rank, 5000, "i8"), (noise(rank, 700),)),
    }
    if rank % 2:  # the order of keys is everybody's own
        tree = dict(reversed(tree.items()))
    trees = sp.all_gather(tree)
    got = sp.all_reduce(tree)
    assert isinstance(got["pair"], Pair)
    assert got["steps"] == n * (n - 1) // 2
    picks: list[Any] = [
        lambda t: t["weights"][0],
        lambda t: t["weights"][1],
        lambda t: t["pair"].first,
        lambda t: t["pair"].second[0],
    ]
    for pick in picks:
        assert same(pick(got), expected([pick(t) for t in trees], "sum"))
    sent: Any = sp.broadcast(tree if rank == n - 1 else None, n - 1)
    assert same(sent["pair"].first, trees[-1]["pair"].first)
    assert list(sent) == list(trees[-1])


@several()
@on_every_rank
def test_arrays_of_mixed_sizes_keep_out_of_each_others_way() -> None:
    """One rank is slow to read what the others have reduced, and larger pieces follow smaller."""
    rank, n = sp.get_rank(), sp.get_world_size()
    dice = np.random.default_rng(5)  # the same on all
    slow = np.random.default_rng([9, rank])
    piece: Any = transport._Piece  # pyright: ignore[reportPrivateUsage]
    read = piece.read_others

    def read_slowly(self: Any, half: int) -> None:
        time.sleep(0.002 if slow.random() < 0.3 else 0)  # the fault, not a wait
        read(self, half)

    piece.read_others = read_slowly
    for _ in range(12):
        sizes = dice.integers(200, 20_000, 6)
        parts = [[noise(r, int(size)) for size in sizes] for r in range(n)]
        got = sp.all_reduce(parts[rank])
        for place, total in enumerate(got):
            assert same(total, expected([part[place] for part in parts], "sum"))


@several()
@on_every_rank
def test_gathered_arrays_may_differ_in_size_and_kind() -> None:
    rank, n = sp.get_rank(), sp.get_world_size()
    dice = random.Random(8)  # the same on all
    for step in range(40):
        counts = dice.choices([0, 3, 1500, 20_000, 150_000, 400_000], k=1 if step % 2 else n) * n
        kinds: list[Any] = dice.choices(
            [np.asarray, torch.from_numpy, lambda array: torch.from_numpy(array).bfloat16(),
             lambda array: torch.from_numpy(array).requires_grad_(), lambda array: [array]],
            k=1 if step % 3 else n,
        ) * n  # fmt: skip
        made = [kinds[r](np.full(counts[r], step + r, "f4")[::-1].copy()) for r in range(n)]
        found = sp.all_gather(made[rank])
        assert found[rank] is made[rank]
        assert sp.all_reduce(step) == n * step
        assert list(map(codec.encode, found)) == list(map(codec.encode, made))


@several()
def test_a_memory_map_travels_as_its_items(world: Ranks, tmp_path: Path) -> None:
    def program() -> None:
        rank, n = sp.get_rank(), sp.get_world_size()
        for size in (3, 30_000, 400_000):
            path = tmp_path / f"{rank}-{size}"
            mine = np.memmap(path, "f4", "w+", shape=(size,))
            mine[:] = rank
            plain = np.array(mine)
            total = sp.all_reduce(plain if rank else mine)
            assert type(total) is np.ndarray
            assert set(total.tolist()) == {n * (n - 1) / 2}
            parts = sp.all_gather(mine)
            assert [set(part.tolist()) for part in parts] == [{r} for r in range(n)]
            assert [type(part) for r, part in enumerate(parts) if r != rank] == [np.ndarray] * (
                n - 1
            )
            into = np.memmap(path, "f4", "r+")
            assert sp.broadcast(plain, n - 1, out=into) is into
            assert np.fromfile(path, "f4").tolist() == [n - 1] * size
            assert sp.all_reduce(np.ones(size, "f4"), out=into) is into
            assert np.fromfile(path, "f4").tolist() == [n] * size

    world.run(program, SYNCPRIMS_PICKLE="0")


@several()
@on_every_rank
def test_what_has_one_checksum_is_not_one() -> None:
    # These pairs differ by a multiple of the polynomial of CRC-32.
    numbers, texts = [1 << 40, (1 << 40) ^ 0x1DB710641], [b"cabCaa", b".L_.ia"]
    assert zlib.crc32(codec.encode(numbers[0])) == zlib.crc32(codec.encode(numbers[1]))
    assert zlib.crc32(texts[0]) == zlib.crc32(texts[1])
    turn = sp.get_rank() % 2
    mine, name = numbers[turn], texts[turn].decode()
    sent = [numbers[rank % 2] for rank in range(sp.get_world_size())]
    assert sp.all_gather(mine) == sent
    assert sp.all_reduce(mine) == sum(sent)
    with pytest.raises(sp.RankMismatch):
        sp.all_reduce({name: 1.0})
    with pytest.raises(sp.CollectiveMismatch):
        sp.barrier(name)


@several()
@on_every_rank
def test_an_object_that_needs_pickle_takes_its_arrays_along() -> None:
    shared = ["twice"]
    sent: Any = {"w": np.arange(1000.0), "x": shared, "y": shared}
    got: Any = sp.broadcast(sent if sp.is_main() else None)
    assert got["x"] is got["y"]
    assert np.array_equal(got["w"], sent["w"])
    assert sp.broadcast("next") == "next"


class Calling:
    def __reduce__(self) -> Any:
        sp.barrier("inside")
        return int, ()


@several()
@pytest.mark.parametrize("call", ["broadcast", "all_gather"])
def test_a_collective_in_a_method_that_encodes_is_one_error_on_all(world: Ranks, call: str) -> None:
    outcomes = world.outcomes(lambda: getattr(sp, call)(Calling() if sp.is_main() else None))
    assert [type(outcome) for outcome in outcomes] == [sp.CollectiveMismatch] * world.ranks


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@on_every_rank
def test_nested_tensors_travel_and_are_not_reduced() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    for value in sp.broadcast(nested), sp.all_gather({"n": nested, "w": nested[0]})[-1]["n"]:
        assert [part.tolist() for part in value.unbind()] == [[1, 1], [0, 0, 0]]
    with pytest.raises(TypeError, match="nested tensor"):
        sp.all_reduce(nested)


@pytest.mark.parametrize("call", ["broadcast", "all_reduce"])
def test_a_death_between_the_pieces_is_told(meeting_place: Path, call: str) -> None:
    def program() -> Any:
        array = np.ones(60_000_000, "f4")
        sp.barrier()
        if sp.get_rank() == 1:
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            while True:
                getattr(sp, call)(array, out=array)
        except sp.PeerLost as error:
            return error.rank, "SIGKILL" in str(error), call in str(error)

    outcomes = Ranks(Kind("file", 3), meeting_place).outcomes(program)
    assert outcomes[0] == outcomes[2] == (1, True, True)


def test_memory_beside_the_arrays_is_bounded(meeting_place: Path) -> None:
    def program() -> list[int]:
        array, out = np.ones(16_000_000), np.ones(16_000_000)  # 128 MB each
        sp.barrier()
        most = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]
        for call in (sp.all_reduce, sp.broadcast):
            call(array, out=out)
        most.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        sp.all_gather(array)
        most.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return most

    for before, filled, gathered in Ranks(Kind("file", 2), meeting_place).run(program):
        assert filled - before < 24 * 1024  # KB, where one copy would be 125,000
        assert gathered - filled < 125_000 + 24 * 1024  # the array of the other rank


def test_where_room_is_short_the_memory_is_smaller(meeting_place: Path) -> None:
    def program() -> Any:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        sp.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, resource.RLIM_INFINITY))
        total = sp.all_reduce(np.arange(1_000_000))
        assert same(total, np.arange(1_000_000) * 2)
        for array in sp.all_gather(total):
            assert same(array, total)
        return sp.broadcast(total)[-1]

    assert Ranks(Kind("file", 2), meeting_place).run(program) == [1_999_998] * 2


def test_no_room_at_all_is_a_shared_failure(meeting_place: Path) -> None:
    def program() -> Any:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        sp.barrier()
        said: list[str] = []
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
        for call in (sp.broadcast, sp.all_reduce):
            try:
                call(np.ones(1_000_000))
            except (OSError, sp.PeerFailed) as error:
                said.append(f"{type(error).__name__}: {'ulimit -f' in str(error)}")
        sp.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return said, sp.all_reduce(np.ones(1_000_000))[0]

    first, second = Ranks(Kind("file", 2), meeting_place).run(program)
    assert first == (["SharedMemoryError: True", "SharedMemoryError: True"], 2)
    assert second == (["PeerFailed: True", "SharedMemoryError: True"], 2)


def test_tensors_of_every_dtype(world: Ranks) -> None:
    def program() -> None:
        n, rank = sp.get_world_size(), sp.get_rank()
        base = torch.arange(6000).reshape(60, 100) % 5
        names = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64"
        for name in (*names.split(), "complex128", "uint16", "uint32", "uint64", "float8_e5m2"):
            dtype = getattr(torch, name)
            parts = [(base + r % 2).to(dtype) for r in range(n)]
            sent: Any = sp.broadcast(parts[rank] if rank == n - 1 else None, n - 1)
            assert (sent.dtype, sent.tolist()) == (dtype, parts[-1].tolist()), name
            total = sp.all_reduce(parts[rank])
            assert total.dtype == (torch.int64 if name == "bool" else dtype)
            # Small whole numbers: every dtype holds their sums exactly, or rounds them once.
            wide = torch.complex128 if dtype.is_complex else torch.float64
            exact: Any = sum(part.to(wide) for part in parts)
            assert total.tolist() == exact.to(total.dtype).tolist(), name

    world.run(program, SYNCPRIMS_PICKLE="0")


@several()
@on_every_rank
def test_torch_is_not_deceived() -> None:
    n, rank = sp.get_world_size(), sp.get_rank()
    value = torch.full((1000,), 1 + 2j, dtype=torch.complex64)
    for out in (torch.zeros(1000, dtype=torch.complex64).conj(), torch.zeros_like(value)):
        assert sp.all_reduce(value, out=out) is out
        assert torch.equal(out.resolve_conj(), value * n)
        assert sp.broadcast(value, out=out) is out
        assert torch.equal(out.resolve_conj(), value)
    leaf = torch.ones(1000, requires_grad=True)
    middle = leaf * 2
    loss = (middle * middle).sum()
    sp.all_reduce(torch.ones(1000), out=middle.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]
    dense = torch.ones(1000)
    with pytest.raises(sp.RankMismatch, match="sparse_coo"):
        sp.all_reduce(dense if rank else dense.to_sparse())
    assert torch.equal(sp.all_reduce(dense.to_sparse()).to_dense(), dense * n)
