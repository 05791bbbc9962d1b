"""A rank that is a process, from its first step to its last."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncprims._world.backends import load_backend
from syncprims._world.group import entered
from syncprims._world.launchers import make_rank_variables
from syncprims._world.runtime import become_rank, provided_world
from syncprims._world.version import version

from .errorbox import pack
from .faults import here
from .journal import Scribe
from .output import mark
from .probe import Probe
from .report import shortened
from .runs import buried, is_consequence

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from syncprims.interface import Backend, Settings, Topology

    from .faults import Fault

#: Asks a rank for its stack. One that nobody uses, where there are such.
STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2


@dataclass(frozen=True)
class Orders:
    """What a rank is told by its parent."""

    folder: Path  #: of this world
    ranks: int
    faults: list[Fault]
    environ: Mapping[str, str]
    parent: int

    def path(self, what: str, rank: int) -> Path:
        """Return the path of a rank's ``journal``, ``report``, ``stack`` or ``stdout``."""
        return self.folder / f"{what}-{rank}"

    @property
    def verdict(self) -> Path:
        """Where the parent says that all wait in vain."""
        return self.folder / "verdict"


class _Victim:
    """What faults do to this process."""

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def be_rank(orders: Orders, rank: int, fn: Callable[[], Any]) -> None:
    """Run `fn` as this rank, leave a report, and end this process."""
    code = 1
    try:
        _settle(orders, rank)
        probe = Probe(
            rank,
            orders.faults,
            _Victim(),
            Scribe(orders.path("journal", rank), orders.verdict, orders.faults),
        )

        def make(cls: type[Backend], place: Topology, settings: Settings) -> Backend:
            return probe.probe(cls(place, settings))

        become_rank(make)
        result: Any = None
        error: BaseException | None = None
        try:
            with provided_world():
                result = fn()
        except SystemExit as end:
            error = end if end.code else None
        except BaseException as raised:
            error = raised
        _report(orders, rank, result, error, probe)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _settle(orders: Orders, rank: int) -> None:
    """Make this process what a launcher would have made it."""
    os.setpgid(0, 0)  # so that what it leaves behind can be found
    _die_with(orders.parent)
    for stream, fd in (("stdout", 1), ("stderr", 2)):
        to = os.open(orders.path(stream, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(to, fd)
        os.close(to)
        setattr(sys, stream, os.fdopen(os.dup(fd), "w", buffering=1, errors="backslashreplace"))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(
            signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
        )
    stack = orders.path("stack", rank).open("w")
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=False)
    os.environ.clear()
    os.environ.update(orders.environ)
    os.environ.update(make_rank_variables(rank, orders.ranks))
    entered.set(None)
    here.set(_Victim())
    mark(None, rank)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # the threads of a forked parent's operations are not here


def _die_with(parent: int) -> None:
    """End when the parent does, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


# -- the report --------------------------------------------------------------------------------


def _report(
    orders: Orders, rank: int, result: Any, error: BaseException | None, probe: Probe
) -> None:
    text = "".join(traceback.format_exception(shortened(error))) if error is not None else ""
    facts = {
        "text": text,
        "torn": probe.torn,
        "waits": probe.waits is not None,
        "consequence": is_consequence(error),
        "buried": buried(error),
    }
    try:
        packed = pickle.dumps(result)
    except Exception as why:
        error = error or TypeError(
            f"rank {rank} returns a {type(result).__name__}, which cannot be sent to the test: "
            f"{why}. Return plain values, or use a world of threads"
        )
        packed = pickle.dumps(None)
    new = orders.path("new", rank)
    new.write_bytes(pickle.dumps({**facts, "result": packed, "error": pack(error)}))
    new.rename(orders.path("report", rank))


# -- processes that begin anew -----------------------------------------------------------------


class Function:
    """A function that another Python finds again, also in a test file that it cannot import."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        name = getattr(fn, "__module__", None) or ""
        self._module = name
        self._file = getattr(sys.modules.get(name), "__file__", None)
        try:
            self._data = pickle.dumps(fn)
        except Exception as error:
            raise TypeError(
                f"{fn!r} cannot be sent to a process that begins anew: {error}. Define it at the "
                f"top level of a file, or say start='fork'"
            ) from error

    def load(self) -> Callable[[], Any]:
        """Return the function, in the other Python."""
        if self._module and self._module not in sys.modules:
            self._load_module()
        elif self._module == "__main__":
            self._load_module("__mp_main__")
        loaded: Callable[[], Any] = pickle.loads(self._data)
        return loaded

    def _load_module(self, name: str | None = None) -> None:
        if name is None:
            with contextlib.suppress(ImportError):
                found = importlib.import_module(self._module)
                if getattr(found, "__file__", None) == self._file:
                    return
        if self._file is None:
            return
        spec = importlib.util.spec_from_file_location(name or self._module, self._file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[self._module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def main() -> None:
    """Be the rank that the file named by the arguments describes; or fork all of them."""
    path, rank = sys.argv[1:]
    with Path(path).open("rb") as file:
        orders, function = pickle.load(file)
    fn = function.load()
    if rank != "all":
        be_rank(orders, int(rank), fn)
    serve(orders, fn)


def serve(orders: Orders, fn: Callable[[], Any]) -> None:
    """Fork all ranks, and pass on how they end; what a fork server does."""
    inner = Orders(orders.folder, orders.ranks, orders.faults, orders.environ, os.getpid())
    _die_with(orders.parent)
    load_once(orders.environ["SYNCPRIMS_BACKEND"])
    pids: dict[int, int] = {}
    for rank in range(orders.ranks):
        pid = os.fork()
        if not pid:
            be_rank(inner, rank, fn)
        pids[pid] = rank
        os.write(1, f"started {rank} {pid}\n".encode())
    while pids:
        pid = await_any()
        os.write(1, f"ended {pids.pop(pid)} {reap(pid)}\n".encode())
    os._exit(0)


def load_once(backend: str) -> None:
    """Find here, before it forks, what every rank would look for by itself."""
    load_backend(backend)
    version()


def await_any() -> int:
    """Return a child that has ended and is not reaped yet."""
    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_pid


def reap(pid: int) -> int:
    """Return the exit code of an ended rank, having ended all that it left behind."""
    # Before it is reaped: until then, nobody else has its number.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
