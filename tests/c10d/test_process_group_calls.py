"""Every collective of c10d, on every backend: results, dtypes, forms, and groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import in_processes, on_every_rank, several
from support.process_groups import dist, process_group, seconds
from support.rank_worlds import Ranks

import syncprims as sp

# Torch renames its functions, and warns of the names that older versions know.
pytestmark = [in_processes, pytest.mark.filterwarnings("ignore::FutureWarning")]

SMALL, LARGE = 3, 70_000  # items: in a note, and through a transport
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn,
]  # fmt: skip
REDUCTIONS: dict[str, Any] = {
    "SUM": lambda x: x.sum(0),
    "AVG": lambda x: x.mean(0),
    "PRODUCT": lambda x: x.prod(0),
    "MIN": lambda x: x.amin(0),
    "MAX": lambda x: x.amax(0),
}
BITWISE = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}


def of_rank(rank: int, size: int) -> torch.Tensor:
    """Return what one rank has, with small values."""
    return (torch.arange(size, dtype=torch.float64) % 5 + rank + 1).float()


@pytest.mark.parametrize("size", [SMALL, LARGE])
@on_every_rank
def test_every_collective_gives_what_torch_promises(size: int) -> None:
    rank, n = sp.get_rank(), sp.get_world_size()
    everyone = torch.stack([of_rank(r, size) for r in range(n)])
    mine, last = everyone[rank], n - 1
    with process_group():
        got = mine.clone()
        dist.all_reduce(got)
        assert torch.equal(got, everyone.sum(0))
        got = mine.clone()
        dist.reduce(got, last)
        assert rank != last or torch.equal(got, everyone.sum(0))
        got = mine.clone()
        dist.broadcast(got, last)
        assert torch.equal(got, everyone[last])
        parts = [torch.empty(size) for _ in range(n)]
        dist.all_gather(parts, mine)
        assert torch.equal(torch.stack(parts), everyone)
        got = torch.empty(n * size)
        dist.group.WORLD.allgather([[*got.view(n, size)]], [mine]).wait()
        assert torch.equal(got.view(n, size), everyone)
        kept = [torch.empty(size) for _ in range(n)] if rank == last else None
        dist.gather(mine, kept, dst=last)
        assert kept is None or torch.equal(torch.stack(kept), everyone)
        got = torch.empty(size)
        given = [one + 7 for one in everyone] if rank == last else None
        dist.scatter(got, given, src=last)
        assert torch.equal(got, mine + 7)
        got = torch.empty(size)
        dist.reduce_scatter(got, [mine * (r + 1) for r in range(n)])
        assert torch.equal(got, everyone.sum(0) * (rank + 1))
        received = [torch.empty(size) for _ in range(n)]
        dist.all_to_all(received, [mine + r for r in range(n)])
        assert torch.equal(torch.stack(received), everyone + rank)
        dist.barrier()


@pytest.mark.parametrize("size", [SMALL, LARGE])
@on_every_rank
def test_base_and_coalesced_forms(size: int) -> None:
    rank, n = sp.get_rank(), sp.get_world_size()
    everyone = torch.stack([of_rank(r, size) for r in range(n)])
    mine = everyone[rank]
    with process_group():
        group = dist.group.WORLD
        got = torch.empty(n * size)
        group._allgather_base(got, mine).wait()
        assert torch.equal(got.view(n, size), everyone)
        got = torch.empty(size)
        group._reduce_scatter_base(got, mine.repeat(n)).wait()
        assert torch.equal(got, everyone.sum(0))
        pair = [mine.clone(), 2 * mine]
        group.allreduce_coalesced(pair).wait()
        assert torch.equal(pair[1], 2 * pair[0])
        assert torch.equal(pair[0], everyone.sum(0))
        outs = [torch.empty(n * size) for _ in range(2)]
        group.allgather_into_tensor_coalesced(outs, [mine, 3 * mine]).wait()
        assert torch.equal(outs[1].view(n, size), 3 * everyone)
        outs = [torch.empty(size) for _ in range(2)]
        group.reduce_scatter_tensor_coalesced(outs, [mine.repeat(n)] * 2).wait()
        assert torch.equal(outs[1], everyone.sum(0))
        rows = torch.arange(n).repeat_interleave(torch.arange(1, n + 1)) + 100 * rank
        got = torch.empty(n * (rank + 1), dtype=rows.dtype)
        dist.all_to_all_single(got, rows, [rank + 1] * n, list(range(1, n + 1)))
        expected = torch.arange(n).repeat_interleave(rank + 1) * 100 + rank
        assert torch.equal(got, expected)


@several(2)
@on_every_rank
def test_dtypes_arrive_unchanged() -> None:
    rank = sp.get_rank()
    with process_group():
        for dtype in DTYPES:
            for size in (SMALL, LARGE):
                mine = (torch.arange(size) % 3 + rank).to(dtype)
                other = (torch.arange(size) % 3 + 1).to(dtype)
                got = [torch.empty(size, dtype=dtype) for _ in range(2)]
                dist.all_gather(got, mine)
                assert torch.equal(got[1].view(torch.uint8), other.view(torch.uint8)), dtype
                dist.broadcast(mine, 1)
                assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8)), dtype


@several(2)
@on_every_rank
def test_reductions() -> None:
    rank, n = sp.get_rank(), sp.get_world_size()
    with process_group():
        for size in (SMALL, LARGE):
            for name, expected in REDUCTIONS.items():
                for dtype in (torch.float32, torch.bfloat16, torch.float64):
                    everyone = torch.stack([of_rank(r, size).to(dtype) for r in range(n)])
                    got = everyone[rank].clone()
                    dist.all_reduce(got, getattr(dist.ReduceOp, name))
                    wide = expected(everyone.double())
                    assert torch.allclose(got.double(), wide, rtol=0.02), (name, dtype)
            for name, function in BITWISE.items():
                pair = [torch.arange(size, dtype=torch.int32) + r for r in range(2)]
                got = pair[rank].clone()
                dist.all_reduce(got, getattr(dist.ReduceOp, name))
                assert torch.equal(got, function(*pair)), name
            flags = torch.tensor([bool(rank), False, True])
            dist.all_reduce(flags, dist.ReduceOp.SUM)
            assert flags.tolist() == [True, False, True]
        sparse = torch.sparse_coo_tensor(
            torch.tensor([[rank]]), torch.tensor([2.0]), (3,), check_invariants=True
        )
        dist.all_reduce(sparse)
        assert sparse.to_dense().tolist() == [2.0, 2.0, 0.0]


@several(2)
@on_every_rank
def test_tensors_of_any_layout() -> None:
    """Transposed, strided, zero-dimensional and empty tensors, and views."""
    rank = sp.get_rank()
    with process_group():
        for rows in (3, 300):
            base = torch.zeros(rows, 2 * rows)
            view = base.t()[::2]
            view.fill_(rank + 1)
            dist.all_reduce(view)
            assert (base[:, ::2] == 3).all()
            assert (base[:, 1::2] == 0).all()
        one = torch.tensor(float(rank))
        dist.all_reduce(one)
        assert one.item() == 1.0
        nothing = torch.empty(0, 3)
        dist.all_reduce(nothing)
        dist.broadcast(nothing, 1)
        leaf = torch.ones(2, requires_grad=True)
        dist.all_reduce(leaf)
        assert leaf.tolist() == [2.0, 2.0]
        assert leaf.is_leaf


@several(4)
@on_every_rank
def test_groups_have_rounds_of_their_own() -> None:
    """Several groups of the same ranks, overlapping ones, subgroups and meshes."""
    rank = sp.get_rank()
    with process_group():
        twins = [dist.new_group([0, 1, 2, 3], group_desc=name) for name in ("a", "b")]
        for number, group in enumerate(twins):
            one = torch.tensor([number])
            dist.all_reduce(one, group=group)
            assert one.item() == 4 * number
        chain = [dist.new_group([k, k + 1]) for k in range(3)]
        for k, group in enumerate(chain):
            if rank in (k, k + 1):
                one = torch.tensor([rank])
                dist.broadcast(one, k + 1, group=group)
                assert one.item() == k + 1
        own, _ = dist.new_subgroups(2)
        one = torch.tensor([rank])
        dist.all_reduce(one, group=own)
        assert one.item() == (1 if rank < 2 else 5)
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        one = torch.tensor([rank])
        dist.all_reduce(one, group=mesh["dp"].get_group())
        assert one.item() == 2 * (rank % 2) + 2
        dist.destroy_process_group(twins[0])
        again = dist.new_group([0, 1, 2, 3])
        dist.barrier(group=again)


@several(2)
@on_every_rank
def test_handles_have_futures_and_take_a_timeout() -> None:
    with process_group():
        rank, one = dist.get_rank(), torch.ones(2)
        work = dist.all_reduce(one, async_op=True)
        assert work.is_completed()
        work.wait()
        doubled = work.get_future().then(lambda done: done.value()[0] * 2)
        assert doubled.wait().tolist() == [4.0, 4.0]
        with dist._coalescing_manager():
            pair = [torch.ones(1), torch.ones(1)]
            for tensor in pair:
                dist.all_reduce(tensor)
        assert [tensor.item() for tensor in pair] == [2.0, 2.0]
        transfer = dist.isend(one, 1) if rank == 0 else dist.irecv(one, 0)
        for handle in (work, dist.barrier(async_op=True), transfer):
            assert handle.wait(seconds(60))
            assert handle.wait(timeout=seconds(60))


@several(2)
def test_methods_of_a_group_take_what_torch_says(world: Ranks) -> None:
    maximum, minute = dist.ReduceOp.MAX, {"timeout": seconds(60)}

    def program() -> None:
        with process_group():
            group: Any = dist.group.WORLD
            rank = float(dist.get_rank())

            def mine() -> torch.Tensor:
                return torch.tensor([rank])

            calls: tuple[Callable[[torch.Tensor], Any], ...] = (
                lambda x: group.allreduce(x, op=maximum, **minute),
                lambda x: group.allreduce([x], maximum, seconds(60)),
                lambda x: group.broadcast(x, root=1, **minute),
                lambda x: group.broadcast(x, 1, seconds(60)),
                lambda x: group.reduce_scatter(x, [mine(), mine()], op=maximum, **minute),
                lambda x: group.scatter(x, [mine(), mine()] if rank else [], root=1, **minute),
            )
            for call in calls:
                room = mine()
                call(room).wait()
                assert room.item() == 1
            room = mine()
            group.reduce(room, root=0, op=maximum, **minute).wait()
            assert room.item() == 1
            rooms = [mine(), mine()]
            group.allgather(rooms, mine(), **minute).wait()
            assert [one.item() for one in rooms] == [0, 1]
            group.gather(rooms if rank == 0 else [], mine() + 5, root=0, **minute).wait()
            assert [one.item() for one in rooms] == ([5, 6] if rank == 0 else [0, 1])
            group.alltoall(rooms, [mine(), mine() + 1], **minute).wait()
            assert [one.item() for one in rooms] == [rank, rank + 1]
            group.barrier(**minute).wait()

    world.run(program)


@several(2)
def test_modes_of_the_dispatcher_see_every_call(world: Ranks) -> None:
    """Profilers of communication count calls; fake tensors are computed without communication."""

    def program() -> tuple[dict[str, int], list[float]]:
        import torch.distributed._functional_collectives as functional
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.distributed.tensor import debug
        from torch.testing._internal import two_tensor

        modes: Any = debug
        subclasses: Any = two_tensor
        with process_group():
            one, room = torch.ones(2), torch.empty(4)
            with modes.CommDebugMode() as mode:
                dist.all_reduce(one)
                dist.group.WORLD._allgather_base(room, one)
                dist.group.WORLD.allgather_into_tensor_coalesced([room], [one])
                dist.reduce_scatter(one, [*room.view(2, 2)])
                dist.group.WORLD.monitored_barrier()
                dist.barrier()
            if torch.__version__ >= "2.8":  # torch 2.6 computes no such call
                with FakeTensorMode():
                    dist.all_reduce(torch.ones(3))
            two = subclasses.TwoTensor(torch.ones(2), torch.full((2,), 2.0))
            dist.all_reduce(two)
            pending = functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
            dist.all_reduce(pending)
            assert (two.a.tolist(), two.b.tolist(), pending.item()) == ([2, 2], [4, 4], 4)
            dist.barrier()
            return {str(op): count for op, count in mode.get_comm_counts().items()}, one.tolist()

    calls = "allreduce", "_allgather_base", "allgather_into_tensor_coalesced", "reduce_scatter"
    counts = {f"c10d.{call}_": 1 for call in calls}
    assert world.run(program) == [(counts, [4.0, 4.0])] * 2
