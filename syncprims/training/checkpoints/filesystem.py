"""The file system as checkpoints use it: every call that touches it is made in this module.

A test that replaces this module's ``os`` sees each call: it can record it, make it fail, or kill
the process before it. Errors are `OSError` and carry the path.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

from syncprims import CheckpointError, ConfigurationError
from syncprims._system.locks import try_lock, unlock

LOG = logging.getLogger("syncprims")
_LONGEST = 512 << 20  # bytes of a file that is read as a whole
_WRITEBACK = 16 << 20  # bytes after which the kernel is asked to start writing to the disk

_WINDOWS = sys.platform == "win32"
_BINARY: int = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)  # systems lack some flags
_NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)
_READ = os.O_RDONLY | _BINARY | getattr(os, "O_NONBLOCK", 0)  # opening a FIFO must not block
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK | _BINARY


@contextlib.contextmanager
def _naming(path: str) -> Generator[None]:
    """Add the path to an OSError: `write` and `fsync` know only a file descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise


class _Opened:
    """Something that is open."""

    _fd = -1  # its descriptor; none: it is closed

    def close(self) -> None:
        """Close it, if it is open. What was written is not synced."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


class NewFile(_Opened):
    """A new file, open for writing. The umask decides its mode. `torch.save` can write to it.

    :raises OSError: if there is already something of that name.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, _NEW, 0o666)
        self._size = 0
        self._started = 0  # bytes whose write-back was started
        self.error: OSError | None = None  #: of a write: torch raises another one instead

    def write(self, data: memoryview | bytes) -> int:
        """Append all of `data`, and return its size."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            with _naming(self.path):
                while left:
                    done = os.write(self._fd, left)
                    left = left[done:]
        except OSError as error:
            self.error = error
            raise
        self._size += size
        self._start_writing_back()
        return size

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def _start_writing_back(self) -> None:
        size = self._size - self._started
        if size >= _WRITEBACK and sys.platform == "linux":
            # The kernel then starts writing to the disk, and the final sync waits less. It is only
            # a hint: the sync reports errors.
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, self._started, size, os.POSIX_FADV_DONTNEED)
            self._started = self._size

    def write_at(self, data: bytes, offset: int) -> None:
        """Overwrite the bytes at `offset` with all of `data`."""
        with _naming(self.path):
            os.lseek(self._fd, offset, os.SEEK_SET)  # Windows has no pwrite
            while data:
                data = data[os.write(self._fd, data) :]

    def finish(self) -> None:
        """Sync and close the file. A failed sync is not retried: that could wrongly succeed."""
        with _naming(self.path):
            os.fsync(self._fd)
            fd, self._fd = self._fd, -1
            os.close(fd)


def write_small(path: str, data: bytes) -> None:
    """Write a new file `path` with this content, and sync it."""
    with contextlib.closing(NewFile(path)) as file:
        file.write(data)
        file.finish()


_position = threading.Lock()  # of an open file on Windows, where a read begins at it


def _read_some(fd: int, buffer: memoryview, offset: int) -> int:
    if not _WINDOWS:
        return os.preadv(fd, [buffer], offset)
    with _position:
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, min(len(buffer), _WRITEBACK))
    buffer[: len(data)] = data
    return len(data)


class ExistingFile(_Opened):
    """A regular file, open for reading. It stays the same file if its name is replaced.

    It is read and not memory-mapped: a disk error is then an exception, not a signal.

    :raises OSError: also if it is a link (unless `follow`), not a regular file, or empty.
    """

    def __init__(self, path: str, *, follow: bool = False) -> None:
        self.path = path
        self._fd = os.open(path, _READ if follow else _READ | _NO_LINK)
        try:
            with _naming(path):
                found = os.fstat(self._fd)
                if not stat.S_ISREG(found.st_mode):
                    raise OSError(errno.EINVAL, "not a regular file")
                if found.st_size == 0:
                    raise OSError(errno.ENODATA, "the file is empty")
        except BaseException:
            self.close()
            raise
        self.size: int = found.st_size
        self._modified = found.st_mtime_ns

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes from `offset` on. Several threads may call it at once."""
        with _naming(self.path):
            while buffer:
                done = _read_some(self._fd, buffer, offset)
                if done == 0:
                    raise OSError(errno.ENODATA, "the file was cut off while it was read")
                buffer, offset = buffer[done:], offset + done

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on."""
        data = bytearray(size)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def check_unchanged(self) -> None:
        """Raise if the file was written to since it was opened.

        :raises OSError: with ``ESTALE``.
        """
        with _naming(self.path):
            found = os.fstat(self._fd)
            if (found.st_size, found.st_mtime_ns) != (self.size, self._modified):
                raise OSError(errno.ESTALE, "the file was changed while it was read")


def read_small(path: str, *, follow: bool = False) -> bytes:
    """Return the content of a regular file: one that lists others, or reports.

    :raises OSError: as :class:`ExistingFile`, and if it is too long for such a file.
    """
    with contextlib.closing(ExistingFile(path, follow=follow)) as file:
        if file.size > _LONGEST:
            what = f"the file has {file.size} bytes, and may have {_LONGEST}"
            raise OSError(errno.EFBIG, what, path)
        return file.read(0, file.size)


def names(directory: str) -> list[str]:
    """Return the sorted names in a directory; an empty list if there is no directory."""
    try:
        return sorted(os.listdir(directory))  # noqa: PTH208 - through this module's `os`
    except FileNotFoundError:
        return []


def path_of(given: Any, what: str, takes: str = "a str or a path") -> str:
    """Return a path as a str.

    :raises TypeError: if it is neither a str nor a path.
    :raises ConfigurationError: if nothing can have this name.
    """
    path = os.fspath(given)
    if not isinstance(path, str):
        raise TypeError(f"{what}={given!r}: it takes {takes}")
    if not is_possible(path):
        what = f"{what}={given!r}: no file has a name with NUL, or with half of a character, in it"
        raise ConfigurationError(f"{what}. Read the name again where it comes from.")
    return path


def is_possible(path: str) -> bool:
    """Return whether the system knows such names, whether there is such a file or not."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half of a pair of surrogates
        return False


