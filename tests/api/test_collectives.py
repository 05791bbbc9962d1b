"""Collectives: results, groups and arguments, on every backend and world size."""

from __future__ import annotations

import contextvars
import dataclasses
import math
import threading
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import in_processes, on_every_rank, several
from support.rank_worlds import PATIENCE, Ranks

import syncprims as sp

VALUES: list[Any] = [
    None, True, 0, -1, 2**70, -(2**63), 1.5, math.inf, 1 + 2j, "", "héllo \ud800", b"\x00\xff",
    [1, [2, [3]]], (1, "two", None), {"a": 1, 2: (3.0,), None: []}, {1, 2, 3}, frozenset({"x"}),
    Path("/some/where"), "x" * 200_000,
]  # fmt: skip


def test_queries_know_the_place(world: Ranks) -> None:
    def program() -> tuple[Any, ...]:
        w = sp.current()
        assert (w.rank, w.world_size) == (sp.get_rank(), sp.get_world_size())
        assert (w.local_rank, w.local_world_size) == (
            sp.get_local_rank(),
            sp.get_local_world_size(),
        )
        assert (w.node_rank, w.num_nodes) == (sp.get_node_rank(), sp.get_num_nodes())
        place = sp.get_rank(), sp.get_world_size(), sp.get_node_rank(), sp.get_num_nodes()
        return *place, sp.is_main(), sp.is_local_main(), sp.is_last()

    n, hosts = world.ranks, world.kind.hosts
    here = n // hosts
    assert world.run(program) == [
        (r, n, r // here, hosts, r == 0, r % here == 0, r == n - 1) for r in range(n)
    ]


@on_every_rank
def test_nobody_leaves_a_barrier_before_all_have_entered(tmp_path: Path) -> None:
    for k in range(20):
        (tmp_path / f"{k}-{sp.get_rank()}").touch()
        sp.barrier(f"round {k}" if k % 2 else None)
        arrived = [(tmp_path / f"{k}-{r}").exists() for r in range(sp.get_world_size())]
        assert all(arrived)


@on_every_rank
def test_broadcast_gives_everyone_the_object_of_src() -> None:
    for src in range(sp.get_world_size()):
        for value in VALUES:
            sent = value if sp.get_rank() == src else "something else"
            got = sp.broadcast(sent, src=src)
            assert got is sent or sp.get_rank() != src
            assert got == value
            assert type(got) is type(value)


class Config(NamedTuple):
    steps: int
    rate: float


OPS: dict[Any, Callable[[list[Any]], Any]] = {
    "sum": sum, "mean": lambda all_: sum(all_) / len(all_), "min": min, "max": max,
    "prod": math.prod,
}  # fmt: skip
NUMBERS: list[Callable[[int], Any]] = [lambda r: 2**53 + 1 + r, lambda r: 0.5 * r]
#: What rank `r` of `n` gives, the operation, and the result, whose type is the same, too.
REDUCED: list[tuple[Callable[[int, int], Any], Any, Callable[[int], Any]]] = [
    (lambda r, n: r == 0, "sum", lambda n: 1),
    (lambda r, n: np.array([r == 0, True]), "sum", lambda n: np.array([1, n], np.int64)),
    *((lambda r, n: math.nan if r == n - 1 else 1.0, op, lambda n: math.nan)
      for op in ("min", "max")),
    (lambda r, n: np.full(2, 40000, "f2"), "mean", lambda n: np.full(2, 40000, "f2")),
    (lambda r, n: np.int32(3), "sum", lambda n: 3 * n),
    (lambda r, n: Config(1, 0.5), "sum", lambda n: Config(n, 0.5 * n)),
]  # fmt: skip


@on_every_rank
def test_reductions_are_exact_and_keep_types() -> None:
    n, rank = sp.get_world_size(), sp.get_rank()
    for make in NUMBERS:
        for op, combine in OPS.items():
            expected = combine([make(r) for r in range(n)])
            assert repr(sp.all_reduce(make(rank), op)) == repr(expected), op
    for give, op, result in REDUCED:
        assert repr(sp.all_reduce(give(rank, n), op)) == repr(result(n))
    assert sp.all_reduce(rank == 0, "max") == 1
    assert sp.all_reduce(np.int64(2**62)) == n * 2**62


def test_flags(world: Ranks) -> None:
    def program() -> list[bool]:
        r, last = sp.get_rank(), sp.get_world_size() - 1
        return [
            sp.any_rank(False),
            sp.any_rank(r == last),
            sp.all_ranks(True),
            sp.all_ranks(r == last),
            sp.any_rank(np.bool_(True)),
        ]

    n = world.ranks
    assert world.run(program) == [[False, True, True, n == 1, True]] * n


@several(4)
def test_groups_meet_without_the_others(world: Ranks) -> None:
    def program() -> Any:
        r = sp.get_rank()
        low, odd = sp.group([1, 0]), sp.group([1, 3])
        assert low.ranks == (0, 1)
        assert sp.group([0, 1]) is low
        said: list[Any] = []
        if r in (0, 1):
            with low as entered:
                assert entered is low
                said += [sp.all_gather(r), sp.all_reduce(r), sp.split(list("abc"))]
                said.append(low.broadcast(r, src=1))
        else:
            with pytest.raises(ValueError, match=rf"rank {r} is not in the group .*\[0, 1\]"):
                low.__enter__()
            with pytest.raises(ValueError, match="not in the group"):
                low.barrier()
        if r in (1, 3):
            said.append(odd.all_gather(r))
            with pytest.raises(ValueError, match="src=0"):
                odd.broadcast(1, src=0)
        sp.barrier("all again")
        said.append(len(sp.all_gather(None)))
        return said

    assert world.run(program) == [
        [[0, 1], 1, ["a", "b"], 1, 4],
        [[0, 1], 1, ["c"], 1, [1, 3], 4],
        [4],
        [[1, 3], 4],
    ]


def test_device_waits_where_there_is_none(world: Ranks) -> None:
    assert world.run(lambda: sp.barrier("step", device=True)) == [None] * world.ranks


@several(2)
@on_every_rank
def test_the_default_device_is_for_the_programs_own_tensors() -> None:
    for dtype, count in ((torch.float32, 3), (torch.bfloat16, 3), (torch.float32, 600_000)):
        mine = torch.full((count,), 1.0 + sp.get_rank(), dtype=dtype)
        mine[0] = torch.nan
        with torch.device("meta"):
            total, sent = sp.all_reduce(mine), sp.broadcast(mine)
            listed = sp.all_gather({"x": mine})
        assert total[0].isnan()
        assert total[1:].tolist() == [3.0] * (count - 1)
        assert sent[1:].tolist() == [1.0] * (count - 1)
        assert [item["x"][1].item() for item in listed] == [1.0, 2.0]


def test_a_block_of_a_group_may_end_in_another_order_and_place(world: Ranks) -> None:
    def blocks(group: sp.Group) -> Generator[None]:
        with group:
            yield

    def program() -> None:
        n = sp.get_world_size()
        singles = [sp.group([rank]) for rank in range(n)]
        everyone, alone = sp.current().group, singles[sp.get_rank()]
        outer, inner = blocks(everyone), blocks(alone)
        next(outer)
        next(inner)
        outer.close()
        assert sp.split(["mine"]) == ["mine"]  # still within the inner one
        inner.close()
        elsewhere = blocks(alone)
        contextvars.copy_context().run(next, elsewhere)
        elsewhere.close()
        assert sp.split(list(range(n))) == [sp.get_rank()]

    world.run(program)


@in_processes
@on_every_rank
def test_blocks_of_a_group_may_overlap_in_threads() -> None:
    n = sp.get_world_size()
    alone = [sp.group([rank]) for rank in range(n)][sp.get_rank()]
    meet = threading.Barrier(2)
    raised: list[BaseException] = []

    def block(*, first: bool) -> None:
        try:
            if first:
                meet.wait(PATIENCE)
            with alone:
                if not first:
                    meet.wait(PATIENCE)
                meet.wait(PATIENCE)
                sp.barrier()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=block, kwargs={"first": first}) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []


