"""Worlds of threads."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import os
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from syncprims import errors
from syncprims._world.environment import rank_variables
from syncprims._world.group import entered
from syncprims._world.registry import backend_class
from syncprims._world.runtime import clean_environ, seated
from syncprims.errors import CollectiveMismatch

from .errors import Killed, WorldAborted
from .faults import here
from .output import mark, told_apart
from .probe import JOIN, Probe, Seen, Witness
from .report import shortened, users_lines
from .runs import Outcome, Run, buried, is_consequence
from .scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from types import FrameType

    from syncprims.interface import Backend, Settings, Topology

    from .faults import Fault
    from .output import Sink
    from .schedules import Seed

_PATIENCE = 1.0  # seconds for a rank to end by itself, once its world is given up
_GRACE = 2.0  # seconds for threads to end once their world has been given up
_DEBUGGERS = ("bdb", "pdb", "pydevd")


class _Victim:
    """What faults do to a rank that is a thread."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world = world
        self._rank = rank

    def kill(self) -> None:
        for room in self._world.rooms:
            room.lose(self._rank, "killed by SIGKILL")
        self._world.probes[self._rank].dead = True
        raise Killed

    def stop(self) -> None:
        self._world.outcomes[self._rank].end = "stopped"
        self._world.scheduler.stop(self._rank)

    def sleep(self, seconds: float) -> None:
        self._world.scheduler.sleep(self._rank, seconds)


class _Tracer(Witness):
    def __init__(self, run: Run) -> None:
        self._run = run

    def posted(self, rank: int, seen: Seen, number: int) -> None:
        if seen.label.kind != JOIN:
            self._run.trace.append((rank, seen))


