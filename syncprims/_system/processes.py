"""Processes of this machine: which one it is, how it ended, and how to end what one has started.

A process that moves to a session of its own leaves its process group. A process whose parent ends
leaves its place in the tree. So the processes of a launch are also found by what they inherit: a
variable with the path of its scratch directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_TIME_TO_END = 2.0  # seconds for killed processes to be gone
_PAUSE = 0.002  # seconds between two looks


def die_with(parent: int) -> None:
    """End this process when its parent ends, for any reason; at once if that is not `parent`.

    To the system, the parent is the thread that has started this process.
    """
    _control(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def leave_terminal() -> None:
    """Give up the controlling terminal: a process group in the background may then read it."""
    import fcntl  # neither exists on Windows
    import termios

    with contextlib.suppress(OSError):  # there is none
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        try:
            fcntl.ioctl(terminal, termios.TIOCNOTTY)
        finally:
            os.close(terminal)


def adopt_orphans(adopt: bool = True) -> None:
    """Become the parent of descendants whose parent ends, on Linux.

    Afterwards a forked child can call :func:`die_with`, whatever locks it has inherited.
    """
    _control(_SET_CHILD_SUBREAPER, int(adopt))


def set_title(title: str) -> None:
    """Show `title` as the command line of this process, as far as it has room there, on Linux."""
    fields = stat_fields("self")
    begin, end = map(int, fields[45:47] or (0, 0))  # arg_start and arg_end in proc(5)
    if end > begin > 0:
        text = title.encode()[: end - begin - 1].ljust(end - begin, b"\0")
        ctypes.memmove(begin, text, len(text))


def _control(operation: int, value: int) -> None:
    if sys.platform == "linux":
        load_libc().prctl(operation, value, 0, 0, 0)


@functools.cache
def load_libc() -> Any:
    """Return the C library of this process."""
    return ctypes.CDLL(None)


def find_children() -> set[int]:
    """Return the children of this process, ended ones included; none if the system does not say."""
    found: set[int] = set()
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(map(int, children.read_text().split()))
    return found


def reap_children(spare: Collection[int]) -> None:
    """Reap the children of this process that have ended, except `spare`."""
    for pid in find_children().difference(spare):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def end_processes(
    folder: Path | None, root: int | None = None, spare: Collection[int] = ()
) -> None:
    """Kill the descendants of `root`, and all processes that inherited a path in `folder`.

    This process stays, and so do those in `spare` and their descendants. Nothing happens where the
    system does not list its processes, as Linux does.
    """
    kept = {os.getpid(), *spare}
    deadline = time.monotonic() + _TIME_TO_END
    while (found := _find(folder, root, spare) - kept) and time.monotonic() < deadline:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except PermissionError:
                kept.add(pid)  # it belongs to another user now
        time.sleep(_PAUSE)


def find_descendants(root: int) -> set[int]:
    """Return the processes that `root` has started, directly or not, as far as they live."""
    return _find(None, root, ())


def stat_fields(pid: int | str) -> list[bytes]:
    """Return the fields of proc(5) stat from the state on; none if the system does not say."""
    with contextlib.suppress(OSError):
        return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()  # a name may hold anything
    return []


def _find(folder: Path | None, root: int | None, spare: Collection[int]) -> set[int]:
    """Return the living descendants of `root`, and the living processes that inherited `folder`."""
    mark = None if folder is None else os.fsencode(folder) + b"/"
    found: set[int] = set()
    parents: dict[int, int] = {}
    spare_set = set(spare)
    try:
        names = os.listdir("/proc")  # noqa: PTH208 - there may be thousands, and pathlib is slow
    except OSError:
        return found
    for name in filter(str.isdecimal, names):
        try:
            state, parent, *_ = stat_fields(name)
            if state in (b"Z", b"X"):
                continue
            parents[int(name)] = int(parent)
            if mark is not None and mark in _read(f"/proc/{name}/environ"):
                found.add(int(name))
        except (OSError, ValueError):
            continue  # it has ended meanwhile, or belongs to another user
    for pid in parents if root is not None else ():
        line = [pid]
        while (above := parents.get(line[-1], 0)) not in (0, root):
            line.append(above)
        if above == root and not spare_set.intersection(line):
            found.update(line)
    return found


def _read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 - pathlib is slow
        return file.read()


# -- another process -------------------------------------------------------------------------------


class ProcessIdentity(NamedTuple):
    """Identifies one process, even after another process has got its number."""

    pid: int
    started: int  #: clock ticks since boot
    namespace: int  #: of pids

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Return the identity of the living process `pid`; None if the system does not say."""
        fields = stat_fields(pid)
        try:
            namespace = Path(f"/proc/{pid}/ns/pid").stat().st_ino
        except OSError:
            return None
        return cls(pid, int(fields[19]), namespace) if fields else None

    def is_gone(self, namespace: int) -> bool:
        """Return whether the process is known, in this namespace, to have ended, reaped or not."""
        if not self.started or self.namespace != namespace:
            return False
        fields = stat_fields(self.pid)
        return not fields or fields[0] in (b"Z", b"X") or int(fields[19]) != self.started

    @classmethod
    def own(cls) -> ProcessIdentity:
        """Return that of this process; where the system has none, one that fits no process."""
        return cls.of(os.getpid()) or cls(os.getpid(), 0, 0)


