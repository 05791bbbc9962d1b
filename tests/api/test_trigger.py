"""`Trigger`: any rank sets it, and all ranks see it at the same step."""

from __future__ import annotations

import dis
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
from conftest import in_processes, on_every_rank, several
from support.rank_environment import PATIENCE
from support.rank_worlds import Ranks, Scripts

import syncprims as sp
from syncprims.testing import run_world


@pytest.mark.parametrize("lag", [0, 1])
@on_every_rank
def test_all_ranks_see_it_at_the_same_check_and_it_stays_set(lag: int) -> None:
    stop = sp.Trigger("stop", lag=lag)
    seen = []
    for step in range(9):
        if step == 2 and sp.is_last():
            stop.set("converged")
            stop.set("said twice")
        if stop.check():
            seen.append((step, stop.ranks, stop.reason))
        if step == 5:
            stop.clear()
            sp.barrier()
            if sp.is_main():
                stop.set("again")
    first = [(step, [sp.get_world_size() - 1], "converged") for step in range(2 + lag, 6)]
    again = [(step, [0], "again") for step in range(6 + lag, 9)]
    assert seen == first + again


@on_every_rank
def test_a_set_trigger_needs_no_further_rounds() -> None:
    stop = sp.Trigger("stop")
    stop.set()
    assert stop.check()
    assert not sp.is_main() or all(stop.check() for _ in range(3))  # of this rank alone
    stop.clear()
    assert (sp.all_gather(stop.reason), stop.check()) == ([None] * sp.get_world_size(), False)


def test_signals_are_for_the_main_thread() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="main thread"):
        pool.submit(sp.Trigger().set_on_signal).result()


@several(4)
@on_every_rank
def test_ranks_and_reason_are_the_same_everywhere() -> None:
    stop = sp.Trigger()
    if sp.get_rank() in (1, 3):
        stop.set(f"by {sp.get_rank()}")
    assert stop.check()
    assert (stop.ranks, stop.reason) == ([1, 3], "by 1")


@several()
@on_every_rank
def test_lagging_checks_mix_with_other_calls() -> None:
    a, b = sp.Trigger("a", lag=1), sp.Trigger("b", lag=1)
    many = [sp.Trigger(f"t{i}", lag=1) for i in range(20)]
    answers = []
    for step in range(12):
        if step == 3 and sp.is_main():
            a.set()
        if step == 5 and sp.is_last():
            b.set()
        answers.append((a.check(), b.check()))
        assert sp.all_gather(step) == [step] * sp.get_world_size()
        assert not any(trigger.check() for trigger in many)
    expected = [(step >= 4, step >= 6) for step in range(12)]
    assert answers == expected


@several(2)
def test_a_lagging_check_does_not_wait_for_a_peer_one_check_behind(world: Ranks) -> None:
    if world.kind.backend != "file":
        pytest.skip("a stopped rank may hold this backend's one lock")

    def program() -> None:
        lag = sp.Trigger(lag=1)
        pid = sp.all_gather(os.getpid())[1]
        if sp.is_main():
            os.kill(pid, signal.SIGSTOP)
            try:
                assert not lag.check()  # would hang if it waited for the stopped rank
            finally:
                os.kill(pid, signal.SIGCONT)
        else:
            lag.check()
        lag.check()

    world.run(program)


@on_every_rank
def test_the_worlds_own_trigger() -> None:
    answers = [sp.check_trigger()]
    if sp.is_last():
        sp.set_trigger("enough")
    assert [*answers, sp.check_trigger(), sp.check_trigger()] == [False, True, False]


def test_the_worlds_own_trigger_is_set_before_its_start(scripts: Scripts) -> None:
    ended = scripts.run(
        """
set_trigger("early")
print(check_trigger())
shutdown()
try:
    set_trigger("late")
except WorldClosed:
    init()
print(check_trigger())
"""
    )
    assert [one.out for one in ended] == ["True\nFalse\n"] * 3, [one.err for one in ended]


#: Sends this process a signal while it loads the backend, and calls init().
_INTERRUPTED_START = """
class Interruption:
    def find_spec(self, name, path=None, target=None):
        if name == "syncprims.backends.file.backend":
            signal.raise_signal(signal.SIGUSR1)

sys.meta_path.insert(0, Interruption())
signal.signal(signal.SIGUSR1, lambda *_: handle())
"""


def test_a_signal_handler_sets_the_worlds_own_trigger_while_that_starts(scripts: Scripts) -> None:
    ended = scripts.run(
        _INTERRUPTED_START
        + """
def handle():
    if rank == 1:
        set_trigger("early")
init()
print(check_trigger(), check_trigger())
"""
    )
    assert [one.out for one in ended] == ["True False\n"] * 3, [one.err for one in ended]


