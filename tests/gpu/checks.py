"""The checks of one device: what is true of tensors there, on every kind of world.

Every check also runs with ``-d cpu``, where tensors are in the host's memory.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Generator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from rig import Skip, about_machine, check, interleave, note
from torch import nn

import syncprims as sp
from syncprims._world.runtime import get_world
from syncprims.training import (
    Accumulator,
    Precision,
    gather,
    load_state,
    prepare,
    rank_device,
    save_model,
    save_state,
)  # fmt: skip

dist: Any = torch.distributed  # its types leave out what its documentation names
PAIRS = ("file-2", "torch-2")
WORLDS = (*PAIRS, "nccl-1")


def on_gpu() -> bool:
    """Return whether the device is one: else this is a dry run."""
    return os.environ["GPU_CHECKS_DEVICE"] == "cuda"


def device() -> torch.device:
    """Return this rank's device, which is then the current one."""
    return rank_device(cpu=not on_gpu())


def shared() -> Path:
    """Return a folder that the ranks of this check share."""
    return Path(os.environ["GPU_CHECKS_SHARED"])


def sync() -> None:
    if on_gpu():
        torch.cuda.synchronize()


def busy(milliseconds: int = 100) -> None:
    """Keep the current stream of the device busy."""
    if on_gpu():
        torch.cuda._sleep(milliseconds * 1_500_000)  # cycles


@contextlib.contextmanager
def side_stream() -> Generator[None]:
    """Work on a stream that is not the default one, where there are streams."""
    if not on_gpu():
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
        torch.cuda.current_stream().synchronize()


def late(value: float, size: int = 300_000) -> torch.Tensor:
    """Return a tensor whose items a kernel writes later, on the current stream."""
    tensor = torch.zeros(size, device=device())
    busy()
    return tensor.add_(value)


def values(tensor: Any) -> list[float]:
    """Return the different values in a tensor, which must be on this rank's device."""
    assert tensor.device == device(), (tensor.device, device())
    return sorted(set(tensor.flatten().tolist()))


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(),
        nn.Dropout(0.2), nn.LazyLinear(4),
    )  # fmt: skip


def image(seed: int = 0, count: int = 4) -> torch.Tensor:
    made = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return made.to(device())


def same_bits(one: Any, other: Any) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(value.cpu(), other[key].cpu()) for key, value in one.items())


# -- the primitives --------------------------------------------------------------------------------


@check(*WORLDS)
def barriers_flags_and_objects_touch_no_device() -> None:
    for _ in range(50):
        sp.barrier()
        assert sp.any_rank(sp.is_last())
        assert sp.broadcast({"step": 3}) == {"step": 3}
        assert sp.all_reduce(1) == sp.get_world_size()
    assert not torch.cuda.is_initialized()


@check(*WORLDS)
def a_barrier_waits_for_the_device_and_takes_no_memory() -> None:
    late(1.0)
    done = torch.cuda.Event() if on_gpu() else None
    if done is not None:
        done.record()
    sp.barrier(device=True)
    assert done is None or done.query()
    before = torch.cuda.memory_reserved() if on_gpu() else 0
    for _ in range(200):
        sp.barrier(device=True)
    assert before == (torch.cuda.memory_reserved() if on_gpu() else 0)


@check(*WORLDS)
def tensors_arrive_on_the_receivers_own_device() -> None:
    own, last, n = device(), sp.get_world_size() - 1, sp.get_world_size()
    for size in (0, 1, 3, 100_000, 3_000_000):
        mine = torch.full((size,), float(sp.get_rank()), device=own)
        tree: Any = sp.broadcast({"w": mine, "n": [size, mine.half()]}, last)
        assert values(tree["w"]) == values(tree["n"][1]) == [float(last)] * (size > 0)
        parts = sp.all_gather(mine)
        assert [values(part) for part in parts] == [[float(r)] * (size > 0) for r in range(n)]
        sums: Any = sp.all_reduce({"a": mine, "b": [mine + 1, 2]})
        assert values(sums["b"][0]) == [n * (n + 1) / 2] * (size > 0)
        assert sums["b"][1] == 2 * n
    assert sp.broadcast(torch.tensor(3.0, device=own)).shape == ()


