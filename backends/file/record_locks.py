"""Record locks: each rank locks one byte of a file that all ranks keep open.

The kernel frees the lock when the process ends or runs another program. Unlike the lock of an open
file, no child inherits it, so a child that outlives its rank does not hold it. One system call
shows whether another rank holds its lock. It needs neither a path nor a permission.

A process must open the file only once: closing it anywhere frees all locks of the process on it. A
program that reads all files of a directory does that, so a free lock alone proves no end.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .private_dir import PrivateDirectory

_FILE = "locks"
_LINUX = sys.platform == "linux"
#: Linux can also ask about locks of this very process, which matters where two ranks share one.
_ASK = fcntl.F_OFD_GETLK if _LINUX else fcntl.F_GETLK


class RecordLocks:
    """The locks of one world's ranks, of which this process holds that of `rank`."""

    def __init__(self, directory: PrivateDirectory, rank: int) -> None:
        """Take the lock of `rank`.

        :raises ConfigurationError: if the file is something else.
        :raises OSError: if another process holds the lock.
        """
        self._fd = directory.open_file(_FILE, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except BaseException:
            os.close(self._fd)
            raise

    def is_free(self, rank: int) -> bool:
        """Return whether no process holds the lock of `rank`; False if the system does not say."""
        try:
            found = fcntl.fcntl(self._fd, _ASK, _pack(fcntl.F_WRLCK, rank))
        except OSError:
            return False
        return _type_of(found) == fcntl.F_UNLCK

    def close(self) -> None:
        """Free this rank's lock. In a forked child, the parent keeps it."""
        os.close(self._fd)


def _pack(kind: int, at: int) -> bytes:
    """Return a ``struct flock`` for the byte `at`."""
    if _LINUX:
        return struct.pack("@hhqqi0q", kind, os.SEEK_SET, at, 1, 0)
    return struct.pack("@qqihh0q", at, 1, 0, kind, os.SEEK_SET)  # macOS and the BSDs


def _type_of(flock: bytes) -> int:
    kind: int = struct.unpack_from("@h", flock, 0 if _LINUX else 20)[0]
    return kind
