"""Locks on files: all that the library locks, it locks here.

A lock belongs to one opening of a file: forked processes share it, and the kernel frees it when the
last of them has closed the file or died. This makes it a proof of life (ranks, scratch
directories), and none of these locks is ever stale.

An exclusive lock is filelock's `lock_descriptor`, which also works on Windows. Its `FileLock` opens
the file itself, by a path that others could replace, and is of no use for a directory, or for a
file that exists under its name only while it is locked. filelock is loaded by the first exclusive
lock, since it is slow to import. It has no shared locks, so those are `flock` itself, which is the
same lock on POSIX. Whether a process lives is asked with a shared one, so that two that ask at the
same moment do not see each other.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from collections.abc import Generator


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file until it is closed, unless another opening of it has the lock.

    :raises OSError: if the file cannot be locked at all, as on a file system without locks.
    """
    if not shared:
        import filelock

        return filelock.lock_descriptor(fd, blocking=False)
    import fcntl  # not there on Windows

    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_free(path: str | os.PathLike[str], dir_fd: int | None = None) -> bool:
    """Return whether no process holds the lock of a file; not if it cannot be seen."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        fd = os.open(path, flags, dir_fd=dir_fd)
        try:
            return try_lock(fd, shared=True)
        finally:
            os.close(fd)
    return False


def identify_kernel() -> str:
    """Return what this start of this system is called; "" if it is not Linux.

    On some file systems a lock is not seen by other hosts.
    """
    path = "/proc/sys/kernel/random/boot_id"
    with contextlib.suppress(OSError), open(path, encoding="ascii") as file:  # noqa: PTH123
        return file.read().strip()
    return ""


def lock(fd: int, timeout: float = math.inf) -> None:
    """Wait for the lock of an open file.

    :raises BlockingIOError: if another opening has held it for `timeout` seconds.
    :raises OSError: as :func:`try_lock`.
    """
    deadline, pause = time.monotonic() + timeout, 0.0005
    while not try_lock(fd):
        if time.monotonic() > deadline:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        time.sleep(pause)
        pause = min(1.2 * pause, 0.05)


def unlock(fd: int) -> None:
    """Free the lock at once, also where a forked process has the same open file."""
    import filelock

    with contextlib.suppress(OSError):
        filelock.unlock_descriptor(fd)


@contextlib.contextmanager
def locked(fd: int) -> Generator[None]:
    """Hold the lock of an open file in the body.

    :raises OSError: as :func:`try_lock`.
    """
    lock(fd)
    try:
        yield
    finally:
        unlock(fd)
