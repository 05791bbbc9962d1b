"""Scratch directories: where the processes of a launch, or of a test world, keep their files."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

from syncprims._system.locks import identify_kernel, is_free, try_lock
from syncprims._system.places import find_weakness, list_common_places
from syncprims.errors import ConfigurationError

_PREFIX = "syncprims-"  # of all their names
LOCK = "in-use"  #: a file in it, with the process and the kernel that have made it
_LEAST = 1 << 20  # bytes that a place must have free


@contextlib.contextmanager
def scratch_directory(purpose: str, inside: Path | None = None) -> Generator[Path]:
    """Make a private directory, in shared memory if possible, and remove it with its content.

    This process, and those that it forks, hold a lock in it. A directory whose lock is free belongs
    to processes that were killed: it is removed, too, unless another host may hold the lock.

    :raises ConfigurationError: if no such directory can be made.
    """
    places = list_common_places()
    _remove_dead(*places)
    path = _make(purpose, places if inside is None else [inside])
    try:
        # The lock gets its name only once it is held: under this name it never looks free.
        fd = os.open(path / ".new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(OSError):  # no locks there: it is removed by us or nobody
                try_lock(fd)
            os.write(fd, f"{os.getpid()} {identify_kernel()}".encode())
            (path / ".new").rename(path / LOCK)
            yield path
        finally:
            os.close(fd)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _make(purpose: str, places: list[Path]) -> Path:
    tried: list[str] = []
    for place in places:
        try:
            if weakness := find_weakness(place):
                why = f"{weakness}, so others could replace what is in it"
            elif shutil.disk_usage(place).free < _LEAST:
                why = "No space left on device"
            else:
                return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-", dir=place))
        except OSError as error:
            why = error.strerror or str(error)
        tried.append(f"{place} ({why})")
    raise ConfigurationError(
        f"there is no place for temporary files, tried {' and '.join(tried)}; make a directory of "
        f"your own, and set TMPDIR to it: `export TMPDIR=$(mktemp -d ~/tmp.XXXXXX)`"
    )


@functools.cache  # once in each process
def _remove_dead(*places: Path) -> None:
    kernel = identify_kernel().split()
    for place in places:
        with contextlib.suppress(OSError):
            for path in place.glob(f"{_PREFIX}*/{LOCK}"):
                with contextlib.suppress(OSError):  # it is gone
                    ours = path.parent.lstat().st_uid == os.geteuid()
                    if ours and path.read_text().split()[1:] == kernel and is_free(path):
                        shutil.rmtree(path.parent, ignore_errors=True)
