"""Killed ranks of the file backend, at any point of a call: all other ranks raise."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from support.rank_worlds import Died, Kind, Ranks, Signs, await_end

import syncprims as sp

# The backend is imported before the ranks are forked.
from syncprims._world.registry import load_backend

# A kill in the middle of a start: it is put into a function of the start.
from syncprims._world.world import RunningWorld

VICTIM, LATE = 1, 2

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfds")


def kill_me(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_watched() -> bool:
    """Return whether another process has a descriptor of this process."""
    for path in Path("/proc").glob("[0-9]*/fdinfo/*"):
        with contextlib.suppress(OSError):
            if f"Pid:\t{os.getpid()}\n" in path.read_text():
                return True
    return False


def hold(leash: int) -> None:
    """Live until the test lets go of the other end."""
    os.read(leash, 1)


def nobody(leash: int) -> None:
    pass


def a_fork(leash: int) -> None:
    if os.fork() == 0:
        hold(leash)
        os._exit(0)


def a_multiprocessing_child(leash: int) -> None:
    multiprocessing.get_context("fork").Process(target=hold, args=(leash,)).start()


def a_raw_fork(leash: int) -> None:
    """Fork as a library in C does: no hook of Python runs."""
    if ctypes.CDLL(None).fork() == 0:
        hold(leash)
        os._exit(0)


COMPANIONS = [nobody, a_fork, a_multiprocessing_child, a_raw_fork]


@pytest.fixture
def leash() -> Generator[tuple[int, int]]:
    """A pipe: who reads from it lives until the test ends."""
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def in_a_barrier() -> None:
    signal.signal(signal.SIGALRM, kill_me)
    signal.setitimer(signal.ITIMER_REAL, 0.03)
    sp.barrier("load")


def while_encoding() -> None:
    class Deadly:
        def __reduce__(self) -> NoReturn:
            kill_me()
            raise AssertionError

    sp.broadcast(Deadly(), src=VICTIM)


def while_writing() -> None:
    """Die over a file that is half written: of what does not fit into shared memory."""
    signal.signal(signal.SIGXFSZ, kill_me)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
    sp.broadcast(b"x" * 5_000_000, src=VICTIM)


PLACES: list[Callable[[], None]] = [kill_me, in_a_barrier, while_encoding, while_writing]


def meet(place: Callable[[], None]) -> None:
    if place in PLACES[2:]:
        sp.broadcast(None, src=VICTIM)
    sp.barrier("load")  # which passes if the late note comes before the news of the death
    sp.barrier("next")


def told(
    place: Callable[[], None],
    companion: Callable[[int], None],
    leash: tuple[int, int],
    directory: Path,
) -> None:
    """Kill rank 1 and assert that both others are told so, one of them when it comes late."""

    def program() -> Any:
        os.close(leash[1])
        pids = sp.all_gather(os.getpid())
        if sp.get_rank() == VICTIM:
            companion(leash[0])
            place()
        if sp.get_rank() == LATE:
            await_end(pids[VICTIM])
        with pytest.raises(sp.PeerLost) as caught:
            meet(place)
        return caught.value.rank, caught.value.missing, "killed by SIGKILL" in str(caught.value)

    outcomes = Ranks(Kind("file", 3), directory).outcomes(program)
    assert isinstance(outcomes.pop(VICTIM), Died)
    assert outcomes == [(VICTIM, [VICTIM], True)] * 2


@pytest.mark.parametrize(
    ("place", "companion"),
    [*((place, nobody) for place in PLACES), *((in_a_barrier, one) for one in COMPANIONS[1:])],
)
def test_a_kill_is_told_wherever_it_falls(
    place: Callable[[], None],
    companion: Callable[[int], None],
    leash: tuple[int, int],
    meeting_place: Path,
) -> None:
    told(place, companion, leash, meeting_place)


def joining(directory: Path, prepare: Callable[[], None], **variables: str) -> list[Any]:
    """Start three ranks of which rank 1 does `prepare` first; return what each one says."""

    signs = Signs(directory.parent)

    def program() -> Any:
        load_backend("file")
        rank = int(os.environ["SYNCPRIMS_RANK"])
        if rank == VICTIM:
            prepare()
        else:  # on a busy machine one may be slower to start than the deadline is long
            signs.gather(f"{rank} is up", *(f"{r} is up" for r in range(3) if r != VICTIM))
        try:
            sp.init()
        except sp.SyncError as error:
            return type(error).__name__, error.missing, "killed by SIGKILL" in str(error)
        return "joined"

    outcomes = Ranks(Kind("file", 3), directory).outcomes(program, start=False, **variables)
    assert isinstance(outcomes.pop(VICTIM), Died)
    return outcomes


def be_killed_with_the_run_locked() -> None:
    """The system frees the lock, and the others go on."""
    vars(sys.modules["syncprims.backends.file.backend"])["_world_to_join"] = kill_me


@pytest.mark.parametrize("prepare", [kill_me, be_killed_with_the_run_locked])
def test_a_rank_killed_before_it_joined_is_missed_by_name(
    prepare: Callable[[], None], meeting_place: Path
) -> None:
    said = joining(meeting_place, prepare, SYNCPRIMS_JOIN_TIMEOUT="1")
    assert said == [("SyncTimeout", [VICTIM], False)] * 2


@pytest.mark.parametrize("companion", [nobody, a_raw_fork])
def test_a_rank_killed_after_joining_is_reported_to_those_that_joined(
    companion: Callable[[int], None], leash: tuple[int, int], meeting_place: Path
) -> None:
    """Rank 1 dies between joining and its first note; rank 2 never comes."""

    def program() -> Any:
        os.close(leash[1])
        rank = int(os.environ["SYNCPRIMS_RANK"])
        if rank == VICTIM:

            def die(_: object) -> None:
                # Not before the other is there: it would find only dead ranks, and create a world.
                while not list(meeting_place.glob("*/world-1/alive-0")):
                    os.sched_yield()
                while not is_watched():
                    os.sched_yield()
                kill_me()

            companion(leash[0])
            replaced: Any = RunningWorld
            assert replaced.join
            replaced.join = die
        if rank == LATE:
            return None
        with contextlib.suppress(TimeoutError), pytest.raises(sp.PeerLost) as caught:
            sp.init()
        return caught.value.rank, caught.value.missing, "killed by SIGKILL" in str(caught.value)

    outcomes = Ranks(Kind("file", 3), meeting_place).outcomes(program, start=False)
    assert outcomes[0] == (VICTIM, [VICTIM], True)