def _look(path: str, *, follow: bool = True) -> os.stat_result | None:
    try:
        return os.stat(path) if follow else os.lstat(path)  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return None


def exists(path: str) -> bool:
    """Return whether anything has this name, a dangling link included."""
    return _look(path, follow=False) is not None


def is_directory(path: str) -> bool:
    """Return whether this is a directory, or a link to one."""
    status = _look(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def absolute(path: str) -> str:
    """Return the absolute path of a name. A later chdir then does not matter.

    ``..`` after a link is the parent of the link's target, as for every program that opens it.
    """
    above = os.pardir in path.split("/")
    try:
        return os.path.realpath(path) if above else os.path.abspath(path)  # noqa: PTH100
    except FileNotFoundError as error:
        what = f"{path}: something has removed the working directory. Pass an absolute path."
        raise CheckpointError(what, path=path, errno=error.errno) from error


def directory_path(directory: str | os.PathLike[str]) -> str:
    """Return the absolute path of a directory. A later chdir does not change it.

    :raises TypeError: if `directory` is neither a str nor a path.
    :raises ValueError: if it is empty.
    """
    path = path_of(directory, "directory")
    if not path:
        raise ValueError("directory='': it takes a name; '.' is the working directory")
    return absolute(path)


def resolve_target(path: str) -> str:
    """Return the file that a write to `path` replaces: the target, if `path` is a link.

    :raises OSError: if there is something there that is not a regular file.
    """
    status, own = _look(path), _look(path, follow=False)
    if status is not None and not stat.S_ISREG(status.st_mode):
        what = "only a regular file can be replaced: open this, and pass the open file"
        raise OSError(errno.EINVAL, what, path)
    return os.path.realpath(path) if own is not None and stat.S_ISLNK(own.st_mode) else path


def make_directory(path: str) -> None:
    """Make a directory and its missing parents, durably.

    :raises OSError: if something else has that name.
    """
    if is_directory(path):
        return
    parent = os.path.dirname(path) or os.curdir  # noqa: PTH120
    if parent != path:
        make_directory(parent)
    try:
        try:
            os.mkdir(path)  # noqa: PTH102
        except FileExistsError:
            if not is_directory(path):  # else another process just made it
                what = "this exists, and is not a directory"
                raise OSError(errno.ENOTDIR, what, path) from None
        sync_directory(parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.rmdir(path)  # noqa: PTH106
        raise


def sync_directory(path: str) -> None:
    """Sync a directory: the names in it then survive a power loss. Windows has no such call."""
    if _WINDOWS:
        return
    with _naming(path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems do not support it
                raise
        finally:
            os.close(fd)


class DirectoryLock(_Opened):
    """A lock on a directory: at most one program has it. The kernel releases it when that dies.

    It adds no file. Where the file system has no locks, and on Windows, every program gets it.

    :raises BlockingIOError: if another program has it.
    :raises FileNotFoundError: if there is no such directory any more.
    """

    def __init__(self, path: str) -> None:
        if _WINDOWS:
            return
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            taken = True
            try:
                taken = try_lock(self._fd)
            except OSError as error:
                LOG.debug("%s cannot be locked: %s", path, error)
            if not taken:
                raise BlockingIOError(errno.EAGAIN, "locked by another program", path)
            with _naming(path):
                here, there = os.fstat(self._fd), os.stat(path)  # noqa: PTH116
            if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
                raise FileNotFoundError(errno.ENOENT, "replaced by another program", path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock, if it is held."""
        if self._fd >= 0:
            unlock(self._fd)
        super().close()


def rename(source: str, target: str) -> None:
    """Rename atomically. An existing `target` is replaced."""
    os.replace(source, target)  # noqa: PTH105


def remove(path: str) -> bool:
    """Remove a file; return whether there was one."""
    try:
        os.unlink(path)  # noqa: PTH108
    except FileNotFoundError:
        return False
    return True


def remove_directory(path: str) -> None:
    """Remove a directory and everything in it. A missing directory is not an error."""
    for name in names(path):
        inner = f"{path}/{name}"
        with contextlib.suppress(FileNotFoundError):  # its writer may be removing it, too
            if stat.S_ISDIR(os.lstat(inner).st_mode):
                remove_directory(inner)
            else:
                remove(inner)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)  # noqa: PTH106


# -- clean-up, whose failure is logged and not raised ---------------------------------------------


def remove_or_log(path: str, remover: Callable[[str], object] = remove) -> None:
    """Remove a file that is no longer needed; log a failure."""
    try:
        remover(path)
    except OSError as error:
        LOG.warning("could not remove %s (%s): it is no longer needed, remove it", path, error)


def remove_each_or_log(directory: str, is_unneeded: Callable[[str], bool]) -> None:
    """Remove the files in a directory whose names are those of unneeded ones; log a failure."""
    try:
        found = names(directory)
    except OSError as error:
        LOG.warning("could not look for files to remove in %s: %s", directory, error)
        return
    for name in found:
        if is_unneeded(name):
            remove_or_log(f"{directory}/{name}")
