"""Start the ranks of one machine, pass on their output, and leave no process behind.

After a rank has failed, the others have :data:`GRACE` seconds to raise and report their own error.
Then they get SIGTERM, and after the same time SIGKILL. A signal to the launcher is passed on, and
the ranks have the seconds of ``--grace`` to stop. A second SIGTERM changes nothing, since
schedulers send two; a second SIGINT ends the ranks at once. SIGUSR1 and SIGUSR2 are passed on, too,
and end nothing here.

If the launcher itself is killed, the system ends its ranks (on Linux), and a second process, its
*guard*, ends what they have started and removes the scratch directory. The guard waits at a pipe
that closes when the launcher ends.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import itertools
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from syncprims import errors
from syncprims._system import processes
from syncprims._system.host import free_port, most_processes
from syncprims._world.launchers import detect, make_rank_variables
from syncprims._world.registry import find_end_recorder
from syncprims._world.scratch import Scratch, scratch_directory
from syncprims._world.settings import EPOCH_NOTE, STOP_NOTE
from syncprims.errors import ConfigurationError, Failure, SyncError

from .options import LaunchPlan
from .output import Output, OutputLost, Source
from .who import describe_run

GRACE = 5.0  # seconds between a failure and SIGTERM, and between SIGTERM and SIGKILL
STOPPED = 75  # exit code if SIGTERM has stopped the run, and all ranks have ended with 0
#: Seconds within which a second signal is the same request: timeout(1) sends it to the launcher and
#: to its group.
_ONE_REQUEST = 0.2
_POLL_INTERVAL = 0.02
_LAST_WORDS = 0.5  # seconds for the stderr of a rank that has ended: a child may hold it open
_REAP_EVERY = 1.0  # seconds
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ANSWERED = (signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
#: Errors of a process that cannot be started since there are too many, of processes or of files.
_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
_CURE = "start fewer ranks, or raise the limit: ulimit -n (files), ulimit -u (processes)"
_LONGEST_LINE = 400  # characters of a cause in a line
_TRACEBACK = re.compile(r"( *[|+] .*)?Traceback \(most recent call last\):")
_PREFIX = re.compile(r"\[rank\d+\]: ")  # of each line of torch's own report
_RAISED = re.compile(r"[A-Za-z_][\w.]*(: .*)?$")  # the line that ends one
_TAIL = 30  # lines of a failed rank's stderr to show again


def launch(plan: LaunchPlan, environ: Mapping[str, str]) -> int:
    """Run the command on every rank and return the exit code: 0, or that of the root cause.

    If a rank fails, all are started again, at most as often as the plan says.

    :raises ConfigurationError: if the system allows fewer processes, or files, than the ranks need.
    :raises OutputLost: if all ranks succeeded, and part of their output was lost.
    :raises OSError: if the system refuses what a start needs.
    """
    most, limit = most_processes(2 if plan.options.log_dir is None else 4)
    if plan.ranks > most:
        what = f"{plan.ranks} ranks, and this system has room for {most} by its limit of {limit}"
        raise ConfigurationError(f"{what}; start fewer ranks, or raise that limit")
    launcher = _Launcher(plan, environ)
    # In a launch that is a part of another one, the scratch directory is in that one's.
    outer = Path(environ.get("SYNCPRIMS_ERROR_FILE") or "/none").parent
    inside = outer.name.isdecimal() and os.access(outer, os.W_OK)
    with (
        _signals(launcher.take_signal),
        scratch_directory("run", outer if inside else None) as scratch,
        _guard(scratch) as guard,
        contextlib.ExitStack() as stack,
    ):
        processes.adopt_orphans()  # so that what ranks leave behind is found
        stack.callback(processes.adopt_orphans, False)
        return launcher.run(scratch.path, guard)


@contextlib.contextmanager
def _signals(take: Callable[[int], None]) -> Generator[None]:
    """Hand signals to `take` during the block; an ignored one, as by nohup, stays ignored."""
    before = {signum: signal.getsignal(signum) for signum in (*_STOPPING, *_ANSWERED)}
    children = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, they leave no exit status
    try:
        for signum, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(signum, lambda number, frame: take(number))
        yield
    finally:
        for signum, handler in {**before, signal.SIGCHLD: children}.items():
            signal.signal(signum, handler)


# -- the guard ----------------------------------------------------------------------------------


class _Guard(NamedTuple):
    """The guard, as the launcher sees it."""

    pid: int
    pipe: int

    def send(self, word: str) -> None:
        """Send it the pid of a started rank, a newline before a restart, or at the end a dot."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.pipe, word.encode())


