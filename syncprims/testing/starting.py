"""Ways to start the ranks of a world of processes, and to hear of their ends."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any, Literal, Protocol

from .child import Function, Orders, be_rank, reap

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Literal["fork", "forkserver", "spawn"]


_BEGIN = """
import sys
sys.path[:] = sys.argv.pop(1).split("\\n")
from syncprims.testing.child import main
main()
"""


class Started(Protocol):
    """The processes of all ranks."""

    pids: dict[int, int]  #: by rank, of those that have not ended

    def ended(self, within: float) -> dict[int, int]:
        """Return the exit codes of ranks that have ended since, waiting so long for one."""
        ...

    def close(self) -> None:
        """Let go of everything; all ranks have ended."""
        ...


def start(how: Start, orders: Orders, fn: Callable[[], Any]) -> Started:
    """Start all ranks.

    :raises TypeError: if `fn` cannot be sent to a process that begins anew.
    """
    if how == "fork":
        return _Children({rank: _fork(orders, rank, fn) for rank in range(orders.ranks)})
    path = orders.folder / "orders"
    with path.open("wb") as file:
        pickle.dump((orders, Function(fn)), file)
    if how == "forkserver":
        return _Served(_spawn(path, "all", subprocess.PIPE), orders.ranks)
    children = [_spawn(path, str(rank)) for rank in range(orders.ranks)]
    return _Children({rank: child.pid for rank, child in enumerate(children)}, children)


def default_start() -> Start:
    """Return the quickest way that is safe here."""
    torch = sys.modules.get("torch")
    has_cuda = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    return "fork" if hasattr(os, "fork") and not has_cuda else "spawn"


def _fork(orders: Orders, rank: int, fn: Callable[[], Any]) -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or the child would say it again
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: theirs are not ours
        pid = os.fork()
    if not pid:
        be_rank(orders, rank, fn)
    return pid


def _spawn(path: Any, rank: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
    # It looks for modules where we do, and nowhere else before.
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _BEGIN, "\n".join(sys.path), str(path), rank],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
    )


class _Children:
    """Processes of our own."""

    def __init__(
        self, pids: dict[int, int], popen: list[subprocess.Popen[bytes]] | None = None
    ) -> None:
        self.pids = pids
        self._popen = popen or []
        self._eyes: dict[int, int] = {}  # pidfd -> rank
        self._poll = select.poll()  # `select` itself knows no descriptor from 1024 up
        if hasattr(os, "pidfd_open"):
            self._eyes = {os.pidfd_open(pid): rank for rank, pid in pids.items()}
        for eye in self._eyes:
            self._poll.register(eye, select.POLLIN)

    def ended(self, within: float) -> dict[int, int]:
        """Return the exit codes of ranks that have ended since."""
        if self._eyes:
            ranks = [self._forget(eye) for eye, _ in self._poll.poll(within * 1000)]
        else:
            threading.Event().wait(min(within, 0.005))
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            ranks = [r for r, pid in self.pids.items() if os.waitid(os.P_PID, pid, flags)]
        return {rank: self._reap(rank) for rank in ranks}

    def _forget(self, eye: int) -> int:
        self._poll.unregister(eye)
        os.close(eye)
        return self._eyes.pop(eye)

    def _reap(self, rank: int) -> int:
        code = reap(self.pids.pop(rank))
        if self._popen:
            self._popen[rank].returncode = code
        return code

    def close(self) -> None:
        """Close what is open."""
        for eye in [*self._eyes]:
            self._forget(eye)


class _Served:
    """Processes of a fork server: it says when they start and end."""

    def __init__(self, server: subprocess.Popen[bytes], ranks: int) -> None:
        self.pids: dict[int, int] = {}
        self._server = server
        self._left = set(range(ranks))
        self._text = b""
        assert server.stdout is not None
        self._pipe = server.stdout.fileno()
        self._poll = select.poll()
        self._poll.register(self._pipe, select.POLLIN)

    def ended(self, within: float) -> dict[int, int]:
        """Return the exit codes of ranks that have ended since."""
        if not self._poll.poll(within * 1000):
            return {}
        data = os.read(self._pipe, 65536)
        if not data:  # it is gone, and so are they
            return {rank: self._server.wait() for rank in self._left}
        *lines, self._text = (self._text + data).split(b"\n")
        codes: dict[int, int] = {}
        for line in lines:
            what, rank, number = line.split()
            if what == b"started":
                self.pids[int(rank)] = int(number)
            else:
                self.pids.pop(int(rank), None)
                self._left.discard(int(rank))
                codes[int(rank)] = int(number)
        return codes

    def close(self) -> None:
        """End the server."""
        if self._server.stdout is not None:
            self._server.stdout.close()
        if self._left:
            self._server.send_signal(signal.SIGKILL)
        self._server.wait()
