"""The file system, as checkpoints use it. Every call of theirs that touches it is made here.

So a test that replaces this module's ``os`` sees every one of them, and can let each fail, kill the
process before it, or record it. Errors are `OSError` with the path in them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

PIECE = 4 << 20  #: bytes written at once: small enough that what was just digested is still at hand
_BEHIND = 16 << 20  # bytes after which the disk is asked to begin with them

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a planted FIFO must not hold anybody up
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
        self._size = 0
        self._begun = 0  # of these bytes the disk has been told

    def write(self, data: memoryview | bytes) -> None:
        """Append all of `data`."""
        left = memoryview(data)
        with _about(self.path):
            while left:
                done = os.write(self._fd, left)
                left, self._size = left[done:], self._size + done
        if self._size - self._begun >= _BEHIND:
            self._begin()

    def _begin(self) -> None:
        """Let the disk begin with what has been written, so that the sync has little to wait for.

        Linux starts to write what it is told will not be needed. Only a hint: whether the disk has
        it, and what went wrong, the sync says.
        """
        begun, self._begun = self._begun, self._size
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, begun, self._size - begun, os.POSIX_FADV_DONTNEED)

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


class OldFile:
    """A regular file to read from: the same one, whatever gets its name meanwhile.

    Read, and not mapped: what the disk cannot give is an error here, and would be a signal there.

    :raises OSError: also if it is a link (unless `follow`), no regular file, or empty.
    """

    def __init__(self, path: str, *, follow: bool = False) -> None:
        self.path = path
        with _about(path):
            self._fd, found = _open_regular(path, follow)
        self.size = found.st_size
        self._changed = found.st_mtime_ns
        if self.size == 0:
            self.close()
            raise OSError(errno.ENODATA, "the file is empty", path)

    def read_into(self, room: memoryview, offset: int) -> None:
        """Fill `room` with what begins at `offset`. Any number of threads may do so at once."""
        with _about(self.path):
            while room:
                done = os.preadv(self._fd, [room], offset)
                if done == 0:
                    raise OSError(errno.ENODATA, "the file was cut off while it was read")
                room, offset = room[done:], offset + done

    def read(self, offset: int, size: int) -> bytes:
        """Return so many bytes from `offset` on."""
        data = bytearray(size)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def check_unchanged(self) -> None:
        """Return only if nobody has written to it since it was opened.

        :raises OSError: otherwise.
        """
        with _about(self.path):
            found = os.fstat(self._fd)
            if (found.st_size, found.st_mtime_ns) != (self.size, self._changed):
                raise OSError(errno.ESTALE, "the file was changed while it was read")

    def close(self) -> None:
        """Let go of it. Nothing happens the second time."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def read_small(path: str, most: int, *, follow: bool = False) -> bytes:
    """Return the content of a regular file of at most `most` bytes.

    :raises OSError: also if it is a link (unless `follow`), no regular file, or longer.
    """
    with _about(path):
        fd, found = _open_regular(path, follow)
        try:
            if found.st_size > most:
                what = f"the file has {found.st_size} bytes, and may have {most}"
                raise OSError(errno.EFBIG, what, path)
            chunks: list[bytes] = []
            while chunk := os.read(fd, 1 << 20):
                chunks.append(chunk)
            return b"".join(chunks)
        finally:
            os.close(fd)


def _open_regular(path: str, follow: bool) -> tuple[int, os.stat_result]:
    fd = os.open(path, _READ if follow else _READ | os.O_NOFOLLOW)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
    except BaseException:
        os.close(fd)
        raise
    return fd, found


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


def absolute(path: str) -> str:
    """Return where a name leads now, for a later chdir must not matter.

    What is above a link is above what that leads to, as it is for everybody who opens the name.
    """
    above = os.pardir in path.split("/")
    return os.path.realpath(path) if above else os.path.abspath(path)  # noqa: PTH100


def replaceable(path: str) -> str:
    """Return the name that a new content of the file `path` is to get: where its links lead.

    :raises OSError: if there is anything else than a regular file.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
            what = "not a regular file, and would be replaced: to write into it, open it, pass that"
            raise OSError(errno.EINVAL, what, path)
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISLNK(os.lstat(path).st_mode):
            return os.path.realpath(path)
    return path


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
            made.append(path)
        except FileExistsError:
            if not is_directory(path):  # else somebody has made it meanwhile
                what = "there is something else in place of a directory"
                raise OSError(errno.ENOTDIR, what, path) from None
        sync_directory(parent)
    except BaseException:
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
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems have no such thing
                raise
        finally:
            os.close(fd)


def rename(source: str, target: str) -> None:
    """Give `source` the name `target`, in place of what had it, in one step."""
    os.rename(source, target)  # noqa: PTH104


def remove(path: str) -> bool:
    """Remove a file, and tell whether there was one."""
    try:
        os.unlink(path)  # noqa: PTH108
    except FileNotFoundError:
        return False
    return True


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
