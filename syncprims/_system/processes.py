"""Processes of this machine: end one with its parent, and end all that one has started.

A process that moves to a session of its own leaves its process group. A process whose parent ends
leaves its place in the tree. So the processes of a launch are also found by what they inherit: a
variable with the path of its scratch directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

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