@contextlib.contextmanager
def _guard(scratch: Scratch) -> Generator[_Guard]:
    """Run a guard during the block. It is forked here, before there is any thread."""
    reader, writer = os.pipe()
    launcher = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        pid = os.fork()
    except OSError as error:
        if error.errno not in _LIMITS:
            raise
        raise ConfigurationError(f"no process can be started: {error.strerror}; {_CURE}") from error
    if not pid:
        try:
            os.close(writer)
            _stand_guard(reader, scratch, launcher)
        finally:
            os._exit(0)
    os.close(reader)
    guard = _Guard(pid, writer)
    try:
        yield guard
    finally:
        guard.send(".")
        os.close(writer)
        os.waitpid(pid, 0)


def _stand_guard(reader: int, scratch: Scratch, launcher: int) -> None:
    """Wait for the end of the launcher; if it was killed, end what it has started.

    A signal that comes here was meant for the launcher.
    """

    def pass_on(signum: int, frame: object) -> None:
        if os.getppid() == launcher:
            os.kill(launcher, signum)

    for signum in (*_STOPPING, *_ANSWERED):
        signal.signal(signum, pass_on)
    os.setsid()  # no terminal
    processes.set_title(f"syncprims run: guard of {launcher}")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):  # or those who wait for the end of the output would wait for this process
        os.dup2(null, fd)
    said = b""
    while part := os.read(reader, 4096):
        said += part
    if said.endswith(b"."):
        return
    processes.end_processes(scratch.path)
    for pid in said.rpartition(b"\n")[2].split():
        # On Linux, the system has ended the ranks: a leader that lives is of another group.
        if sys.platform != "linux" or processes.stat_fields(int(pid))[:1] in ([], [b"Z"]):
            with contextlib.suppress(OSError):
                os.killpg(int(pid), signal.SIGKILL)
    scratch.remove()


# -- the ranks ------------------------------------------------------------------------------------


