"""Start the ranks of one machine, pass on what they say, and see that none is left behind.

When a rank fails the others get :data:`GRACE` seconds to meet their own error and report it, then
SIGTERM, then SIGKILL. A signal to the launcher is passed on once, and the ranks get
:data:`STOP_GRACE` seconds to stop as they see fit. The rank that failed first by itself, not as a
consequence of another, is the root cause: it is shown first, and its exit code returned.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, TextIO

from syncprims import errors
from syncprims._world.launchers import list_rank_variables, make_rank_variables

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

GRACE = 5.0  # seconds between a failure and SIGTERM, and between SIGTERM and SIGKILL
STOP_GRACE = 30.0  # between a signal to the launcher and SIGKILL
_LOOK_EVERY = 0.02
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LONGEST_LINE = 1 << 20  # bytes without an end of line, after which one is made
_TAIL = 30  # lines of a failed rank's stderr to show again


class Launch(NamedTuple):
    """What to start."""

    command: Sequence[str]
    ranks: int
    variables: Mapping[str, str]  #: that every rank gets, beside those of the launcher's own


def launch(what: Launch, environ: Mapping[str, str]) -> int:
    """Run the command on every rank and return the exit code: 0, or that of the root cause.

    :raises OSError: if none failed, and not all that they wrote could be passed on.
    """
    with _signals() as received, _scratch() as scratch:
        outer = list_rank_variables()  # what an outer launcher said holds for us, not for our ranks
        common = {k: v for k, v in environ.items() if k not in outer}
        common |= what.variables
        common["SYNCPRIMS_RUN_ID"] = uuid.uuid4().hex
        common.setdefault("SYNCPRIMS_DIR", str(scratch / "board"))
        common["MASTER_ADDR"] = "127.0.0.1"
        common["MASTER_PORT"] = str(_free_port())
        return _Run(what, common, scratch, received).wait()


@contextlib.contextmanager
def _signals() -> Generator[list[int]]:
    """Collect the signals that ask us to end; those that are ignored, as by nohup, stay ignored."""
    received: list[int] = []
    before = {signum: signal.getsignal(signum) for signum in (*_SIGNALS, signal.SIGCHLD)}
    try:
        for signum in _SIGNALS:
            if before[signum] is not signal.SIG_IGN:
                signal.signal(signum, lambda number, frame: received.append(number))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, children could not be waited for
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def _scratch() -> Generator[Path]:
    """Make a private directory, in memory where there is some; it goes whatever the ranks did."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="syncprims-run-", dir=memory))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _read_together(fd: int) -> bytes:
    """Return the next bytes, with what follows at once: a traceback comes in many small writes."""
    data = os.read(fd, 65536)
    deadline = time.monotonic() + 0.1
    eye = select.poll()  # `select` itself knows no descriptor from 1024 up
    eye.register(fd, select.POLLIN)
    while data and len(data) < 65536 and time.monotonic() < deadline:
        if not eye.poll(10):
            break
        more = os.read(fd, 65536)
        if not more:
            break
        data += more
    return data


class _Rank:
    """One rank's process and what it said last."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], report: Path) -> None:
        self.rank = rank
        self.process = process
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL)
        self.ended_at: float | None = None
        self.stopped = False  #: it was ended by us
        self._report = report

    def look(self) -> bool:
        """Tell whether the process has just ended."""
        if self.ended_at is not None:
            return False
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if os.waitid(os.P_PID, self.process.pid, flags) is None:
            return False
        self.ended_at = time.monotonic()
        return True

    def send(self, signum: int) -> None:
        """Signal the rank and the children it started, which share its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signum)

    @property
    def failure(self) -> errors.Failure | None:
        """What the rank reported of its end, if it could."""
        try:
            error = errors.load(self._report.read_bytes())
        except (OSError, ValueError):
            return None
        return error.failures.get(self.rank)

    @property
    def how(self) -> str:
        """``exit code 1``, or ``killed by SIGKILL``."""
        code = self.process.returncode
        if code is None or code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"


