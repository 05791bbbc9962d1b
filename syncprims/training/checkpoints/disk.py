"""The file system, as checkpoints use it. Every call of theirs that touches it is made here.

So a test that replaces this module's ``os`` sees every one of them, and can let each fail, kill the
process before it, or record it. Errors are `OSError` with the path in them.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

PIECE = 4 << 20  #: bytes written at once: small enough that what was just digested is still at hand

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a planted FIFO must not hold anybody up
_POPULATE = 22  # MADV_POPULATE_READ of Linux 5.14: all page tables at once
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def _about(path: str) -> Generator[None]:
    """Let an OSError name the path: those of `write` and `fsync` know only a number."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


class NewFile:
    """A file that did not exist. Its mode is what the umask says."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, _NEW, 0o666)

    def write(self, data: memoryview | bytes) -> None:
        """Append all of `data`."""
        left = memoryview(data)
        with _about(self.path):
            while left:
                left = left[os.write(self._fd, left) :]

    def write_at(self, data: bytes, offset: int) -> None:
        """Write all of `data` over what is at `offset`."""
        with _about(self.path):
            while data:
                done = os.pwrite(self._fd, data, offset)
                data, offset = data[done:], offset + done

    def finish(self) -> None:
        """Return when the disk has it all. A failed sync is not tried again: it would only lie."""
        fd, self._fd = self._fd, -1
        with _about(self.path):
            try:
                os.fsync(fd)
            except OSError:
                with contextlib.suppress(OSError):
                    os.close(fd)
                raise
            os.close(fd)

    def abandon(self) -> None:
        """Close it, whatever state it is in."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def write_small(path: str, data: bytes) -> None:
    """Make the file `path` with this content; return when the disk has it."""
    file = NewFile(path)
    try:
        file.write(data)
        file.finish()
    finally:
        file.abandon()


def map_file(path: str, *, follow: bool = False) -> mmap.mmap:
    """Return the content of a regular file, mapped: changes to the memory never reach the file.

    :raises OSError: also if it is a link (unless `follow`), no regular file, or empty.
    """
    with _about(path):
        fd, size = _open_regular(path, follow)
        try:
            if size == 0:
                raise OSError(errno.ENODATA, "the file is empty", path)
            data = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
            with contextlib.suppress(OSError):  # an older kernel: then page by page
                data.madvise(_POPULATE)
            return data
        finally:
            os.close(fd)


def read_small(path: str, most: int, *, follow: bool = False) -> bytes:
    """Return the content of a regular file of at most `most` bytes.

    :raises OSError: also if it is a link (unless `follow`), no regular file, or longer.
    """
    with _about(path):
        fd, size = _open_regular(path, follow)
        try:
            if size > most:
                raise OSError(errno.EFBIG, f"the file has {size} bytes, and may have {most}", path)
            chunks: list[bytes] = []
            while chunk := os.read(fd, 1 << 20):
                chunks.append(chunk)
            return b"".join(chunks)
        finally:
            os.close(fd)


def _open_regular(path: str, follow: bool) -> tuple[int, int]:
    fd = os.open(path, _READ if follow else _READ | os.O_NOFOLLOW)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
    except BaseException:
        os.close(fd)
        raise
    return fd, found.st_size


def names(directory: str) -> list[str]:
    """Return what is in a directory, in order; nothing if there is none."""
    try:
        return sorted(os.listdir(directory))  # noqa: PTH208 - names are wanted, through this `os`
    except FileNotFoundError:
        return []


def exists(path: str) -> bool:
    """Tell whether there is anything of this name, be it a link to nowhere."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_directory(path: str) -> bool:
    """Tell whether this is a directory, or a link to one."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return False


def make_directory(path: str) -> list[str]:
    """Make a directory and what is missing above it, durably; return what was made, top first.

    :raises OSError: if there is something else of that name; then nothing is left of it.
    """
    if is_directory(path):
        return []
    parent = os.path.dirname(path) or os.curdir  # noqa: PTH120
    made = make_directory(parent) if parent != path else []
    try:
        try:
            os.mkdir(path)  # noqa: PTH102
        except FileExistsError:
            what = "there is something else in place of a directory"
            raise OSError(errno.ENOTDIR, what, path) from None
        made.append(path)
        sync_directory(parent)
    except OSError:
        unmake_directories(made)
        raise
    return made


def unmake_directories(made: list[str]) -> None:
    """Remove directories that were made, unless there is something in them by now."""
    for path in reversed(made):
        with contextlib.suppress(OSError):
            os.rmdir(path)  # noqa: PTH106


def sync_directory(path: str) -> None:
    """Return when the disk has the names in a directory."""
    with _about(path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def rename(source: str, target: str) -> None:
    """Give `source` the name `target`, in place of what had it, in one step."""
    os.rename(source, target)  # noqa: PTH104


def remove(path: str) -> None:
    """Remove a file; nothing happens if there is none."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108


def remove_directory(path: str) -> None:
    """Remove a directory and all that is in it; nothing happens if there is none."""
    for name in names(path):
        inner = f"{path}/{name}"
        with contextlib.suppress(FileNotFoundError):  # its owner may be removing it, too
            if stat.S_ISDIR(os.lstat(inner).st_mode):
                remove_directory(inner)
            else:
                remove(inner)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)  # noqa: PTH106