class _RankProcess:
    """One rank's process, in a process group of its own, and the last lines of its stderr."""

    def __init__(
        self, rank: int, process: subprocess.Popen[bytes], report: Path, *, late: bool
    ) -> None:
        self.rank = rank
        self.late = late  #: it replaces a lost one
        self.process = process
        assert process.stderr is not None
        self.stderr: IO[bytes] = process.stderr
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL)
        self.status: int | None = None  #: as `os.waitstatus_to_exitcode`, once it has ended
        self.stopped = False  #: by us, unless it had reported a failure of its own
        self._report = report
        self._told = False

    def look(self) -> bool:
        """Return whether the process has ended since the last call.

        It stays a zombie, so that its number, and that of its process group, are not reused.
        """
        if self.status is not None:
            return False
        end = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is None:
            return False
        self.status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        if self._told and self.status < 0:  # as Python would have ended without that thread
            code = self.failure.message if self.failure and self.kind == "SystemExit" else ""
            self.status = int(code) & 255 if code.isdecimal() else 1
        return True

    def stop(self, signum: int) -> None:
        """Signal a rank to end; one that has failed, and only waits for its threads, is a cause."""
        self._told = self._told or (not self.stopped and bool(self.failure) and not self.follows)
        self.stopped = not self._told
        self.send(signum)

    def send(self, signum: int) -> None:
        """Signal the rank, which decides about its children; SIGKILL is for all of its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if signum == signal.SIGKILL else os.kill)(self.process.pid, signum)

    @property
    def failure(self) -> Failure | None:
        """What the rank has reported, if anything."""
        try:
            return next(iter(errors.load(self._report.read_bytes()).failures.values()), None)
        except (OSError, ValueError):
            return None

    @property
    def epoch(self) -> int:
        """The last epoch that it was in; -1 if it has met no other rank."""
        try:
            return int(Path(f"{self._report}{EPOCH_NOTE}").read_bytes())
        except OSError:
            return -1

    @property
    def waits(self) -> bool:
        """Whether it is a replacement that the others have not met."""
        return self.late and self.epoch < 0

    @property
    def was_asked_to_stop(self) -> bool:
        """Whether SIGTERM has set a trigger of the rank, which has not cleared it since."""
        return Path(f"{self._report}{STOP_NOTE}").exists()

    @property
    def follows(self) -> bool:
        """Whether it failed only because another rank had failed, or all together."""
        said = " ".join(self.tail) if self.failure is None else self.failure.message
        if "/gloo/transport/" in said and " by peer" in said:  # Gloo says so of a rank that is lost
            return True
        return self.failure is not None and self.failure.consequence

    @property
    def kind(self) -> str:
        """The class of its error."""
        return "" if self.failure is None else self.failure.type.removeprefix("syncprims.")

    @property
    def cause(self) -> Failure | None:
        """What it has reported; else the traceback that ends its stderr, if it ends with a code."""
        lines = [_PREFIX.sub("", line) for line in self.tail]
        while lines and not _TRACEBACK.match(lines[0]):
            del lines[0]
        if self.failure is None and (self.status or 0) > 0 and lines and _RAISED.match(lines[-1]):
            kind, _, message = lines[-1].partition(": ")
            return Failure(self.rank, kind, message, "\n".join(lines))
        return self.failure

    @property
    def how(self) -> str:
        """How its process ended, and with which error."""
        text = f"({errors.describe_exit(self.status)})"
        if (cause := self.cause) is not None:
            text += f": {cause.headline.removeprefix('syncprims.')}"
        return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}..."


def _prepare(parent: int) -> None:
    """Make this process end with its parent, and independent of the terminal's job control."""
    processes.die_with(parent)
    processes.leave_terminal()


