"""Worker processes, one per rank: how they start, what they run, how their ends are noticed."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import select
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncprims._world.group import entered
from syncprims._world.launchers import make_rank_variables
from syncprims._world.processes import adopt_orphans, die_with, end_processes, find_children
from syncprims._world.registry import load_backend
from syncprims._world.runtime import become_rank, provided_world
from syncprims._world.version import version
from syncprims.interface import Backend, Settings, Topology

from .faults import Fault, FaultTarget, current_target
from .journal import JournalWriter
from .outcomes import RankOutcome, await_threads
from .probe import Probe, ProbedBackend
from .rank_output import set_writer
from .world_spec import Start

#: Asks a worker for its stack: a signal that programs do not use, where there is one.
STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2

_BOOT = """
import sys
sys.path[:] = sys.argv.pop(1).split("\\n")
from syncprims.testing.workers import main
main()
"""


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker has to know of its world."""

    folder: Path  #: of this world
    ranks: int
    faults: Sequence[Fault]
    environ: Mapping[str, str]
    parent: int  #: process id
    torch: bool = False  #: torch.distributed is served

    def path(self, what: str, rank: int) -> Path:
        """Return the path of a rank's ``journal``, ``stack``, ``stdout`` or ``stderr``."""
        return self.folder / f"{what}-{rank}"

    def read(self, what: str, rank: int) -> str:
        """Return what the file at this path contains; "" if it does not exist."""
        path = self.path(what, rank)
        return path.read_text(errors="backslashreplace") if path.exists() else ""


# -- in a worker -----------------------------------------------------------------------------------


def _run_worker(spec: WorkerSpec, rank: int, fn: Callable[[], Any]) -> None:
    """Run `fn` as this rank, write the journal, and end this process."""
    code = 1
    try:
        _set_up(spec, rank)
        outcome = RankOutcome(rank)
        journal = JournalWriter(spec.path("journal", rank), spec.faults)

        def make_backend(cls: type[Backend], place: Topology, settings: Settings) -> Backend:
            return ProbedBackend(cls(place, settings), Probe(outcome, spec.faults, journal))

        become_rank(make_backend)
        if spec.torch:
            from .torch_worlds.serving import serve_in_process  # imports torch

            serve_in_process(rank, spec.folder / "store")
        outcome.run_program(fn, provided_world(), await_threads)
        journal.on_end(outcome)
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


def _set_up(spec: WorkerSpec, rank: int) -> None:
    """Prepare this process as a launcher would have done."""
    os.setpgid(0, 0)  # what it leaves behind is found by its group
    die_with(spec.parent)
    adopt_orphans()  # or among its children
    for stream, fd in (("stdout", 1), ("stderr", 2)):
        with spec.path(stream, rank).open("ab") as file:
            os.dup2(file.fileno(), fd)
        setattr(sys, stream, os.fdopen(os.dup(fd), "w", buffering=1, errors="backslashreplace"))
    with Path(os.devnull).open("rb") as null:
        os.dup2(null.fileno(), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(signum, signal.SIG_DFL)
    stack = spec.path("stack", rank).open("w")
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=False)
    os.environ.clear()
    os.environ.update(spec.environ)
    os.environ.update(make_rank_variables(rank, spec.ranks))
    entered.set(())
    current_target.set(FaultTarget())  # not that of a forked thread
    set_writer(None, rank)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # the threads of a forked parent's operations are not here


# -- workers that do not inherit the parent's memory -----------------------------------------------


