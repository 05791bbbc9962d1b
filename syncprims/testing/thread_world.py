"""Worlds whose ranks are threads."""

from __future__ import annotations

import contextlib
import contextvars
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from syncprims._protocol.deadlock import Wait, deadlock_error, describe_group, find_stuck
from syncprims._protocol.threads import (
    Activity,
    busy_threads,
    look_at_threads,
    supervises,
    waits_for_thread,
)
from syncprims._world.group import entered
from syncprims._world.launchers import make_rank_variables
from syncprims._world.registry import load_backend
from syncprims._world.runtime import environ_without_rank, thread_as_rank, threads_as_ranks
from syncprims.errors import dump
from syncprims.interface import Backend, Settings, Topology

from .errors import Killed, WorldAborted
from .faults import FaultTarget, Join, current_target
from .outcomes import RankOutcome, WorldRun
from .patches import undone_at_end
from .probe import Probe, probe_backend
from .rank_threads import raise_in, threads_belong_to_ranks, wake, will_call
from .scheduler import RankThread, Scheduler, is_in_debugger
from .world_spec import RankOutput, WorldSpec, capture_ranks, current_writer

if TYPE_CHECKING:
    from .torch_worlds import TorchThreads

T = TypeVar("T")
_UNDISTURBED = 1.0  # seconds for a rank to end by itself, once its world is given up
_WOKEN = 0.3  # seconds after which a thread that waits is one that cannot be woken
_GRACE = 2.0  # seconds for threads to end once their world has been given up
_IMPORTS = "importlib._bootstrap", "_find_and_load"


#: Held by a world with ``torch=True``: the globals of this process are those of its ranks.
_alone = threading.Lock()
_has_globals: ContextVar[bool] = ContextVar("syncprims_torch_world", default=False)


def run_threads(spec: WorldSpec, output: RankOutput | None) -> WorldRun:
    """Run a world of threads; with ``torch=True``, first wait for that of another thread to end."""
    turn = getattr(threading.current_thread(), "turn", None)
    with supervises(), turn or contextlib.nullcontext():  # a rank keeps the turn meanwhile
        return _run_threads(spec, output)


def _run_threads(spec: WorldSpec, output: RankOutput | None) -> WorldRun:
    if not spec.torch or _has_globals.get():  # a rank waits for the world that it starts
        return ThreadWorld(spec, output).run()
    with _alone:
        token = _has_globals.set(True)  # for the ranks, too
        try:
            return ThreadWorld(spec, output).run()
        finally:
            _has_globals.reset(token)


