"""Refuse file systems whose locks do not hold for other clients, before any rank relies on one.

If each client keeps its locks to itself, ranks of two hosts, or of a host and a container, can take
the same slot. Such file systems are known by their type, where the system shows it (on Linux). On
all systems, a lock that is held must be refused to a second opening of the same file.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple

from syncprims.errors import BackendUnavailable

if TYPE_CHECKING:
    from .private_dir import PrivateDirectory

_CURE = "set SYNCPRIMS_DIR to a directory on a local file system"

#: Types whose locks, or whose shared memory, need not hold across clients.
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


class Mount(NamedTuple):
    """One line of proc(5) mountinfo."""

    number: int
    device: str  #: ``major:minor``; on btrfs not the one that stat(2) gives
    point: str
    type: str

    @property
    def remote(self) -> bool:
        """True where locks need not hold across clients."""
        kind, _, driver = self.type.partition(".")
        return kind in _REMOTE.split() or (kind == "fuse" and driver in _REMOTE_FUSE.split())


def parse_mounts(text: str) -> list[Mount]:
    """Return the mounts in the `text` of mountinfo, the latest last; odd lines are left out."""
    found: list[Mount] = []
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if dash and len(fields) >= 6 and fields[0].isdecimal() and rest[0]:
            found.append(Mount(int(fields[0]), fields[2], _plain(fields[4]), _plain(rest[0])))
    return found


def find_mount(text: str, path: str, device: str = "", number: int | None = None) -> Mount | None:
    """Return the mount that `path`, without links, is on; None if `text` does not show it.

    The `number` of the mount decides where it is known. Else it is the innermost mount above
    `path`, of those with the same `device` if there are any: a mount may be hidden by a later one.
    """
    known = parse_mounts(text)
    for mount in known:
        if mount.number == number:
            return mount
    above = [mount for mount in known if PurePath(path).is_relative_to(mount.point)]
    same = [mount for mount in above if mount.device == device]
    # Of two mounts at one point, the later one hides the other.
    return max(reversed(same or above), key=lambda mount: len(mount.point), default=None)


def refuse_remote(path: Path, fd: int) -> None:
    """Refuse the open directory `path` where locks need not hold across clients.

    :raises BackendUnavailable: naming the type and the mount point.
    """
    try:
        text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        info = Path(f"/proc/self/fdinfo/{fd}").read_text()
    except OSError:
        return  # no such file on this system: to try the lock must be enough
    found = re.search(r"^mnt_id:\s*(\d+)$", info, re.MULTILINE)
    number = int(found[1]) if found else None
    device = os.fstat(fd).st_dev
    shown = f"{os.major(device)}:{os.minor(device)}"
    mount = find_mount(text, os.path.realpath(path), shown, number)
    if mount is not None and mount.remote:
        raise BackendUnavailable(
            f"{path} is on a file system of type {mount.type}, mounted at {mount.point}: locks "
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
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
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
