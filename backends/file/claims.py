"""Claims: the first process to claim a name decides what it represents.

A claim is a line that a process appends to a file of the world. The kernel puts the lines of all
processes one after another, and the first line about a name holds for all. No lock is held, so a
process that is stopped or killed on the way delays no other. The file stays open, so claims also
work when the directory has been removed under the run.
"""

from __future__ import annotations

import errno
import os
import zlib

from .private_dir import PrivateDirectory

_MOST = 1 << 20  # bytes: thousands of claims, where a run makes a few


class Claims:
    """The claims in a file of `directory`."""

    def __init__(self, directory: PrivateDirectory, file: str = "claims") -> None:
        """Open `file`, by default that of the world, creating it if it is not there.

        :raises ConfigurationError: if it is something else.
        """
        self._fd = directory.open_file(file, os.O_RDWR | os.O_APPEND | os.O_CREAT)

    def decide(self, name: str, value: str = "") -> str:
        """Return what `name` stands for; with `value`, claim it first, unless it is claimed.

        :raises OSError: if there is no space for another claim.
        """
        found = self._find(name)
        if not found and value:
            # Between two line ends: a line that a full disk has cut off damages no other line.
            os.write(self._fd, b"\n%s\n" % _line(name, value))
            found = self._find(name)
            if not found:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        return found

    def _find(self, name: str) -> str:
        for line in os.pread(self._fd, _MOST, 0).splitlines():
            claim = line.decode(errors="replace").split()
            if len(claim) == 3 and claim[1] == name and line == _line(*claim[1:]):
                return claim[2]
        return ""

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _line(name: str, value: str) -> bytes:
    text = f"{name} {value}".encode()
    return b"%08x %s" % (zlib.crc32(text), text)