@dataclasses.dataclass(repr=False)
class Shown:
    """It fails to be shown where it is asked to."""

    value: int

    def __repr__(self) -> str:
        if self.value:
            raise RuntimeError("no words for it")
        return f"Shown({self.value})"


@several()
@on_every_rank
def test_assert_same_tells_of_what_cannot_be_shown() -> None:
    with pytest.raises(sp.RankMismatch) as caught:
        sp.assert_same(Shown(sp.is_last()), "value")
    sp.barrier("still in step")
    said = str(caught.value)
    assert "rank 0: Shown(False)  (digest" in said
    assert f"rank {sp.get_world_size() - 1}: <no text: its __repr__ raised RuntimeError>" in said


#: What takes a group.
GROUPED: list[tuple[Any, ...]] = [
    (sp.barrier,), (sp.main_first,), (sp.in_turn,), (sp.broadcast, 1), (sp.all_gather, 1),
    (sp.all_reduce, 1), (sp.any_rank, 1), (sp.all_ranks, 1), (sp.assert_same, 1, "one"),
]  # fmt: skip
#: Calls that no rank makes, since their arguments are wrong: the error, and what it says.
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: sp.all_reduce(1, "minimum"), ValueError, "sum, mean, min, max, prod"),  # type: ignore[call-overload]
    (lambda: sp.all_reduce({"a": ["text"]}), TypeError, r"value\['a'\]\[0\] is a str"),
    (lambda: sp.group([]), ValueError, "group is made of different ranks"),
    (lambda: sp.group([0, 0]), ValueError, "group is made of different ranks"),
    (lambda: sp.group([99]), ValueError, "group is made of different ranks"),
    (lambda: sp.group([-1]), ValueError, "group is made of different ranks"),
    (lambda: sp.group(["a"]), TypeError, "whole number"),  # type: ignore[list-item]
    (lambda: sp.group(0), TypeError, r"group\(0\): a group takes a list of ranks"),  # type: ignore[arg-type]
    (lambda: sp.broadcast(1, src=99), ValueError, "src=99"),
    *((partial(sp.barrier, timeout=one), ValueError, "seconds above 0") for one in (0, -1.0)),
    (lambda: sp.barrier(timeout="30"), TypeError, "seconds, or a timedelta"),  # type: ignore[arg-type]
    (lambda: sp.barrier(3), TypeError, "a name is a str"),  # type: ignore[arg-type]
    (lambda: sp.on_rank("a"), TypeError, "whole number"),  # type: ignore[call-overload]
    (lambda: sp.main_first(local=True, group=sp.current().group), ValueError, "pass only one"),
    (lambda: sp.main_first(local=True, at="."), ValueError, "pass only one"),
    (lambda: sp.Trigger().set(3), TypeError, "a reason is a str"),  # type: ignore[arg-type]
    (lambda: bool(sp.Trigger()), TypeError, r"check\(\)"),
    (lambda: sp.Trigger(lag=2), ValueError, "lag=2"),
    (lambda: sp.Trigger().set_on_signal("TERM"), TypeError, "and 'TERM' is a str"),  # type: ignore[arg-type]
    (lambda: sp.Trigger().set_on_signal(grace=0), ValueError, "grace=0: it takes seconds above 0"),
    (lambda: sp.Trigger().set_on_signal(0), ValueError, "signum=0: no program can catch such"),
    (lambda: sp.Trigger().set_on_signal(999), ValueError, "signum=999: no program can catch"),
    (lambda: sp.Trigger().set_on_signal(9), ValueError, "signum=9: no program can catch such"),
    *((partial(call, *args, group=[0]), TypeError, r"group= takes a Group, .* is a list")
      for call, *args in GROUPED),
]  # fmt: skip