class ThreadWorld:
    """One run of a world of threads."""

    def __init__(self, spec: WorldSpec, output: RankOutput | None) -> None:
        self._spec = spec
        self._output = output
        environ = {**environ_without_rank(), "SYNCPRIMS_BACKEND": "threads"}
        if not spec.traced:
            environ.pop("SYNCPRIMS_TRACE", None)
        late = sum(isinstance(fault, Join) for fault in spec.faults)  # ranks that may start later
        if late:
            environ["SYNCPRIMS_ELASTIC"] = "1"
        ranks = range(spec.ranks + late)
        self._environs = [
            {**environ, **make_rank_variables(rank % spec.ranks, spec.ranks, spec.nodes)}
            for rank in ranks
        ]
        self._torch: TorchThreads | None = None
        if spec.torch:
            from .torch_worlds import TorchThreads, make_torchrun_variables  # imports torch

            variables = make_torchrun_variables()
            for of_rank in self._environs:
                of_rank |= variables
            self._torch = TorchThreads(self._environs, spec.replicas)
        self._backend: Any = load_backend("threads")
        self._scheduler = Scheduler(
            len(ranks),
            spec.schedule or spec.seed.schedule(len(ranks)),
            self._break_standstill,
            self._torch.enter if self._torch else None,
            late,
        )
        # One, unless the program ends its world and starts another.
        self._shared_worlds: list[Any] = []
        self._worlds_begun = [0] * len(ranks)
        self._outcomes = [RankOutcome(rank) for rank in ranks]
        self._run = WorldRun(self._outcomes[: spec.ranks], spec.faults, spec.seed)
        all_threads = [
            RankThread(
                target=contextvars.copy_context().run,
                args=(self._run_rank, rank),
                name=f"rank {rank} of {spec.ranks}",
                daemon=True,
            )
            for rank in ranks
        ]
        self._threads, self._late = all_threads[: spec.ranks], all_threads[spec.ranks :]

    def run(self) -> WorldRun:
        """Return how it went."""
        run = self._run
        with (
            threads_as_ranks(),
            threads_belong_to_ranks(),
            capture_ranks(),
            undone_at_end(own_environ=self._torch is not None),
            _one_processor(self._spec.seed.number),
            self._torch.serve() if self._torch else contextlib.nullcontext(),
        ):
            try:
                for thread in self._threads:
                    thread.start()
                self._scheduler.pass_on()
                self._wait()
            except BaseException:
                self._scheduler.abort()
                self._end(self._threads)
                raise
            if not self._scheduler.aborted:
                for thread in self._threads:
                    thread.join()  # it has nothing left to do
            # As at the end of a process: one that works ends by itself, for a time.
            busy = busy_threads()
            started = [of_rank.started for of_rank in self._scheduler.threads]
            # Not by going through `started`: a thread that still runs may add another one.
            helpers = {t for t in threading.enumerate() if any(t in of_rank for of_rank in started)}
            stuck = [thread for thread in helpers if thread.ident in busy and _waits(thread)]
            if not self._end([*stuck, *self._threads]):  # a rank may join one of the others
                run.gave_up += ". A thread could not be ended, and is left alone"
            end, busy = time.monotonic() + _GRACE, busy_threads()
            for helper in helpers:
                if helper.ident in busy and not helper.daemon:
                    helper.join(max(0.0, end - time.monotonic()))
        # One that waited to join until the others had ended took no part.
        first = self._spec.ranks
        run.outcomes = [o for o in run.outcomes if o.rank < first or o.calls or not o.consequence]
        run.steps, run.undecided = self._scheduler.steps, self._scheduler.undecided
        return run

    # -- a rank -----------------------------------------------------------------------------------

    def _run_rank(self, rank: int) -> None:
        spec, outcome = self._spec, self._outcomes[rank]
        entered.set(())
        sleep = partial(self._scheduler.sleep, rank)
        stop = partial(sleep, math.inf)
        access = partial(self._scheduler.access, rank)
        current_target.set(
            FaultTarget(partial(self._kill, rank), stop, sleep, self._start_late, access)
        )
        current_writer.set(None if self._output is None else (self._output, rank))
        fn = self._torch.as_rank(spec.fn) if self._torch else spec.fn
        try:
            with contextlib.suppress(WorldAborted):
                self._scheduler.enter(rank)
                outcome.run_program(
                    fn,
                    thread_as_rank(self._environs[rank], partial(self._make_backend, rank)),
                    lambda: self._scheduler.await_threads(rank),
                    self._scheduler.threads[rank],
                )
        finally:
            self._scheduler.leave(rank)

    def _kill(self, rank: int) -> NoReturn:
        if self._scheduler.exact:
            self._scheduler.step(rank)
        for world in self._shared_worlds:
            world.lose(rank, "killed by SIGKILL")
        raise Killed

    def _start_late(self) -> None:
        """Start another rank; it joins in the next `reform`."""
        self._run.outcomes.append(self._outcomes[len(self._threads)])
        self._threads.append(self._late.pop(0))
        self._scheduler.add(self._threads[-1])

    def _make_backend(
        self, rank: int, cls: type[Backend], place: Topology, settings: Settings
    ) -> Backend:
        number = self._worlds_begun[rank]
        self._worlds_begun[rank] += 1
        if number == len(self._shared_worlds):
            members = self._shared_worlds[-1].members if number else range(self._spec.ranks)
            self._shared_worlds.append(self._backend.shared_world(self._scheduler, members))
        backend = self._backend(place, settings, self._shared_worlds[number], rank)
        probe = Probe(
            self._outcomes[rank],
            self._spec.faults,
            on_post=lambda rank, call: self._run.trace.append((rank, call)),
        )
        return probe_backend(backend, probe)

    def _break_standstill(self, forever: bool) -> bool:
        """Abort the waits of ranks that wait for each other; return whether there are any.

        If the standstill is not `forever`, a time limit ends other waits. If it is, and there are
        none, the others wait for a rank that a fault has stopped, or that waits for a thread of its
        own. A rank that waits for one that has ended does not come here: its board
        says so, and the call raises.
        """
        waiting = {
            board: call for world in self._shared_worlds for board, call in world.waiting.items()
        }
        # Ranks as they are now: `reform` may have changed them since the start.
        numbers = {p: rank for world in self._shared_worlds for rank, p in enumerate(world.members)}
        living = {
            numbers.get(o.rank, o.rank) for o in self._run.outcomes if o.end in ("left", "stopped")
        }
        waits: dict[int, list[Wait]] = {}
        for board, call in waiting.items():
            group = describe_group(board.members, board.name)
            if call:
                others = living.intersection(board.members) - {board.rank}
                wait = Wait(call, group, others, any=True)
            else:
                wait = Wait(str(board.status(board.rank).label), group, board.missing())
            waits.setdefault(board.rank, []).append(wait)
        locked = self._scheduler.describe_locked() if forever else {}
        for rank, text in locked.items():
            self._outcomes[rank].detail = text
            waits.setdefault(numbers.get(rank, rank), [Wait(text, "", (), any=True)])
        stuck = find_stuck(waits)
        if not waiting or not stuck:
            stopped = [o.rank for o in self._outcomes if o.end == "stopped"]
            if forever and (stopped or locked):
                self._run.stood_still(stopped)
            return False
        ended = waits.keys() if forever else stuck
        verdict = dump(deadlock_error({r: waits[r] for r in sorted(ended)}, min(ended)))
        for board in waiting:
            if board.rank in ended:
                board.abort(verdict)
        return True

    # -- from outside -----------------------------------------------------------------------------

    def _wait(self) -> None:
        """Return when all ranks have ended or the world is given up."""
        limit = self._spec.time_limit
        while not self._scheduler.finished.wait(limit):
            stacks = self._look_at_ranks(traceback.format_stack)
            if any(self._look_at_ranks(is_in_debugger).values()):
                continue
            assert limit is not None
            self._run.timed_out(limit, stacks)
            for rank in self._scheduler.ready_ranks():
                self._outcomes[rank].detail = "is ready to run"
            for rank, place in self._scheduler.describe_locked().items():
                self._outcomes[rank].detail = place
            for rank, module in self._look_at_ranks(_imported_module).items():
                if module:
                    self._outcomes[rank].detail = f"is importing {module}"
            self._scheduler.abort()

    def _end(self, threads: Sequence[threading.Thread]) -> bool:
        """End these threads, which have nothing left to do; return whether they have ended."""
        begin = time.monotonic()
        while living := [thread for thread in threads if thread.is_alive()]:
            living[0].join(0.05)
            waited = time.monotonic() - begin
            waiting = [thread for thread in living if _waits(thread)]
            if waited > _GRACE or (waited > _WOKEN and waiting == living):
                return False  # nothing of Python ends their waits
            importing = look_at_threads(_imported_module)
            for thread in living:
                if importing.get(thread.ident or 0):
                    continue  # half of a module would stay in this process
                if thread.ident is not None and thread.is_alive():
                    late = waited > _UNDISTURBED  # it may be writing a traceback before
                    # One that has lost the turn ends where it is back in the user's code. An
                    # exception between any two steps could come where a lock is given back.
                    again = late or (thread in waiting and waited > _WOKEN / 3)
                    comes = will_call(thread, anywhere=again)
                    if not comes and (late or thread in waiting):
                        raise_in(thread.ident, WorldAborted)
                    if comes or late or thread in waiting:
                        wake(thread)
        return True

    def _look_at_ranks(self, look: Callable[[FrameType], T]) -> dict[int, T]:
        """Return what `look` returns for the innermost frame of each rank that still runs."""
        found = look_at_threads(look)
        return {
            rank: found[thread.ident]
            for rank, thread in enumerate(self._threads)
            if thread.ident in found
        }


def _waits(thread: threading.Thread) -> bool:
    return waits_for_thread(thread, Activity.of(thread))


def _imported_module(frame: FrameType) -> str:
    """Return the innermost module that is imported there, or ""."""
    for outer, _ in traceback.walk_stack(frame):
        if (outer.f_globals.get("__name__"), outer.f_code.co_name) == _IMPORTS:
            return str(outer.f_locals.get("name"))
    return ""


@contextlib.contextmanager
def _one_processor(number: int) -> Generator[None]:
    """Return a context in which new threads share a processor: to wake one there is far faster.

    Nothing is done on other systems, or where torch is imported: its operations use several
    processors, and the workers of its loaders would inherit the one.
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
