"""Start the ranks of one machine, pass on what they say, and see that none is left behind.

When a rank fails the others get :data:`GRACE` seconds to meet their own error and report it, then
SIGTERM, then SIGKILL. The rank that failed first by itself, not as a consequence of another, is the
root cause: it is shown first, and its exit code returned.
"""

from __future__ import annotations

import collections
import contextlib
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
from typing import IO, TYPE_CHECKING, NamedTuple

from . import errors
from .environment import place_variables, rank_variables
from .errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from types import FrameType

GRACE = 5.0  # seconds between a failure and SIGTERM, and between SIGTERM and SIGKILL
_LOOK_EVERY = 0.02
#: An ended rank stays a zombie for this long: older kernels tell its exit code only meanwhile.
_REAP_AFTER = 0.3
_TAIL = 30  # lines of a failed rank's stderr to show again


class Launch(NamedTuple):
    """What to start."""

    command: Sequence[str]
    ranks: int
    backend: str | None = None


def launch(what: Launch, environ: Mapping[str, str]) -> int:
    """Run the command on every rank and return the exit code: 0, or that of the root cause.

    :raises ConfigurationError: if the backend contradicts ``SYNCPRIMS_BACKEND``.
    """
    named = environ.get("SYNCPRIMS_BACKEND") or None
    if what.backend is not None and named not in (None, what.backend):
        raise ConfigurationError(
            f"--backend {what.backend} contradicts SYNCPRIMS_BACKEND={named}; drop one of them"
        )
    with _scratch() as scratch:
        outer = place_variables()  # what an outer launcher said holds for us, not for our ranks
        common = {k: v for k, v in environ.items() if k not in outer}
        common["SYNCPRIMS_BACKEND"] = what.backend or named or "file"
        common["SYNCPRIMS_RUN_ID"] = uuid.uuid4().hex
        common.setdefault("SYNCPRIMS_DIR", str(scratch / "board"))
        common["MASTER_ADDR"] = "127.0.0.1"
        common["MASTER_PORT"] = str(_free_port())
        if what.ranks > 1:
            # As torchrun does: every rank's math library would start a thread per processor.
            threads = max(1, (os.cpu_count() or 1) // what.ranks)
            common.setdefault("OMP_NUM_THREADS", str(threads))
        return _Run(what, common, scratch).wait()


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
    while data and len(data) < 65536 and time.monotonic() < deadline:
        if not select.select([fd], [], [], 0.01)[0]:
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
        if self.process.returncode is None:
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
    def __init__(self, what: Launch, common: Mapping[str, str], scratch: Path) -> None:
        self._ranks: list[_Rank] = []
        self._pumps: list[threading.Thread] = []
        self._voice = threading.Lock()
        self._received: list[int] = []
        self._first_failed: list[_Rank] = []
        # Before the first rank starts: from now on a signal to us is a signal to them.
        self._handlers = {
            signum: signal.signal(signum, self._on_signal)
            for signum in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            for rank in range(what.ranks):
                self._start(what, rank, common, scratch)
        except BaseException:
            self._kill_all()
            self._restore()
            raise

    def _start(self, what: Launch, rank: int, common: Mapping[str, str], scratch: Path) -> None:
        report = scratch / f"failure-{rank}"
        variables = rank_variables(rank, what.ranks)
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
        self, rank: int, source: IO[bytes], sink: IO[str], tail: collections.deque[str] | None
    ) -> None:
        """Pass on what a rank writes, line by line; a progress bar's returns end a line too."""
        rest = b""
        while chunk := _read_together(source.fileno()):
            *lines, rest = (rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            self._say(rank, lines, sink, tail)
        if rest:
            self._say(rank, [rest], sink, tail)
        source.close()

    def _say(
        self, rank: int, lines: list[bytes], sink: IO[str], tail: collections.deque[str] | None
    ) -> None:
        texts = [line.decode(errors="replace") for line in lines]
        if tail is not None:
            tail.extend(texts)
        # A closed pipe behind us must not stop the ranks: their output is then nobody's.
        with self._voice, contextlib.suppress(BrokenPipeError, ValueError):
            sink.write("".join(f"[rank {rank}] {text}\n" for text in texts))
            sink.flush()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._received.append(signum)

    # -- waiting --------------------------------------------------------------------------------

    def wait(self) -> int:
        """Wait for all ranks, end them if need be, report, and return the exit code."""
        try:
            self._watch()
        finally:
            self._kill_all()
            for one in self._ranks:
                one.process.wait()
            for pump in self._pumps:
                pump.join(timeout=GRACE)
            self._restore()
        if self._received and not self._first_failed:
            return 128 + self._received[0]
        return self._report()

    def _watch(self) -> None:
        """Return when all have ended, or when none can be waited for any longer."""
        deadline: float | None = None
        forwarded = escalation = 0
        while True:
            for one in self._ranks:
                if one.look() and self._code_of(one) != 0 and not one.stopped:
                    self._first_failed.append(one)
            running = [one for one in self._ranks if one.ended_at is None]
            now = time.monotonic()
            self._reap(now)
            if not running:
                return
            for signum in self._received[forwarded:]:
                for one in running:
                    one.stopped = True
                    one.send(signum)
            forwarded = len(self._received)
            if deadline is None and (self._first_failed or self._received):
                deadline = now + GRACE
            elif deadline is not None and now >= deadline:
                escalation += 1
                deadline = now + GRACE
                for one in running:
                    one.stopped = True
                    one.send(signal.SIGTERM if escalation == 1 else signal.SIGKILL)
            time.sleep(_LOOK_EVERY)

    def _code_of(self, one: _Rank) -> int:
        found = os.waitid(os.P_PID, one.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return 0 if found is None else int(found.si_status)

    def _reap(self, now: float) -> None:
        for one in self._ranks:
            if one.ended_at is not None and now - one.ended_at >= _REAP_AFTER:
                one.process.poll()

    def _kill_all(self) -> None:
        """Leave nobody: neither ranks nor what they started and left running."""
        for one in self._ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(one.process.pid, signal.SIGKILL)

    def _restore(self) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

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
