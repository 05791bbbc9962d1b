"""Refuse file systems whose locks do not hold for other clients, before any rank relies on one.

If each client keeps its locks to itself, ranks of two hosts, or of a host and a container, can take
the same entry. Such file systems are known by their type, where the system shows it (on Linux). On
all systems, a lock that is held must be refused to a second opening of the same file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from syncprims._system.locks import try_lock
from syncprims.errors import BackendUnavailable

from .private_dir import PrivateDirectory

_CURE = "set SYNCPRIMS_DIR to a directory on a local file system"

#: File systems on which a lock or a mapping need not be seen by other hosts.
_REMOTE = """
    9p acfs afs auristorfs beegfs beegfs_nodev ceph cifs coda dvs fhgfs gfs gfs2 gpfs kafs lustre
    lustre_lite mfs mmfs ncpfs nfs nfs4 ocfs2 orangefs panfs prl_fs pvfs2 quobyte smb3 smbfs vboxsf
    virtiofs vmhgfs wekafs
"""
#: The same for what follows ``fuse.``; a plain ``fuse`` may be anything, so only the lock is tried.
_REMOTE_FUSE = """
    beegfs blobfuse blobfuse2 ceph ceph-fuse curlftpfs davfs davfs2 gcsfuse glusterfs goofys hdfs
    juicefs JuiceFS lizardfs mfs moosefs mount-s3 nfs orangefs quobyte rclone s3fs seaweedfs
    smbnetfs sshfs vmhgfs-fuse wekafs
"""


def find_mount(mounts: str, number: str) -> tuple[str, str] | None:
    """Return the point and the type of mount `number` in the text of proc(5) mountinfo, if known.

    The system gives the number of an open file's mount. A path would need more: a later mount may
    hide an earlier one.
    """
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")[0]
        if fields[0] == number and len(fields) > 5 and kind:
            return _plain(fields[4]), _plain(kind)
    return None


def is_remote(kind: str) -> bool:
    """Return whether other hosts need not see a lock on a file system of this type."""
    first, _, driver = kind.partition(".")
    return first in _REMOTE.split() or (first == "fuse" and driver in _REMOTE_FUSE.split())


def refuse_remote(path: Path, fd: int) -> None:
    """Refuse the open directory `path` where other hosts need not see its locks.

    :raises BackendUnavailable: naming the type and the mount point.
    """
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        info = Path(f"/proc/self/fdinfo/{fd}").read_text()
    except OSError:
        return  # no such file on this system: to try the lock must be enough
    number = re.search(r"^mnt_id:\s*(\d+)$", info, re.MULTILINE)
    mount = find_mount(mounts, number[1]) if number else None
    if mount is not None and is_remote(mount[1]):
        raise BackendUnavailable(
            f"{path} is on a file system of type {mount[1]}, mounted at {mount[0]}: locks "
            f"there need not hold for other hosts that have it mounted, and ranks of this backend "
            f"prove by locks that they live; {_CURE}"
        )


def refuse_useless_locks(directory: PrivateDirectory, name: str) -> None:
    """Refuse the file `name`, locked by this process, if a second opening of it gets the lock.

    :raises BackendUnavailable: if it does, or if that is unknown.
    """
    path = directory.path / name
    with directory.opened(name, os.O_RDWR) as second:
        try:
            if not try_lock(second):
                return
        except OSError as error:
            raise BackendUnavailable(f"{path} cannot be locked: {error}; {_CURE}") from error
    raise BackendUnavailable(
        f"{path} could be locked twice at the same time: locks do not work on its file system, and "
        f"ranks of this backend prove by locks that they live; {_CURE}"
    )


def _plain(field: str) -> str:
    r"""Return a field as it was: a space in it is written as ``\040``."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
