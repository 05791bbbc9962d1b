"""Forked children are not ranks, and do not disturb the world of their parent."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rank_worlds import PATIENCE, Kind, Ranks, Scripts, Signs, await_end

import syncprims as sp

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfds")


def enter(context: Any) -> None:
    with context:
        pass


def answers(before: sp.Group) -> list[str]:
    """Return what each call of a child says, in which none may pass and none may hang."""
    calls: list[Callable[[], object]] = [
        sp.barrier,
        lambda: sp.barrier("named", timeout=1),
        lambda: sp.any_rank(True),
        lambda: sp.all_ranks(True),
        lambda: sp.broadcast("x"),
        lambda: sp.broadcast(b"x" * 3_000_000),
        lambda: sp.all_gather(1),
        lambda: sp.all_reduce(1),
        lambda: sp.all_reduce(np.ones(500_000)),
        lambda: sp.assert_same(1, "seed"),
        lambda: sp.group([0]),
        lambda: sp.group([0, 1, 2]),
        lambda: enter(sp.in_turn()),
        lambda: enter(sp.main_first()),
        lambda: sp.Trigger().check(),
        lambda: sp.on_main(share=True)(lambda: 1)(),
        before.barrier,
        lambda: before.all_gather(1),
        sp.current,
        sp.init,
    ]
    said: list[str] = []
    for call in calls:
        try:
            call()
        except sp.SyncError as error:
            said.append(type(error).__name__)
        else:
            said.append("passed")
    places = (sp.get_rank(), sp.get_world_size(), sp.is_main(), sp.split([1, 2, 3]))
    return [*said, f"{places}"]


REFUSED = ["ForkedProcess"] * 20 + ["(0, 3, True, [1])"]

SOURCE = f"""
import json, multiprocessing, select, threading
from pathlib import Path
from typing import Any
import numpy as np
import syncprims as sp

{inspect.getsource(enter)}
{inspect.getsource(answers)}
def asleep():
    board = current().rounds.board
    # The round first: from the one before it may still be waking up.
    return board.status(0).rounds > board.collected and board._memory[board._asleep][0]

def live_on():
    os.close(1), os.close(2)  # the test reads them to the end
    while not Path("end").exists():
        time.sleep(0.01)
    os._exit(0)

def be_child():
    signal.alarm({int(PATIENCE)})  # no other process would end it
    Path("said").write_text(json.dumps([os.getpid(), answers(both)]))
    os.rename("said", "child")
    ENDING

def fork():
    global child
    if WAY == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=be_child)
        process.start()
        child = process.pid
    else:
        child = os.fork()
        if child == 0:
            be_child()

def once_asleep(act):
    while not asleep():
        os.sched_yield()
    act()

def reduce():
    assert all_reduce(np.ones(500_000))[-1] == 3

def files():
    return set(Path(os.environ["SYNCPRIMS_DIR"]).rglob("*"))

init()
signal.signal(signal.SIGUSR1, lambda *_: fork())
pids = all_gather(os.getpid())
reduce()  # the window is made: a child lets go of that as well
both = group([0, 1])
forker = threading.Thread(target=once_asleep, args=(fork,))
if rank == 0 and THREAD:
    forker.start()
if rank == 1:  # late, until the child has had its say
    before = files()
    if not THREAD:
        once_asleep(lambda: os.kill(pids[0], signal.SIGUSR1))
    while not Path("child").exists():
        os.sched_yield()
    child, said = json.loads(Path("child").read_text())
    assert said == {REFUSED}, said
    if not LIVES:
        select.select([os.pidfd_open(child)], [], [])
    assert files() == before
    assert current().rounds.board.status(0).state == "alive"
CALL
assert os.getpid() == pids[rank], "a child passed"
if rank == 0 and THREAD:
    forker.join()
