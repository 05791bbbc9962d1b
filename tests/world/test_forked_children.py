"""Forked children are not ranks, and do not disturb the world of their parent."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.rank_worlds import PATIENCE, Died, Kind, Ranks, Scripts, await_end

import syncprims as sp

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

FORKER, CALLER, LATE = 0, 1, 2

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfds")


class Pipe:
    """A pipe whose ends every process inherits."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self._ends = [self.reader, self.writer]

    def send(self, what: object) -> None:
        """Write one line."""
        os.write(self.writer, json.dumps(what).encode() + b"\n")

    def receive(self) -> Any:
        """Read one line."""
        said = b""
        while not said.endswith(b"\n"):
            assert select.select([self.reader], [], [], PATIENCE / 2)[0], f"silence after {said!r}"
            said += os.read(self.reader, 1)
        return json.loads(said)

    def await_let_go(self) -> None:
        """Return once no other process holds the writing end."""
        os.close(self.writer)
        self._ends.remove(self.writer)
        os.read(self.reader, 1)

    def close(self) -> None:
        """Close what is still open."""
        for end in self._ends:
            os.close(end)


@pytest.fixture
def report() -> Generator[Pipe]:
    """What a child says."""
    pipe = Pipe()
    yield pipe
    pipe.close()


@pytest.fixture
def leash() -> Generator[Pipe]:
    """Who waits on it lives until the test ends."""
    pipe = Pipe()
    yield pipe
    pipe.close()


# -- in the child ---------------------------------------------------------------------------------


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


# -- ways to fork ---------------------------------------------------------------------------------


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


def by_multiprocessing(child: Callable[[], None]) -> int:
    """Fork, and leave by multiprocessing's way out."""
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert process.pid is not None
    return process.pid


def is_asleep() -> bool:
    """Return whether rank 0 has come to the next round, and sleeps until the others come."""
    board = sp.current().group._rounds.board
    memory, asleep = vars(board)["_memory"], vars(board)["_asleep"]
    # The round first: from the one before it may still be waking up.
    return board.status(FORKER).rounds > board.collected and bool(memory[asleep][FORKER])


def once_it_sleeps(act: Callable[[], object]) -> None:
    while not is_asleep():
        os.sched_yield()
    act()


def barrier() -> None:
    sp.barrier("while it forks")


def reduce() -> None:
    assert sp.all_reduce(np.ones(500_000))[-1] == 3


def files(directory: Path) -> set[str]:
    return {str(path) for path in directory.rglob("*")}


@pytest.mark.parametrize("call", [barrier, reduce])
@pytest.mark.parametrize("lives", [False, True], ids=["ends", "lives on"])
@pytest.mark.parametrize("way", [plainly, by_multiprocessing])
@pytest.mark.parametrize("by", ["handler", "thread"])
def test_a_child_forked_in_the_middle_of_a_wait_is_no_rank_and_does_no_harm(
    by: str,
    way: Callable[[Callable[[], None]], int],
    lives: bool,
    call: Callable[[], None],
    meeting_place: Path,
    report: Pipe,
    leash: Pipe,
) -> None:
    def program() -> Any:
        pids = sp.all_gather(os.getpid())
        reduce()  # the window is made: a child lets go of that as well
        both = sp.group([FORKER, CALLER])

        def child() -> None:
            report.send([os.getpid(), answers(both)])
            if lives:
                leash.await_let_go()

        if sp.get_rank() == FORKER:
            signal.signal(signal.SIGUSR1, lambda *_: way(child))
            if by == "thread":
                threading.Thread(target=once_it_sleeps, args=(lambda: way(child),)).start()
            call()
            assert sp.all_gather("in step") == ["in step"] * 3
            os.kill(os.getpid(), signal.SIGKILL)
        if sp.get_rank() == CALLER:  # late, until the child has had its say
            before = files(meeting_place)
            if by == "handler":
                once_it_sleeps(lambda: os.kill(pids[FORKER], signal.SIGUSR1))
            pid, said = report.receive()
            assert said == REFUSED
            if not lives:
                await_end(pid)
            assert files(meeting_place) == before
            status = sp.current().group._rounds.board.status(FORKER)
            assert status.state == "alive"
        call()
        assert sp.all_gather("in step") == ["in step"] * 3
        with pytest.raises(sp.PeerLost) as caught:
            sp.barrier("one too many")
        assert "killed by SIGKILL" in str(caught.value)
        if lives and sp.get_rank() == CALLER:
            os.kill(pid, 0)  # it still does
        return caught.value.missing

    outcomes = Ranks(Kind("file", 3), meeting_place).outcomes(program)
    assert isinstance(outcomes.pop(FORKER), Died), outcomes
    assert outcomes == [[FORKER]] * 2
    assert not any(meeting_place.iterdir())