@check(*WORLDS)
def out_strides_views_and_versions() -> None:
    own, n = device(), sp.get_world_size()
    out = torch.empty(50_000, device=own)
    version = out._version
    assert sp.all_reduce(torch.ones(50_000, device=own), out=out) is out
    assert values(out) == [n]
    assert sp.broadcast(torch.full((50_000,), 7.0, device=own), out=out) is out
    assert values(out) == [7.0]
    assert out._version > version
    assert values(sp.all_reduce(torch.ones(400, 300, device=own).t()[::2])) == [n]
    for dtype in (torch.bool, torch.uint8, torch.complex64, torch.bfloat16, torch.float8_e4m3fn):
        sent = torch.ones(1000, device=own).to(dtype)
        assert sp.broadcast(sent).dtype == dtype
        assert torch.equal(sp.broadcast(sent).float(), sent.float())


@check(*WORLDS)
def dense_strides_travel_and_are_saved() -> None:
    dense = image().to(memory_format=torch.channels_last)
    assert torch.equal(arrived := sp.broadcast(dense), dense)
    model, optimizer, _ = train("no", 1, layout=torch.channels_last)
    inner = getattr(model, "module", model)
    save_state(shared() / "state", {"model": inner, "optimizer": optimizer})
    load_state(shared() / "state", {"model": inner, "optimizer": optimizer})
    first = next(inner.parameters())
    assert optimizer.state[first]["exp_avg"].stride() == first.stride()
    assert arrived.stride() == dense.stride()


@check(*WORLDS)
def a_pickled_model_keeps_its_ties_and_devices() -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device())
    tied[1].weight = tied[0].weight
    got: Any = sp.broadcast(tied)
    assert got[0].weight.device == device()
    assert got[0].weight is got[1].weight
    assert isinstance(got[0].weight, nn.Parameter)


@check(*WORLDS)
def every_dtype_is_reduced_with_every_op() -> None:
    own, n = device(), sp.get_world_size()
    kinds = ["float16", "bfloat16", "float32", "float64"]
    kinds += ["int8", "uint8", "int16", "int32", "int64"]
    total, product = sum(range(1, n + 1)), 2.0 if n == 2 else 1.0
    wanted: dict[Any, float] = {
        "sum": total, "mean": total / n, "min": 1, "max": n, "prod": product
    }  # fmt: skip
    for dtype in [getattr(torch, kind) for kind in kinds]:
        for size in (7, 100_000):
            mine = torch.full((size,), sp.get_rank() + 1, dtype=dtype, device=own)
            for op, value in wanted.items():
                got = sp.all_reduce(mine, op)
                assert values(got) == [value], (dtype, op, size)
                whole = op == "mean" and not dtype.is_floating_point
                assert got.dtype == (torch.float64 if whole else dtype), (dtype, op, got.dtype)
            assert values(mine) == [sp.get_rank() + 1]


@check(*PAIRS)
def what_differs_is_a_mismatch_that_all_survive() -> None:
    with pytest.raises(sp.RankMismatch, match="50000"):
        sp.all_reduce(torch.ones(50_000 + sp.get_rank(), device=device()))
    with pytest.raises(sp.RankMismatch):
        sp.assert_same(torch.full((5,), float(sp.get_rank()), device=device()), "weights")
    sp.assert_same(torch.ones(5, device=device()), "weights")
    where = device() if sp.is_main() else torch.device("cpu")
    with contextlib.suppress(sp.RankMismatch):  # one on the host, one on the device
        sp.all_reduce(torch.ones(9, device=where))
    sp.barrier()


@check(*WORLDS)
def work_on_another_stream_is_waited_for() -> None:
    n = sp.get_world_size()
    for _ in range(3):
        with side_stream():
            assert values(sp.all_reduce(late(1.0)) * 2) == [2.0 * n]
            assert values(sp.broadcast(late(3.0))) == [3.0]
            assert values(sp.all_gather(late(4.0))[-1]) == [4.0]
            out = late(0.0)
            sp.broadcast(late(5.0), out=out)
            assert values(out) == [5.0]
            sp.barrier(device=True)


# -- failures --------------------------------------------------------------------------------------


@check(*PAIRS)
def out_of_memory_on_one_rank_is_named_on_the_other() -> None:
    if on_gpu():
        torch.cuda.set_per_process_memory_fraction(0.02)

    def program() -> None:
        with sp.init():
            if sp.get_rank() == 1:
                torch.empty(1 << 59, dtype=torch.uint8, device=device())
            sp.barrier("step")

    main = sp.is_main()
    with pytest.raises(sp.PeerFailed if main else RuntimeError) as caught:
        program()
    if main:
        assert ("OutOfMemoryError" if on_gpu() else "RuntimeError") in str(caught.value)
        assert "memory" in str(caught.value)