if rank == 0 and not LIVES:
    print("child's exit code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for _ in range(100):
    assert all_gather("in step") == ["in step"] * 3
if rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    barrier("one too many")
except PeerLost as error:
    assert "killed by SIGKILL" in str(error)
    print("lost", error.missing)
if rank == 1 and LIVES:
    os.kill(child, 0)  # it still does
    Path("end").touch()
"""


BARRIER = "barrier('while it forks')"


@pytest.mark.parametrize(
    ("thread", "way", "ending", "code", "call"),
    [
        (False, "fork", "os._exit(0)", 0, BARRIER),
        (False, "fork", "sys.exit(0)", 0, BARRIER),
        (False, "fork", "sys.exit(3)", 3, BARRIER),
        (False, "fork", "return", 1, BARRIER),  # into the wait, where it is refused: it is no rank
        (False, "fork", "raise ValueError('its own')", 1, BARRIER),
        (False, "fork", "live_on()", None, BARRIER),
        (False, "multiprocessing", "return", 0, BARRIER),
        (False, "multiprocessing", "live_on()", None, BARRIER),
        (True, "fork", "return", 0, BARRIER),
        (True, "fork", "sys.exit(3)", 0, BARRIER),  # which ends a thread, here the child's only one
        (True, "fork", "live_on()", None, BARRIER),
        (True, "multiprocessing", "return", 0, BARRIER),
        (False, "fork", "live_on()", None, "reduce()"),
        (True, "fork", "sys.exit(3)", 0, "reduce()"),
    ],
)
def test_a_child_forked_in_the_middle_of_a_wait_is_no_rank_and_does_no_harm(
    thread: bool, way: str, ending: str, code: int | None, call: str, scripts: Scripts
) -> None:
    source = SOURCE.replace("CALL", call).replace("ENDING", ending).replace("WAY", repr(way))
    source = source.replace("THREAD", str(thread)).replace("LIVES", str(code is None))
    first, *others = scripts.run(source)
    assert first.code == -signal.SIGKILL, first.err
    assert [one.out for one in others] == ["lost [0]\n"] * 2, [one.err for one in others]
    assert not any(scripts.directory.iterdir())
    assert first.out == ("" if code is None else f"child's exit code {code}\n")
    assert ("ForkedProcess" in first.err) == (code == 1)


def plainly(child: Callable[[], None]) -> int:
    """Fork, and leave without a word."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(PATIENCE))  # no other process would end it
        try:
            child()
        finally:
            os._exit(0)
    return pid


def test_a_child_forked_after_data_passed_is_free(meeting_place: Path, signs: Signs) -> None:
    """It does not have the threads that carried them, and must not wait for their end."""

    def child() -> None:
        with pytest.raises(sp.ForkedProcess):
            sp.barrier()
        signs.give("free")

    def program() -> Any:
        data = np.arange(400_000)
        assert (sp.broadcast(data) == data).all()
        if sp.get_rank() == 1:
            pid = plainly(child)
            try:
                signs.wait("free")
                await_end(pid)
            finally:
                os.kill(pid, signal.SIGKILL)  # as it cannot do by itself if it hangs in the fork
                os.waitpid(pid, 0)
        return int(sp.broadcast(data, src=1).sum())

    world = Ranks(Kind("torch", 2, hosts=2), meeting_place)
    assert world.run(program) == [sum(range(400_000))] * 2
    world.check_nothing_left()


def test_a_child_forked_while_a_world_starts_is_refused(meeting_place: Path, signs: Signs) -> None:
    def program() -> Any:
        def child() -> None:
            with pytest.raises(sp.ForkedProcess):
                sp.init()
            signs.give("refused")

        def fork_in_the_middle() -> None:
            while vars(world)["_state"].world is None:  # the others are waited for
                os.sched_yield()
            os.waitpid(plainly(child), 0)
            signs.give("over")

        world = sys.modules["syncprims._world.runtime"]
        if os.environ["SYNCPRIMS_RANK"] == "0":
            threading.Thread(target=fork_in_the_middle).start()
        else:
            signs.wait("over")  # before this rank comes
        with sp.init():
            sp.barrier()
        return signs.given("refused")

    outcomes = Ranks(Kind("file", 2), meeting_place).run_alone(program)
    assert outcomes == [True] * 2
