"""Start the ranks of one machine, pass on their output, and leave no process behind.

After a rank has failed, the others have :data:`GRACE` seconds to raise and report their own error.
Then they get SIGTERM, and after the same time SIGKILL. A signal to the launcher is passed on once,
and the ranks have :data:`STOP_GRACE` seconds to stop. The root cause is the rank that failed first
by itself, not as a consequence of another: it is shown first, and its exit code is returned.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import IO, TextIO

from syncprims import errors
from syncprims._world.host import free_port, scratch_directory
from syncprims._world.launchers import make_rank_variables
from syncprims.errors import describe_exit

from .plan import LaunchPlan, launch_environment
from .who import print_table

GRACE = 5.0  # seconds between a failure and SIGTERM, and between SIGTERM and SIGKILL
STOP_GRACE = 30.0  # between a signal to the launcher and SIGKILL
_POLL_INTERVAL = 0.02
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LONGEST_LINE = 1 << 20  # bytes without an end of line, after which one is added
_TAIL = 30  # lines of a failed rank's stderr to show again


def launch(plan: LaunchPlan, environ: Mapping[str, str]) -> int:
    """Run the command on every rank and return the exit code: 0, or that of the root cause.

    :raises OSError: if all ranks succeeded, and part of their output was lost.
    """
    with _received_signals() as received, scratch_directory("syncprims-run-") as scratch:
        common = launch_environment(plan, environ)
        common["SYNCPRIMS_RUN_ID"] = uuid.uuid4().hex
        common.setdefault("SYNCPRIMS_DIR", str(scratch / "board"))
        common["MASTER_ADDR"] = "127.0.0.1"
        common["MASTER_PORT"] = str(free_port())
        with _table_on_quit(common["SYNCPRIMS_RUN_ID"]):
            return _LaunchedRun(plan, common, scratch, received).wait()


@contextlib.contextmanager
def _table_on_quit(run_id: str) -> Generator[None]:
    """Print what the ranks do on SIGQUIT, which Ctrl-Backslash sends, and let them go on."""

    def show(*_: object) -> None:
        print_table(run_id, sys.stderr)

    before = signal.getsignal(signal.SIGQUIT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, show)
    try:
        yield
    finally:
        signal.signal(signal.SIGQUIT, before)


@contextlib.contextmanager
def _received_signals() -> Generator[list[int]]:
    """Collect the signals that ask us to end; an ignored one, as by nohup, stays ignored."""
    received: list[int] = []
    before = {signum: signal.getsignal(signum) for signum in (*_SIGNALS, signal.SIGCHLD)}
    try:
        for signum in _SIGNALS:
            if before[signum] is not signal.SIG_IGN:
                signal.signal(signum, lambda number, frame: received.append(number))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, children leave no exit status
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _read_burst(fd: int) -> bytes:
    """Return the next bytes with those that follow at once, as the lines of a traceback do."""
    data = os.read(fd, 65536)
    deadline = time.monotonic() + 0.1
    poll = select.poll()  # `select` itself takes no descriptor from 1024 up
    poll.register(fd, select.POLLIN)
    while data and len(data) < 65536 and time.monotonic() < deadline and poll.poll(10):
        if not (more := os.read(fd, 65536)):
            break
        data += more
    return data


class _RankProcess:
    """One rank's process, in a session of its own, and the last lines of its stderr."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], report: Path) -> None:
        self.rank = rank
        self.process = process
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL)
        self.ended = False
        self.stopped = False  #: by us
        self._report = report

    def poll(self) -> int | None:
        """Return the exit status if the process has ended since the last call.

        It stays a zombie, so that its number, and that of its process group, are not reused.
        """
        if self.ended:
            return None
        found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        self.ended = found is not None
        return None if found is None else int(found.si_status)

    def send(self, signum: int) -> None:
        """Signal the rank and the children it started, which share its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signum)

    @functools.cached_property
    def failure(self) -> errors.Failure | None:
        """What the rank reported of its end, if anything."""
        try:
            error = errors.load(self._report.read_bytes())
        except (OSError, ValueError):
            return None
        return error.failures.get(self.rank)

    @property
    def summary(self) -> str:
        """How the process ended, and with which error, if it has reported one."""
        how = f"({describe_exit(self.process.returncode)})"
        return how if self.failure is None else f"{how}: {self.failure.headline}"


class _LaunchedRun:
    """The processes of a run, and the threads that pass on their output."""

    def __init__(
        self, plan: LaunchPlan, common: Mapping[str, str], scratch: Path, received: list[int]
    ) -> None:
        self._ranks: list[_RankProcess] = []
        self._threads: list[threading.Thread] = []
        self._output_lock = threading.Lock()
        self._output_error: Exception | None = None
        self._received = received
        self._failed: list[_RankProcess] = []  # by themselves, in the order in which they ended
        try:
            for rank in range(plan.ranks):
                self._start(plan, rank, common, scratch)
        except BaseException:
            for one in self._ranks:
                one.send(signal.SIGKILL)
            raise

    def _start(self, plan: LaunchPlan, rank: int, common: Mapping[str, str], scratch: Path) -> None:
        report = scratch / f"failure-{rank}"
        variables = make_rank_variables(rank, plan.ranks)
        process = subprocess.Popen(
            plan.command,
            env={**common, **variables, "SYNCPRIMS_ERROR_FILE": str(report)},
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # its children get its signals, too
        )
        one = _RankProcess(rank, process, report)
        self._ranks.append(one)
        for source, sink, tail in (
            (process.stdout, sys.stdout, None),
            (process.stderr, sys.stderr, one.tail),
        ):
            arguments = (rank, source, sink, tail)
            thread = threading.Thread(target=self._forward, args=arguments, daemon=True)
            thread.start()
            self._threads.append(thread)

    # -- output ---------------------------------------------------------------------------------

    def _forward(
        self, rank: int, source: IO[bytes], sink: TextIO, tail: collections.deque[str] | None
    ) -> None:
        """Pass on what a rank writes, line by line; a progress bar's returns end a line too."""
        begun = b""  # a line that has not ended
        after_return = False  # its newline may come in the next chunk
        while chunk := _read_burst(source.fileno()):
            if after_return:
                chunk = chunk.removeprefix(b"\n")
            after_return = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            *lines, begun = (begun + chunk).split(b"\n")
            if len(begun) > _LONGEST_LINE:
                lines, begun = [*lines, begun], b""
            if lines:
                self._write(rank, lines, sink, tail)
        if begun:
            self._write(rank, [begun], sink, tail)
        source.close()

    def _write(
        self, rank: int, lines: list[bytes], sink: TextIO, tail: collections.deque[str] | None
    ) -> None:
        if tail is not None:
            tail.extend(line.decode(errors="replace") for line in lines)
        data = b"".join(b"[rank %d] %b\n" % (rank, line) for line in lines)
        with self._output_lock:
            try:
                sink.buffer.write(data)
                sink.flush()
            except Exception as error:
                # It is raised at the end: if we stopped reading now, the ranks would block.
                self._output_error = self._output_error or error

    # -- waiting --------------------------------------------------------------------------------

    def wait(self) -> int:
        """Wait for all ranks, end them if one failed, report, and return the exit code.

        :raises OSError: if all ranks succeeded, and part of their output was lost.
        """
        try:
            self._watch()
        finally:
            # Ended ranks are still zombies, so this kills what they started, and nothing else.
            for one in self._ranks:
                one.send(signal.SIGKILL)
                one.process.wait()
            deadline = time.monotonic() + GRACE
            for thread in self._threads:
                thread.join(timeout=max(0.0, deadline - time.monotonic()))
        if self._failed:
            return self._report()
        if self._received:
            return 128 + self._received[0]
        error = self._output_error
        if isinstance(error, OSError):
            why = f"the ranks ended well, and what they wrote is lost: {error.strerror}"
            raise OSError(error.errno, why)
        if error is not None:
            raise error
        return 0

    def _watch(self) -> None:
        """Return when all ranks have ended; stop them after a failure or a signal."""
        kill_at = term_at = math.inf
        forwarded = 0
        while True:
            self._failed += [one for one in self._ranks if one.poll() and not one.stopped]
            running = [one for one in self._ranks if not one.ended]
            if not running:
                return
            now = time.monotonic()
            for signum in self._received[forwarded:]:
                self._stop(running, signum)
                kill_at = min(kill_at, now + STOP_GRACE)
            forwarded = len(self._received)
            if self._failed and kill_at == math.inf:
                term_at, kill_at = now + GRACE, now + 2 * GRACE
            if now >= term_at:
                self._stop(running, signal.SIGTERM)
                term_at = math.inf
            if now >= kill_at:
                self._stop(running, signal.SIGKILL)
                kill_at = now + GRACE
            time.sleep(_POLL_INTERVAL)

    def _stop(self, running: list[_RankProcess], signum: int) -> None:
        for one in running:
            one.stopped = True
            one.send(signum)

    # -- reporting ------------------------------------------------------------------------------

    def _report(self) -> int:
        """Print which rank failed first and why, then the others; return the first one's code."""

        def is_consequence(one: _RankProcess) -> bool:
            return one.failure is not None and one.failure.consequence

        # The sort is stable: within each kind in the order in which they ended.
        root, *others = sorted(self._failed, key=is_consequence)
        lines = [f"syncprims run: rank {root.rank} failed first {root.summary}"]
        shown = root.failure.traceback.rstrip().splitlines() if root.failure else root.tail
        lines += [f"  | {line}" for line in shown]
        lines += [f"then rank {one.rank} {one.summary}" for one in others]
        stopped = [str(one.rank) for one in self._ranks if one.stopped]
        if stopped:
            lines.append(f"still running then, and ended: rank {', '.join(stopped)}")
        with contextlib.suppress(BrokenPipeError):
            print("\n".join(lines), file=sys.stderr, flush=True)  # noqa: T201
        code: int = root.process.returncode
        return 128 - code if code < 0 else code