def test_a_call_in_a_signal_handler_does_not_start_a_second_world(scripts: Scripts) -> None:
    ended = scripts.run(_INTERRUPTED_START + "handle = barrier\ninit()")
    for one in ended:
        assert "ConcurrentCall: a signal handler calls barrier (" in one.err


@in_processes
@on_every_rank
def test_signals_at_one_time_set_it_and_a_later_one_acts() -> None:
    """A launcher and the system may each signal every process of a job."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    stop = sp.Trigger()
    stop.set_on_signal(signal.SIGTERM)
    if sp.is_last():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    seen = stop.check(), stop.ranks, stop.reason
    stop.clear()
    assert not stop.check()
    if sp.is_last():
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            while True:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.05)
    signal.signal(signal.SIGTERM, before)
    assert seen == (True, [sp.get_world_size() - 1], "SIGTERM")


@in_processes
@on_every_rank
def test_a_forked_child_ends_by_the_signal_as_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = sp.Trigger()
    stop.set_on_signal()
    codes = set()
    for _ in range(20):  # also if it comes at once
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(PATIENCE,))
        child.start()
        child.terminate()
        child.join()
        codes.add(child.exitcode)
    signal.signal(signal.SIGTERM, before)
    assert codes == {-signal.SIGTERM}
    assert not stop.check()


@pytest.mark.parametrize("lag", [0, 1])
@in_processes
@on_every_rank
def test_all_ranks_know_when_the_first_one_is_killed(lag: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = sp.Trigger(lag=lag)
    stop.set_on_signal(grace=100 if sp.is_last() else timedelta(seconds=200))
    unknown = stop.seconds_left
    if sp.is_main() or sp.is_last():
        os.kill(os.getpid(), signal.SIGTERM)
    while not stop.check():
        pass
    known = stop.seconds_left
    stop.clear()
    signal.signal(signal.SIGTERM, before)
    assert known is not None
    assert 0 < known <= 100
    assert unknown is stop.seconds_left is None


def test_a_second_signal_while_python_ends_is_the_same_one() -> None:
    code = (
        "import os, signal, syncprims\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid(), signum=signal.SIGTERM):\n"
        "        kill(pid, signum)\n"
        "late = Late()  # it goes when Python has taken its handlers away\n"
        "syncprims.Trigger().set_on_signal()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="no real-time signals")
def test_a_signal_without_a_name_works_too() -> None:
    number = signal.SIGRTMIN + 1
    before = signal.getsignal(number)
    trigger = sp.Trigger()
    trigger.set_on_signal(number)
    os.kill(os.getpid(), number)
    try:
        assert run_world(lambda: (trigger.check(), trigger.reason), ranks=1) == [
            (True, f"signal {number}")
        ]
    finally:
        signal.signal(number, before)


class Interrupted(Exception):
    """Raised in a check, as by a signal handler."""


def check_interrupted(trigger: sp.Trigger, at: int, act: Callable[[], object]) -> tuple[bool, bool]:
    """Return what a check returns that calls ``act()`` before its instruction `at`, if it has one.

    A tracer stands in for a signal handler, which can run between any two instructions; Python runs
    none between a call and the return of what it returned, nor where a branch is not taken.
    """
    seen = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal seen
        if frame.f_code is not sp.Trigger.check.__code__:
            return None
        frame.f_trace_opcodes = True
        operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if event == "opcode" and not operation.startswith(("RETURN", "NOT_TAKEN")):
            seen += 1
            if seen == at:
                act()
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # else Python 3.12 traces no instruction
    sys.settrace(trace)
    try:
        found = trigger.check()
    finally:
        sys.settrace(before)
    return found, seen >= at


def test_none_is_lost_whenever_in_a_check_it_is_set() -> None:
    def program() -> int:
        at, reached = 1, True
        while reached:
            trigger = sp.Trigger()
            found, reached = check_interrupted(trigger, at, lambda: trigger.set("SIGTERM"))  # noqa: B023
            assert not found or trigger.reason == "SIGTERM"
            assert (found or trigger.check()) == reached, at
            at += 1
        return at

    (operations,) = run_world(program, 1)
    assert operations > 20


def test_none_is_lost_wherever_a_check_is_interrupted() -> None:
    def interrupt() -> None:
        raise Interrupted

    def program() -> int:
        at, raised = 1, True
        while raised:
            trigger, raised = sp.Trigger(), False
            trigger.set("SIGTERM")
            try:
                check_interrupted(trigger, at, interrupt)
            except Interrupted:
                raised = True
                assert trigger.check(), at
            at += 1
        return at

    (operations,) = run_world(program, 1)
    assert operations > 20