def _is_hidden(pid: int) -> bool:
    """Return whether this process may not inspect the process `pid`."""
    try:
        Path(f"/proc/{pid}/ns/pid").stat()
    except PermissionError:
        return True
    except OSError:
        pass
    return False


class ProcessWatch:
    """Watches another process; made while that lives.

    On Linux this is a pidfd: it becomes readable when the process ends, and it never refers to
    another process. On other systems it knows nothing, and the process's lock must be enough.
    """

    def __init__(self, who: ProcessIdentity) -> None:
        self._who = who
        self.fd = -1  #: becomes readable when the process ends; negative if there is none
        namespace = ProcessIdentity.own().namespace
        if sys.platform != "linux" or namespace != who.namespace or not who.started:
            return
        with contextlib.suppress(OSError, OverflowError):  # a damaged number belongs to no process
            self.fd = os.pidfd_open(who.pid)
        if self.fd >= 0 and ProcessIdentity.of(who.pid) not in (who, None):
            self.close()  # the number has passed on to another process

    def has_ended(self, within: float = 0.0) -> bool:
        """Return whether the process is known to have ended, having waited so many seconds."""
        if self.fd < 0:
            return False
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return any(event & select.POLLIN for _, event in poll.poll(within * 1000))

    def exit_status(self) -> int | None:
        """Return how the process ended, as :func:`os.waitstatus_to_exitcode`; None if unknown."""
        if self.fd < 0:
            return None
        status = self._reaped_status()
        if status is None:
            status = self._zombie_status()
        return None if status is None else os.waitstatus_to_exitcode(status)

    def _reaped_status(self) -> int | None:
        """Ask the pidfd: since Linux 6.15 it remembers how a reaped process ended."""
        import fcntl  # not there on Windows

        # struct pidfd_info, first version: mask, cgroup, eleven ids, exit code. pidfd(2) ioctl 11.
        wants_exit, size = 1 << 3, 64
        request = (3 << 30) | (size << 16) | (0xFF << 8) | 11
        info = bytearray(struct.pack("<Q", wants_exit).ljust(size, b"\0"))
        try:
            fcntl.ioctl(self.fd, request, info)
        except OSError:
            return None
        (mask,) = struct.unpack_from("<Q", info)
        return struct.unpack_from("<i", info, 60)[0] if mask & wants_exit else None

    def _zombie_status(self) -> int | None:
        """Ask proc(5), which knows it until the parent has reaped the process."""
        hidden = _is_hidden(self._who.pid)  # asked first: a process that is reaped is not hidden
        fields = stat_fields(self._who.pid)
        if len(fields) < 50 or fields[0] != b"Z" or int(fields[19]) != self._who.started:
            return None
        status = int(fields[49])
        # The system shows 0 to those who may not know: this process has another user now.
        return None if status == 0 and hidden else status

    def close(self) -> None:
        """Stop watching."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
