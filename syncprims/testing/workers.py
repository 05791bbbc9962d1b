"""Worker processes, one per rank: what they run, and the journals that say how they went.

A journal is a file to which one rank appends events, and which its parent reads. So the parent
knows what a killed rank did last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncprims._protocol.threads import busy_threads
from syncprims._system.processes import adopt_orphans, die_with, end_processes, find_children
from syncprims._world.group import entered
from syncprims._world.launchers import make_rank_variables
from syncprims._world.registry import load_backend
from syncprims._world.runtime import become_rank, provided_world
from syncprims._world.version import version
from syncprims.interface import Backend, Settings, Topology

from .errors import PackedException, pack_exception
from .faults import Fault, FaultTarget, current_target
from .outcomes import RankOutcome
from .probe import Probe, probe_backend
from .rank_threads import RankThreads, threads_belong_to_ranks
from .world_spec import Start, set_writer

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


# -- journals --------------------------------------------------------------------------------------


def _open_journal(path: Path) -> Callable[[str, Any], None]:
    """Return a function that appends an event to the journal of this rank."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def write(event: str, fact: Any) -> None:
        data = pickle.dumps((event, fact))
        while data:
            data = data[os.write(fd, data) :]

    return write


def _end_of(outcome: RankOutcome) -> tuple[RankOutcome, bytes, PackedException | None]:
    """Return how a rank has ended, without what its journal has already."""
    try:
        result = pickle.dumps(outcome.result)
    except Exception as why:
        outcome.fail(
            TypeError(
                f"rank {outcome.rank} returns a {type(outcome.result).__name__}, which cannot "
                f"be sent to the test: {why}. Return plain values, or use a world of threads"
            )
        )
        result = pickle.dumps(None)
    error = None if outcome.error is None else pack_exception(outcome.error)
    rest = dataclasses.replace(outcome, result=None, error=None, calls=[], struck=[])
    return rest, result, error


class Journal:
    """The journal of one rank, as far as the parent has read it."""

    def __init__(self, path: Path, rank: int, faults: Sequence[Fault]) -> None:
        self.outcome = RankOutcome(rank)
        path.touch()
        self._path = path
        self._offset = 0
        self._faults = faults

    def read(self) -> bool:
        """Read what is new, and return whether anything is."""
        begin = self._offset
        with self._path.open("rb") as file:
            file.seek(begin)
            with contextlib.suppress(EOFError, pickle.UnpicklingError):  # not written yet
                while True:
                    self._take(*pickle.load(file))
                    self._offset = file.tell()
        return self._offset > begin

    def _take(self, event: Any, fact: Any) -> None:
        earlier = self.outcome
        if event != "end":
            earlier.take(event, self._faults[fact] if event == "fault" else fact)
            return
        outcome, result, error = fact
        self.outcome = dataclasses.replace(
            outcome, result=pickle.loads(result), error=error and error.unpack(),
            calls=earlier.calls, struck=earlier.struck,
        )  # fmt: skip


# -- in a worker -----------------------------------------------------------------------------------


def _run_worker(spec: WorkerSpec, rank: int, fn: Callable[[], Any]) -> None:
    """Run `fn` as this rank, write the journal, and end this process."""
    code = 1
    try:
        _set_up(spec, rank)
        outcome = RankOutcome(rank)
        write = _open_journal(spec.path("journal", rank))

        def make_backend(cls: type[Backend], place: Topology, settings: Settings) -> Backend:
            return probe_backend(cls(place, settings), Probe(outcome, spec.faults, write))

        become_rank(make_backend)
        if spec.torch:
            from .torch_worlds import serve_in_process  # imports torch

            serve_in_process(rank, spec.folder / "store")
        with threads_belong_to_ranks():
            outcome.run_program(fn, provided_world(), await_threads, RankThreads())
        write("end", _end_of(outcome))
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


def await_threads() -> None:
    """Return when no thread of this process is left for which Python would wait at its exit."""
    while any(
        thread.ident in busy_threads() and not thread.daemon
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
    ):
        time.sleep(0.005)


# -- starting workers ------------------------------------------------------------------------------
# Not by `multiprocessing`: the end of its process is seen at a pipe that the children of a rank
# inherit, so that a killed rank seems to live as long as they do.


def start_workers(how: Start | None, spec: WorkerSpec, fn: Callable[[], Any]) -> dict[int, int]:
    """Start the workers of all ranks, and return their process ids.

    :param how: None stands for the fastest way that is safe here.
    :raises TypeError: if `fn` cannot be sent to a process that starts a new Python.
    """
    if how is None:
        torch = sys.modules.get("torch")
        has_cuda = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
        how = "spawn" if has_cuda else "fork"
    if how == "fork":
        _load_before_fork(spec)
        return {rank: _fork(spec, rank, fn) for rank in range(spec.ranks)}
    path = spec.folder / "spec"
    path.write_bytes(pickle.dumps((spec, _pack_function(fn))))
    # A worker looks for modules in the places where this process does, and in no other place first.
    boot = [sys.executable, "-P", "-c", _BOOT, "\n".join(sys.path), str(path)]
    pids: dict[int, int] = {}
    for rank in range(spec.ranks):
        child = subprocess.Popen([*boot, str(rank)], stdin=subprocess.DEVNULL)
        child.returncode = 0  # `ProcessWorld` reaps it: Popen is not to look for its end, nor warn
        pids[rank] = child.pid
    return pids


def _load_before_fork(spec: WorkerSpec) -> None:
    """Load here what otherwise every forked rank would look for itself."""
    load_backend(spec.environ["SYNCPRIMS_BACKEND"])
    version()
    if spec.torch:
        importlib.import_module("syncprims.testing.torch_worlds")
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


def _pack_function(fn: Callable[[], Any]) -> tuple[str, str | None, bytes]:
    """Return `fn` as plain data: its module, the file of that, and a pickle.

    :raises TypeError: if another Python could not find it.
    """
    module: str = getattr(fn, "__module__", None) or ""
    file = getattr(sys.modules.get(module), "__file__", None)
    why = ""
    if module == "__main__" and file is None:
        why = "it is defined in a notebook or an interactive session, and not in a file"
    try:
        data = pickle.dumps(fn)
    except Exception as error:
        why, data = str(error), b""
    if why:
        raise TypeError(
            f"{fn!r} cannot be sent to a process that starts a new Python: {why}. Define it at the "
            f"top level of a file, or say start='fork'"
        )
    return module, file, data


def _load_function(module: str, file: str | None, data: bytes) -> Callable[[], Any]:
    """Return the function, also of a test file that this Python cannot import by its name."""
    is_main = module == "__main__"
    if not is_main and module not in sys.modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    if file is not None and (is_main or getattr(sys.modules.get(module), "__file__", None) != file):
        # Under that name, a script is not run once more as a script.
        spec = importlib.util.spec_from_file_location("__mp_main__" if is_main else module, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    loaded: Callable[[], Any] = pickle.loads(data)
    return loaded


def main() -> None:
    """Run the worker that the arguments name."""
    path, rank = sys.argv[1:]
    spec, function = pickle.loads(Path(path).read_bytes())
    _run_worker(spec, int(rank), _load_function(*function))
