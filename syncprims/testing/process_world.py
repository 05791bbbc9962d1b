"""Worlds whose ranks are processes, each of which writes a journal.

A journal is a file to which one rank appends events, and which its parent reads. So the parent
knows what a killed rank did last.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import math
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from syncprims._protocol.threads import busy_threads, supervises
from syncprims._system.host import free_port
from syncprims._system.processes import adopt_orphans, die_with, end_processes, find_children
from syncprims._world.group import entered
from syncprims._world.launchers import make_rank_variables
from syncprims._world.registry import BY_TORCH, load_backend
from syncprims._world.runtime import become_rank, environ_without_rank, provided_world
from syncprims._world.scratch import scratch_directory
from syncprims._world.world import version
from syncprims.errors import describe, describe_exit
from syncprims.interface import Backend, Settings, Topology

from .errors import pack_exception
from .faults import FaultTarget, current_target
from .outcomes import RankOutcome, WorldRun
from .probe import Probe, probe_backend
from .rank_threads import StartedThreads, threads_belong_to_ranks
from .world_spec import RankOutput, WorldSpec

#: Asks a worker for its stack: a signal that programs do not use, where there is one.
_STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
_LOOK_EVERY = 0.002  # seconds
_STANDSTILL = 1.0  # seconds in which ranks that only wait for a stopped one write nothing
_GRACE = 5.0  # seconds for the other ranks to raise their own error once one has failed
_STACK_HEAD = "Stack (most recent call first):\n"  # of what faulthandler writes
_TIME_FOR_STACKS = 2.0  # seconds


class _Job(NamedTuple):
    """The facts about a world that a worker needs."""

    spec: WorldSpec
    folder: Path  #: of this world
    environ: Mapping[str, str]
    parent: int  #: process id

    def path(self, what: str, rank: int) -> Path:
        """Return the path of a rank's ``journal``, ``stack``, ``stdout`` or ``stderr``."""
        return self.folder / f"{what}-{rank}"


def run_processes(spec: WorldSpec, output: RankOutput | None) -> WorldRun:
    """Run a world of processes, and return how it went."""
    with scratch_directory("test") as scratch:
        folder = scratch.path
        (folder / "board").mkdir(mode=0o700)
        job = _Job(spec, folder, _make_environ(spec, folder), os.getpid())
        workers = [_Worker(job, rank) for rank in range(spec.ranks)]
        run = WorldRun([worker.outcome for worker in workers], spec.faults)
        try:
            _load_before_fork(job)
            for rank, worker in enumerate(workers):
                worker.pid = _fork(job, rank)
            _watch(spec.time_limit, run, workers)
        finally:
            _end(folder, workers)
            if output is not None:
                for worker in workers:
                    for stream in ("stdout", "stderr"):
                        output.write(worker.outcome.rank, stream, worker.read(stream))
    return run


def _make_environ(spec: WorldSpec, folder: Path) -> dict[str, str]:
    backend = spec.backend or "file"
    environ = {
        **environ_without_rank(),
        "SYNCPRIMS_BACKEND": backend,
        "SYNCPRIMS_RUN_ID": folder.name,
        "SYNCPRIMS_DIR": str(folder / "board"),
    }
    environ.setdefault("OMP_NUM_THREADS", "1")
    if spec.torch:
        from .torch_worlds import make_torchrun_variables  # imports torch

        environ |= make_torchrun_variables()
    elif backend in BY_TORCH:
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return environ


# -- while it runs ---------------------------------------------------------------------------------