class PortableFunction:
    """A function that another Python finds again, also in a test file that it cannot import."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self._module: str = getattr(fn, "__module__", None) or ""
        self._file = getattr(sys.modules.get(self._module), "__file__", None)
        try:
            self._data = pickle.dumps(fn)
        except Exception as error:
            raise TypeError(
                f"{fn!r} cannot be sent to a process that starts a new Python: {error}. Define it "
                f"at the top level of a file, or say start='fork'"
            ) from error
        if self._module == "__main__" and self._file is None:
            raise TypeError(
                f"{fn!r} cannot be sent to a process that starts a new Python: it is defined in a "
                f"notebook or an interactive session, and not in a file that the process could "
                f"read. Move it to a file, or say start='fork'"
            )

    def load(self) -> Callable[[], Any]:
        """Return the function, in the other Python."""
        if self._module == "__main__":
            self._load_file("__mp_main__")  # not again as a script
        elif self._module and self._module not in sys.modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(self._module)
            if getattr(sys.modules.get(self._module), "__file__", None) != self._file:
                self._load_file(self._module)
        loaded: Callable[[], Any] = pickle.loads(self._data)
        return loaded

    def _load_file(self, name: str) -> None:
        if self._file is not None:
            spec = importlib.util.spec_from_file_location(name, self._file)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[self._module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)


def main() -> None:
    """Run the worker that the arguments name; or fork all workers, as a fork server does."""
    path, which = sys.argv[1:]
    spec, function = pickle.loads(Path(path).read_bytes())
    fn = function.load()
    if which != "all":
        _run_worker(spec, int(which), fn)
    # Fork all; report to the parent the pid of each rank, and at its end the exit code.
    die_with(spec.parent)
    _load_before_fork(spec)
    spec = dataclasses.replace(spec, parent=os.getpid())
    workers = Workers({rank: _fork(spec, rank, fn) for rank in range(spec.ranks)})
    for rank, pid in workers.pids.items():
        os.write(1, b"%d %d\n" % (rank, pid))
    while workers.pids:
        for rank, code in workers.wait(1.0).items():
            os.write(1, b"%d %d\n" % (rank, code))
    os._exit(0)


# -- in the parent ---------------------------------------------------------------------------------


class Workers:
    """The workers of all ranks, as processes of our own."""

    def __init__(self, pids: dict[int, int]) -> None:
        self.pids = pids  #: by rank, of those that have not ended
        self._pidfds: dict[int, int] = {}  # descriptor -> rank
        self._poll = select.poll()  # `select` itself takes no descriptor from 1024 up
        if hasattr(os, "pidfd_open"):
            self._pidfds = {os.pidfd_open(pid): rank for rank, pid in pids.items()}
        for fd in self._pidfds:
            self._poll.register(fd, select.POLLIN)

    def wait(self, timeout: float) -> dict[int, int]:
        """Return the exit codes of ranks that have ended since, after so many seconds if none."""
        if self._pidfds:
            ranks: list[int] = []
            for fd, _ in self._poll.poll(timeout * 1000):
                self._poll.unregister(fd)
                os.close(fd)
                ranks.append(self._pidfds.pop(fd))
        else:
            time.sleep(min(timeout, 0.005))
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            ranks = [r for r, pid in self.pids.items() if os.waitid(os.P_PID, pid, flags)]
        return {rank: _reap(self.pids.pop(rank)) for rank in ranks}

    def close(self) -> None:
        """Release all resources, once all ranks have ended: here, `wait` has done that."""


class _ServedWorkers(Workers):
    """The workers of a fork server, which reports their starts and ends."""

    def __init__(self, server: subprocess.Popen[bytes], ranks: int) -> None:
        super().__init__({})
        self._server = server
        self._left = set(range(ranks))
        assert server.stdout is not None
        self._pipe = server.stdout
        self._poll.register(self._pipe, select.POLLIN)

    def wait(self, timeout: float) -> dict[int, int]:
        if not self._poll.poll(timeout * 1000):
            return {}
        line = self._pipe.readline()
        if not line:  # the server has ended, and so have the ranks
            self.pids.clear()
            return dict.fromkeys(self._left, self._server.wait())
        rank, number = map(int, line.split())
        if rank not in self.pids:
            self.pids[rank] = number
            return {}
        del self.pids[rank]
        self._left.remove(rank)
        return {rank: number}

    def close(self) -> None:
        self._pipe.close()
        if self._left:
            self._server.send_signal(signal.SIGKILL)
        self._server.wait()


def start_workers(how: Start | None, spec: WorkerSpec, fn: Callable[[], Any]) -> Workers:
    """Start the workers of all ranks; None stands for the fastest way that is safe here.

    :raises TypeError: if `fn` cannot be sent to a process that starts a new Python.
    """
    if how is None:
        torch = sys.modules.get("torch")
        has_cuda = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
        how = "spawn" if has_cuda else "fork"
    if how == "fork":
        _load_before_fork(spec)
        return Workers({rank: _fork(spec, rank, fn) for rank in range(spec.ranks)})
    path = spec.folder / "spec"
    path.write_bytes(pickle.dumps((spec, PortableFunction(fn))))
    if how == "forkserver":
        return _ServedWorkers(_spawn(path, "all", subprocess.PIPE), spec.ranks)
    children = [_spawn(path, str(rank)) for rank in range(spec.ranks)]
    for child in children:
        child.returncode = 0  # `Workers` reaps it: Popen is not to look for its end, nor to warn
    return Workers({rank: child.pid for rank, child in enumerate(children)})


def _load_before_fork(spec: WorkerSpec) -> None:
    """Load here what otherwise every forked rank would look for itself."""
    load_backend(spec.environ["SYNCPRIMS_BACKEND"])
    version()
    if spec.torch:
        importlib.import_module("syncprims.testing.torch_worlds.serving")
        before = {*os.environ}
        importlib.import_module("torch._dynamo")  # DDP and FSDP import it, which takes seconds
        for name in os.environ.keys() - before:
            del os.environ[name]  # it would be set for the tests, too


def _fork(spec: WorkerSpec, rank: int, fn: Callable[[], Any]) -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or the child would print it again
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child uses none
        pid = os.fork()
    if not pid:
        gc.freeze()  # to free here what the parent has left could end things of the parent
        _run_worker(spec, rank, fn)
    return pid


def _spawn(path: Path, rank: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
    # It looks for modules in the places where this process does, and in no other place first.
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _BOOT, "\n".join(sys.path), str(path), rank],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        bufsize=0,  # what `poll` does not see is not read ahead
    )


def _reap(pid: int) -> int:
    """Return the exit code of an ended worker, after all processes it has left are killed."""
    # Before it is reaped: until then, no other process has its number.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