@check(*PAIRS, killed=(1,))
def a_rank_that_is_killed_while_kernels_run_is_named() -> None:
    late(1.0)
    sp.barrier()
    for _ in range(50):
        busy(20)
    if sp.get_rank() == 1:
        (shared() / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(sp.PeerLost, match="rank 1"):
        sp.all_reduce(torch.ones(100_000, device=device()))
    noticed = time.time() - float((shared() / "killed").read_text())
    note(noticed=f"after {1000 * noticed:.0f} ms, own kernels included")


@check("file-3", "torch-3", killed=(2,))
def survivors_hand_over_what_is_on_the_device() -> None:
    state = {"w": torch.full((100_000,), 2.0, device=device()), "step": 4}
    sp.barrier()
    if sp.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(sp.PeerLost):
        sp.all_reduce(state["w"])
    change = sp.reform()
    assert values(sp.hand_over(state, change)["w"]) == [2.0]
    assert values(sp.all_reduce(state["w"])) == [4.0]
    model = prepare(nn.Linear(4, 4), accumulator=Accumulator(), device=device())
    model(torch.ones(2, 4, device=device())).sum().backward()


@check("alone-1")
def a_launcher_names_a_killed_rank_whose_kernels_run() -> None:
    script = shared() / "train.py"
    gpu = "w = torch.ones(9, device='cuda'); [torch.cuda._sleep(30_000_000) for _ in range(50)]\n"
    script.write_text(
        "import os, signal, torch, syncprims as sp\n"
        + (gpu if on_gpu() else "w = torch.ones(9)\n")
        + "sp.barrier()\n"
        "if sp.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sp.all_reduce(w)\n"
    )
    done = python("-m", "syncprims", "run", "-n", "2", script)
    assert done.returncode != 0
    assert "rank 1" in done.stderr, done.stderr
    assert "SIGKILL" in done.stderr, done.stderr


def python(*words: object) -> Any:
    """Run this Python in a clean environment, and return the finished process."""
    from support.rank_environment import run_python

    # In another directory: Python finds a checkout in its own one first.
    return run_python(*words, cwd=shared(), PYTHONPATH=os.pathsep.join(filter(None, sys.path)))


# -- torch.distributed -----------------------------------------------------------------------------


def collectives() -> None:
    """Call every collective of torch with tensors on the device."""
    own, n, me = device(), dist.get_world_size(), dist.get_rank()
    gloo = dist.get_backend() == "gloo"

    def t(*numbers: float) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float32, device=own)

    a = t(me + 1.0, 2.0)
    dist.broadcast(a, 0)
    assert a.tolist() == [1, 2]
    ops: dict[str, Any] = {"SUM": sum, "MIN": min, "MAX": max}
    for name, reduce in ops.items():
        b = t(me + 1.0)
        dist.all_reduce(b, getattr(dist.ReduceOp, name))
        assert b.tolist() == [reduce(range(1, n + 1))], name
    parts = [t(0.0) for _ in range(n)]
    dist.all_gather(parts, t(me))
    assert [p.item() for p in parts] == list(range(n))
    dist.reduce(b := t(1.0), 0)
    assert me or b.item() == n
    dist.scatter(got := t(0.0), [t(r + 5.0) for r in range(n)] if me == 0 else None, 0)
    assert got.item() == me + 5
    dist.gather(t(me), parts if me == 0 else None, 0)
    work = dist.all_reduce(c := t(1.0), async_op=True)
    assert work is not None
    work.wait()
    assert c.item() == n
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": me})
    assert objects[-1] == {"rank": n - 1}
    dist.barrier()
    if not gloo:  # Gloo has some of these for the host's memory only
        dist.all_gather_into_tensor(whole := t(*[0.0] * n), t(me))
        assert whole.tolist() == list(range(n))
        dist.reduce_scatter_tensor(part := t(0.0), t(*range(n)))
        assert part.item() == n * me
        dist.all_to_all_single(whole, t(*[me] * n))
        assert whole.tolist() == list(range(n))
        dist.all_to_all(parts, [t(me) for _ in range(n)])
        dist.all_reduce(mean := t(me), dist.ReduceOp.AVG)
        assert mean.item() == (n - 1) / 2
    if n > 1:
        other = 1 - me
        if not gloo:
            sends = [dist.P2POp(dist.isend, late(me + 1.0), other),
                     dist.P2POp(dist.irecv, room := late(0.0), other)]  # fmt: skip
            for one in dist.batch_isend_irecv(sends):
                one.wait()
            assert values(room) == [other + 1]
        if not (gloo and on_gpu()):  # where Gloo's send ends the process
            call: Any = dist.send if me == 0 else dist.recv
            call(d := t(me), other)
            assert d.item() == 0
    sub = dist.new_group([n - 1])
    if me == n - 1:
        dist.all_reduce(c, group=sub)
        assert c.item() == n