#: What a process runs that starts beside a thread of ours, before it becomes the rank.
_LATE = (
    "import os, sys; from syncprims.cli.launcher import _prepare; _prepare(int(sys.argv[1])); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
_LONGEST_BACK_OFF = 30.0  # seconds before a restart or a replacement


class _Launcher:
    """Starts all ranks, at most as often as the plan says, and watches them."""

    def __init__(self, plan: LaunchPlan, environ: Mapping[str, str]) -> None:
        self._plan, self._options = plan, plan.options
        #: Ranks that go on after losses; then lost ones are replaced.
        self._least = plan.options.elastic[0] if plan.options.elastic else None
        self._variables = {
            **plan.environment(environ),
            "SYNCPRIMS_RUN_ID": uuid.uuid4().hex,
            "MASTER_ADDR": "127.0.0.1",
        }
        self._directory = self._variables.get("SYNCPRIMS_DIR")
        self._received: list[int] = []  # signals that ask us to end
        self._logs = None if self._options.log_dir is None else Path(self._options.log_dir)
        self._facts: dict[str, Any] | None = None  # in each line of JSON
        if self._options.json:
            self._facts = {"host": socket.gethostname()}
        self._output = Output(sys.stdout, sys.stderr, self._received, self._facts)
        self._spare = processes.find_children()  # of the calling program: no part of the run
        self._began: list[float] = []  # restarts and replacements: when they were granted
        # Of the present start:
        self._lost: list[_RankProcess] = []  # without which the others go on
        self._replace_at: list[tuple[float, int]] = []  # when to start a process, for which rank
        self._ranks: list[_RankProcess] = []
        self._failed: list[_RankProcess] = []  # by themselves, in the order in which they ended

    def take_signal(self, signum: int) -> None:
        """Take a signal: one to stop, one for the ranks, or SIGQUIT, which asks what they do."""
        if signum in _STOPPING:
            self._received.append(signum)
        elif signum == signal.SIGQUIT:
            self._output.say(*describe_run(str(detect(self._environ(0)).run_id)))
        else:
            for rank in self._ranks:
                if rank.status is None:
                    rank.send(signum)

    def run(self, scratch: Path, guard: _Guard) -> int:
        """Run all ranks to their end, again after a failure, and return the exit code."""
        self._spare.add(guard.pid)
        if self._logs is not None:
            try:
                self._logs.mkdir(parents=True, exist_ok=True)
                (self._logs / "rank-0.log").open("ab").close()
            except OSError as refusal:
                text = f"--log-dir {self._logs}: {refusal.strerror}; name a directory"
                raise ConfigurationError(f"{text} in which this user may write") from refusal
        for restart in itertools.count():
            if self._facts is not None:
                self._facts["restart"] = restart
            folder = scratch / str(restart)
            folder.mkdir(mode=0o700)  # not by the umask: ranks meet only where no other may write
            self._variables |= {
                "SYNCPRIMS_DIR": self._directory or str(folder / "board"),
                "SYNCPRIMS_RESTART": str(restart),
                "TORCHELASTIC_RESTART_COUNT": str(restart),
                "MASTER_PORT": str(free_port()),
            }
            self._run_once(folder, guard)
            if not self._failed or self._received or self._least:
                break
            if (again := self._grant()) is None:
                break
            self._report()
            self._output.say(f"syncprims run: restart {again[1]}")
            self._failed = []
            shutil.rmtree(folder, ignore_errors=True)
            until = time.monotonic() + again[0]
            while time.monotonic() < until and not self._received:
                time.sleep(_POLL_INTERVAL)
            if self._received:
                break
        if self._failed:
            return self._report()
        saved = bool(self._ranks) and not any(r.status for r in self._ranks if r not in self._lost)
        if saved and not self._received and any(r.was_asked_to_stop for r in self._ranks):
            return STOPPED
        if self._received:
            saved = saved and self._received[0] == signal.SIGTERM
            return STOPPED if saved else 128 + self._received[0]
        if (error := self._output.error) is not None:
            why = f"all ranks succeeded, but their output is lost: {error.strerror}"
            raise OutputLost(error.errno, why)
        return 0

    def _run_once(self, folder: Path, guard: _Guard) -> None:
        """Start all ranks, and return when they have ended and nothing is left of them."""
        self._ranks, self._failed, sources = [], [], list[Source]()
        guard.send("\n")
        try:
            # A signal that comes while ranks start goes to those that have started.
            while len(self._ranks) < self._plan.ranks and not self._received:
                sources += self._start(len(self._ranks), folder, guard)
            # In the first thread: from now on no process is forked.
            try:
                self._output.forward(sources)
            except RuntimeError as error:
                raise ConfigurationError(f"the launcher {error}; {_CURE}") from error
            self._watch(folder, guard)
        finally:
            # Ended ranks are still zombies, so this kills what they started, and nothing else.
            for rank in self._ranks:
                rank.send(signal.SIGKILL)
                rank.process.wait()
            processes.end_processes(folder, os.getpid(), self._spare)
            processes.reap_children(self._spare)
            self._output.finish()
            with contextlib.suppress(OSError, SyncError):  # what is left where the ranks met
                recorder, topology, settings = find_end_recorder(self._environ(0))
                recorder.remove_run(topology, settings)

    def _start(
        self, rank: int, folder: Path, guard: _Guard, *, late: bool = False
    ) -> tuple[Source, Source]:
        report = folder / f"failure-{rank}-{len(self._ranks)}"
        # Python must not fork beside a thread, and the output has one: the process does it itself.
        command = [sys.executable, "-c", _LATE, str(os.getpid())] if late else []
        try:
            process = subprocess.Popen(
                [*command, *self._plan.command],
                env={**self._environ(rank), "SYNCPRIMS_ERROR_FILE": str(report)},
                stdin=None if rank == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,  # so that its children can be killed
                # Not a session of its own: Linux schedules each session as one, and then a rank
                # that waits cannot yield its processor to another one.
                preexec_fn=None if late else functools.partial(_prepare, os.getpid()),
            )
        except OSError as error:
            if error.errno not in _LIMITS:
                raise
            what = f"rank {rank} of {self._plan.ranks} cannot be started: {error.strerror}"
            raise ConfigurationError(f"{what}; {_CURE}") from error
        guard.send(f"{process.pid} ")
        started = _RankProcess(rank, process, report, late=late)
        self._ranks.append(started)
        assert process.stdout is not None
        logs: list[IO[bytes] | None] = [None, None]
        if self._logs is not None:
            logs = [(self._logs / f"rank-{rank}.log").open("ab", buffering=0) for _ in logs]
        return (
            Source(rank, process.stdout, "stdout", logs[0]),
            Source(rank, started.stderr, "stderr", logs[1], started.tail),
        )

    def _environ(self, rank: int) -> dict[str, str]:
        return {**self._variables, **make_rank_variables(rank, self._plan.ranks)}

    def _watch(self, folder: Path, guard: _Guard) -> None:
        """Return when all ranks have ended; stop them after a failure or a signal."""
        kill_at = term_at = requested_at = math.inf
        ends: list[tuple[float, _RankProcess]] = []  # to record, and until when to read its stderr
        handled = 0
        reap_at = time.monotonic() + _REAP_EVERY
        while True:
            ended = [rank for rank in self._ranks if rank.look()]
            running = [rank for rank in self._ranks if rank.status is None]
            self._take_failures([rank for rank in ended if rank.status and not rank.stopped])
            if not running:
                if not self._received:
                    self._failed[:0] = [one for one in self._lost if not self._has_survived(one)]
                return
            replaced = {rank for _, rank in self._replace_at}
            if not self._failed and not self._received:
                self._start_replacements(folder, guard)
            now = time.monotonic()
            # Others may wait for it to join, unless another process comes.
            ends += [(now + _LAST_WORDS, rank) for rank in ended if rank.rank not in replaced]
            for end in [end for end in ends if now > end[0] or end[1].stderr.closed]:
                ends.remove(end)
                self._record(end[1])
            for signum in self._received[handled:]:
                if requested_at == math.inf:
                    requested_at, kill_at = now, min(kill_at, now + self._options.grace)
                    name, seconds = signal.Signals(signum).name, f"{self._options.grace:g} s"
                    what = f"{name}: the ranks have {seconds} to stop"
                    again = "; another Ctrl-C ends them at once" if signum == signal.SIGINT else ""
                    self._output.say(f"syncprims run: {what}{again}")
                elif signum != signal.SIGINT:
                    continue
                elif now - requested_at > _ONE_REQUEST:
                    kill_at = now
                self._stop(running, signum)
            handled = len(self._received)
            if self._failed and kill_at == math.inf:
                term_at, kill_at = now + GRACE, now + 2 * GRACE
            if now >= term_at:
                self._stop(running, signal.SIGTERM)
                term_at = math.inf
            if now >= kill_at:
                self._stop(running, signal.SIGKILL)
                kill_at = now + GRACE
            if now >= reap_at:
                processes.reap_children({*self._spare, *(rank.process.pid for rank in self._ranks)})
                reap_at = now + _REAP_EVERY
            time.sleep(_POLL_INTERVAL)

    def _record(self, rank: _RankProcess) -> None:
        """Record how a rank has ended and what it raised, for those that wait for it to join."""
        cause = rank.cause if rank.status else None
        failure = errors.dump(errors.PeerFailed.from_failure(cause)) if cause else None
        with contextlib.suppress(OSError, SyncError):
            recorder, topology, settings = find_end_recorder(self._environ(rank.rank))
            how = errors.describe_exit(rank.status)
            recorder.record_end(topology, settings, how, failure)

    def _take_failures(self, failed: list[_RankProcess]) -> None:
        """Fail the run, unless enough ranks are left; then a replacement may be due."""
        over = all(rank.status is not None or rank.waits for rank in self._ranks)
        for rank in [one for one in failed if over and one.waits]:
            failed.remove(rank)
            what = f"the replacement for rank {rank.rank} came too late"
            self._output.say(f"syncprims run: {what}: the others had ended")
        left = [rank for rank in self._ranks if not rank.status]
        ends = self._failed or self._received or over or len(left) < (self._least or math.inf)
        if failed and ends:
            self._failed += failed
        else:
            self._lost += failed
            for rank in failed:
                text = "no replacement is left"
                if again := self._grant():
                    self._replace_at.append((time.monotonic() + again[0], rank.rank))
                    text = f"replacement {again[1]}"
                ranks = f"{len(left)} rank{'s' * (len(left) > 1)}"
                what = f"lost rank {rank.rank} {rank.how}; {ranks} left, {text}"
                self._output.say(f"syncprims run: {what}")

    def _has_survived(self, lost: _RankProcess) -> bool:
        """Return whether others have met in a later epoch, or another process has done its work."""
        return any(
            other.epoch > lost.epoch or (other.rank == lost.rank and other.status == 0)
            for other in self._ranks
        )

    def _grant(self) -> tuple[float, str] | None:
        """Grant a restart, or a replacement: after how many seconds, and which of how many it is.

        None if as many were granted as the plan allows, within its window of time.
        """
        now, most = time.monotonic(), self._options.max_restarts
        count = sum(now - at < self._options.restart_window for at in self._began)
        if count >= most:
            return None
        self._began.append(now)
        pause = min(2.0 ** (count - 1), _LONGEST_BACK_OFF) if count else 0.0
        return pause, f"{count + 1} of {most}" + (f" in {pause:g} s" if pause else "")

    def _start_replacements(self, folder: Path, guard: _Guard) -> None:
        due = [entry for entry in self._replace_at if entry[0] <= time.monotonic()]
        for entry in due:
            self._replace_at.remove(entry)
            self._output.add(self._start(entry[1], folder, guard, late=True))

    def _stop(self, running: list[_RankProcess], signum: int) -> None:
        for rank in running:
            rank.stop(signum)

    def _report(self) -> int:
        """Report which ranks failed, and why; return the exit code of the root cause."""
        stopped = [rank.rank for rank in self._ranks if rank.stopped]
        lines, code = _describe_failure(self._failed, stopped)
        if self._logs is not None:
            lines.append(f"  all that the ranks have printed is in {self._logs}/rank-N.log")
        self._output.say(*lines)
        return code


# -- the report: the ranks that followed in one line, the cause at the end -----------------------


def _describe_failure(
    failed: Sequence[_RankProcess], stopped: Sequence[int]
) -> tuple[list[str], int]:
    """Return the lines about a run that failed, and its exit code.

    `failed` are the ranks that failed, in the order in which they ended; `stopped` were ended.
    """
    causes = [end for end in failed if not end.follows]
    # A cleanup that met the others in another call: its rank has an error of its own.
    causes = causes or [end for end in failed if end.failure and end.failure.handled]
    first = (causes or failed)[0]
    # With the same error, or the same verdict, no rank was first.
    leaders = [end for end in causes if end.how == first.how]
    leaders = leaders or [end for end in failed if end.kind == first.kind]
    verb = "failed together" if len(leaders) > 1 else "failed first" if causes else "failed"
    ways = collections.defaultdict[str, list[int]](list)
    for end in failed:
        if causes and end not in causes:
            ways[f": {end.kind or 'failed'} because of rank {first.rank}"].append(end.rank)
    for end in causes or failed:
        if end not in leaders:
            ways[f" failed, too {end.how}"].append(end.rank)
    lines = [f"{_name(stopped)}: still running then, and ended"] if stopped else []
    lines += [f"{_name(ranks)}{how}" for how, ranks in ways.items()]
    lines.append(f"syncprims run: {_name(end.rank for end in leaders)} {verb} {first.how}")
    shown: Sequence[str] = first.tail
    if first.failure is not None and not causes:
        shown = first.failure.message.rstrip().splitlines()[1:]
    elif first.failure is not None and "Traceback" in first.failure.traceback:  # no plain exit
        shown = first.failure.traceback.rstrip().splitlines()
    lines += [f"  | {line}" for line in shown]
    status = first.status or 0
    return lines, 128 - status if status < 0 else status


def _name(ranks: Iterable[int]) -> str:
    """Return ``rank 3``, or ``ranks 0-4, 6-7``."""
    text = errors.format_ranks(sorted(ranks)).replace(",", ", ")
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"
