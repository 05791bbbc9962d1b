"""Ranks with threads of their own: each verdict is there, at once, and names its cause."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from conftest import WorldKind, both_kinds
from support.random_programs import in_thread

import syncprims as sp
from syncprims.testing import DeadlockError, Delay, Kill, run_world, sleep


def in_pool(call: Callable[[], Any]) -> Any:
    """Make a call in a pool's thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def in_loop(call: Callable[[], Any]) -> Any:
    """Make a call in a thread of an event loop."""

    async def main() -> Any:
        return await asyncio.to_thread(call)

    return asyncio.run(main())


def beside_idle_thread(call: Callable[[], object]) -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    call()


def beside_idle_pool(call: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        call()


@both_kinds
@pytest.mark.parametrize(
    "way",
    [in_thread, in_pool, in_loop, beside_idle_thread, beside_idle_pool],
    ids=lambda w: w.__name__,
)
def test_a_deadlock_is_found_however_the_rank_waits(way: Any, kind: WorldKind) -> None:
    """No time limit is involved: that of the world would be another error."""

    def program() -> None:
        pair = sp.group([0, 1])
        way(sp.barrier) if sp.get_rank() == 0 else pair.barrier(
            "pair"
        ) if sp.get_rank() == 1 else None
        sp.barrier()

    with pytest.raises(DeadlockError, match="can never go on") as caught:
        run_world(program, 3, kind=kind)
    assert "barrier 'pair' (" in str(caught.value)


@pytest.mark.parametrize(
    "wait",
    [lambda: threading.Event().wait(), lambda: queue.Queue[int]().get()],
    ids=["event", "queue"],
)
@pytest.mark.parametrize("where", ["rank", "helper", "helper at the end"])
def test_a_thread_that_nobody_can_wake_is_a_deadlock_and_is_ended(wait: Any, where: str) -> None:
    waiting: list[threading.Thread] = []

    def endless() -> None:
        waiting.append(threading.current_thread())
        wait()

    def program() -> None:
        if sp.get_rank() == 0:
            if where == "rank":
                endless()
            helper = threading.Thread(target=endless)
            helper.start()
            if where == "helper":
                helper.join()
        if where != "helper at the end":
            sp.barrier()

    with pytest.raises(DeadlockError, match="thread") as caught:
        run_world(program, 3)
    assert "rank 0: " in str(caught.value)
    assert not waiting[0].is_alive()


def test_time_limits_hold_while_a_thread_sleeps() -> None:
    def program() -> str:
        sleeper = threading.Thread(target=time.sleep, args=(0.5,))
        sleeper.start()
        with pytest.raises(sp.SyncTimeout):
            sp.barrier("late", timeout=0.1)
        sleeper.join()
        return "timeout"

    late = Delay(1, at="late", seconds=60)  # virtual
    assert run_world(program, 2, faults=[late]) == ["timeout"] * 2


@both_kinds
def test_the_error_of_a_group_comes_before_those_that_report_it(kind: WorldKind) -> None:
    def differing() -> None:
        pair = sp.group([2, 3])
        if sp.get_rank() == 2:
            pair.barrier()
        if sp.get_rank() == 3:
            pair.broadcast(1)
        sp.barrier("all")

    def killed() -> None:
        pair = sp.group([2, 3])
        if sp.get_rank() > 1:
            pair.barrier("pair")
        sp.barrier("all")

    with pytest.raises(sp.CollectiveMismatch, match="broadcast"):
        run_world(differing, 4, kind=kind)
    with pytest.raises(sp.PeerLost) as lost:
        run_world(killed, 4, kind=kind, faults=[Kill(3, at="pair")])
    assert lost.value.rank == 3


@both_kinds
def test_a_rank_that_returns_early_is_a_deadlock_of_threads_too(kind: WorldKind) -> None:
    def program() -> None:
        trio = sp.group([0, 1, 2])
        if sp.get_rank() != 2:
            helper = threading.Thread(target=trio.barrier, args=("trio",))
            helper.start()
            helper.join()

    with pytest.raises(DeadlockError, match="rank 2 has finished"):
        run_world(program, 3, kind=kind)


@both_kinds
def test_a_wait_of_one_thread_is_known_while_another_one_makes_calls(kind: WorldKind) -> None:
    def program(by_helper: bool) -> None:
        pair = sp.group([0, 1])
        if sp.get_rank() < 2:
            calls = [lambda: pair.barrier("pair"), lambda: sp.barrier("all")]
            helper = threading.Thread(target=calls[by_helper])
            helper.start()
            try:
                calls[not by_helper]()
            finally:
                helper.join()

    for by_helper in (False, True):
        with pytest.raises(DeadlockError, match=r"ranks \[0, 1\] of 3 wait") as caught:
            run_world(partial(program, by_helper), 3, kind=kind)
        assert "rank 2 has finished" in str(caught.value)


@pytest.mark.parametrize("ends", [True, False])
def test_a_heartbeat_holds_up_no_time_limit(ends: bool) -> None:
    done, threads = threading.Event(), list[threading.Thread]()

    def program() -> str:
        def beat() -> None:
            while not done.is_set():
                time.sleep(0.01)

        threads.append(threading.Thread(target=beat, daemon=True))
        threads[-1].start()
        with pytest.raises(sp.SyncTimeout):
            sp.barrier("late", timeout=0.1)
        if not ends:
            sleep(10_000)
        return "timeout"

    try:
        late = Delay(1, at="late", seconds=10_000)  # virtual
        assert run_world(program, 2, faults=[late]) == ["timeout"] * 2
    finally:
        done.set()
        for thread in threads:
            thread.join()


@both_kinds
def test_a_rank_fails_with_what_ends_its_thread(kind: WorldKind, capsys: Any) -> None:
    def program() -> None:
        if sp.get_rank() < 2:
            threading.Thread(target=sp.barrier).start()
        else:
            raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch") as caught:
        run_world(program, 3, kind=kind)
    assert "rank 0: PeerFailed" in "".join(caught.value.__notes__)

    def lost() -> None:
        if sp.get_rank() < 2:
            in_thread(sp.barrier)
        else:
            sp.barrier("mine")

    with pytest.raises(sp.PeerLost, match="rank 2"):
        run_world(lost, 3, kind=kind, faults=[Kill(2, at="mine")])


def test_a_thread_calls_as_the_rank_that_has_started_it() -> None:
    def program() -> list[Any]:
        seen: list[int] = []
        in_thread(lambda: seen.append(sp.get_rank()))
        in_thread(lambda: in_thread(lambda: seen.append(sp.all_reduce(1))))
        return [*seen, shared.submit(sp.get_rank).result()]

    with ThreadPoolExecutor(1) as shared:
        assert run_world(program, 3) == [[rank, 3, rank] for rank in range(3)]


def test_a_pool_serves_ranks_after_the_one_that_has_started_its_threads() -> None:
    ranks: dict[int, threading.Thread] = {}

    def slow() -> int:
        time.sleep(0.1)
        return sp.get_rank()

    def program() -> int:
        ranks[sp.get_rank()] = threading.current_thread()
        in_thread(sp.barrier)
        if sp.get_rank():
            ranks[sp.get_rank() - 1].join()
        return shared.submit(slow).result()

    with ThreadPoolExecutor(1) as shared:
        assert run_world(program, 3) == [0, 1, 2]


def with_pool() -> Any:
    pair = sp.group([0, 1])
    with ThreadPoolExecutor(2) as pool:
        task = pool.submit(pair.all_gather if sp.get_rank() < 2 else str, sp.get_rank())
        return sp.all_reduce(1), len(task.result()), [*pool.map(abs, range(3))]


def with_queues() -> Any:
    work, results = queue.Queue[int | None](), queue.Queue[int]()

    def helper() -> None:
        while (item := work.get()) is not None:
            results.put(sp.all_reduce(item))

    thread = threading.Thread(target=helper)
    thread.start()
    sums: list[int] = []
    for item in range(5):
        work.put(item)
        sums.append(results.get())
    work.put(None)
    thread.join()
    return sums


def with_loop() -> Any:
    async def main() -> list[int]:
        sums = [await asyncio.to_thread(sp.all_reduce, k) for k in range(3)]
        await asyncio.sleep(0.001)
        return sums

    return asyncio.run(main())


def with_condition() -> Any:
    changed, turn, rounds = threading.Condition(), ["main"], 3

    def pass_on(to: str) -> None:
        with changed:
            turn[0] = to
            changed.notify()

    def helper() -> None:
        for _ in range(rounds):
            with changed:
                changed.wait_for(lambda: turn[0] == "helper")
            sp.barrier()
            pass_on("main")

    thread = threading.Thread(target=helper)
    thread.start()
    for _ in range(rounds):
        pass_on("helper")
        with changed:
            changed.wait_for(lambda: turn[0] == "main")
    return sp.get_world_size()


@pytest.mark.parametrize(
    "program", [with_pool, with_queues, with_loop, with_condition], ids=lambda p: p.__name__
)
@pytest.mark.parametrize("worlds", [10, pytest.param(1000, marks=pytest.mark.soak)])
def test_threads_that_wake_each_other_are_no_deadlock(program: Any, worlds: int) -> None:
    for seed in range(worlds):
        results = run_world(program, 3, seed=seed)
        assert len({str(result) for result in results[:2]}) == 1
