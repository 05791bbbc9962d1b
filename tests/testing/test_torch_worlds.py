"""What a program finds in a world with ``torch=True``: what a process under torchrun has."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed
import torch.distributed.nn  # keeps the default group that there is at its import
from conftest import both_kinds
from torch import nn
from torch.profiler import ExecutionTraceObserver

import syncprims as sp
from syncprims.testing import DeadlockError, explore, run_world, sleep

dist: Any = torch.distributed  # its types leave out what its documentation names


def summed() -> float:
    """Return the sum of 1, 2, ... over the ranks of the default group."""
    number = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(number)
    return number.item()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"backend": "nccl"},
        {"backend": "cpu:gloo,cuda:nccl"},
        {"backend": "syncprims"},
        {"init_method": "env://"},
        {"init_method": "tcp://10.0.0.1:1"},
        {"init_method": "file:///nowhere/at/all"},
        {"timeout": timedelta(minutes=1)},
    ],
    ids=str,
)
def test_a_group_opens_however_the_program_asks(arguments: dict[str, Any]) -> None:
    def body() -> tuple[float, str]:
        dist.init_process_group(**arguments)
        assert len(dist.distributed_c10d._pg_map) == 1  # Fabric looks there
        assert dist.group.WORLD._get_backend_name() == dist.get_backend()  # ShardedTensor asks it
        found = summed(), str(dist.get_backend())
        dist.destroy_process_group()
        assert not dist.is_initialized()
        return found

    name = arguments.get("backend", "gloo")
    assert run_world(body, 2, torch=True) == [(3.0, name)] * 2


@both_kinds
def test_numbers_that_a_program_gives_must_be_those_of_its_rank(kind: Any) -> None:
    def body() -> None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        with pytest.raises(ValueError, match=r"rank=7.*in this world it is"):
            dist.init_process_group("gloo", "tcp://localhost:1", rank=7, world_size=size)
        for _ in range(3):  # a program can open its group again
            dist.init_process_group("gloo", "tcp://localhost:1", rank=rank, world_size=size)
            dist.barrier(group=dist.new_group([0, 1]))
            assert summed() == 3
            dist.destroy_process_group()

    run_world(body, 2, torch=True, kind=kind)


def test_nothing_is_left_even_if_the_program_closes_nothing() -> None:
    module: Any = dist.distributed_c10d

    def body() -> None:
        dist.init_process_group("gloo")
        dist.new_group([0])
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        torch.set_default_dtype(torch.float64)
        os.environ["LEFT"] = "1"

    def state() -> list[Any]:
        return [module._world, module.rendezvous, module._new_process_group_helper, sys.excepthook]

    before = state()
    for _ in range(2):
        run_world(body, 2, torch=True)
        assert [*map(id, state())] == [*map(id, before)]
        assert not dist.is_initialized()
        assert torch.get_default_dtype() is torch.float32
        assert "LEFT" not in os.environ
        assert subprocess.run(["sh", "-c", 'test -z "$LEFT"'], check=False).returncode == 0


def test_a_group_that_the_test_has_open_is_not_disturbed() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        outer = dist.group.WORLD

        def body() -> float:
            assert not dist.is_initialized()
            dist.init_process_group("gloo")
            return summed()

        assert run_world(body, 2, torch=True) == [3.0] * 2
        assert run_world(body, 2, torch=True, kind="processes") == [3.0] * 2
        assert dist.group.WORLD is outer
        assert summed() == 1
    finally:
        dist.destroy_process_group()


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(sp.BackendUnavailable, match=r"pip install '\.\[torch\]'"):
        run_world(lambda: None, 2, torch=True)


@pytest.mark.world(ranks=[1, 3], kind=["threads", "processes"], torch=True)
def test_the_marker_takes_torch_too() -> None:
    dist.init_process_group("nccl")
    size = dist.get_world_size()
    assert summed() == size * (size + 1) / 2
    dist.destroy_process_group()


@both_kinds
def test_variables_are_those_of_the_rank(kind: Any) -> None:
    def body() -> list[str]:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        os.environ["OWN"] = f"value {rank}"
        if rank == 0:
            os.environ["ONLY"] = "0"
        dist.barrier()
        seen_by_child = subprocess.run(
            ["sh", "-c", 'echo "$RANK $OWN $ONLY"'], check=True, capture_output=True, text=True
        )
        names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OWN"
        assert os.environ["MASTER_ADDR"]
        assert int(os.environ["MASTER_PORT"])
        assert dist.is_torchelastic_launched()
        only = os.environ.get("ONLY", "none")
        os.environ.pop("ONLY", None)
        dist.barrier()
        return [*map(os.environ.__getitem__, names), only, seen_by_child.stdout.strip()]

    assert run_world(body, 2, torch=True, kind=kind) == [
        ["0", "2", "0", "2", "0", "value 0", "0", "0 value 0 0"],
        ["1", "2", "1", "2", "0", "value 1", "none", "1 value 1"],
    ]
    assert "OWN" not in os.environ


def draw(*, wait: Callable[[], object]) -> list[float]:
    """Draw from all global generators; between any two draws, call `wait`."""
    values: list[float] = []
    for _ in range(3):
        values.append(torch.rand(1).item())
        wait()
        values.append(random.gauss(0, 1))
        wait()
        values.append(numpy.random.standard_normal())
        wait()
        values.append(numpy.random.rand())
        wait()
        values.append(nn.Linear(2, 2).weight.sum().item())
        wait()
    return values


def test_random_numbers_are_those_of_a_process_of_its_own() -> None:
    def seed(rank: int) -> None:
        torch.manual_seed(rank)
        random.seed(rank)
        numpy.random.seed(rank)

    def body() -> list[float]:
        dist.init_process_group("gloo")
        seed(dist.get_rank())
        return draw(wait=dist.barrier)

    alone: list[list[float]] = []
    for rank in range(3):
        seed(rank)
        alone.append(draw(wait=lambda: None))
    seed(9)
    numpy.random.standard_normal()  # the second of the pair is kept
    before = draw(wait=lambda: None)
    seed(9)
    numpy.random.standard_normal()
    for number in range(5):
        assert run_world(body, 3, torch=True, seed=number) == alone
    assert draw(wait=lambda: None) == before


def test_ranks_begin_with_the_random_states_of_the_test_except_pythons() -> None:
    def body() -> tuple[float, float, float]:
        return torch.rand(1).item(), numpy.random.rand(), random.random()

    torch.manual_seed(3)
    numpy.random.seed(3)
    random.seed(3)
    threads = run_world(body, 2, torch=True)
    processes = run_world(body, 2, torch=True, kind="processes")
    assert threads[0][:2] == threads[1][:2] == processes[0][:2] == processes[1][:2]
    assert threads[0][2] != threads[1][2]  # a forked process gets others, too
    assert threads == run_world(body, 2, torch=True)  # but a replay gets the same


@both_kinds
def test_the_modes_of_the_test_hold_in_its_ranks(kind: Any) -> None:
    def body() -> tuple[bool, torch.dtype]:
        return torch.is_inference_mode_enabled(), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    def device_and_grad() -> tuple[str, bool]:
        return torch.ones(1).device.type, torch.is_grad_enabled()

    with torch.device("meta"), torch.no_grad():
        assert run_world(device_and_grad, 2, torch=True, kind=kind) == [("meta", False)] * 2
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert run_world(body, 2, torch=True, kind=kind) == [(True, torch.bfloat16)] * 2
    assert run_world(body, 2, torch=True, kind=kind) == [(False, torch.float32)] * 2


def test_a_backward_pass_stays_in_the_thread_of_its_rank() -> None:
    """Else the passes of all ranks on a device would be in one thread, and wait for each other."""
    several: Any = torch._C._is_multithreading_enabled  # on the CPU nothing else shows it
    assert run_world(several, 2, torch=True) == [False, False]


def functional_sum() -> float:
    from torch.distributed import _functional_collectives as functional

    world: Any = dist.group.WORLD
    total: torch.Tensor = functional.all_reduce(torch.ones(1), "sum", world)
    return total.item()


def test_a_world_may_stand_in_a_rank_of_another() -> None:
    def inner() -> float:
        dist.init_process_group("gloo")
        return functional_sum()

    def body() -> list[float]:
        dist.init_process_group("gloo")
        found = run_world(inner, 2, torch=True) if dist.get_rank() == 0 else []
        dist.barrier()
        return [*found, functional_sum(), float(os.environ["RANK"])]

    assert run_world(body, 3, torch=True) == [[2.0, 2.0, 3.0, 0.0], [3.0, 1.0], [3.0, 2.0]]


def test_worlds_of_two_threads_run_one_after_the_other() -> None:
    def body() -> tuple[float, str]:
        dist.init_process_group("gloo")
        for _ in range(5):
            found = summed()
        return found, os.environ["RANK"]

    with ThreadPoolExecutor(2) as pool:
        two, three = (pool.submit(run_world, body, ranks, torch=True) for ranks in (2, 3))
        assert two.result() == [(3.0, "0"), (3.0, "1")]
        assert three.result() == [(6.0, "0"), (6.0, "1"), (6.0, "2")]


def test_attributes_of_a_module_that_a_rank_imports_are_its_own() -> None:
    name = "torch.distributed.tensor._random"
    kept = sys.modules.pop(name, None)

    def body() -> Any:
        dist.init_process_group("gloo")
        dist.barrier()
        import torch.distributed.tensor._random as module

        before = module._rng_tracker
        tracker: Any = dist.get_rank()
        module._rng_tracker = tracker
        dist.barrier()
        return before, module._rng_tracker

    try:
        assert run_world(body, 2, torch=True) == [(None, 0), (None, 1)]
    finally:
        if kept is not None:
            sys.modules[name] = kept


def test_tables_of_torch_are_a_ranks_own_under_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._debug_utils import SimpleProfiler

    monkeypatch.setattr(SimpleProfiler, "renamed", set(), raising=False)
    table = attrgetter("renamed")

    def body() -> int:
        table(SimpleProfiler).add(sp.get_rank())
        sp.barrier()
        return len(table(SimpleProfiler))

    assert run_world(body, 2, torch=True) == [1, 1]
    assert table(SimpleProfiler) == set()


def test_hooks_of_all_modules_are_a_ranks_own() -> None:
    def body() -> int:
        calls: list[object] = []
        with nn.modules.module.register_module_forward_pre_hook(lambda *said: calls.append(said)):
            sp.barrier()
            nn.Linear(1, 1)(torch.ones(1))
            sp.barrier()
        nn.Linear(1, 1)(torch.ones(1))
        return len(calls)

    of_test: list[object] = []
    with nn.modules.module.register_module_forward_pre_hook(lambda *said: of_test.append(said)):
        assert run_world(body, 2, torch=True, seed=1) == [1, 1]
    assert len(of_test) == 4
    assert not nn.modules.module._global_forward_pre_hooks


def test_a_thread_that_its_rank_waits_for_acts_for_the_rank() -> None:
    def body() -> list[float]:
        dist.init_process_group("gloo")
        found: list[float] = []
        thread = threading.Thread(target=lambda: found.append(summed()))
        thread.start()
        thread.join()
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(summed).result())
        return [*found, summed()]

    assert run_world(body, 2, torch=True) == [[3.0] * 3] * 2


def test_a_thread_that_its_rank_does_not_wait_for_is_refused() -> None:
    def call() -> None:
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            tried.set()

    def body() -> None:
        dist.init_process_group("gloo")
        dist.barrier()  # else the thread may see a rank without a group
        if dist.get_rank() == 0:
            threading.Thread(target=call).start()
        while dist.get_rank() == 1 and not tried.is_set():
            dist.distributed_c10d._get_default_store().check(["none"])  # the others get their turn
        dist.barrier()

    for seed in range(10):
        tried = threading.Event()
        with pytest.raises(sp.ConcurrentCall):  # the rank fails with what ends its thread
            run_world(body, 2, seed=seed, torch=True)


def test_a_profiler_is_refused_where_ranks_are_threads() -> None:
    def body() -> None:
        dist.init_process_group("gloo")
        for start in torch.autograd.profiler.profile().__enter__, ExecutionTraceObserver().start:
            with pytest.raises(RuntimeError, match="profile in a world of processes"):
                start()
        dist.barrier()

    run_world(body, 2, torch=True)


def test_warnings_are_recorded_by_rank() -> None:
    def body() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sp.barrier()
            warnings.warn(f"of rank {sp.get_rank()}", stacklevel=1)
            sp.barrier()
        return [str(one.message) for one in caught]

    before = warnings.filters
    for seed in range(5):
        assert run_world(body, 2, torch=True, seed=seed) == [["of rank 0"], ["of rank 1"]]
    assert warnings.filters is before


@both_kinds
def test_the_store_is_shared_by_the_ranks(kind: Any) -> None:
    def body() -> list[Any]:
        dist.init_process_group("gloo")
        store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
        if rank == 2:
            store.set("key", "value")
            store.set("empty", b"")
        found: list[Any] = [store.get("key"), store.get("empty")]
        store.add("count", rank)
        store.append("text", "x")
        dist.barrier()
        found += [store.add("count", 0), store.get("text"), store.check(["key", "none"])]
        found += [store.compare_set("key", "value", "other"), store.num_keys()]
        dist.barrier()
        found.append(store.get("key"))
        dist.barrier()
        if rank == 0:
            assert store.delete_key("key")
            assert not store.delete_key("key")
        dist.barrier()
        found.append(store.check(["key"]))
        with pytest.raises(dist.DistStoreError, match=r"store\.wait .*timed out after 0\.01 s"):
            store.wait(["key"], timedelta(seconds=0.01))
        dist.barrier()
        dist.destroy_process_group()
        return found

    for found in run_world(body, 3, torch=True, kind=kind):
        assert found[:5] == [b"value", b"", 3, b"xxx", False]
        assert found[5] in (b"other", b"value")
        assert found[6:] == [4, b"other", False]


def test_the_store_loses_nothing_when_processes_write_at_once() -> None:
    def program() -> int:
        dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
        for _ in range(300):
            store.add("count", 1)
        dist.barrier()
        return int(store.add("count", 0))

    assert run_world(program, ranks=4, kind="processes", torch=True) == [1200] * 4


@both_kinds
def test_a_wait_in_the_store_ends_when_the_others_have(kind: Any) -> None:
    def body() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            dist.distributed_c10d._get_default_store().get("never")

    with pytest.raises(DeadlockError, match=r"rank 1: waits in store\.get 'default_pg/0//never'"):
        run_world(body, 3, torch=True, kind=kind)


@both_kinds
def test_a_wait_in_the_store_ends_when_a_rank_fails(kind: Any) -> None:
    def body() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            with pytest.raises(
                sp.PeerFailed, match=r"rank 0 failed.*store\.get.*test_torch_worlds"
            ):
                dist.distributed_c10d._get_default_store().get("never")
        if dist.get_rank() == 0:
            raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause"):
        run_world(body, 2, torch=True, kind=kind)


POLLS: list[Callable[[Any], bool]] = [
    lambda store: int(store.get("count")) == 3,
    lambda store: int(store.multi_get(["count"])[0]) == 3,
    lambda store: store.add("count", 0) == 3,
    lambda store: store.compare_set("count", "no number", "0") == b"3",
    lambda store: store.check(["last"]),
]


@pytest.mark.parametrize("poll", POLLS)
def test_a_rank_may_call_the_store_until_a_key_changes(poll: Callable[[Any], bool]) -> None:
    def body() -> None:
        dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
        if store.add("count", 1) == 3:
            store.set("last", "")
        while not poll(store):
            pass

    run_world(body, 3, torch=True, timeout=10)


@pytest.mark.parametrize("strategy", ["random", "pct"])
def test_an_update_that_two_ranks_lose_in_the_store_is_found(strategy: Any) -> None:
    def body() -> None:
        dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            store.set("sum", "0")
        dist.barrier()
        store.set("sum", str(int(store.get("sum")) + 1))
        dist.barrier()
        assert store.get("sum") == b"2"

    with pytest.raises(AssertionError):
        explore(body, 2, torch=True, schedules=50, strategy=strategy, seed=1)


def test_a_wait_for_a_receive_ends_at_its_own_timeout() -> None:
    def body() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            work = dist.irecv(torch.empty(3), 1)
            with pytest.raises(sp.SyncTimeout, match=r"recv at .* timed out after 5\.0 s"):
                work.wait(timedelta(seconds=5))
        else:
            sleep(60)

    run_world(body, 2, torch=True)


def program() -> float:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    found = summed()
    dist.destroy_process_group()
    return found


def grow(worlds: int) -> int:
    """Run so many worlds; return by how many bytes this process has grown."""

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = resident()
    for _ in range(worlds):
        assert run_world(program, 4, torch=True) == [10.0] * 4
    return resident() - before


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_hundred_worlds_do_not_grow() -> None:
    grow(50)
    assert grow(200) < 8 << 20


@both_kinds
def test_a_forgotten_argument_is_named(kind: Any) -> None:
    with pytest.raises(ValueError, match="expected, but not set") as caught:
        run_world(lambda: dist.init_process_group("gloo"), 2, kind=kind)
    assert any("if torch=True is given" in note for note in caught.value.__notes__)


def test_an_error_of_torch_after_a_fork_says_what_to_do() -> None:
    def program() -> None:  # whether torch raises it depends on its build
        raise RuntimeError("Unable to handle autograd's threading in combination with fork")

    with pytest.raises(RuntimeError) as caught:
        run_world(program, 1, kind="processes")
    assert any("kind='threads'" in note for note in caught.value.__notes__)


@both_kinds
@pytest.mark.parametrize("wrong", [False, True])
def test_parameters_of_ddp_that_differ_are_named(kind: Any, wrong: bool) -> None:
    def body() -> None:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        synced = sp.get_rank() % 2 if wrong else 1  # which micro-batch averages
        for _ in range(2):
            for micro in range(2):
                sync = contextlib.nullcontext() if micro == synced else model.no_sync()
                with sync:
                    model(torch.full((1, 3), sp.get_rank() + micro + 1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    if not wrong:
        run_world(body, 3, kind=kind, replicas=True)
        return
    run_world(body, 3, kind=kind, torch=True)  # a comparison is for those who ask for it
    with pytest.raises(sp.RankMismatch, match=r"after step 1") as caught:
        run_world(body, 3, kind=kind, replicas=True)
    assert "  parameter 'weight': " in str(caught.value)


def test_groups_in_another_order_are_named() -> None:
    def body() -> None:
        dist.init_process_group("gloo")
        pairs = [[0, 1], [1, 2]]
        groups = [dist.new_group(p) for p in (pairs[::-1] if sp.get_rank() == 0 else pairs)]
        if sp.get_rank() < 2:
            dist.all_reduce(torch.ones(1), group=groups[sp.get_rank() - 1])

    with pytest.raises(sp.CollectiveMismatch, match="in the same order"):
        run_world(body, 3, torch=True)


def test_the_line_of_a_test_that_stands_in_a_framework_is_shown() -> None:
    path = f"{Path(torch.__file__).parent}/testing/_internal/written.py"
    names: dict[str, Any] = {"__name__": "torch.testing._internal.written", "dist": dist}
    exec(compile("def check():\n    dist.barrier()", path, "exec"), names)

    def body() -> None:
        dist.init_process_group("gloo")
        if sp.get_rank():
            names["check"]()

    with pytest.raises(DeadlockError, match=r"barrier.*written\.py:2"):
        run_world(body, 2, torch=True)
