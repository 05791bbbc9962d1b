"""Scratch directories: where the processes of a launch, or of a test world, keep their files."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

from syncprims._system.locks import identify_kernel, is_free, try_lock
from syncprims._system.places import find_weakness, list_common_places
from syncprims.errors import ConfigurationError

_PREFIX = "syncprims-"  # of all their names
LOCK = "in-use"  #: a file in it, with the process and the kernel that have made it
_LEAST = 1 << 20  # bytes that a place must have free


class Scratch(NamedTuple):
    """A scratch directory, open in this process and in those that it forks."""

    path: Path  #: of its files, for all processes of this user
    top: Path
    fd: int  #: of `top`

    def remove(self) -> None:
        """Remove it with its content, and nothing else that has its name now."""
        for name in os.listdir(self.fd):  # noqa: PTH208 - pathlib knows no descriptors
            try:
                os.unlink(name, dir_fd=self.fd)
            except OSError:  # it is a directory
                shutil.rmtree(name, ignore_errors=True, dir_fd=self.fd)
        with contextlib.suppress(OSError):
            self.top.rmdir()


@contextlib.contextmanager
def scratch_directory(purpose: str, inside: Path | None = None) -> Generator[Scratch]:
    """Make a private directory, in shared memory if possible, and remove it with its content.

    This process, and those that it forks, hold a lock in it. A directory whose lock is free belongs
    to processes that were killed: it is removed, too, unless another host may hold the lock.

    :raises ConfigurationError: if no such directory can be made.
    """
    _remove_dead(*list_common_places())
    with contextlib.ExitStack() as stack:
        yield _make(purpose, inside, stack)


def _make(purpose: str, inside: Path | None, stack: contextlib.ExitStack) -> Scratch:
    tried: list[str] = []
    for place in list_common_places() if inside is None else [inside]:
        try:
            if weakness := find_weakness(place, modes=False):
                why = f"{weakness}, so others could replace what is in it"
            elif shutil.disk_usage(place).free < _LEAST:
                why = "No space left on device"
            else:
                top = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-", dir=place))
                # Of an outer launch, the path is safe already.
                return _open(top, find_weakness(place) if inside is None else "", stack)
        except OSError as error:
            stack.close()
            why = error.strerror or str(error)
            if error.errno == errno.EFBIG:
                why += ": raise the limit of the size of files, ulimit -f"
        tried.append(f"{place} ({why})")
    raise ConfigurationError(
        f"there is no place for temporary files, tried {' and '.join(tried)}; make a directory of "
        f"your own, and set TMPDIR to it: `export TMPDIR=$(mktemp -d ~/tmp.XXXXXX)`"
    )


def _open(top: Path, weakness: str, stack: contextlib.ExitStack) -> Scratch:
    """Open and lock `top`, which was just made; `stack` closes and removes it.

    With a `weakness`, other users can rename it, and put a link, a directory of theirs or another
    one of this user in its place. So its name is used for nothing but to open it, once, and to
    remove it when it is empty. Files have a path through the descriptor, which leads to the same
    directory whatever they do. (Where the system has no such paths, the place is refused.)
    """
    fd = stack.enter_context(_opened(top))
    found, path = os.fstat(fd), top
    if weakness:
        if found.st_uid != os.geteuid() or found.st_mode & 0o077 or os.listdir(fd):  # noqa: PTH208
            raise OSError(errno.EACCES, "another user has put another directory there")
        path = Path(f"/proc/{os.getpid()}/fd/{fd}", top.name)
    scratch = Scratch(path, top, fd)
    stack.callback(scratch.remove)
    if weakness:
        if not path.parent.exists() or not os.path.samestat(path.parent.stat(), found):
            raise OSError(errno.EACCES, f"{weakness}, so others could replace what is in it")
        path.mkdir(mode=0o700)
    # The lock gets its name only once it is held: under this name it never looks free.
    lock = os.open(".new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=fd)
    stack.callback(os.close, lock)
    with contextlib.suppress(OSError):  # no locks there: it is removed by us or nobody
        try_lock(lock)
    os.write(lock, f"{os.getpid()} {identify_kernel()}".encode())
    os.rename(".new", LOCK, src_dir_fd=fd, dst_dir_fd=fd)
    return scratch


@functools.cache  # once in each process
def _remove_dead(*places: Path) -> None:
    kernel = identify_kernel().encode().split()
    for top in (top for place in places for top in place.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError), _opened(top) as fd:  # it is gone, or none of these
            with os.fdopen(os.open(LOCK, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=fd), "rb") as file:
                here = file.read().split()[1:] == kernel
            if here and os.fstat(fd).st_uid == os.geteuid() and is_free(LOCK, fd):
                Scratch(top, top, fd).remove()


@contextlib.contextmanager
def _opened(path: Path) -> Generator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
