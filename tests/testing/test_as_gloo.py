"""A world that serves ``gloo`` refuses what Gloo refuses or computes wrongly, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import both_kinds
from support.process_groups import with_gloo
from support.rank_worlds import Kind, Ranks

import syncprims as sp
from syncprims.testing import run_world

dist: Any = torch.distributed  # its types leave out what its documentation names
pytestmark = [
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="measured with 2.13"),
    pytest.mark.filterwarnings("ignore:.*deprecated"),
]

#: torch computes nearly nothing with complex32, and this library reduces none of it.
DTYPES = sorted(
    {one for one in vars(torch).values() if isinstance(one, torch.dtype)} - {torch.complex32},
    key=str,
)
REDUCTIONS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG")
Call = Callable[[], Any]


def two_ranks_on_gloo(program: Callable[[], Any], folder: Path) -> list[Any]:
    folder.mkdir()
    return Ranks(Kind("torch", 2), folder).run_alone(with_gloo(program, folder))


def calls_of(dtype: torch.dtype, rank: int) -> Iterator[tuple[str, Call]]:
    """Yield each collective and reduction of a dtype, as rank `rank` of two makes it."""

    def new(size: int = 2) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def pair() -> list[torch.Tensor]:
        return [new(), new()]

    of_main = pair() if rank == 0 else None
    for name in REDUCTIONS:
        op = getattr(dist.ReduceOp, name)
        yield f"all_reduce {name}", partial(dist.all_reduce, new(), op)
        yield f"all_reduce_coalesced {name}", partial(dist.all_reduce_coalesced, pair(), op)
        yield f"reduce {name}", partial(dist.reduce, new(), 0, op)
        yield f"reduce_scatter {name}", partial(dist.reduce_scatter, new(), pair(), op)
        into = partial(dist.reduce_scatter_tensor, new(), new(4), op)
        yield f"reduce_scatter_tensor {name}", into
    yield "broadcast", lambda: dist.broadcast(new(), 0)
    yield "all_gather", lambda: dist.all_gather(pair(), new())
    yield "all_gather_into_tensor", lambda: dist.all_gather_into_tensor(new(4), new())
    yield "gather", lambda: dist.gather(new(), of_main, 0)
    yield "scatter", lambda: dist.scatter(new(), of_main, 0)
    yield "all_to_all", lambda: dist.all_to_all(pair(), pair())
    yield "all_to_all_single", lambda: dist.all_to_all_single(new(4), new(4))
    yield "send", lambda: dist.recv(new(), 0) if rank else dist.send(new(), 1)


def refused_dtypes() -> list[str]:
    """Return the cells of the table that are refused on this rank."""
    found: list[str] = []
    for dtype in DTYPES:
        for name, call in calls_of(dtype, dist.get_rank()):
            try:
                call()
            except (RuntimeError, ValueError):
                found.append(f"{name} of {dtype}")
    return found


def served(program: Callable[[], Any], backend: str = "gloo") -> Callable[[], Any]:
    def run() -> Any:
        dist.init_process_group(backend)
        return program()

    return run


def test_a_dtype_is_refused_exactly_where_gloo_refuses_it(tmp_path: Path) -> None:
    theirs = two_ranks_on_gloo(refused_dtypes, tmp_path / "gloo")
    assert len(theirs[0]) > 1000
    assert run_world(served(refused_dtypes), 2, torch=True) == theirs


@both_kinds
def test_a_refusal_names_gloo_and_the_line(kind: Any) -> None:
    def program() -> None:
        dist.all_reduce(torch.ones(2, dtype=torch.int16))

    with pytest.raises(
        ValueError, match=r"all_reduce 'int16\[2\]' .*test_as_gloo.py:\d+.*: Gloo ref"
    ):
        run_world(served(program), 2, kind=kind, torch=True)
    run_world(served(program, "syncprims"), 2, kind=kind, torch=True)


def test_of_sparse_tensors_only_the_sum_is_served() -> None:
    def program() -> list[float]:
        one = torch.tensor([1.0, 0.0]).to_sparse()
        with pytest.raises(ValueError, match="Gloo has only the sum"):
            dist.all_reduce(one, dist.ReduceOp.AVG)
        dist.all_reduce(one)
        found: list[float] = one.to_dense().tolist()
        return found

    assert run_world(served(program), 2, torch=True) == [[2, 0]] * 2


COLLECTIVES = 12
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.clone,
    "a slice": lambda one: torch.cat([one, one])[len(one) :],
    "transposed": lambda one: one.transpose(0, 3).contiguous().transpose(0, 3),
    "inner transposed": lambda one: one.transpose(2, 3).contiguous().transpose(2, 3),
    "channels_last": lambda one: one.contiguous(memory_format=torch.channels_last),
    "with gaps": lambda one: torch.stack([one, -one], -1)[..., 0],
}


def calls_with(
    given: Callable[[torch.Tensor], torch.Tensor],
    filled: Callable[[torch.Tensor], torch.Tensor],
    group: Any,
) -> Iterator[tuple[str, Call]]:
    """Yield each collective, which returns what it fills, with inputs and outputs of layouts."""
    me = dist.get_rank()

    def one(number: int = 0, parts: int = 1) -> torch.Tensor:
        items = torch.arange(16.0 * parts) + 100 * me + 1000 * number
        return given(items.view(2 * parts, 2, 2, 2))

    def room(parts: int = 1) -> torch.Tensor:
        return filled(torch.zeros(2 * parts, 2, 2, 2))

    def of(call: Callable[..., object], outputs: Any, *args: Any) -> Call:
        def run() -> list[torch.Tensor]:
            call(*args, group=group)
            return [outputs] if isinstance(outputs, torch.Tensor) else outputs or []

        return run

    pair, rooms, mine, into, whole = [one(1), one(2)], [room(), room()], one(), room(), room(2)
    main = me == 0
    yield "all_reduce", of(dist.all_reduce, mine, mine)
    yield "all_reduce_coalesced", of(dist.all_reduce_coalesced, pair, pair)
    yield "reduce", of(dist.reduce, mine if main else [], mine, 0)
    yield "broadcast", of(dist.broadcast, mine, mine, 0)
    yield "all_gather", of(dist.all_gather, rooms, rooms, mine)
    yield "all_gather_into_tensor", of(dist.all_gather_into_tensor, whole, whole, mine)
    yield "gather", of(dist.gather, rooms if main else [], mine, rooms if main else None, 0)
    yield "scatter", of(dist.scatter, into, into, pair if main else None, 0)
    yield "reduce_scatter", of(dist.reduce_scatter, into, into, pair)
    yield "reduce_scatter_tensor", of(dist.reduce_scatter_tensor, into, into, one(3, 2))
    yield "all_to_all", of(dist.all_to_all, rooms, rooms, pair)
    yield "all_to_all_single", of(dist.all_to_all_single, whole, whole, one(3, 2))


def results_by_layout(group_for_each: bool = False) -> dict[str, list[Any] | None]:
    """Return what each collective fills, or None where it is refused, by layout and place."""
    found: dict[str, list[Any] | None] = {}
    places = itertools.product(LAYOUTS, ("in", "out", "both"), ((0,), (1,), (0, 1)))
    for layout, where, ranks in places:
        here = LAYOUTS[layout] if dist.get_rank() in ranks else torch.clone
        given, filled = (here if where in (side, "both") else torch.clone for side in ("in", "out"))
        group = dist.new_group(timeout=timedelta(seconds=1))
        for number in range(COLLECTIVES):
            name, call = [*calls_with(given, filled, group)][number]
            try:
                values: Any = [one.tolist() for one in call()]
            except (RuntimeError, ValueError):
                values = None
            found[f"{name}, {where} {layout} on {ranks}"] = values
            if group_for_each:  # a mismatch breaks a group of ours
                dist.destroy_process_group(group)
                group = dist.new_group()
    return found


@pytest.mark.soak  # 20 s
def test_a_layout_is_refused_exactly_where_gloo_fails_or_is_wrong(tmp_path: Path) -> None:
    theirs = two_ranks_on_gloo(results_by_layout, tmp_path / "gloo")
    right = run_world(served(results_by_layout, "syncprims"), 2, torch=True)
    ours = run_world(served(lambda: results_by_layout(True)), 2, torch=True)
    for case in ours[0]:
        of_gloo, correct, of_ours = ([of[case] for of in each] for each in (theirs, right, ours))
        assert None not in correct
        assert (of_ours == correct) == (of_gloo == correct), case
        assert of_ours == correct or None in of_ours, case


def refuse_transfers() -> None:
    """Start transfers that are refused at once."""
    if dist.get_rank() == 0:
        for layout in LAYOUTS.keys() - {"contiguous", "a slice"}:
            for call in dist.isend, dist.irecv:
                with pytest.raises((RuntimeError, ValueError), match="contiguous"):
                    call(LAYOUTS[layout](torch.zeros(2, 2, 2, 2)), 1)


def test_a_transfer_is_refused_where_gloo_refuses_it(tmp_path: Path) -> None:
    two_ranks_on_gloo(refuse_transfers, tmp_path / "gloo")
    run_world(served(refuse_transfers), 2, torch=True)


@both_kinds
def test_a_layout_that_differs_names_gloo_and_both_lines(kind: Any) -> None:
    def program() -> None:
        one = torch.ones(2, 3)
        if dist.get_rank():
            dist.all_reduce(torch.ones(3, 2).T)
        else:
            dist.all_reduce(one)

    with pytest.raises(sp.CollectiveMismatch) as caught:
        run_world(served(program), 2, kind=kind, torch=True)
    assert "'float32[2, 3], by Gloo in the order [1, 0] of dimensions'" in str(caught.value)
    assert str(caught.value).count("test_as_gloo.py:") >= 2
