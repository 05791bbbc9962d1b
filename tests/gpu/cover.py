"""What needs a CUDA device: each rank of torchrun runs this script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import syncprims as sp


def values(tensor: Any) -> list[float]:
    """Return the different values in a tensor."""
    return sorted(set(tensor.flatten().tolist()))


def own_device() -> torch.device:
    """Return the device of this rank."""
    return torch.device("cuda", sp.get_local_rank() % torch.cuda.device_count())


def barriers_flags_and_objects_touch_no_device() -> None:
    sp.barrier()
    assert sp.any_rank(sp.is_last())
    assert sp.broadcast({"step": 3}) == {"step": 3}
    assert not torch.cuda.is_initialized()


def a_barrier_waits_for_the_device() -> None:
    work = torch.ones(4096, 4096, device="cuda")
    for _ in range(50):
        work = work @ work / 4096
    done = torch.cuda.Event()
    done.record()
    sp.barrier(device=True)
    assert done.query()


def tensors_arrive_on_the_receivers_own_device() -> None:
    own = own_device()
    for size in (3, 100_000):
        sent = {"w": torch.full((size,), float(sp.get_rank()), device=own)}
        arrived = sp.broadcast(sent)["w"]
        assert arrived.device == own, (arrived.device, own)
        assert values(arrived) == [0.0]
    module = sp.broadcast(torch.nn.Linear(3, 3).to(own))  # a pickle, with parameters inside
    assert module.weight.device == own


def every_dtype_is_reduced_with_every_op() -> None:
    own = own_device()
    n = sp.get_world_size()
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)
    for dtype in dtypes:
        for size in (7, 100_000):
            mine = torch.full((size,), sp.get_rank() + 1, dtype=dtype, device=own)
            total = sum(range(1, n + 1))
            expected: dict[Any, float] = {"sum": total, "mean": total / n, "min": 1, "max": n}
            for op, value in expected.items():
                out = sp.all_reduce(mine, op)
                assert out.device == own
                assert values(out) == [value], (dtype, op, values(out))
            assert values(mine) == [sp.get_rank() + 1]


def an_out_on_the_device_is_filled() -> None:
    own = own_device()
    out = torch.empty(50_000, device=own)
    assert sp.all_reduce(torch.ones(50_000, device=own), out=out) is out
    assert values(out) == [sp.get_world_size()]
    assert sp.broadcast(torch.full((50_000,), 7.0, device=own), out=out) is out
    assert values(out) == [7.0]


def shapes_that_differ_are_a_mismatch() -> None:
    own = own_device()
    if sp.get_world_size() == 1:
        return
    with pytest.raises(sp.RankMismatch, match="50000"):
        sp.all_reduce(torch.ones(50_000 + sp.get_rank(), device=own))
    sp.barrier()


CHECKS: list[Callable[[], None]] = [
    barriers_flags_and_objects_touch_no_device,
    a_barrier_waits_for_the_device,
    tensors_arrive_on_the_receivers_own_device,
    every_dtype_is_reduced_with_every_op,
    an_out_on_the_device_is_filled,
    shapes_that_differ_are_a_mismatch,
]

if __name__ == "__main__":
    with sp.init():
        for function in CHECKS:
            function()
