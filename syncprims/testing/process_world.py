"""Worlds whose ranks are processes."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import select
import signal
import time
from pathlib import Path

from syncprims._system.host import free_port
from syncprims._system.processes import end_processes
from syncprims._world.registry import BY_TORCH
from syncprims._world.runtime import environ_without_rank
from syncprims._world.scratch import scratch_directory
from syncprims.errors import describe_exit

from .outcomes import RankOutcome, WorldRun, trim_stack
from .workers import STACK_SIGNAL, Journal, WorkerSpec, start_workers
from .world_spec import RankOutput, WorldSpec, capture_ranks

_LOOK_EVERY = 0.01  # seconds
_STANDSTILL = 1.0  # seconds in which ranks that only wait for a stopped one write nothing
_GRACE = 5.0  # seconds for the other ranks to raise their own error once one has failed


class ProcessWorld:
    """One run of a world of processes."""

    def __init__(self, spec: WorldSpec, output: RankOutput | None) -> None:
        self._spec = spec
        self._output = output
        self._run = WorldRun([], spec.faults)
        self._pids: dict[int, int] = {}  # by rank, of those that have not ended
        self._pidfds: dict[int, int] = {}  # descriptor -> rank, where the system has such
        self._poll = select.poll()  # `select` itself takes no descriptor from 1024 up
        self._exit_codes: dict[int, int] = {}

    def run(self) -> WorldRun:
        """Return how it went."""
        spec = self._spec
        with scratch_directory("test") as folder, capture_ranks(self._output):
            (folder / "board").mkdir(mode=0o700)
            self._worker_spec = WorkerSpec(
                folder, spec.ranks, spec.faults, self._environ(folder), os.getpid(), spec.torch
            )
            self._journals = {
                rank: Journal(self._worker_spec.path("journal", rank), rank, spec.faults)
                for rank in range(spec.ranks)
            }
            self._pids = start_workers(spec.start, self._worker_spec, spec.fn)
            if hasattr(os, "pidfd_open"):
                self._pidfds = {os.pidfd_open(pid): rank for rank, pid in self._pids.items()}
            for fd in self._pidfds:
                self._poll.register(fd, select.POLLIN)
            try:
                self._watch()
            finally:
                killed = self._end_all()
                for rank, stream in itertools.product(range(spec.ranks), ("stdout", "stderr")):
                    text = self._worker_spec.read(stream, rank)
                    if text and self._output is not None:
                        self._output.write(rank, stream, text)
            self._run.outcomes = [self._outcome_of(rank, killed) for rank in range(spec.ranks)]
        return self._run

    def _environ(self, folder: Path) -> dict[str, str]:
        backend = self._spec.backend or "file"
        environ = {
            **environ_without_rank(),
            "SYNCPRIMS_BACKEND": backend,
            "SYNCPRIMS_RUN_ID": folder.name,
            "SYNCPRIMS_DIR": str(folder / "board"),
        }
        environ.setdefault("OMP_NUM_THREADS", "1")
        if self._spec.torch:
            from .torch_worlds import make_torchrun_variables  # imports torch

            environ |= make_torchrun_variables()
        elif backend in BY_TORCH:
            environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return environ

    # -- while it runs ------------------------------------------------------------------------

    def _watch(self) -> None:
        """Return when all ranks have ended, or the world is given up."""
        limit = self._spec.time_limit
        begin = changed_at = time.monotonic()
        failed_at = math.inf
        while self._pids:
            self._await_ends(_LOOK_EVERY)
            now = time.monotonic()
            if sum(journal.read() for journal in self._journals.values()):
                changed_at = now
            elif now > changed_at + _STANDSTILL and self._waits_for_stopped():
                return
            if limit is not None and now > begin + limit:
                self._run.timed_out(limit, self._stacks())
                return
            if any(journal.outcome.error is not None for journal in self._journals.values()):
                failed_at = min(failed_at, now)
            if now > failed_at + _GRACE:
                self._run.stacks = self._stacks()
                return  # the others do not notice that a rank has failed

    def _await_ends(self, timeout: float) -> None:
        """Record the exit codes of ranks that have ended, after so many seconds if none has."""
        ended: list[int] = []
        if self._pidfds:
            for fd, _ in self._poll.poll(timeout * 1000):
                self._poll.unregister(fd)
                os.close(fd)
                ended.append(self._pidfds.pop(fd))
        else:
            time.sleep(min(timeout, 0.005))
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            ended = [r for r, pid in self._pids.items() if os.waitid(os.P_PID, pid, flags)]
        for rank in ended:
            pid = self._pids.pop(rank)
            # What it has left goes before it is reaped: until then, no other process has its pid.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            self._exit_codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _waits_for_stopped(self) -> bool:
        """Return whether faults have stopped ranks, and all others wait for notes."""
        living = [self._journals[rank].outcome for rank in self._pids]
        stopped = [outcome.rank for outcome in living if outcome.end == "stopped"]
        waiting = [outcome.rank for outcome in living if outcome.waits_for_notes]
        if not stopped or not waiting or len(stopped) + len(waiting) < len(living):
            return False
        self._run.stood_still(stopped)
        return True

    def _stacks(self) -> str:
        """Return the stacks of all ranks that still run, as they write them."""
        texts = dict.fromkeys(self._pids, "")
        for pid in self._pids.values():
            os.kill(pid, STACK_SIGNAL)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline and not all(texts.values()):
            self._await_ends(_LOOK_EVERY)
            texts = {rank: self._worker_spec.read("stack", rank) for rank in texts}
        return "\n".join(
            f"stack of rank {rank}:\n" + "\n".join(trim_stack(text.splitlines()[:0:-1]))
            for rank, text in texts.items()
            if text
        )

    # -- when it is over ------------------------------------------------------------------------

    def _end_all(self) -> set[int]:
        """Kill the ranks that still run, release all resources, and return these ranks."""
        killed = set(self._pids)
        for pid in self._pids.values():
            end_processes(None, pid)
            os.kill(pid, signal.SIGKILL)
        while self._pids:
            self._await_ends(_LOOK_EVERY)
        if any(self._exit_codes.values()):  # else each rank has ended what it had started
            end_processes(self._worker_spec.folder)
        return killed

    def _outcome_of(self, rank: int, killed: set[int]) -> RankOutcome:
        """Return what the journal of `rank` contains at the end, or how the process has ended."""
        journal = self._journals[rank]
        journal.read()
        outcome = journal.outcome
        if outcome.end == "left" and rank not in killed:
            outcome.end, outcome.detail = "died", describe_exit(self._exit_codes.get(rank))
        return outcome
