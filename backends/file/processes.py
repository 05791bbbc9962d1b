"""What the system knows of another process of this host: whether it lives, and how it ended.

The word of a rank is one thing, this is the other: a killed process leaves no word.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import sys
from pathlib import Path
from typing import NamedTuple


class Identity(NamedTuple):
    """One process, told apart from a later one with the same number."""

    pid: int
    started: int  #: clock ticks since boot
    namespace: int  #: pids mean something only inside theirs

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """Return the identity of the living process `pid`, or None where it cannot be told."""
        fields = _stat_fields(pid)
        try:
            namespace = Path(f"/proc/{pid}/ns/pid").stat().st_ino
        except OSError:
            return None
        return cls(pid, int(fields[19]), namespace) if fields else None


def myself() -> Identity:
    """Return this process's identity; where the system gives none, one that fits no process."""
    return Identity.of(os.getpid()) or Identity(os.getpid(), 0, 0)


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of proc(5) stat from the state on; none if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text[text.rindex(")") + 2 :].split()  # the name before may hold anything


class Watch:
    """An eye on another process, opened while it lives.

    On Linux it is a pidfd: it becomes readable the moment the process ends, and it never means
    another process. Elsewhere it sees nothing, and the process's lock must do.
    """

    def __init__(self, who: Identity) -> None:
        self._who = who
        self._fd = -1
        mine = myself()
        if sys.platform != "linux" or mine.namespace != who.namespace or not who.started:
            return
        with contextlib.suppress(OSError, OverflowError):  # a damaged number is nobody's
            self._fd = os.pidfd_open(who.pid)
        if self._fd >= 0 and Identity.of(who.pid) not in (who, None):
            self.close()  # the number has passed on to another process

    @property
    def fd(self) -> int:
        """The descriptor that becomes readable; negative where there is none."""
        return self._fd

    @property
    def sees(self) -> bool:
        """False where it cannot tell."""
        return self._fd >= 0

    def ended(self, within: float = 0.0) -> bool:
        """Tell whether the process is known to have ended, waiting so many seconds for it."""
        if self._fd < 0:
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return any(event & select.POLLIN for _, event in poll.poll(within * 1000))

    def exit_status(self) -> int | None:
        """Return how the process ended, as :func:`os.waitstatus_to_exitcode`; None if unknown."""
        status = self._reaped_status()
        if status is None:
            status = self._zombie_status()
        return None if status is None else os.waitstatus_to_exitcode(status)

    def _reaped_status(self) -> int | None:
        """Ask the pidfd: since Linux 6.15 it remembers how a reaped process ended."""
        if self._fd < 0:
            return None
        import fcntl

        # struct pidfd_info, first version: mask, cgroup, eleven ids, exit code. pidfd(2) ioctl 11.
        wants_exit, size = 1 << 3, 64
        request = (3 << 30) | (size << 16) | (0xFF << 8) | 11
        info = bytearray(struct.pack("<Q", wants_exit).ljust(size, b"\0"))
        try:
            fcntl.ioctl(self._fd, request, info)
        except OSError:
            return None
        (mask,) = struct.unpack_from("<Q", info)
        return struct.unpack_from("<i", info, 60)[0] if mask & wants_exit else None

    def _zombie_status(self) -> int | None:
        """Ask proc(5), which knows it until the parent has reaped the process."""
        fields = _stat_fields(self._who.pid) if self._fd >= 0 else []
        if len(fields) < 50 or fields[0] != "Z" or int(fields[19]) != self._who.started:
            return None
        return int(fields[49])

    def close(self) -> None:
        """Close the eye."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def describe_exit(status: int | None) -> str:
    """Return ``killed by SIGKILL``, ``exit code 3``, or that it is not known."""
    if status is None:
        return "its process is gone, how is not known"
    if status >= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"killed by {name}"
