"""A world that serves ``gloo`` refuses what Gloo refuses or computes wrongly, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import both_kinds
from support.process_groups import with_gloo
from support.rank_worlds import Kind, Ranks

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
Call = Callable[[], object]


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