def open_group(backend: str | None = None) -> None:
    """Open torch's default group: one of the library by name, or the one of the world."""
    rank, size = sp.get_rank(), sp.get_world_size()
    if backend:
        store = dist.FileStore(str(shared() / "store"), size)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30)
        )
    elif size > 1:
        sp.current().open_process_group()
    else:  # what the public call does with more ranks: so NCCL can be tried on one device
        get_world().backend.open_process_group()


@check("file-2", "file-1")
def every_collective_of_c10d_takes_device_tensors() -> None:
    open_group("syncprims")
    collectives()
    with side_stream():
        collectives()
        dist.all_reduce(a := late(1.0))
        assert values(a) == [dist.get_world_size()]
    dist.destroy_process_group()


@check("torch-2", "nccl-1")
def the_default_group_of_a_world_serves_the_device() -> None:
    open_group()
    if on_gpu() and sp.get_world_size() == 1:
        assert "nccl" in dist.get_backend_config(), dist.get_backend_config()
        bound = dist.distributed_c10d._get_default_group().bound_device_id
        assert bound == device(), bound
        dist.barrier(device_ids=[device().index])
    collectives()
    with sp.group(range(sp.get_world_size())) as group:
        assert values(group.all_reduce(late(1.0))) == [sp.get_world_size()]


@check("nccl-1", "torch-2")
def reform_aborts_the_group_of_the_world() -> None:
    for epoch in range(3):
        open_group()
        dist.all_reduce(a := late(1.0))
        assert values(a) == [sp.get_world_size()]
        assert values(sp.all_reduce(late(1.0))) == [sp.get_world_size()]
        assert sp.current().epoch == epoch
        busy()
        dist.all_reduce(a, async_op=True)
        if sp.get_world_size() > 1:
            sp.reform()
        else:
            get_world().backend.abort_process_group()
            assert values(late(2.0)) == [2.0]
            break
        assert not dist.is_initialized()


@check("nccl-1")
def the_engine_of_devices_carries_tensors_on_the_current_stream() -> None:
    engines: Any = import_module("syncprims.backends.torch.engines")

    engine = engines.NcclEngine([0], 1, get_world().backend.open_process_group)
    for dtype in engine._DTYPES:
        with side_stream():
            one = late(2.0, 30_000).to(dtype)
            assert engine.takes(one, "sum") == on_gpu()
            for op in ("sum", "min", "max", "prod", *(["mean"] * dtype.is_floating_point)):
                engine.all_reduce(one, op)
                assert values(one) == [2.0], (dtype, op)
            engine.broadcast(one, 0)
            assert values(one) == [2.0], dtype


@check("nccl-2")
def two_ranks_of_nccl_on_one_device_are_an_error() -> None:
    if not on_gpu() or torch.cuda.device_count() > 1:
        raise Skip("it needs exactly one GPU")
    with pytest.raises(Exception, match=r"(?i)duplicate|nccl"):
        sp.current().open_process_group()


@check("alone-1")
def nothing_warns_when_a_program_of_nccl_ends() -> None:
    for ending in ("", "sp.shutdown()", "dist.destroy_process_group()"):
        kind = "nccl" if on_gpu() else "gloo"
        text = (
            "import torch, syncprims as sp, torch.distributed as dist\n"
            f"sp.init({kind!r}).backend.open_process_group()\n"
            f"w = torch.ones(9, device={'cuda' if on_gpu() else 'cpu'!r})\n"
            f"dist.all_reduce(w)\nsp.all_reduce(w)\n{ending}\n"
        )
        (script := shared() / "end.py").write_text(text)
        done = python("-W", "error", script)
        assert done.returncode == 0, done.stderr
        said = [line for line in done.stderr.splitlines() if "arn" in line or "rror" in line]
        assert not said, (ending, done.stderr)