@on_every_rank
def test_bad_arguments_are_refused_before_anyone_waits() -> None:
    for number, (call, error, says) in enumerate(REFUSED):
        with pytest.raises(error, match=says):
            call()
        assert sp.all_gather(number) == [number] * sp.get_world_size()


@on_every_rank
def test_numbers_of_other_types_are_accepted() -> None:
    for timeout in (np.int64(30), np.float32(30)):
        sp.barrier(timeout=timeout)  # type: ignore[arg-type]
    assert sp.on_rank(n=0, default=1)(lambda: 1)() == 1
    assert sp.on_rank(np.int64(0), default=1)(lambda: 1)() == 1  # type: ignore[call-overload]
    assert sp.on_local_rank(np.int64(0), default=1)(lambda: 1)() == 1  # type: ignore[call-overload]
    assert sp.group(np.arange(1)) is sp.group([0])  # type: ignore[arg-type]


@on_every_rank
def test_no_call_leaves_a_trace_on_a_tensor() -> None:
    """A later `resize_` works: FSDP resizes the storage of tensors that have been reduced."""
    for size in (3, 70_000):
        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            used = [torch.ones(size, dtype=dtype) for _ in range(8)]
            out = [torch.empty(size, dtype=dtype) for _ in range(2)]
            used += [
                sp.broadcast(used[0]),
                sp.broadcast(used[1], out=out[0]),
                sp.all_reduce(used[2]),
                sp.all_reduce(used[3], out=out[1]),
                sp.all_reduce({"a": [used[4]]}, "mean")["a"][0],
                *sp.all_gather(used[5]),
                sp.on_main(share=True)(lambda one=used[6]: one)(),
            ]
            sp.assert_same(used[7], "equal")
            for tensor in (*used, *out):
                assert tensor.untyped_storage().resizable()
                tensor.resize_(2 * size)
