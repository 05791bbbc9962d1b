"""Memory for arrays in bulk: a file that all members of a board map, of a fixed size.

A window is what arrays pass through, slot by slot, so that it stays in the processors' caches and
costs the same for any array. It is made when the first array comes, and as small as the directory's
room demands.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from typing import TYPE_CHECKING

from syncprims.errors import ConfigurationError
from syncprims.interface import Window

from .cells import lay

if TYPE_CHECKING:
    from .private_dir import PrivateDirectory

#: Bytes of a window, by preference. A member needs a share of it, so that many members need more.
_SIZES, _LEAST_PER_MEMBER = (8 << 20, 2 << 20, 1 << 19), 64 << 10
_MAGIC = b"syncprims window 1"
_HEADER = struct.Struct("<32sQ")  # magic, bytes


class SharedWindow:
    """The window of a board with `count` members, in the file `name` of `directory`."""

    def __init__(self, directory: PrivateDirectory, name: str, count: int) -> None:
        """Map the file, making it if it is not there; under the run's join lock.

        :raises ConfigurationError: if the file is something else.
        :raises OSError: if there is no room for the smallest.
        """
        fd = directory.open_file(name, os.O_RDWR | os.O_CREAT)
        try:
            size = _size_of(fd) or _make(fd, directory, name, count)
            if os.fstat(fd).st_size != mmap.PAGESIZE + size:
                raise ConfigurationError(
                    f"{directory.path / name} is no window of {count} ranks; remove the file, and "
                    f"start all ranks from one installation"
                )
            self._map = mmap.mmap(fd, mmap.PAGESIZE + size)
        finally:
            os.close(fd)
        self._memory = memoryview(self._map)
        # A lock that is always taken: to give it back and take it again is a full fence, on weakly
        # ordered processors too (a release, then an acquire; either alone would let stores pass).
        self._lock = threading.Lock()
        self._lock.acquire()
        self.window = Window(self._memory[mmap.PAGESIZE :], self._fence)

    def _fence(self) -> None:
        self._lock.release()
        self._lock.acquire()

    def close(self) -> None:
        """Let go of the memory, unless somebody still looks at it: then at the process's end."""
        try:
            self.window.memory.release()
            self._memory.release()
            self._map.close()
        except BufferError:
            pass


def _size_of(fd: int) -> int:
    magic, size = _HEADER.unpack(os.pread(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))
    return int(size) if magic.rstrip(b"\0") == _MAGIC else 0


def _make(fd: int, directory: PrivateDirectory, name: str, count: int) -> int:
    """Give the window the largest size that there is room for."""
    for wanted in _SIZES:
        size = max(wanted, count * _LEAST_PER_MEMBER)
        try:
            lay(fd, mmap.PAGESIZE + size, _HEADER.pack(_MAGIC, size))
        except OSError as error:
            os.ftruncate(fd, 0)
            if wanted == _SIZES[-1]:
                directory.remove(name)
                raise OSError(
                    error.errno,
                    f"{error.strerror}, making room for {size} bytes that arrays pass through; "
                    f"free some space, or set SYNCPRIMS_DIR to a place with more",
                    str(directory.path / name),
                ) from error
        else:
            return size
    raise AssertionError("unreachable: there are sizes to try")