@check("alone-1")
def ranks_of_torchrun_join_a_group_that_the_program_opened() -> None:
    script = shared() / "joined.py"
    kind = "nccl" if on_gpu() else "gloo"
    script.write_text(
        "import torch, torch.distributed as dist, syncprims as sp\n"
        f"where = {'cuda:0' if on_gpu() else 'cpu'!r}\n"
        f"dist.init_process_group({kind!r})\n"
        "assert sp.get_world_size() == 1\n"
        "w = sp.all_reduce(torch.ones(100_000, device=where))\n"
        "assert w.device == torch.device(where) and w.sum() == 100_000\n"
        "sp.barrier(device=True)\ndist.destroy_process_group()\n"
    )
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    done = python(*start, script)
    assert done.returncode == 0, done.stderr


@check("file-2")
def fsdp2_trains_on_the_device() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    open_group("syncprims")
    own = device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(own)
    reference = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(own)
    reference.load_state_dict(model.state_dict())
    mesh = init_device_mesh(own.type, (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    both = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1)).to(own)
    for one, data in ((model, both[dist.get_rank()]), (reference, both.flatten(0, 1))):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            one(data).square().mean().backward()
            optimizer.step()
    for mine, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), wanted, rtol=1e-3, atol=1e-5)  # type: ignore[attr-defined]
    dist.destroy_process_group()


# -- training --------------------------------------------------------------------------------------


def train(
    mode: str, steps: int = 3, *, layout: Any = torch.contiguous_format, sgd: bool | None = None
) -> tuple[Any, Any, Accumulator]:
    """Train a small network for some steps; return it, the optimizer and the accumulator."""
    own = device()
    model: Any = net().to(own)
    model(image())
    model = model.to(memory_format=layout)
    scaler = {"init_scale": 1024.0} if mode == "fp16" else None
    accumulator = Accumulator(2, precision=Precision(mode, own, scaler=scaler))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if sgd is not None:  # its steps are in proportion to the gradients; `sgd` says if it is fused
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, fused=sgd)
    model, optimizer = prepare(model, optimizer, accumulator=accumulator, device=own)
    for micro in range(2 * steps):
        with accumulator.accumulate(model):
            batch = image(10 * micro + sp.get_rank()).to(memory_format=layout)
            accumulator.backward(model(batch).square().mean())
            accumulator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, accumulator


@check(*WORLDS)
def ranks_train_alike_in_every_precision() -> None:
    for mode in ("no", "bf16", "fp16"):
        for layout in (torch.contiguous_format, torch.channels_last):
            model, optimizer, _ = train(mode, layout=layout)
            for name, parameter in model.named_parameters():
                sp.assert_same(parameter.detach(), f"{mode} {name}")
                assert parameter.isfinite().all()
            first = next(model.parameters())
            assert first.is_contiguous(memory_format=layout)
            moment = optimizer.state[first]["exp_avg"]
            assert moment.stride() == first.stride()
            assert optimizer.steps_taken == 3


@check("file-2", "torch-2")
def a_plain_backward_averages_over_the_ranks() -> None:
    own = device()
    accumulator = Accumulator()
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)).to(own)
    model = prepare(model, accumulator=accumulator, device=own)
    for _ in range(3):
        model(torch.full((2, 3), 1.0 + sp.get_rank(), device=own)).sum().backward()
    for parameter in model.parameters():
        sp.assert_same(parameter.grad, "gradient")
    with side_stream():
        model(torch.full((2, 3), 1.0 + sp.get_rank(), device=own)).sum().backward()
    sp.assert_same(next(model.parameters()).grad, "gradient")


@check("file-2", "torch-2")
def fused_kernels_and_layouts_train_as_plain_ones_do() -> None:
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    results = []
    for fused, layout in ((False, torch.contiguous_format), (True, torch.channels_last)):
        model, _, _ = train("no", layout=layout, sgd=fused)
        results.append([p.detach().clone() for p in model.parameters()])
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(plain, other, rtol=1e-2, atol=1e-3)


