"""A directory that only this user can change, and everything in it relative to its descriptor.

Another user may plant anything at a predictable path: a directory of their own, a link, a pipe. So
a directory is opened without following links, and its owner and mode are checked on the open
descriptor, not on the name. What is inside then cannot be swapped by anyone else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

from syncprims.errors import ConfigurationError

_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CURE = "set SYNCPRIMS_DIR to a directory of your own (it is created if need be)"


def default_base(runtime_directory: str | None) -> Path:
    """Return where runs meet by default: memory rather than disk, and private to the user."""
    if runtime_directory is not None and os.access(runtime_directory, os.W_OK | os.X_OK):
        return Path(runtime_directory) / "syncprims"
    shared_memory = Path("/dev/shm")
    parent = shared_memory if os.access(shared_memory, os.W_OK) else Path(tempfile.gettempdir())
    return parent / f"syncprims-{os.geteuid()}"


class PrivateDirectory:
    """An open directory that belongs to this user and that nobody else can write to."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    def open(cls, path: Path, *, private: bool = True) -> PrivateDirectory:
        """Open `path`, making it with mode 0700 if it is not there.

        With ``private=False`` others may look into a directory that existed, but not change it.

        :raises ConfigurationError: if it cannot be made, is no directory, is a link, belongs to
            another user, or others may write to it.
        """
        try:
            # One level only by hand, the rest as the user's umask has it.
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            fd = os.open(path, _OPEN_DIR)
        except OSError as error:
            raise ConfigurationError(_why_not(path, error)) from error
        try:
            _check(path, os.fstat(fd), 0o077 if private else 0o022)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd)

    def sub(self, name: str) -> PrivateDirectory:
        """Open the directory `name` inside, making it if it is not there."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self.fd)
        fd = os.open(name, _OPEN_DIR, dir_fd=self.fd)
        try:
            _check(self.path / name, os.fstat(fd), 0o077)
        except BaseException:
            os.close(fd)
            raise
        return PrivateDirectory(self.path / name, fd)

    def open_file(self, name: str, flags: int) -> int:
        """Return a descriptor of the regular file `name` inside: ours, and under no other name.

        :raises ConfigurationError: if it is something else.
        """
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(name, flags, 0o600, dir_fd=self.fd)
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink <= 1:
            return fd
        os.close(fd)
        raise ConfigurationError(
            f"{self.path / name} is not a plain file of this user's own; remove it, or {_CURE}"
        )

    def open_pipe(self, name: str, *, make: bool = False) -> int:
        """Return a descriptor of the named pipe `name` inside, to read and to write.

        :raises ConfigurationError: if it is something else.
        """
        if make:
            with contextlib.suppress(FileExistsError):
                if os.mkfifo in os.supports_dir_fd:
                    os.mkfifo(name, 0o600, dir_fd=self.fd)
                else:  # macOS before 13
                    os.mkfifo(self.path / name, 0o600)
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(name, flags, dir_fd=self.fd)
        found = os.fstat(fd)
        if stat.S_ISFIFO(found.st_mode) and found.st_uid == os.geteuid():
            return fd
        os.close(fd)
        raise ConfigurationError(f"{self.path / name} is no pipe of this user's own; remove it")

    def claim(self, name: str, word: str) -> str:
        """Make the name `name` stand for `word`, unless it is taken; return what it stands for.

        A link to nowhere: the one thing that is made, with its content, in one step.

        :raises OSError: if the directory has no room for another name.
        """
        with contextlib.suppress(FileExistsError):
            os.symlink(word, name, dir_fd=self.fd)
        return os.readlink(name, dir_fd=self.fd)

    def claimed(self, name: str) -> str | None:
        """Return what `name` stands for, or None if nobody has claimed it."""
        try:
            return os.readlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        """Return the names inside."""
        return os.listdir(self.fd)  # noqa: PTH208 - pathlib knows no descriptors

    def remove(self, name: str) -> None:
        """Remove the file `name`, if it is there."""
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(name, dir_fd=self.fd)

    def remove_tree(self, name: str) -> None:
        """Remove the directory `name` and the files in it, if they are there."""
        try:
            inner = self.sub(name)
        except OSError:
            return
        try:
            for inside in inner.names():
                inner.remove(inside)
        finally:
            inner.close()
        with contextlib.suppress(OSError):  # it is gone, or holds what is not ours
            os.rmdir(name, dir_fd=self.fd)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


def _check(path: Path, found: os.stat_result, forbidden: int) -> None:
    if found.st_uid != os.geteuid():
        raise ConfigurationError(
            f"{path} belongs to user {found.st_uid}, and this process runs as user "
            f"{os.geteuid()}: whoever owns it could forge what ranks tell each other; {_CURE}"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & forbidden:
        raise ConfigurationError(
            f"{path} has mode {mode:04o}, which lets others in: they could forge what ranks tell "
            f"each other; run `chmod 700 {path}`, or {_CURE}"
        )


def _why_not(path: Path, error: OSError) -> str:
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EEXIST):
        kind = "a link" if path.is_symlink() else "no directory"
        return f"{path} cannot be used as a meeting place: it is {kind}; remove it, or {_CURE}"
    reason = error.strerror or type(error).__name__
    return f"{path} cannot be used as a meeting place: {reason}; make it writable, or {_CURE}"
