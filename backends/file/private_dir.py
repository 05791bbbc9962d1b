"""A directory that only this user can change, and everything in it relative to its descriptor.

Another user may create anything at a predictable path: a directory of their own, a link, a pipe. So
every directory on the way is opened without following links and checked on the open descriptor,
not on the name, and the next one is opened relative to it. If none can write to its end, no other
user can replace anything inside, even one who can rename what is on the way (`_check_passage`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Generator
from pathlib import Path, PurePath

from syncprims._system.places import (
    find_outer_user,
    find_weakness,
    is_closed,
    is_trusted,
    list_common_places,
)
from syncprims.errors import ConfigurationError, SharedMemoryError
from syncprims.interface import Settings

_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_DIR = os.O_RDONLY | _DIRECTORY
#: A directory on the way is only passed through. It need not be readable.
_PASS_DIR = getattr(os, "O_PATH", os.O_RDONLY) | _DIRECTORY
_MOST_LINKS = 40  # on the way, as in the kernel
_CURE = "set SYNCPRIMS_DIR to a directory of your own (it is created if need be)"
_NOT_PLAIN = {errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV, errno.EOPNOTSUPP}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


def base_path(settings: Settings) -> Path:
    """Return the directory that contains those of the runs."""
    return Path(settings.directory or default_base(settings.runtime_directory)).absolute()


def default_base(runtime_directory: str | None) -> Path:
    """Return where runs meet by default: in memory if possible, and private to the user.

    If another user has made a directory of that name, it is in the next place.
    """
    own = Path(runtime_directory or "/")
    if runtime_directory and _may_host(own / "syncprims") and own.stat().st_uid == os.geteuid():
        return own / "syncprims"
    name = f"syncprims-{find_outer_user()}"
    places = [place / name for place in list_common_places()]
    # If none will do, to open one that is there says why.
    there = next((place for place in places if place.parent.exists()), places[0])
    return next(filter(_may_host, places), there)


def _may_host(path: Path) -> bool:
    try:
        if find_weakness(path.parent, modes=False) or not os.access(path.parent, os.W_OK | os.X_OK):
            return False
        return path.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return path.parent.exists()
    except OSError:
        return False


class PrivateDirectory:
    """An open directory that belongs to this user, and to which no other user can write."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    def open(cls, path: Path) -> PrivateDirectory:
        """Open the absolute `path`, creating it with mode 0700 if it is not there.

        Others may read one that existed, but not change it.

        :raises ConfigurationError: if it cannot be created, is no directory, is a link, belongs to
            another user or is below one that does, or others may write to it.
        :raises OSError: if there is no space for it.
        """
        above = _pass_to(path)
        try:
            fd = _enter(path, path.name or "/", above)
        finally:
            os.close(above)
        return cls._checked(path, fd, 0o022)

    def sub(self, name: str, *, create: bool = True) -> PrivateDirectory:
        """Open the directory `name` inside; with `create`, create it if it is not there.

        :raises ConfigurationError: if it is something else, or others may read it.
        """
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.fd)
        path = self.path / name
        try:
            fd = os.open(name, _OPEN_DIR, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise ConfigurationError(_why_not(path, error)) from error
            raise
        return self._checked(path, fd, 0o077)

    @classmethod
    def _checked(cls, path: Path, fd: int, forbidden: int) -> PrivateDirectory:
        try:
            found = os.fstat(fd)
            if found.st_uid != os.geteuid():
                raise _refused(path, f"belongs to user {found.st_uid}, not to user {os.geteuid()}")
            mode = stat.S_IMODE(found.st_mode)
            if mode & forbidden:
                cure = f"run `chmod 700 {path}`, or {_CURE}"
                raise _refused(path, f"has mode {mode:04o}, which lets others in", cure)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd)

    def open_file(self, name: str, flags: int) -> int:
        """Return a descriptor of the regular file `name` inside: private, and with no other name.

        :raises ConfigurationError: if it is something else, which is then left unchanged.
        """
        path = self.path / name
        careful = flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(name, careful, 0o600, dir_fd=self.fd)
        except OSError as error:
            if error.errno in _NOT_PLAIN:
                raise _not_ours(path) from error
            raise
        try:
            found = os.fstat(fd)
            plain = stat.S_ISREG(found.st_mode) and found.st_nlink <= 1
            if not plain or found.st_uid != os.geteuid():
                raise _not_ours(path)
            mode = stat.S_IMODE(found.st_mode)
            if mode & 0o077:
                # A user who may only read a file can still hold its lock forever.
                cure = f"remove it, or run `chmod 600 {path}`"
                raise _refused(path, f"has mode {mode:04o}, which lets others in", cure)
        except BaseException:
            os.close(fd)
            raise
        return fd

    @contextlib.contextmanager
    def opened(self, name: str, flags: int) -> Generator[int]:
        """Yield a descriptor of the file `name` inside, as :meth:`open_file`, and close it."""
        fd = self.open_file(name, flags)
        try:
            yield fd
        finally:
            os.close(fd)

    def read(self, name: str) -> bytes:
        """Return the content of the file `name` inside; checked as by :meth:`open_file`."""
        with os.fdopen(self.open_file(name, os.O_RDONLY), "rb") as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Make `data` the content of the file `name` inside; checked as by :meth:`open_file`."""
        with os.fdopen(self.open_file(name, os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.truncate()  # only now: before the check it might be another user's
            file.write(data)

    def replace(self, name: str, data: bytes) -> None:
        """Make `data` the content of the file `name` at once: no reader sees a part of it.

        Others do not do this at the same time.
        """
        self.write(f"{name}.new", data)
        os.rename(f"{name}.new", name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def reach(self, name: str) -> Path:
        """Return a path of `name` for this process to open by itself, while this one is open.

        On Linux it leads through the descriptor, past what other users can rename on the way.
        """
        opened = Path(f"/proc/self/fd/{self.fd}")
        return (opened if opened.exists() else self.path) / name

    def open_pipe(self, name: str, *, create: bool = False) -> int:
        """Return a descriptor of the named pipe `name` inside, for reading and writing.

        :raises ConfigurationError: if it is something else.
        """
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkfifo(name, 0o600, dir_fd=self.fd)  # macOS: from 13 on
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(name, flags, dir_fd=self.fd)
        found = os.fstat(fd)
        if stat.S_ISFIFO(found.st_mode) and found.st_uid == os.geteuid():
            return fd
        os.close(fd)
        raise _refused(self.path / name, "is not a pipe that belongs to this user", "remove it")

    def names(self) -> list[str]:
        """Return the names inside."""
        return os.listdir(self.fd)  # noqa: PTH208 - pathlib knows no descriptors

    def remove(self, name: str) -> None:
        """Remove the file `name`, if it is there."""
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(name, dir_fd=self.fd)

    def remove_directory(self, name: str) -> bool:
        """Remove the directory `name`; False if it is not there, not empty, or no directory."""
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=self.fd)
            return True
        return False

    def remove_tree(self, name: str) -> None:
        """Remove the directory `name` and the files in it, if they are there and private."""
        try:
            inner = self.sub(name, create=False)
        except (OSError, ConfigurationError):
            return
        with contextlib.closing(inner):
            for inside in inner.names():
                with contextlib.suppress(OSError):
                    inner.remove(inside)
        self.remove_directory(name)  # fails if something else is in there

    @property
    def is_removed(self) -> bool:
        """Whether the directory was removed, so that no file can be created in it."""
        return os.fstat(self.fd).st_nlink == 0

    @contextlib.contextmanager
    def explained(self, action: str, name: str) -> Generator[None]:
        """Within the block, which does `action` at `name`, errors of the system say what to do."""
        try:
            yield
        except OSError as error:
            if error.errno is None:  # a signal handler has raised it, as a TimeoutError
                raise
            if isinstance(error, FileNotFoundError):
                raise self.removed(action, name) from error
            text = f"{error.strerror}, {action}; {cure_for(error)}: {str(self.path / name)!r}"
            refusal = SharedMemoryError(text)
            refusal.errno = error.errno
            raise refusal from error

    def removed(self, action: str, name: str = "") -> SharedMemoryError:
        """Return the error that `action` failed because something has removed this directory."""
        return SharedMemoryError(
            f"something has removed {self.path / name} during the run, so {action} failed. "
            f"Programs that do this: systemd-logind at the end of the user's last session "
            f"(RemoveIPC=yes), cleaners of temporary files (systemd-tmpfiles, tmpreaper), and "
            f"epilogues of jobs. Set SYNCPRIMS_DIR to a directory that nothing removes, and "
            f"restart the run"
        )

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


# -- the way there --------------------------------------------------------------------------------


def _pass_to(path: Path) -> int:
    """Return a descriptor of the directory that holds `path`; create and check each on the way.

    Links on the way are followed if their owner is trusted: on macOS, /tmp is a link.
    """
    at, todo, links = Path("/"), list(reversed(path.parts[1:-1])), 0
    fd = os.open("/", _PASS_DIR)
    try:
        apart = _check_passage(path, at, os.fstat(fd), True)
        while todo:
            name = todo.pop()
            target = _link(at / name, name, fd, apart)
            if target is not None:
                links += 1
                if links > _MOST_LINKS:
                    error = OSError(errno.EMLINK, "too many links on the way")
                    raise ConfigurationError(_why_not(path, error))
                todo += reversed(PurePath(target).parts)
                continue
            inner = _enter(at / name, name, fd, mode=0o755, flags=_PASS_DIR)
            os.close(fd)
            fd, at = inner, at / name
            apart = _check_passage(path, at, os.fstat(fd), apart)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _link(path: Path, name: str, above: int, apart: bool) -> str | None:
    """Return the target of the link `name`; None if it is not a link, or not there."""
    try:
        found = os.stat(name, dir_fd=above, follow_symlinks=False)
        target = os.readlink(name, dir_fd=above) if stat.S_ISLNK(found.st_mode) else None
    except OSError:
        return None  # to open it will say what is wrong
    if target is not None and not is_trusted(found.st_uid, apart):
        raise _refused(path, f"is a link that belongs to user {found.st_uid}")
    return target


def _enter(path: Path, name: str, above: int, mode: int = 0o700, flags: int = _OPEN_DIR) -> int:
    """Open the directory `name` in the open directory `above`, creating it if it is not there."""
    try:
        try:
            return os.open(name, flags, dir_fd=above)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, mode, dir_fd=above)
            return os.open(name, flags, dir_fd=above)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
        raise ConfigurationError(_why_not(path, error)) from error


def _check_passage(path: Path, at: Path, found: os.stat_result, apart: bool) -> bool:
    """Raise if `at` is another user's; return whether it is closed to others.

    It may be open to all without the sticky bit, as volumes of pods are. Others can then rename
    what this user has there, or make something first. They can keep ranks from meeting by that, as
    by filling the volume. They can neither read nor forge anything: a link or a directory of
    theirs is refused, and only this user can create files in the end of the way, whose owner and
    mode are looked at once it is open. If they put another directory of this user there, files
    with names of ours come into it.
    """
    if not is_trusted(found.st_uid, apart):
        what = f"is below {at}, which belongs to user {found.st_uid}, who could replace it"
        raise _refused(path, what, f"{_CURE}, where others cannot rename it")
    return is_closed(found)


# -- what is wrong --------------------------------------------------------------------------------


_NO_FILES = (
    "raise the limit of open files (ulimit -n): a rank needs one for each other rank, and 20 more"
)
_CURES = {
    errno.EACCES: "drop privileges before the first call, or let this user read and write there",
    errno.EMFILE: _NO_FILES,
    errno.ENFILE: _NO_FILES,
    errno.EFBIG: "raise the limit of the size of files (ulimit -f)",
    **dict.fromkeys(_NO_ROOM, "free some space, or set SYNCPRIMS_DIR to a place with more"),
}


def cure_for(error: OSError) -> str:
    """Return what the user can do about an error of the system at a file of the ranks."""
    return _CURES.get(error.errno or 0, "set SYNCPRIMS_DIR to another place")


def _refused(path: Path, why: str, cure: str = _CURE) -> ConfigurationError:
    return ConfigurationError(f"{path} {why}: what ranks send there could be forged; {cure}")


def _not_ours(path: Path) -> ConfigurationError:
    return _refused(path, "is not a plain file of this user's own", f"remove it, or {_CURE}")


def _why_not(path: Path, error: OSError) -> str:
    reason, cure = error.strerror or type(error).__name__, f"make it writable, or {_CURE}"
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EEXIST):
        reason = "it is a link" if path.is_symlink() else "it is not a directory"
        cure = f"remove it, or {_CURE}"
    elif isinstance(error, PermissionError):
        with contextlib.suppress(OSError):  # it is not there, or cannot be seen
            if (owner := path.lstat().st_uid) != os.geteuid():
                reason = f"user {owner} owns it, and lets user {os.geteuid()} not in"
                cure = _CURE
    return f"{path} cannot be used as a meeting place: {reason}; {cure}"