@check("file-2", "torch-2")
def an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    own = device()
    model: Any = nn.Linear(4, 1).to(own)
    precision = Precision("fp16", own, scaler={"init_scale": 1024.0, "growth_interval": 3})
    accumulator = Accumulator(precision=precision)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model, optimizer = prepare(model, optimizer, accumulator=accumulator, device=own)
    seen = []
    for step in range(4):
        with accumulator.accumulate(model):
            bad = step == 1 and sp.get_rank() == 1
            loss = model(torch.ones(2, 4, device=own)).mean()
            accumulator.backward(loss * float("inf") if bad else loss)
            optimizer.step()
            optimizer.zero_grad()
        seen.append((optimizer.step_was_skipped, precision.state_dict()["scale"]))
    assert seen == [(False, 1024.0), (True, 512.0), (False, 512.0), (False, 512.0)], seen
    sp.assert_same(next(model.parameters()).detach(), "weights")


@check(*WORLDS)
def a_saved_state_resumes_bit_for_bit() -> None:
    for block in (True, False):
        model, optimizer, _ = train("no", 1, layout=torch.channels_last)
        inner = getattr(model, "module", model)
        torch.save([inner.state_dict(), optimizer.state_dict()], file := io.BytesIO())
        with side_stream():
            own = {"late": late(9.0)}
            saving = save_state(
                shared() / "state",
                {"model": inner, "optimizer": optimizer, "own": Holder(own)}, block=block,
            )  # fmt: skip
            own["late"].zero_()  # a save in the background has copied it
        drawn = torch.rand(1000, device=device())
        noise = nn.Dropout()(torch.ones(1000, device=device()))
        saving.wait()
        with torch.no_grad():
            for parameter in inner.parameters():
                parameter.add_(1.0)
        torch.rand(7, device=device())
        load_state(
            shared() / "state", {"model": inner, "optimizer": optimizer, "own": (got := Holder({}))}
        )
        assert values(got.state["late"].to(device())) == [9.0]
        assert torch.equal(torch.rand(1000, device=device()), drawn)
        assert torch.equal(nn.Dropout()(torch.ones(1000, device=device())), noise)
        file.seek(0)
        weights, state = torch.load(file)
        assert same_bits(inner.state_dict(), weights)
        for number, moments in state["state"].items():
            assert same_bits(moments, optimizer.state_dict()["state"][number])
        first = next(inner.parameters())
        assert first.device == device() == optimizer.state[first]["exp_avg"].device
        model(image()).sum().backward()
        optimizer.optimizer.step()
        sp.barrier()