class _Worker:
    """The process of one rank, as its parent sees it."""

    def __init__(self, job: _Job, rank: int) -> None:
        self.outcome = RankOutcome(rank)  #: as far as the journal has been read
        self.pid = 0  #: 0: it has not been started
        self._exit_code: int | None = None
        self._job = job
        job.path("journal", rank).touch()
        self._journal = job.path("journal", rank).open("rb")
        self._size = 0  # of it, at the last look

    def has_ended(self) -> bool:
        """Return whether the process has ended. If so, kill its process group."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if self._exit_code is None and os.waitid(os.P_PID, self.pid, flags):
            # Before it is reaped: until then, no other process has its pid.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.read_journal()
        return self._exit_code is not None

    def read(self, what: str) -> str:
        """Return the contents of the file of this name; "" if it does not exist."""
        path = self._job.path(what, self.outcome.rank)
        return path.read_text(errors="backslashreplace") if path.exists() else ""

    def has_written(self) -> bool:
        """Return whether the rank has added to its journal since the last look.

        To read it all the time would keep a processor busy that the ranks need.
        """
        before, self._size = self._size, os.fstat(self._journal.fileno()).st_size
        return self._size > before

    def read_journal(self) -> None:
        """Read new entries of the journal."""
        offset = self._journal.tell()
        with contextlib.suppress(EOFError, pickle.UnpicklingError):  # not written yet
            while True:
                event, fact = pickle.load(self._journal)
                offset = self._journal.tell()
                if event == "end":
                    vars(self.outcome).update(fact)
                    if fact["error"] is not None:
                        self.outcome.error = fact["error"].unpack()
                else:
                    self.outcome.take(
                        event, self._job.spec.faults[fact] if event == "fault" else fact
                    )
        self._journal.seek(offset)

    def kill(self) -> bool:
        """Kill the process, and all that it has started; return whether it still ran."""
        if not self.pid or self.has_ended():
            return not self.pid
        end_processes(None, self.pid)
        os.kill(self.pid, signal.SIGKILL)
        return True

    def end(self, *, killed: bool) -> int:
        """Take in how the process has ended, and return its exit code."""
        while self.pid and not self.has_ended():
            time.sleep(_LOOK_EVERY)
        self._journal.close()
        if self.outcome.end == "left" and not killed:
            self.outcome.end, self.outcome.detail = "died", describe_exit(self._exit_code)
        return self._exit_code or 0


def _watch(limit: float | None, run: WorldRun, workers: Sequence[_Worker]) -> None:
    """Return when all ranks have ended, or the world is given up."""
    begin = changed_at = time.monotonic()
    failed_at = math.inf
    while living := [worker for worker in workers if not worker.has_ended()]:
        time.sleep(_LOOK_EVERY)
        now = time.monotonic()
        if sum(worker.has_written() for worker in workers):
            changed_at = now
        elif now > changed_at + _STANDSTILL and _wait_for_stopped(run, living):
            return
        if limit is not None and now > begin + limit:
            run.timed_out(limit, _read_stacks(living))
            return
        if any(outcome.error is not None for outcome in run.outcomes):
            failed_at = min(failed_at, now)
        if now > failed_at + _GRACE:
            return  # the others do not notice that a rank has failed


def _wait_for_stopped(run: WorldRun, living: Sequence[_Worker]) -> bool:
    """Return whether faults have stopped ranks, and all others wait for notes."""
    for worker in living:
        worker.read_journal()
    outcomes = [worker.outcome for worker in living]
    stopped = [outcome.rank for outcome in outcomes if outcome.end == "stopped"]
    waiting = [outcome.rank for outcome in outcomes if outcome.waits_for_notes]
    if not stopped or not waiting or len(stopped) + len(waiting) < len(living):
        return False
    run.stood_still(stopped)
    return True


def _read_stacks(living: Sequence[_Worker]) -> dict[int, list[str]]:
    """Return the lines of the stacks of these ranks, outermost first, as they write them."""
    deadline = time.monotonic() + _TIME_FOR_STACKS
    for n in 1, 2:  # when the second one begins, the first one is whole
        for worker in living:
            os.kill(worker.pid, _STACK_SIGNAL)
        while any(worker.read("stack").count(_STACK_HEAD) < n for worker in living):
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK_EVERY)
    texts = {worker.outcome.rank: worker.read("stack").split(_STACK_HEAD) for worker in living}
    return {rank: text[1].splitlines()[::-1] for rank, text in texts.items() if text[1:]}


def _end(folder: Path, workers: Sequence[_Worker]) -> None:
    """Kill the ranks that still run, and all that they have started."""
    killed = [worker.kill() for worker in workers]
    codes = [worker.end(killed=by_us) for worker, by_us in zip(workers, killed, strict=True)]
    if any(codes):
        end_processes(folder)  # else each rank has ended what it had started


# -- starting workers ------------------------------------------------------------------------------
# Not by `multiprocessing`: the end of its process is seen at a pipe that the children of a rank
# inherit, so that a killed rank seems to live as long as they do.


def _load_before_fork(job: _Job) -> None:
    """Load here what otherwise every forked rank would look for itself."""
    load_backend(job.environ["SYNCPRIMS_BACKEND"])
    version()
    if job.spec.torch:
        from .torch_worlds import import_lazy_modules

        import_lazy_modules()


def _fork(job: _Job, rank: int) -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or the child would print it again
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child uses none
        pid = os.fork()
    if not pid:
        gc.freeze()  # to free here what the parent has left could end things of the parent
        _run_worker(job, rank)
    return pid


# -- in a worker -----------------------------------------------------------------------------------


def _run_worker(job: _Job, rank: int) -> None:
    """Run the program as this rank, write the journal, and end this process."""
    spec, code = job.spec, 1
    try:
        _set_up(job, rank)
        outcome = RankOutcome(rank)
        write = _open_journal(job.path("journal", rank))

        def make_backend(cls: type[Backend], place: Topology, settings: Settings) -> Backend:
            return probe_backend(cls(place, settings), Probe(outcome, spec.faults, write))

        become_rank(make_backend)
        program = spec.fn
        if spec.torch:
            from .torch_worlds import serve_in_process  # imports torch

            program = serve_in_process(rank, program, job.folder / "store", spec.replicas)
        with threads_belong_to_ranks():
            outcome.run_program(program, provided_world(), await_threads, StartedThreads())
        write("end", _describe_end(outcome))
        _save_coverage()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            # The program's handler may raise, as that of torch's loaders does for a killed worker.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            if find_children():
                end_processes(None, os.getpid())
        finally:
            os._exit(code)  # in any case: else a forked worker goes on with the parent's program


def _save_coverage() -> None:
    """Keep which lines this process has run, if they are measured: Python does not exit here."""
    coverage: Any = sys.modules.get("coverage")
    if coverage and (measured := coverage.Coverage.current()):
        warnings.simplefilter("ignore")  # of none that was to be measured
        measured.save()


def _set_up(job: _Job, rank: int) -> None:
    """Prepare this process as a launcher would have done."""
    os.setpgid(0, 0)  # what it leaves behind is found by its group
    die_with(job.parent)
    adopt_orphans()  # or among its children
    for stream, fd in (("stdout", 1), ("stderr", 2)):
        with job.path(stream, rank).open("ab") as file:
            os.dup2(file.fileno(), fd)
        setattr(sys, stream, os.fdopen(os.dup(fd), "w", buffering=1, errors="backslashreplace"))
    with Path(os.devnull).open("rb") as null:
        os.dup2(null.fileno(), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(signum, signal.SIG_DFL)
    stack = job.path("stack", rank).open("w")
    faulthandler.register(_STACK_SIGNAL, file=stack, all_threads=False)
    os.environ.clear()
    os.environ.update({**job.environ, **make_rank_variables(rank, job.spec.ranks)})
    entered.set(())
    current_target.set(FaultTarget())  # not that of a forked thread
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # the threads of a forked parent's operations are not here


def _open_journal(path: Path) -> Callable[[str, Any], None]:
    """Return a function that appends an event to the journal of this rank."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def write(event: str, fact: object) -> None:
        data = pickle.dumps((event, fact))
        while data:
            data = data[os.write(fd, data) :]

    return write


def _describe_end(outcome: RankOutcome) -> dict[str, Any]:
    """Return how a rank has ended, without what its journal has already."""
    try:
        pickle.dumps(outcome.result)
    except BaseException as why:
        outcome.fail(
            TypeError(
                f"rank {outcome.rank} returns a {type(outcome.result).__name__}, which cannot "
                f"be sent to the test: {': '.join(describe(why))}. Return plain values, or use a "
                f"world of threads"
            )
        )
        outcome.result = None
    error = None if outcome.error is None else pack_exception(outcome.error)
    fields = {**vars(outcome), "error": error}
    return {name: fields[name] for name in fields.keys() - {"calls", "struck"}}


def await_threads() -> None:
    """Return when no thread of this process is left for which Python would wait at its exit."""
    with supervises():
        while any(
            thread.ident in busy_threads() and not thread.daemon
            for thread in threading.enumerate()
            if thread is not threading.main_thread()
        ):
            time.sleep(0.005)
