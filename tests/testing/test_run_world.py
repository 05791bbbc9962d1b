"""`run_world`, in both kinds of world."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import multiprocessing.connection
import os
import re
import select
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from conftest import WorldKind, both_kinds

import syncprims as sp

# A public call shows only what follows from it, a deadlock or a stall.
from syncprims._protocol.threads import threads_that_may_call

# A world that a process has left cannot be forgotten by a public call.
from syncprims._world import runtime
from syncprims.testing import (
    DeadlockError,
    Delay,
    Kill,
    Raise,
    RankDied,
    StallError,
    Stop,
    run_world,
)


def line_of(text: str) -> str:
    """Return the place in this file where `text` stands, as messages show it."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {text}")]
    return f"tests/testing/test_run_world.py:{number}"


def at_top_level() -> tuple[int, int]:
    sp.barrier()
    return sp.get_rank(), os.getpid()


@both_kinds
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_each_ranks_result_comes_back_in_rank_order(kind: WorldKind, ranks: int) -> None:
    def program() -> Any:
        assert sp.get_world_size() == sp.get_local_world_size() == ranks
        assert (sp.is_main(), sp.is_last()) == (sp.get_rank() == 0, sp.get_rank() == ranks - 1)
        with sp.main_first():
            pass
        everybody = sp.all_gather(sp.get_rank())
        assert sp.broadcast({"lr": sp.get_rank()}, src=ranks - 1) == {"lr": ranks - 1}
        with sp.in_turn():
            pass
        return sp.get_rank(), everybody, sp.all_reduce(sp.get_rank() + 1), sp.split(range(10))

    found = run_world(program, ranks, kind=kind)
    assert [rank for rank, *_ in found] == list(range(ranks))
    assert all(everybody == list(range(ranks)) for _, everybody, *_ in found)
    assert {total for _, _, total, _ in found} == {ranks * (ranks + 1) // 2}
    assert [n for *_, share in found for n in share] == list(range(10))


def test_ranks_are_threads_of_this_process_or_processes() -> None:
    threads = run_world(at_top_level, 2)
    assert [pid for _, pid in threads] == [os.getpid()] * 2
    processes = run_world(at_top_level, 2, kind="processes")
    assert len({os.getpid(), *(pid for _, pid in processes)}) == 3


@both_kinds
def test_a_programs_own_start_and_end_are_its_own(kind: WorldKind) -> None:
    """What a script's main does: it asks for a backend and a timeout, ends, and starts again."""

    def main() -> Any:
        with sp.init("nccl", timeout=50) as world:
            first = sp.all_gather(sp.get_rank()), world.timeout
            calls: list[Any] = [sp.barrier, sp.group([0, 1]).barrier, sp.current]
        for call in calls:
            with pytest.raises(sp.WorldClosed, match="left the world"):
                call()
        assert (sp.get_rank(), sp.get_world_size()) == (world.rank, 2)
        return first

    assert run_world(main, 2, kind=kind) == [([0, 1], 50)] * 2

    def twice() -> Any:
        sp.barrier()
        sp.shutdown()
        sp.init()
        sp.barrier("again")
        return sp.all_gather(sp.get_rank())

    assert run_world(twice, 2, kind=kind) == [[0, 1]] * 2


def test_ranks_may_believe_to_be_on_several_machines() -> None:
    log: list[tuple[int, str]] = []

    def program() -> Any:
        with sp.main_first(local=True):
            log.append((sp.get_node_rank(), "first" if sp.is_local_main() else "then"))
        sp.barrier()
        shared = sp.on_local_main(share=True)(lambda: f"made by {sp.get_rank()}")()
        return sp.get_node_rank(), sp.get_local_rank(), sp.get_local_world_size(), shared

    found = run_world(program, 4, nodes=2)
    assert found == [(r // 2, r % 2, 2, f"made by {r // 2 * 2}") for r in range(4)]
    for node in range(2):
        assert [what for of, what in log if of == node] == ["first", "then"]


@pytest.fixture
def outer() -> Generator[sp.World]:
    """The process's own world; after it the process is as it was before."""
    before = vars(runtime._state).copy()
    with sp.init() as world:
        yield world
    vars(runtime._state).update(before)


def test_a_world_does_not_disturb_the_one_that_runs_around_it(outer: sp.World) -> None:
    assert run_world(sp.get_world_size, 3) == [3, 3, 3]
    assert run_world(lambda: sp.current() is outer, 2) == [False, False]
    assert sp.current() is outer
    assert sp.all_gather("alone") == ["alone"]


def test_worlds_can_stand_in_worlds() -> None:
    def outer() -> Any:
        mine = sp.get_rank()
        inner = run_world(lambda: sp.all_gather((mine, sp.get_rank())), 2)
        sp.barrier()
        return sp.get_rank(), inner[0]

    assert run_world(outer, 2) == [(r, [(r, 0), (r, 1)]) for r in range(2)]


def test_worlds_of_several_threads_stand_side_by_side() -> None:
    found: dict[int, Any] = {}

    def one(size: int) -> None:
        found[size] = [run_world(lambda: sp.all_reduce(1), size) for _ in range(20)]

    threads = [threading.Thread(target=one, args=(size,)) for size in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {2: [[2, 2]] * 20, 3: [[3, 3, 3]] * 20}


@both_kinds
def test_outer_variables_do_not_count(kind: WorldKind, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SYNCPRIMS_BACKEND", "torch")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "64")
    found = run_world(lambda: (sp.get_rank(), sp.get_world_size()), 2, kind=kind)
    assert found == [(0, 2), (1, 2)]
    if kind == "processes":  # there, a script finds what torchrun would have told it
        assert run_world(lambda: os.environ["RANK"], 2, kind=kind) == ["0", "1"]
    monkeypatch.setenv("SYNCPRIMS_TIMEOUT", "17")  # the user's setting holds
    assert run_world(lambda: sp.current().timeout, 2, kind=kind) == [17, 17]


@both_kinds
def test_a_deadlock_has_its_facts(kind: WorldKind) -> None:
    with pytest.raises(DeadlockError) as caught:
        run_world(lambda: sp.barrier() if sp.is_main() else None, 3, kind=kind)
    report = "".join(traceback.format_exception(caught.value))
    assert report.count("Every rank must make the same calls") == 1
    assert "syncprims.PeerLost:" not in report
    assert (caught.value.arrived, caught.value.missing) == ([0], [1, 2])


@both_kinds
def test_a_waiter_whose_peer_has_finished_may_cope_as_in_production(kind: WorldKind) -> None:
    def program() -> str:
        if sp.is_main():
            with pytest.raises(sp.PeerLost, match="rank 1 finished"):
                sp.barrier()
            return "coped"
        return "left"

    assert run_world(program, 2, kind=kind) == ["coped", "left"]


def test_half_an_hour_passes_in_no_time() -> None:
    begin = time.monotonic()

    def program() -> Any:
        sp.barrier("step", timeout=1800)
        if sp.get_rank() == 1:
            return 0
        with pytest.raises(sp.PeerLost) as lost:
            sp.barrier()
        return lost.value.waited

    with pytest.raises(sp.SyncTimeout) as caught:
        run_world(program, 3, faults=[Delay(1, at="step", seconds=3600)])
    assert caught.value.waited == 1800
    assert (caught.value.missing, caught.value.arrived) == ([1], [0, 2])
    assert time.monotonic() - begin < 60  # thirty times less than what passed in there

    assert run_world(program, 3, faults=[Delay(1, at="step", seconds=1700)]) == [0] * 3


class Odd(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@both_kinds
@pytest.mark.parametrize(
    "error", [ValueError("bad"), KeyError("k"), OSError(28, "full"), Odd(1, 2), AssertionError()]
)
def test_a_ranks_own_exception_is_raised(kind: WorldKind, error: Exception) -> None:
    def program() -> None:
        sp.barrier("start")
        if sp.get_rank() == 2:
            raise error
        sp.barrier("end")

    with pytest.raises(type(error)) as caught:
        run_world(program, 4, kind=kind)
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)
    assert (caught.value is error) == (kind == "threads")
    note = "\n".join(caught.value.__notes__)
    assert "rank 2 of 4: raised" in note
    assert "after its round 1, barrier 'start'" in note
    assert "rank 0: PeerFailed in its round 2, barrier 'end'" in note
    if kind == "processes":
        assert "in program" in str(caught.value.__cause__)  # the traceback of the other process


@both_kinds
def test_a_type_that_only_the_rank_knows_keeps_its_text(kind: WorldKind) -> None:
    def program() -> None:
        class Local(Exception):
            pass

        raise Local("nowhere else")

    with pytest.raises(Exception, match="nowhere else") as caught:
        run_world(program, 2, kind=kind)
    assert "Local" in repr(caught.value)


@both_kinds
def test_several_causes_of_one_type_raise_the_lowest_ranks(kind: WorldKind) -> None:
    def program() -> None:
        sp.barrier()
        raise ValueError(f"rank {sp.get_rank()}")

    with pytest.raises(ValueError, match="rank 0") as caught:
        run_world(program, 3, kind=kind)
    assert "rank 2: raised ValueError: rank 2" in "\n".join(caught.value.__notes__)


@both_kinds
def test_causes_of_several_types_are_a_group_ordered_by_rounds(kind: WorldKind) -> None:
    def program() -> None:
        if sp.get_rank() == 1:
            raise KeyError("early")
        with pytest.raises(sp.PeerFailed):
            sp.barrier()
        raise (ValueError if sp.get_rank() else LookupError)("late") from None

    with pytest.raises(ExceptionGroup, match="failed independently") as caught:
        run_world(program, 3, kind=kind)
    assert [type(e) for e in caught.value.exceptions] == [KeyError, LookupError, ValueError]


def in_a_task(call: Callable[[], object]) -> None:
    """Make `call` in a task of asyncio, which raises a group."""

    async def task() -> None:
        call()

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(task())

    asyncio.run(main())


def in_a_handler(call: Callable[[], object]) -> None:
    try:
        call()
    except sp.SyncError as error:
        raise RuntimeError("training failed") from error


@both_kinds
@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (in_a_task, "ExceptionGroup in its round 1, barrier"),
        (in_a_handler, "raised RuntimeError: training failed after its round 1, barrier"),
    ],
)
def test_an_error_over_a_consequence_is_one(
    kind: WorldKind, make: Callable[[Callable[[], object]], None], shown: str
) -> None:
    def program() -> None:
        if sp.get_rank() == 1:
            raise ValueError("the cause")
        make(sp.barrier)

    with pytest.raises(ValueError, match="the cause") as caught:
        run_world(program, 2, kind=kind)
    assert f"rank 0: {shown}" in caught.value.__notes__[0]


@both_kinds
def test_a_group_of_consequences_is_one(kind: WorldKind) -> None:
    def fail() -> None:
        raise ValueError("the cause")

    with pytest.raises(ExceptionGroup) as group:
        run_world(lambda: in_a_task(fail if sp.get_rank() else sp.barrier), 2, kind=kind)
    assert [type(error) for error in group.value.exceptions] == [ValueError]

    with pytest.raises(ExceptionGroup) as group:
        run_world(lambda: in_a_task(sp.barrier), 2, kind=kind, faults=[Kill(rank=1)])
    assert [type(error) for error in group.value.exceptions] == [sp.PeerLost]

    with pytest.raises(DeadlockError, match=r"rank 0: waits in its round 1, barrier"):
        run_world(lambda: in_a_task(sp.barrier) if sp.is_main() else None, 2, kind=kind)


@both_kinds
@pytest.mark.parametrize("killed", [0, 2])
def test_a_deadlock_is_found_among_ranks_with_new_numbers(kind: WorldKind, killed: int) -> None:
    def program() -> None:
        with contextlib.suppress(sp.PeerLost):
            sp.barrier("first")
        sp.reform()
        if sp.get_rank():
            sp.barrier("last")

    end = Kill(killed, at="first")
    with pytest.raises(DeadlockError, match=f"rank {killed}: killed by a fault") as caught:
        run_world(program, 3, kind=kind, faults=[end])
    assert "has finished" in str(caught.value)


@both_kinds
def test_a_group_keeps_its_type_and_members(kind: WorldKind) -> None:
    def program() -> None:
        if sp.get_rank() == 0:
            raise ExceptionGroup("several", [Odd(1, 2), ValueError("bad value")])

    with pytest.raises(ExceptionGroup, match="several") as caught:
        run_world(program, 2, kind=kind)
    assert [type(error) for error in caught.value.exceptions] == [Odd, ValueError]


@both_kinds
def test_the_ways_out_that_are_no_errors(kind: WorldKind) -> None:
    def program() -> Any:
        sp.barrier()
        if sp.get_rank() == 1:
            sys.exit(0)
        return "here"

    assert run_world(program, 2, kind=kind) == ["here", None]

    def nonzero() -> None:
        if sp.get_rank() == 1:
            sys.exit(3)
        sp.barrier()

    with pytest.raises(SystemExit) as caught:
        run_world(nonzero, 2, kind=kind)
    assert caught.value.code == 3

    def interrupted() -> None:
        if sp.get_rank() == 1:
            raise KeyboardInterrupt
        sp.barrier()

    with pytest.raises(KeyboardInterrupt):
        run_world(interrupted, 2, kind=kind)


@both_kinds
def test_a_cause_that_a_cleanup_has_buried_is_named(kind: WorldKind) -> None:
    """A barrier in a `finally` is met by ranks that are elsewhere."""

    def program() -> None:
        try:
            if sp.get_rank() == 1:
                raise ValueError("the cause")
            sp.barrier("step")
        finally:
            sp.barrier("cleanup")

    with pytest.raises(sp.CollectiveMismatch) as caught:
        run_world(program, 3, kind=kind)
    note = "\n".join(caught.value.__notes__)
    assert "rank 1 of 3: raised CollectiveMismatch, while it handled ValueError: the cause" in note


@both_kinds
def test_a_killed_rank_is_lost_to_the_others(kind: WorldKind) -> None:
    def program() -> Any:
        sp.barrier("one")
        try:
            sp.barrier("two")
        except sp.PeerLost as error:
            return error.rank, "SIGKILL" in str(error)
        return None

    found = run_world(program, 3, kind=kind, faults=[Kill(2, at=2)])
    assert found == [(2, True), (2, True), None]

    def careless() -> None:
        sp.barrier("one")
        sp.barrier("two")

    with pytest.raises(sp.PeerLost, match="rank 2"):
        run_world(careless, 3, kind=kind, faults=[Kill(rank=2, at="two")])


def test_a_killed_thread_stays_dead_whatever_its_code_does() -> None:
    tried: list[int] = []

    def program() -> None:
        try:
            sp.barrier()
        except sp.PeerLost:
            return
        except BaseException:
            tried.append(sp.get_rank())
            sp.barrier("from the grave")

    run_world(program, 3, faults=[Kill(1)])
    assert tried == [1]


@both_kinds
def test_a_stopped_rank_is_a_stall_and_no_death(kind: WorldKind) -> None:
    with pytest.raises(StallError, match=r"wait for ranks \[1\], which are stopped"):
        run_world(lambda: sp.barrier(), 3, kind=kind, faults=[Stop(1)])


class Announcement:
    """What one rank does outside of a call, and another one waits for."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.reader, self.writer = os.pipe()

    def make(self) -> None:
        self.event.set()
        os.write(self.writer, b"x")

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


def poll_and_sleep(one: Announcement) -> None:
    while not one.event.is_set():
        time.sleep(0.001)


def poll_in_a_loop(one: Announcement) -> None:
    async def poll() -> None:
        while not one.event.is_set():
            await asyncio.sleep(0.001)

    asyncio.run(poll())


def wait_for_an_event(one: Announcement) -> None:
    assert one.event.wait(60)


def select_a_pipe(one: Announcement) -> None:
    assert select.select([one.reader], [], [], 60)[0] == [one.reader]


def wait_for_a_connection(one: Announcement) -> None:
    assert multiprocessing.connection.wait([one.reader], 60) == [one.reader]


@pytest.mark.parametrize("torch", [False, True])
@pytest.mark.parametrize(
    "wait",
    [poll_and_sleep, poll_in_a_loop, wait_for_an_event, select_a_pipe, wait_for_a_connection],
)
def test_a_rank_may_wait_for_another_outside_of_calls(
    wait: Callable[[Announcement], None], torch: bool
) -> None:
    def program(one: Announcement) -> str:
        if sp.get_rank() == 1:
            one.make()
        wait(one)
        environ = os.environ.get("RANK", "")
        sp.barrier()
        return environ

    for seed in range(3):
        with contextlib.closing(Announcement()) as one:
            found = run_world(partial(program, one), 2, seed=seed, timeout=20, torch=torch)
            assert found == (["0", "1"] if torch else ["", ""])


def test_a_rank_keeps_the_turn_while_a_world_of_its_own_runs() -> None:
    def inner() -> str:
        time.sleep(0.3)
        environ = os.environ["RANK"]
        sp.barrier()
        return environ

    def outer() -> str:
        if sp.get_rank() == 0:
            assert run_world(inner, 2, torch=True) == ["0", "1"]
        sp.barrier()
        return os.environ["RANK"]

    for seed in range(4):
        assert run_world(outer, 3, torch=True, seed=seed, timeout=20) == ["0", "1", "2"]


def test_a_mock_of_sleep_is_called_in_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = mock.Mock()
    monkeypatch.setattr(time, "sleep", sleep)
    run_world(lambda: time.sleep(1000), 2)
    assert sleep.call_count >= 2


@both_kinds
def test_a_busy_rank_is_a_stall_that_shows_all_stacks(kind: WorldKind) -> None:
    def program() -> None:
        if sp.get_rank() == 1:
            while True:
                pass  # busy for ever
        sp.barrier("in vain")  # waited at

    with pytest.raises(StallError) as caught:  # processes take a while to get there
        run_world(program, 2, kind=kind, timeout=1 if kind == "threads" else 5)
    text = str(caught.value)
    waits = f"rank 0: waits in its round 1, barrier 'in vain' ({line_of('waited at')})"
    assert waits in text or (kind == "threads" and "rank 0: is ready to run" in text)
    assert "rank 1: is busy before its first call" in text
    assert text.count("stack of rank") == 2
    shown = text.split("stack of rank 1:")[1]
    number = line_of("busy for ever").split(":")[1]
    assert re.search(rf"test_run_world.py\", line ({number}|{int(number) - 1}),? in program", shown)


def test_a_rank_that_dies_by_itself_is_told() -> None:
    def program() -> None:
        if sp.get_rank() == 1:
            os._exit(7)

    with pytest.raises(RankDied, match="rank 1: exit code 7"):
        run_world(program, 2, kind="processes")


def test_the_root_cause_is_shown_even_if_others_never_end() -> None:
    def program() -> None:
        if sp.get_rank() == 1:
            raise ValueError("the cause")
        with contextlib.suppress(sp.PeerFailed):
            sp.barrier()
        while True:
            pass

    with pytest.raises(ValueError, match="the cause"):
        run_world(program, 2, timeout=1)


def test_a_stalled_import_is_named_and_left_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        "import time",
        "END = time.monotonic() + 3",
        "while time.monotonic() < END:",
        "    pass",
    )
    (tmp_path / "slow_to_import.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    begun: list[threading.Thread] = []

    def program() -> None:
        begun.append(threading.current_thread())
        importlib.import_module("slow_to_import")
        sp.barrier()

    with pytest.raises(StallError, match="is importing slow_to_import"):
        run_world(program, 1, timeout=1)
    begun[0].join()
    assert sys.modules.pop("slow_to_import").END
    assert run_world(lambda: sp.all_reduce(1), 2) == [2, 2]


def test_a_thread_that_cannot_be_ended_leaves_the_process_as_it_was(outer: sp.World) -> None:
    released = threading.Lock()
    left: list[threading.Thread] = []

    def program() -> None:
        if sp.get_rank() == 1:
            left.append(threading.current_thread())
            released.acquire()  # in C, which no exception ends
        sp.barrier()

    released.acquire()
    try:
        with pytest.raises(DeadlockError, match="A thread could not be ended"):
            run_world(program, 2)
        assert sp.current() is outer
        assert run_world(lambda: sp.all_reduce(1), 3) == [3, 3, 3]
        sp.barrier("the world of the process")
    finally:
        released.release()
        left[0].join()
    assert sp.all_gather(sp.get_rank()) == [0]


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"ranks": 0}, ValueError),
        ({"ranks": "4"}, TypeError),
        ({"kind": "greenlets"}, ValueError),
        ({"backend": "file"}, ValueError),
        ({"faults": [Kill(9)]}, ValueError),
        ({"nodes": 3}, ValueError),
        ({"nodes": 2, "kind": "processes"}, ValueError),
        ({"faults": ["kill"]}, TypeError),
        ({"seed": "tomorrow"}, ValueError),
        ({"timeout": -1}, ValueError),
        ({"kind": "processes", "backend": "carrier pigeons"}, sp.ConfigurationError),
    ],
)
def test_wrong_wishes_are_refused(asked: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        run_world(lambda: None, **asked)


def test_threads_are_no_backend_for_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCPRIMS_BACKEND", "threads")
    with pytest.raises(sp.ConfigurationError, match="run_world"):
        sp.init()


ENDS: list[dict[str, Any]] = [
    {},
    {"faults": [Kill(1, at=2)]},
    {"faults": [Raise(2, at=2, error=ValueError)]},
]


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("threads", 200),
        pytest.param("threads", 10_000, marks=pytest.mark.soak),
        pytest.param("processes", 300, marks=pytest.mark.soak),
    ],
)
def test_hundreds_of_worlds_leave_nothing(kind: WorldKind, count: int) -> None:
    def program() -> None:
        sp.barrier()
        sp.barrier()

    threads = threading.active_count()
    fds = len(os.listdir("/dev/fd"))  # noqa: PTH208
    for number in range(count):
        with contextlib.suppress(sp.PeerLost, ValueError):
            run_world(program, 3, seed=number, kind=kind, **ENDS[number % 3])
    assert threading.active_count() == threads
    assert len(os.listdir("/dev/fd")) == fds  # noqa: PTH208


class Held:
    """Something that a rank has in a variable."""


@pytest.fixture
def only_references() -> Generator[None]:
    """Turn the garbage collector off: what is in a cycle of references is not freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("only_references")
def test_a_world_keeps_no_variables_of_its_ranks() -> None:
    """Neither those of a rank that is in a call while another one ends."""
    kept: list[weakref.ref[Held]] = []

    def program() -> None:
        held = Held()
        kept.append(weakref.ref(held))
        sp.barrier()

    for seed in range(5):
        run_world(program, 3, seed=seed)
    assert [ref() for ref in kept] == [None] * 15


@pytest.mark.usefixtures("only_references")
@pytest.mark.parametrize("finishes", [False, True])
def test_an_error_keeps_variables_as_long_as_it_lives(finishes: bool) -> None:
    kept: list[weakref.ref[Held]] = []

    def program() -> None:
        held = Held()
        kept.append(weakref.ref(held))
        if sp.is_main():
            if finishes:
                return
            raise LookupError("this rank is the cause")
        sp.barrier()

    with contextlib.suppress(LookupError, DeadlockError):
        run_world(program, 3)
    assert [ref() for ref in kept] == [None] * 3


@pytest.mark.usefixtures("only_references")
def test_a_forked_rank_frees_nothing_of_its_parent() -> None:
    """As a loader: its workers are processes of the parent."""
    freed: list[int] = []

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            freed.append(os.getpid())

    def program() -> list[int]:
        gc.collect()
        return freed

    Cycle()
    assert run_world(program, 2, kind="processes") == [[], []]


@pytest.mark.usefixtures("only_references")
def test_a_wait_keeps_no_variables_of_its_callers() -> None:
    def wait() -> weakref.ref[Held]:
        held = Held()
        sp.barrier()
        return weakref.ref(held)

    def program() -> None:
        kept = wait()
        assert kept() is None

    late = Delay(1, at=1, seconds=0.5)  # the journal of rank 0 says then that it waits
    run_world(program, 2, kind="processes", faults=[late])


def start(call: Callable[[], object], *, daemon: bool | None = None) -> threading.Thread:
    """Start a thread of this rank."""
    thread = threading.Thread(target=call, daemon=daemon)
    thread.start()
    return thread


@both_kinds
@pytest.mark.parametrize("daemon", [True, False])
def test_a_thread_that_is_late_is_no_deadlock(kind: WorldKind, daemon: bool) -> None:
    def program() -> str:
        pair = sp.group([0, 1])

        def later() -> None:
            time.sleep(0.3)  # long enough for a deadlock to be found
            pair.barrier("pair")

        thread = start(later, daemon=daemon) if sp.get_rank() == 0 else None
        if sp.get_rank() == 1:
            pair.barrier("pair")
        sp.barrier("all")
        if thread:
            thread.join()  # a daemon would be left to end after the test
        return "passed"

    assert run_world(program, 3, kind=kind) == ["passed"] * 3


def test_a_thread_that_ends_is_no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()

    def look() -> set[int | None]:  # after the rank has seen that it must wait
        ends.set()
        thread.join()
        return threads_that_may_call()

    thread = threading.Thread(target=ends.wait)
    monkeypatch.setattr("syncprims.testing.scheduler.threads_that_may_call", look)
    assert run_world(lambda: thread.start(), 1) == [None]
    assert ends.is_set()


@both_kinds
def test_a_thread_may_call_after_the_program_has_returned(kind: WorldKind) -> None:
    def program() -> str:
        pair = sp.group([0, 1])

        def later() -> None:
            time.sleep(0.2)  # the others have returned by now
            pair.barrier()
            pair.barrier()

        if sp.get_rank() < 2:
            start(later)
        return "returned"

    assert run_world(program, 3, kind=kind) == ["returned"] * 3


def test_a_thread_with_the_number_of_an_ended_one_may_call_after_the_program() -> None:
    def program() -> None:
        pair = sp.group([0, 1])

        def later() -> None:
            time.sleep(0.01)  # the others have returned by now
            calls.append(pair.all_gather(sp.get_rank()))

        if sp.get_rank() < 2:
            start(lambda: None).join()
            start(later)

    for seed in range(20):  # of some, the rank without a thread is the first to end
        calls: list[list[int]] = []
        run_world(program, 3, seed=seed)
        assert calls == [[0, 1]] * 2


@both_kinds
def test_a_pool_works_after_the_program_has_returned(kind: WorldKind, tmp_path: Path) -> None:
    def write(pair: sp.Group, to: Path) -> None:
        to.write_text(str(pair.all_gather(0)))

    def program() -> None:
        pair = sp.group([0, 1])
        pool = ThreadPoolExecutor(1)
        pool.submit(int).result()
        for k in range(2):
            done = tmp_path / f"{sp.get_rank()}-{k}"
            pool.submit(write, pair, done)
        pool.shutdown(wait=False)

    run_world(program, 2, kind=kind)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["[0, 0]"] * 4


def test_work_that_a_pool_has_not_begun_is_no_deadlock() -> None:
    def program() -> None:
        pair = sp.group([0, 1])
        with ThreadPoolExecutor(1) as pool:
            pool.submit(int).result()  # its thread is idle now
            if sp.get_rank() == 0:
                pool.submit(pair.barrier)
            if sp.get_rank() == 1:
                pair.barrier()
            sp.barrier()

    for seed in range(50):
        run_world(program, 3, seed=seed)