def test_a_child_forked_after_data_has_passed_between_hosts_is_free_at_once(
    meeting_place: Path, report: Pipe
) -> None:
    """It does not have the threads that carried them, and must not wait for their end."""

    def child() -> None:
        with pytest.raises(sp.ForkedProcess):
            sp.barrier()
        report.send("free")

    def program() -> Any:
        data = np.arange(400_000)
        assert (sp.broadcast(data) == data).all()
        if sp.get_rank() == 1:
            pid = plainly(child)
            try:
                assert report.receive() == "free"
                await_end(pid)
            finally:
                os.kill(pid, signal.SIGKILL)  # as it cannot do by itself if it hangs in the fork
                os.waitpid(pid, 0)
        return int(sp.broadcast(data, src=1).sum())

    world = Ranks(Kind("torch", 2, hosts=2), meeting_place)
    assert world.run(program) == [sum(range(400_000))] * 2
    world.check_nothing_left()


HEAD = """
import select, threading

def asleep():
    board = current().group._rounds.board
    return board.status(0).rounds > board.collected and board._memory[board._asleep][0]

def children(pid):
    found = ""
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            found += open(f"/proc/{pid}/task/{task}/children").read()
        except FileNotFoundError:
            pass  # a thread that has ended since
    return [int(child) for child in found.split()]

def fork():
    global child
    child = os.fork()
    if child == 0:
        ENDING

def once_asleep(act):
    while not asleep():
        os.sched_yield()
    act()

init()
child = None
rank0 = os.getpid()
signal.signal(signal.SIGUSR1, lambda *_: fork())
pids = all_gather(os.getpid())
if rank == 0 and THREAD:
    threading.Thread(target=once_asleep, args=(fork,)).start()
if rank == 1:
    if not THREAD:
        once_asleep(lambda: os.kill(pids[0], signal.SIGUSR1))
    while not (found := children(pids[0])):
        os.sched_yield()
    select.select([os.pidfd_open(found[0])], [], [])
barrier("while it forks")
assert os.getpid() == pids[rank], "a child passed"
if rank == 0:
    print("child's exit code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for _ in range(100):
    assert all_gather("in step") == ["in step"] * 3
if rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    barrier("one too many")
except PeerLost as error:
    print("lost", error.missing)
"""


@pytest.mark.parametrize(
    ("thread", "ending", "code"),
    [
        (False, "os._exit(0)", 0),
        (False, "sys.exit(0)", 0),
        (False, "sys.exit(3)", 3),
        (False, "return", 1),  # into the wait, where it is refused: it is no rank
        (False, "raise ValueError('its own')", 1),
        (True, "return", 0),
        (True, "sys.exit(3)", 0),  # which ends a thread, here the child's only one
    ],
)
def test_however_a_child_ends_its_parent_waits_on(
    thread: bool, ending: str, code: int, scripts: Scripts
) -> None:
    source = HEAD.replace("ENDING", ending).replace("THREAD", str(thread))
    first, *others = scripts.run(source)
    assert first.code == -signal.SIGKILL, first.err
    assert [one.out for one in others] == ["lost [0]\n"] * 2, [one.err for one in others]
    assert not any(scripts.directory.iterdir())
    assert first.out == f"child's exit code {code}\n"
    assert ("ForkedProcess" in first.err) == (code == 1)


def test_a_child_forked_while_another_thread_starts_the_world_is_refused(
    meeting_place: Path, report: Pipe
) -> None:
    def program() -> Any:
        def child() -> None:
            signal.alarm(2)  # far longer than a refusal takes
            with pytest.raises(sp.ForkedProcess):
                sp.init()
            report.send("refused")

        def fork_in_the_middle() -> None:
            while vars(world)["_state"].world is None:  # the others are waited for
                os.sched_yield()
            if os.waitpid(plainly(child), 0)[1]:
                report.send("hung")

        world = sys.modules["syncprims._world.runtime"]
        if os.environ["SYNCPRIMS_RANK"] == "0":
            threading.Thread(target=fork_in_the_middle).start()
        else:
            said = report.receive()  # before this rank comes
        with sp.init():
            sp.barrier()
        return said if sp.get_rank() else "refused"

    outcomes = Ranks(Kind("file", 2), meeting_place).run_alone(program)
    assert outcomes == ["refused"] * 2