class ThreadWorld:
    """One run of `fn` on so many threads."""

    def __init__(
        self,
        fn: Callable[[], Any],
        ranks: int,
        seed: Seed,
        faults: Sequence[Fault],
        sink: Sink | None,
        nodes: int = 1,
        *,
        traced: bool = True,
    ) -> None:
        self._fn = fn
        self._ranks = ranks
        self._nodes = nodes
        self._seed = seed
        self._sink = sink
        self._environ = {**clean_environ(), "SYNCPRIMS_BACKEND": "threads"}
        if not traced:
            self._environ.pop("SYNCPRIMS_TRACE", None)
        self._backend: Any = backend_class("threads")
        self.scheduler = Scheduler(ranks, seed.schedule(ranks), self._break_deadlock)
        self.rooms: list[Any] = []  # one, unless the program ends its world and starts another
        self._worlds_begun = [0] * ranks
        self.outcomes = [Outcome(rank) for rank in range(ranks)]
        self._run = Run(self.outcomes, seed)
        tracer = _Tracer(self._run)
        self.probes = [Probe(rank, faults, _Victim(self, rank), tracer) for rank in range(ranks)]
        self._threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._be_rank, rank),
                name=f"rank {rank} of {ranks}",
                daemon=True,
            )
            for rank in range(ranks)
        ]

    def run(self, timeout: float | None) -> Run:
        """Return how it went; after so many seconds it is given up."""
        with told_apart(self._sink), _one_processor(self._seed.number):
            try:
                for thread in self._threads:
                    thread.start()
                self.scheduler.begin()
                self._wait(timeout)
            except BaseException:
                self._give_up()
                raise
            if not self.scheduler.aborted:
                for thread in self._threads:
                    thread.join()  # it has nothing left to do
            elif not self._give_up():
                self._run.gave_up += ". A thread could not be ended, and is left alone"
        run = self._run
        run.stuck, run.steps = self.scheduler.stuck, self.scheduler.steps
        for outcome, probe in zip(self.outcomes, self.probes, strict=True):
            outcome.calls, outcome.struck, outcome.torn = probe.calls, probe.struck, probe.torn
            outcome.waits = outcome.waits or probe.waits
        return run

    # -- a rank -----------------------------------------------------------------------------------

    def _be_rank(self, rank: int) -> None:
        outcome = self.outcomes[rank]
        entered.set(None)
        here.set(_Victim(self, rank))
        mark(self._sink, rank)
        environ = {**self._environ, **rank_variables(rank, self._ranks, self._nodes)}
        try:
            self.scheduler.enter(rank)
            with seated(environ, self._make):
                outcome.result = self._fn()
            outcome.end = "returned"
        except WorldAborted:
            pass
        except Killed:
            outcome.end = "killed"
        except SystemExit as error:
            outcome.end, outcome.error = ("raised", error) if error.code else ("returned", None)
        except BaseException as error:
            outcome.end, outcome.error = "raised", shortened(error)
            outcome.consequence, outcome.buried = is_consequence(error), buried(error)
        finally:
            self.scheduler.leave(rank)

    def _make(self, cls: type[Backend], place: Topology, settings: Settings) -> Backend:
        number = self._worlds_begun[place.rank]
        self._worlds_begun[place.rank] += 1
        if number == len(self.rooms):
            self.rooms.append(self._backend.room(self.scheduler, self._ranks))
        return self.probes[place.rank].probe(self.rooms[number].backend(place, settings))

    def _break_deadlock(self) -> bool:
        broken = [room for room in self.rooms if _break_cycle(room.waiting)]
        if broken:
            return True
        stopped = [o.rank for o in self.outcomes if o.end == "stopped"]
        self._run.gave_up = (
            f"the others wait for ranks {stopped}, which are stopped but not dead: without a "
            f"timeout they wait for as long as that lasts"
        )
        return False

    # -- from outside -----------------------------------------------------------------------------

    def _wait(self, timeout: float | None) -> None:
        """Wait for the end of all ranks, or give them up."""
        while not self.scheduler.finished.wait(timeout):
            stacks = self._stacks()
            if self._is_debugged():
                continue  # somebody is looking at it
            self._run.gave_up = (
                f"the world still runs after {timeout:g} s of real time: a rank is busy outside "
                f"of the library's calls, or there is much to do. See where the ranks are, or "
                f"allow more: timeout="
            )
            self._run.stacks = stacks
            self._note_waits()
            self.scheduler.abort()
            return

    def _note_waits(self) -> None:
        for outcome in self.outcomes:
            if outcome.end == "left":
                outcome.waits = self.probes[outcome.rank].waits
                outcome.idle = outcome.rank != self.scheduler.turn

    def _give_up(self) -> bool:
        """End all ranks; return whether they have ended."""
        self.scheduler.abort()
        begin = time.monotonic()
        while living := [thread for thread in self._threads if thread.is_alive()]:
            living[0].join(0.05)
            waited = time.monotonic() - begin
            if waited > _GRACE:
                return False
            if waited < _PATIENCE:
                continue  # on its way out, with a traceback to write: not to be disturbed
            for thread in living:
                if thread.is_alive() and thread.ident is not None:
                    # Takes effect between two steps of Python; what waits in C does not hear it.
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread.ident), ctypes.py_object(WorldAborted)
                    )
        return True

    def _frames(self) -> dict[int, FrameType]:
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        return {
            rank: frames[thread.ident]
            for rank, thread in enumerate(self._threads)
            if thread.ident in frames
        }

    def _is_debugged(self) -> bool:
        for found in self._frames().values():
            frame: FrameType | None = found
            while frame is not None:
                if str(frame.f_globals.get("__name__")).split(".")[0] in _DEBUGGERS:
                    return True
                frame = frame.f_back
        return False

    def _stacks(self) -> str:
        parts: list[str] = []
        for rank, frame in self._frames().items():
            stack = users_lines(traceback.format_stack(frame))
            parts.append(f"stack of rank {rank}:\n" + "".join(stack).rstrip())
        return "\n".join(parts)


@contextlib.contextmanager
def _one_processor(number: int) -> Generator[None]:
    """Let threads that are made within share a processor: to wake one on another takes far longer.

    Nothing is done where that cannot be said, or torch is there: its operations use several, and
    the workers of its loaders would inherit the one.
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        yield
        return
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(ours)[number % len(ours)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, ours)


def _break_cycle(waiting: dict[int, Any]) -> bool:
    """Abort the boards of ranks that wait for each other; return whether there are any."""
    stuck: dict[int, Any] = {}
    found = waiting
    while found != stuck:  # until only those are left whose waits lead into a cycle
        stuck, found = found, {r: b for r, b in found.items() if b.missing() & found.keys()}
    if not stuck:
        return False
    lines = "\n".join(
        f"  rank {rank}: {board.status(rank).label} in group {list(board.members)}"
        for rank, board in sorted(stuck.items())
    )
    rank = min(stuck)
    error = CollectiveMismatch(
        f"ranks wait for each other in different groups, and none can go on:\n{lines}\n"
        f"Every rank must make the calls of different groups in the same order.",
        rank=rank,
        call=str(stuck[rank].status(rank).label),
    )
    for board in stuck.values():
        board.abort(errors.dump(error))
    return True
