"""Places for files of several processes: which directories no other user can replace or fill."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def list_common_places() -> list[Path]:
    """Return where programs keep temporary files: in memory, and where Python does."""
    places = [Path("/dev/shm")]
    with contextlib.suppress(FileNotFoundError):  # it finds none to which it may write
        places.append(Path(tempfile.gettempdir()))
    return places


def find_weakness(path: Path, *, modes: bool = True) -> str:
    """Return why another user could replace what this one makes in `path`; empty if none could.

    Without `modes`, only owners count: a volume of a pod, for example, is open to all.

    :raises OSError: if `path` is not there, or may not be looked at.
    """
    path, apart = path.resolve(), True
    for at in (*reversed(path.parents), path):
        found = at.stat()
        if not is_trusted(found.st_uid, apart):
            return f"{at} belongs to user {found.st_uid}"
        apart = is_closed(found)
        if modes and not apart and not found.st_mode & stat.S_ISVTX:
            return f"{at} has mode {stat.S_IMODE(found.st_mode):04o}"
        if found.st_uid == os.geteuid() and not found.st_mode & 0o011:
            return ""  # no other user passes through: what is below may have any mode
    return ""


def is_closed(found: os.stat_result) -> bool:
    """Return whether only its owner may create anything in the directory of this status."""
    return not found.st_mode & 0o022


def is_trusted(owner: int, apart: bool) -> bool:
    """Return whether `owner` of a directory is this user or root.

    `apart` says whether the directory above is closed to other users. In a user namespace that does
    not have the root user of the host, that one has the number of all users who are not there.
    Where only root can create something, it is root's.
    """
    if owner in (0, os.geteuid()):
        return True
    return apart and (owner == Path("/").stat().st_uid or owner == _hidden_root())


def find_outer_user() -> int:
    """Return the number that this user has outside of its user namespace, as far as it is known.

    Containers that share a place have it in common, while each calls its own user 0.
    """
    user = os.geteuid()
    with contextlib.suppress(OSError, ValueError):  # not Linux
        for line in Path("/proc/self/uid_map").read_text().splitlines():
            inside, outside, count = map(int, line.split())
            if inside <= user < inside + count:
                return outside + user - inside
    return user


def _hidden_root() -> int | None:
    """Return the number that the root user of the host has here, if this namespace hides it."""
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
        if any(line.split()[1] == "0" for line in lines):
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except OSError:
        return None
