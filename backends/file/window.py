"""Memory for arrays in bulk: a file that all members of a board map, of a fixed size.

A window is what arrays pass through, slot by slot, so that it stays in the processors' caches and
costs the same for any array. It is made when the first array comes, and as small as the directory's
room demands.
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import TYPE_CHECKING

from syncprims.errors import ConfigurationError
from syncprims.interface import Window

from .memory import allocate

if TYPE_CHECKING:
    from .private_dir import PrivateDirectory

#: Bytes of a window, by preference. A member needs a share of it, so that many members need more.
_SIZES, _LEAST_PER_MEMBER = (8 << 20, 2 << 20, 1 << 19), 64 << 10


class SharedWindow:
    """The window of a board with `count` members, in the file `name` of `directory`."""

    def __init__(self, directory: PrivateDirectory, name: str, count: int) -> None:
        """Map the file, having made it with the others; no lock that a stopped one could hold.

        :raises ConfigurationError: if the file is something else.
        :raises OSError: if there is no room for the smallest.
        """
        fd = directory.open_file(name, os.O_RDWR | os.O_CREAT)
        try:
            size = _agree(fd, directory, name, count)
            if os.fstat(fd).st_size < size:  # to touch what is missing would kill
                raise ConfigurationError(
                    f"{directory.path / name} has been cut off; end what is left of the run"
                )
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._memory = memoryview(self._map)
        # A lock that is always taken: to give it back and take it again is a full fence, on weakly
        # ordered processors too (a release, then an acquire; either alone would let stores pass).
        self._lock = threading.Lock()
        self._lock.acquire()
        self.window = Window(self._memory, self._fence)

    def _fence(self) -> None:
        self._lock.release()
        self._lock.acquire()

    def close(self) -> None:
        """Let go of the memory, unless somebody still looks at it: then at the process's end."""
        try:
            self._memory.release()
            self._map.close()
        except BufferError:
            pass


def _agree(fd: int, directory: PrivateDirectory, name: str, count: int) -> int:
    """Return the size that all members use: what the first to name one has made room for."""
    claim = f"{name}-size"
    agreed = directory.claimed(claim)
    if agreed is None:
        agreed = directory.claim(claim, str(_make_room(fd, directory, name, count)))
    if not agreed.isdecimal():
        raise ConfigurationError(f"{directory.path / claim} is no size; remove it")
    return int(agreed)


def _make_room(fd: int, directory: PrivateDirectory, name: str, count: int) -> int:
    """Give the window the largest size that there is room for. Others may do so at this moment."""
    for wanted in _SIZES:
        size = max(wanted, count * _LEAST_PER_MEMBER)
        try:
            allocate(fd, size)
        except OSError as error:
            if wanted == _SIZES[-1]:
                raise OSError(
                    error.errno,
                    f"{error.strerror}, making room for {size} bytes that arrays pass through; "
                    f"free some space, or set SYNCPRIMS_DIR to a place with more",
                    str(directory.path / name),
                ) from error
        else:
            return size
    raise AssertionError("unreachable: there are sizes to try")