class _Run:
    def __init__(
        self, what: Launch, common: Mapping[str, str], scratch: Path, received: list[int]
    ) -> None:
        self._ranks: list[_Rank] = []
        self._pumps: list[threading.Thread] = []
        self._voice = threading.Lock()
        self._unsaid: Exception | None = None  # why not all that the ranks said was passed on
        self._received = received
        self._first_failed: list[_Rank] = []
        try:
            for rank in range(what.ranks):
                self._start(what, rank, common, scratch)
        except BaseException:
            self._kill_all()
            raise

    def _start(self, what: Launch, rank: int, common: Mapping[str, str], scratch: Path) -> None:
        report = scratch / f"failure-{rank}"
        variables = make_rank_variables(rank, what.ranks)
        process = subprocess.Popen(
            what.command,
            env={**common, **variables, "SYNCPRIMS_ERROR_FILE": str(report)},
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that its children can be signalled with it
        )
        one = _Rank(rank, process, report)
        self._ranks.append(one)
        assert process.stdout is not None
        assert process.stderr is not None
        for source, sink, tail in (
            (process.stdout, sys.stdout, None),
            (process.stderr, sys.stderr, one.tail),
        ):
            pump = threading.Thread(target=self._pump, args=(rank, source, sink, tail), daemon=True)
            pump.start()
            self._pumps.append(pump)

    def _pump(
        self, rank: int, source: IO[bytes], sink: TextIO, tail: collections.deque[str] | None
    ) -> None:
        """Pass on what a rank writes, line by line; a progress bar's returns end a line too."""
        begun: list[bytes] = []  # of a line that has not ended
        half = False  # of an end of line: a return, whose newline may come in the next chunk
        while chunk := _read_together(source.fileno()):
            if half:
                chunk = chunk.removeprefix(b"\n")
            half = chunk.endswith(b"\r")
            first, *more = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            begun.append(first)
            if more:
                self._say(rank, [b"".join(begun), *more[:-1]], sink, tail)
                begun = [more[-1]]
            elif sum(map(len, begun)) > _LONGEST_LINE:
                self._say(rank, [b"".join(begun)], sink, tail)
                begun = []
        if any(begun):
            self._say(rank, [b"".join(begun)], sink, tail)
        source.close()

    def _say(
        self, rank: int, lines: list[bytes], sink: TextIO, tail: collections.deque[str] | None
    ) -> None:
        if tail is not None:
            tail.extend(line.decode(errors="replace") for line in lines)
        data = b"".join(b"[rank %d] %b\n" % (rank, line) for line in lines)
        with self._voice:
            try:
                sink.buffer.write(data)
                sink.flush()
            except Exception as error:
                # It must not stop the ranks, which wait for us to read on: it is told at the end.
                self._unsaid = self._unsaid or error

    # -- waiting --------------------------------------------------------------------------------

    def wait(self) -> int:
        """Wait for all ranks, end them if need be, report, and return the exit code.

        :raises OSError: if none failed, and not all that they wrote could be passed on.
        """
        try:
            self._watch()
        finally:
            # Ended ranks were left as zombies until now, so that their numbers are still theirs:
            # what is killed is what they started, and nobody else.
            self._kill_all()
            for one in self._ranks:
                one.process.wait()
            deadline = time.monotonic() + GRACE
            for pump in self._pumps:
                pump.join(timeout=max(0.0, deadline - time.monotonic()))
        if self._received and not self._first_failed:
            return 128 + self._received[0]
        code = self._report()
        if code == 0 and self._unsaid is not None:
            if not isinstance(self._unsaid, OSError):
                raise self._unsaid
            why = f"the ranks ended well, and what they wrote is lost: {self._unsaid.strerror}"
            raise OSError(self._unsaid.errno, why)
        return code

    def _watch(self) -> None:
        """Return when all have ended, or when none can be waited for any longer."""
        kill_at = term_at = math.inf
        forwarded = 0
        while True:
            for one in self._ranks:
                if one.look() and self._code_of(one) != 0 and not one.stopped:
                    self._first_failed.append(one)
            running = [one for one in self._ranks if one.ended_at is None]
            if not running:
                return
            now = time.monotonic()
            for signum in self._received[forwarded:]:
                self._stop(running, signum)
                kill_at = min(kill_at, now + STOP_GRACE)
            forwarded = len(self._received)
            if self._first_failed and kill_at == math.inf:
                term_at, kill_at = now + GRACE, now + 2 * GRACE
            if now >= term_at:
                self._stop(running, signal.SIGTERM)
                term_at = math.inf
            if now >= kill_at:
                self._stop(running, signal.SIGKILL)
                kill_at = now + GRACE
            time.sleep(_LOOK_EVERY)

    def _stop(self, running: list[_Rank], signum: int) -> None:
        for one in running:
            one.stopped = True
            one.send(signum)

    def _code_of(self, one: _Rank) -> int:
        found = os.waitid(os.P_PID, one.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return 0 if found is None else int(found.si_status)

    def _kill_all(self) -> None:
        """Leave nobody: neither ranks nor what they started and left running."""
        for one in self._ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(one.process.pid, signal.SIGKILL)

    # -- reporting ------------------------------------------------------------------------------

    def _report(self) -> int:
        """Say which rank failed first and why, then the others; return the first one's code."""
        failed = self._first_failed
        if not failed:
            return 0
        reports = {one.rank: one.failure for one in failed}

        def is_consequence(one: _Rank) -> bool:
            report = reports[one.rank]
            return report is not None and report.consequence

        failed.sort(key=is_consequence)  # stable: within each kind in the order they ended
        root = failed[0]
        lines = [f"syncprims run: rank {root.rank} failed first ({root.how})"]
        report = reports[root.rank]
        if report is not None:
            lines[0] += f": {report.headline}"
        shown = report.traceback.rstrip().splitlines() if report is not None else list(root.tail)
        lines += [f"  | {line}" for line in shown]
        for one in failed[1:]:
            other = reports[one.rank]
            why = f": {other.headline}" if other is not None else ""
            lines.append(f"then rank {one.rank} ({one.how}){why}")
        stopped = [str(one.rank) for one in self._ranks if one.stopped]
        if stopped:
            lines.append(f"still running then, and ended: rank {', '.join(stopped)}")
        with contextlib.suppress(BrokenPipeError):
            print("\n".join(lines), file=sys.stderr, flush=True)  # noqa: T201
        code = root.process.returncode
        return 128 - code if code < 0 else code
