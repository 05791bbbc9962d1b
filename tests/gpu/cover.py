"""Try what needs a CUDA device, and say what was covered on which hardware.

Run by itself it starts its own ranks: ``python tests/gpu/cover.py``. With one device, two ranks
share it and their tensors pass through the host's memory; NCCL is then tried by a world of one.
With more, NCCL joins all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
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


CHECKS: dict[str, Callable[[], Any]] = {}


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


@check
def barriers_flags_and_objects_touch_no_device() -> None:
    sp.barrier()
    assert sp.any_rank(sp.is_last())
    assert sp.broadcast({"step": 3}) == {"step": 3}
    assert not torch.cuda.is_initialized()


@check
def a_barrier_waits_for_the_device() -> None:
    work = torch.ones(4096, 4096, device="cuda")
    for _ in range(50):
        work = work @ work / 4096
    done = torch.cuda.Event()
    done.record()
    sp.barrier(device=True)
    assert done.query()


@check
def tensors_arrive_on_the_receivers_own_device() -> None:
    own = own_device()
    for size in (3, 100_000):
        sent = {"w": torch.full((size,), float(sp.get_rank()), device=own)}
        arrived = sp.broadcast(sent)["w"]
        assert arrived.device == own, (arrived.device, own)
        assert values(arrived) == [0.0]
    module = sp.broadcast(torch.nn.Linear(3, 3).to(own))  # a pickle, with parameters inside
    assert module.weight.device == own


@check
def every_dtype_is_reduced_with_every_op() -> None:
    own = own_device()
    n = sp.get_world_size()
    dtypes = (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int32,
        torch.int64,
    )
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


@check
def an_out_on_the_device_is_filled() -> None:
    own = own_device()
    out = torch.empty(50_000, device=own)
    assert sp.all_reduce(torch.ones(50_000, device=own), out=out) is out
    assert values(out) == [sp.get_world_size()]
    assert sp.broadcast(torch.full((50_000,), 7.0, device=own), out=out) is out
    assert values(out) == [7.0]


@check
def shapes_that_differ_are_a_mismatch() -> None:
    own = own_device()
    if sp.get_world_size() == 1:
        return
    with pytest.raises(sp.RankMismatch, match="50000"):
        sp.all_reduce(torch.ones(50_000 + sp.get_rank(), device=own))
    sp.barrier()


def be_rank(folder: str) -> None:
    said: dict[str, str] = {}
    with sp.init():
        for name, function in CHECKS.items():
            try:
                function()
                said[name] = "passed"
            except Exception:
                said[name] = traceback.format_exc()
        group = torch.distributed.is_initialized()
        said["engine"] = torch.distributed.get_backend() if group else "through the host"
        (Path(folder) / str(sp.get_rank())).write_text(json.dumps(said))


def cover(ranks: int) -> list[dict[str, str]]:
    """Return what each of so many ranks found."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", __file__, folder]
        subprocess.run(command, check=True, timeout=300)
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(ranks)]


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was covered")
        return 1
    count = torch.cuda.device_count()
    print(f"{count} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    failed = False
    for ranks in sorted({1, max(2, count)}):
        found = cover(ranks)
        print(f"\n{ranks} ranks, device to device by: {found[0].pop('engine')}")
        for other in found[1:]:
            other.pop("engine")
        for name in CHECKS:
            said = {rank: other[name] for rank, other in enumerate(found)}
            wrong = {rank: text for rank, text in said.items() if text != "passed"}
            failed = failed or bool(wrong)
            print(f"  {'passed' if not wrong else f'FAILED {wrong}'}: {name}")
    return int(failed)


if __name__ == "__main__":
    if "RANK" in os.environ:
        be_rank(sys.argv[1])
    else:
        sys.exit(main())
