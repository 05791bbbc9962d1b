"""The identity of another process of this host, and how it ended, as the system reports it."""

from __future__ import annotations

import contextlib
import os
import select
import struct
import sys
from pathlib import Path
from typing import NamedTuple

from .processes import stat_fields


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
