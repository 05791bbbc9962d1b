"""Worlds whose ranks are processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

from syncprims._world.runtime import clean_environ

from .faults import Kill, Stop
from .journal import Journal, deadlock_verdict, missing_ranks
from .outcomes import RankOutcome, WorldRun, trim_stack
from .rank_output import RankOutput, capture_ranks
from .workers import (
    STACK_SIGNAL,
    Workers,
    WorkerSpec,
    default_start,
    read_report,
    start_workers,
)
from .world_spec import WorldSpec

_LOOK_EVERY = 0.01  # seconds
_GRACE = 5.0  # seconds for the other ranks to raise their own error once one has failed
_NEEDS_PORT = ("torch", "gloo", "nccl")


class ProcessWorld:
    """One run of a world of processes."""

    def __init__(self, spec: WorldSpec, output: RankOutput | None) -> None:
        self._spec = spec
        self._output = output
        self._outcomes = [RankOutcome(rank) for rank in range(spec.ranks)]
        self._run = WorldRun(self._outcomes, spec.faults)
        self._exit_codes: dict[int, int] = {}
        self._failed_at: float | None = None

    def run(self) -> WorldRun:
        """Return how it went."""
        spec = self._spec
        with _scratch_directory() as folder, capture_ranks(self._output):
            (folder / "board").mkdir(mode=0o700)
            self._worker_spec = WorkerSpec(
                folder, spec.ranks, spec.faults, self._environ(folder), os.getpid()
            )
            self._journals = {
                rank: Journal(self._worker_spec.path("journal", rank)) for rank in range(spec.ranks)
            }
            workers = start_workers(spec.start or default_start(), self._worker_spec, spec.fn)
            try:
                self._watch(workers)
            finally:
                self._end_all(workers)
                self._pass_on_output()
            self._complete_outcomes()
        return self._run

    def _environ(self, folder: Path) -> dict[str, str]:
        backend = self._spec.backend or "file"
        environ = {
            **clean_environ(),
            "SYNCPRIMS_BACKEND": backend,
            "SYNCPRIMS_RUN_ID": folder.name,
            "SYNCPRIMS_DIR": str(folder / "board"),
        }
        environ.setdefault("OMP_NUM_THREADS", "1")
        if backend in _NEEDS_PORT:
            environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        return environ

    # -- while it runs ------------------------------------------------------------------------

    def _watch(self, workers: Workers) -> None:
        """Return when all ranks have ended, or the world is given up."""
        limit = self._spec.time_limit
        begin = time.monotonic()
        while len(self._exit_codes) < self._spec.ranks:
            self._take_ends(workers)
            wrote = [journal.read() for journal in self._journals.values()]
            if not any(wrote) and self._is_at_standstill():
                return
            now = time.monotonic()
            if limit is not None and now > begin + limit:
                self._run.timed_out(limit, self._stacks(workers))
                return
            if self._failed_at is not None and now > self._failed_at + _GRACE:
                self._run.stacks = self._stacks(workers)
                return  # the others do not notice that a rank has failed

    def _take_ends(self, workers: Workers) -> None:
        codes = workers.wait(_LOOK_EVERY)
        self._exit_codes |= codes
        for rank in codes:
            outcome = read_report(self._worker_spec, rank) or self._outcomes[rank]
            self._outcomes[rank] = outcome
            if outcome.error is not None and self._failed_at is None:
                self._failed_at = time.monotonic()

    def _is_at_standstill(self) -> bool:
        """Return whether all ranks wait for one that a fault has stopped.

        If ranks wait for each other, leave them the verdict: they will raise. The journals have not
        changed for two looks, so what they contain is true at one time.
        """
        living = {r: j for r, j in self._journals.items() if r not in self._exit_codes}
        stopped = [r for r, journal in living.items() if self._is_stopped(journal)]
        waiting = {r: j for r, j in living.items() if r not in stopped}
        if not waiting or any(j.waits is None or j.has_deadline for j in waiting.values()):
            return False
        for journal in waiting.values():
            missing = missing_ranks(journal, self._journals)
            if not missing or missing - living.keys():
                return False  # its round is complete, or lacks an ended rank: it is about to return
        verdict = self._worker_spec.verdict
        if verdict.exists():
            return False  # they are about to read it
        found = deadlock_verdict(waiting)
        if found is not None:
            self._run.has_cycle = True
            verdict.with_suffix(".new").write_bytes(found)
            verdict.with_suffix(".new").rename(verdict)
        elif stopped:
            self._run.stopped(stopped)
        return found is None and bool(stopped)

    def _is_stopped(self, journal: Journal) -> bool:
        return any(isinstance(self._spec.faults[number], Stop) for number in journal.struck)

    def _stacks(self, workers: Workers) -> str:
        """Return the stacks of all ranks that still run, as they write them."""
        for pid in workers.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACK_SIGNAL)
        deadline = time.monotonic() + 0.5
        files = {rank: self._worker_spec.path("stack", rank) for rank in workers.pids}
        while time.monotonic() < deadline and not all(
            file.exists() and file.stat().st_size for file in files.values()
        ):
            self._take_ends(workers)
        texts = {rank: file.read_text() for rank, file in files.items() if file.exists()}
        return "\n".join(
            f"stack of rank {rank}:\n" + "\n".join(trim_stack(text.splitlines()[:0:-1]))
            for rank, text in texts.items()
            if text
        )

    # -- when it is over ------------------------------------------------------------------------

    def _end_all(self, workers: Workers) -> None:
        """Kill the ranks that still run, and release all resources."""
        for pid in workers.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._killed = set(workers.pids)
        while workers.pids:
            self._take_ends(workers)
        workers.close()

    def _pass_on_output(self) -> None:
        """Pass on what the ranks have printed."""
        if self._output is None:
            return
        for rank in range(self._spec.ranks):
            for stream in ("stdout", "stderr"):
                path = self._worker_spec.path(stream, rank)
                text = path.read_text(errors="backslashreplace") if path.exists() else ""
                if text:
                    self._output.write(rank, stream, text)

    def _complete_outcomes(self) -> None:
        """Add to the reports what the journals contain."""
        for outcome, journal in zip(self._outcomes, self._journals.values(), strict=True):
            journal.read()
            outcome.calls = journal.calls
            outcome.struck = [self._spec.faults[number] for number in journal.struck]
            outcome.waits = outcome.waits or journal.waits
            if outcome.end != "left":
                continue
            if any(isinstance(fault, Stop) for fault in outcome.struck):
                outcome.end = "stopped"
            elif any(isinstance(fault, Kill) for fault in outcome.struck):
                outcome.end = "killed"
            elif outcome.rank not in self._killed:
                outcome.end = "died"
                outcome.detail = _exit_text(self._exit_codes.get(outcome.rank))


@contextlib.contextmanager
def _scratch_directory() -> Generator[Path]:
    """Make a private directory, in memory where possible; remove it in the end."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="syncprims-test-", dir=memory))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _exit_text(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