class Holder:
    """An object with a state dict."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@check("file-2")
def a_saved_model_is_read_by_safetensors_and_back() -> None:
    from safetensors.torch import load_file

    from syncprims.training import load_checkpoint_in_model

    model: Any = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)).to(device())
    for parameter in model.parameters():
        parameter.data = sp.broadcast(parameter.detach())
    save_model(model, shared() / "model")
    (file,) = (shared() / "model").glob("*.safetensors")
    assert same_bits(load_file(file, device=str(device())), model.state_dict())
    other: Any = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)).to(device())
    load_checkpoint_in_model(other, shared() / "model")
    assert same_bits(other.state_dict(), model.state_dict())
    assert next(other.parameters()).device == device()


@check("file-2", "torch-2")
def pinned_loaders_move_batches_and_gather_them() -> None:
    items: Any = torch.arange(103.0).reshape(-1, 1).repeat(1, 5000)
    for workers in (0, 1):
        loader: Any = torch.utils.data.DataLoader(
            items, batch_size=8, pin_memory=on_gpu(), num_workers=workers
        )
        loader = prepare(loader, accumulator=Accumulator(), device=device(), non_blocking=True)
        seen: list[float] = []
        for batch in loader:
            assert batch.device == device()
            busy(2)
            seen += gather(batch[:, -1].contiguous()).tolist()
        assert sorted(set(seen)) == [float(i) for i in range(103)]


@check("file-2", "torch-2", "nccl-1")
def accelerates_names_work_on_the_device() -> None:
    from syncprims.accelerate import Accelerator

    for mode in ("no", "bf16", "fp16"):
        accelerator: Any = Accelerator(mixed_precision=mode, cpu=not on_gpu())
        assert accelerator.device == device()
        model: Any = nn.Linear(5, 1)
        data = torch.utils.data.TensorDataset(torch.randn(22, 5), torch.arange(22.0))
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), fused=True),
            torch.utils.data.DataLoader(data, batch_size=4),
        )  # fmt: skip
        labels: list[float] = []
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x).squeeze(1) - y).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            labels += accelerator.gather_for_metrics(y).tolist()
        assert sorted(labels) == [float(i) for i in range(22)]
        accelerator.save_state(str(shared() / mode))
        accelerator.load_state(str(shared() / mode))
        assert accelerator.reduce(torch.ones(2, device=device())).device == device()
        accelerator.end_training()


# -- worlds of tests -------------------------------------------------------------------------------


def in_a_test_world() -> float:
    own = device()
    dist.init_process_group("nccl" if on_gpu() else "gloo")
    dist.all_reduce(a := torch.ones(70_000, device=own))
    assert values(sp.all_reduce(a)) == [4.0]
    torch.manual_seed(sp.get_rank())
    first = torch.rand(1, device=own)
    sp.barrier()
    return float(first + torch.rand(1, device=own))


@check("alone-1")
def worlds_of_tests_take_device_tensors() -> None:
    from syncprims.testing import run_world

    found = run_world(in_a_test_world, 2, kind="processes", torch=True)
    assert not torch.cuda.is_initialized()  # else no fork could use a device
    assert run_world(in_a_test_world, 2, torch=True) == found


def ddp_in_a_test_world() -> None:
    dist.init_process_group("nccl" if on_gpu() else "gloo")
    model: Any = nn.parallel.DistributedDataParallel(nn.Linear(3, 3).to(device()))
    model(torch.full((2, 3), 1.0 + sp.get_rank(), device=device())).sum().backward()
    assert values(model.module.weight.grad) == [3.0]


@check("alone-1")
def ddp_trains_on_the_device_in_a_world_of_processes() -> None:
    from syncprims.testing import run_world

    run_world(ddp_in_a_test_world, 2, kind="processes", torch=True)


@check("alone-1")
def ddp_trains_on_the_device_in_a_world_of_threads() -> None:
    from syncprims.testing import run_world

    run_world(ddp_in_a_test_world, 2, torch=True, timeout=20)


@check("alone-1")
def a_fork_after_the_first_use_of_cuda_says_what_to_do() -> None:
    from syncprims.testing import run_world

    if not on_gpu():
        raise Skip("CUDA alone forbids it")
    torch.ones(1, device=device())
    with pytest.raises(Exception, match=r"(?i)fork") as caught:
        run_world(lambda: torch.ones(1, device="cuda"), 2, kind="processes")
    note(says=str(caught.value).splitlines()[0][:80])


# -- what a step costs -----------------------------------------------------------------------------


def steps_of(ranks: int) -> dict[str, Callable[[], None]]:
    """Return a step of a bare loop, of Accelerate, and of this library in both its dresses."""
    own = device()

    def job() -> tuple[Any, Any]:
        torch.manual_seed(0)
        layers = [nn.Linear(512, 512), nn.ReLU()]
        model = nn.Sequential(*layers, *[nn.Linear(512, 512), nn.ReLU()], nn.Linear(512, 8)).to(own)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    batch = torch.randn(256 if on_gpu() else 4, 512, device=own)

    def loop(model: Any, optimizer: Any, helper: Any = None) -> Callable[[], None]:
        def step() -> None:
            with helper.accumulate(model) if helper else contextlib.nullcontext():
                loss = model(batch).square().mean()
                helper.backward(loss) if helper else loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        return step

    build: Any = loop
    import accelerate

    from syncprims.accelerate import Accelerator

    model, optimizer = job()
    if ranks > 1:
        model = nn.parallel.DistributedDataParallel(model)
    steps = {"bare": loop(model, optimizer), "bare, again": loop(model, optimizer)}
    theirs: Any = accelerate.Accelerator(cpu=not on_gpu())
    assert theirs.num_processes == ranks
    steps["Accelerate"] = build(*theirs.prepare(*job()), helper=theirs)
    ours: Any = Accelerator(cpu=not on_gpu())
    steps["syncprims.accelerate"] = build(*ours.prepare(*job()), helper=ours)
    accumulator = Accumulator()
    made: Any = prepare(*job(), accumulator=accumulator, device=own)
    steps["syncprims.training"] = build(*made, helper=accumulator)
    return steps


@check("torch-1", "torch-2", alone=True)
def what_a_step_costs() -> None:
    ranks = sp.current().world_size
    if ranks > 1:  # which Accelerate finds; it gives each rank the device of its local rank
        open_group()
        os.environ["LOCAL_RANK"] = str(device().index or 0)
    else:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = interleave(steps_of(ranks), sync, 33 if on_gpu() else 4)
    note(timed=[[ranks, *row] for row in rows], about=about_machine(gpu=on_gpu()))
