"""Places for files of several processes: which directories no other user can replace or fill."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

_SET_USER = 1 << 7  # the capability to become another user
#: The numbers that Linux gives to the namespaces of the host.
_OF_HOST = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF}


def list_common_places() -> list[Path]:
    """Return where programs keep temporary files: in memory, and where Python does."""
    places = [Path("/dev/shm")]
    with contextlib.suppress(FileNotFoundError):  # it finds none to which it may write
        places.append(Path(tempfile.gettempdir()))
    return places


def find_weakness(path: Path) -> str:
    """Return why another user could replace what this one makes in `path`; empty if none could.

    :raises OSError: if `path` is not there, or may not be looked at.
    """
    path, apart = path.resolve(), True
    for at in (*reversed(path.parents), path):
        found = at.stat()
        if weakness := find_own_weakness(at, found, apart):
            return f"{at} {weakness}"
        if found.st_uid == os.geteuid() and not found.st_mode & 0o011:
            return ""  # no other user passes through: what is below may have any mode
        apart = is_closed(found)
    return ""


def find_own_weakness(path: Path, found: os.stat_result, apart: bool) -> str:
    """Return what :func:`find_weakness` does, for this directory without those above it.

    `found` is its status, and `apart` says whether the directory above is closed to other users.
    """
    if not is_trusted(found.st_uid, apart):
        return f"belongs to user {found.st_uid}"
    if is_closed(found) or found.st_mode & stat.S_ISVTX or _is_volume_of_one_user(path):
        return ""
    return f"has mode {stat.S_IMODE(found.st_mode):04o}"


def is_closed(found: os.stat_result) -> bool:
    """Return whether only its owner may create anything in the directory of this status."""
    return not found.st_mode & 0o022


def is_trusted(owner: int, apart: bool) -> bool:
    """Return whether `owner` is this user or root; `apart` is as in :func:`find_own_weakness`.

    In a user namespace that does not have the root user of the host, that one has the number of all
    users who are not there. Where only root can create something, it is root's.
    """
    if owner in (0, os.geteuid()):
        return True
    return apart and (owner == Path("/").stat().st_uid or owner == _hidden_root())


def _hidden_root() -> int | None:
    """Return the number that the root user of the host has here, if this namespace hides it."""
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
        if any(line.split()[1] == "0" for line in lines):
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except OSError:
        return None


def _is_volume_of_one_user(path: Path) -> bool:
    """Return whether `path` is mounted in a container in which no other user can run.

    Volumes of pods are open to all, without the sticky bit. All ranks must find the same answer, so
    it does not depend on which processes run now: the container has its own processes and its own
    shared memory, its first process belongs to this user, and this is not a root that could start
    processes of others.
    """
    try:
        here = {kind: Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in _OF_HOST}
        lines = Path("/proc/1/status").read_text().splitlines()
        facts = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        may_become_others = os.geteuid() == 0 and int(facts["CapBnd"][0], 16) & _SET_USER
        return (
            all(here[kind] != number for kind, number in _OF_HOST.items())
            and set(facts["Uid"]) == {str(os.geteuid())}
            and not may_become_others
            and path.is_mount()
        )
    except (OSError, KeyError):
        return False
