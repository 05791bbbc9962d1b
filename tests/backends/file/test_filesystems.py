"""Unsuitable file systems: locks that do not work, and full disks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.intruders import needs_root
from support.rank_worlds import Kind, Ranks

import syncprims as sp

# The backend is imported before the ranks are forked.
from syncprims._world.registry import load_backend

load_backend("file")
filesystems: Any = import_module("syncprims.backends.file.filesystems")
#: As a login node of a cluster might have it, and more.
MOUNTINFO = r"""
25 24 0:23 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,size=24684084k
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
40 27 0:45 / /home rw,relatime shared:23 master:2 - nfs4 filer:/vol/home rw,vers=4.2,hard
42 27 0:47 / /lustre/work rw,flock - lustre 10.0.0.1@o2ib:/work rw,localflock
43 27 0:48 / /mnt/win rw - cifs //server/share rw,vers=3.1.1
45 27 0:50 / /mnt/ssh rw - fuse.sshfs me@there: rw,user_id=1000
47 27 0:52 / /mnt/c rw - 9p C:\134 rw,dirsync,aname=drvfs
49 27 0:54 / /gpfs/fs1 rw - gpfs fs1 rw
53 27 0:45 /me/data\040sets /data\040sets rw - nfs4 filer:/vol/home rw
61 27 0:66 / /mnt/ntfs rw - fuseblk /dev/sda2 rw
63 27 0:68 / /tab\011new\012line\134 rw optional:1 another:2 - lustre x rw
this line is odd
64 27 0:69 / /short
"""

#: Number, mount point, type, and whether it is refused.
MOUNTS = [
    (25, "/dev/shm", "tmpfs", False),
    (27, "/", "ext4", False),
    (40, "/home", "nfs4", True),
    (42, "/lustre/work", "lustre", True),
    (43, "/mnt/win", "cifs", True),
    (45, "/mnt/ssh", "fuse.sshfs", True),
    (47, "/mnt/c", "9p", True),
    (49, "/gpfs/fs1", "gpfs", True),
    (53, "/data sets", "nfs4", True),
    (61, "/mnt/ntfs", "fuseblk", False),
    (63, "/tab\tnew\nline\\", "lustre", True),
]


@pytest.mark.parametrize(("number", "point", "kind", "remote"), MOUNTS)
def test_a_mount_is_refused_by_its_type(number: int, point: str, kind: str, remote: bool) -> None:
    assert filesystems.find_mount(MOUNTINFO, str(number)) == (point, kind)
    assert filesystems.is_remote(kind) == remote


def test_odd_texts_tell_nothing() -> None:
    for text in (MOUNTINFO, "", "\n", " - ", "64 2 3 4 5 6 - ", "64"):
        assert filesystems.find_mount(text, "64") is None


def refusal(directory: Path, changed: dict[str, Any]) -> str:
    """Return what a rank says in `directory` if these names of the module mean something else."""

    def program() -> str:
        vars(filesystems).update(changed)
        with pytest.raises(sp.BackendUnavailable) as caught:
            sp.init()
        return str(caught.value)

    (said,) = Ranks(Kind("file", 1), directory).run_alone(program)
    return str(said)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_remote_file_system_is_refused_with_the_cure(meeting_place: Path) -> None:
    text = f"1 0 0:1 / / rw - ext4 /dev/vda rw\n2 1 0:2 / {meeting_place} rw - lustre x rw\n"

    class Pretended(type(meeting_place)):  # type: ignore[misc]
        def read_text(self, *how: Any, **more: Any) -> str:
            return text if self.name == "mountinfo" else "flags: 0\nmnt_id:\t2\n"

    said = refusal(meeting_place, {"Path": Pretended})
    assert f"{meeting_place} is on a file system of type lustre" in said
    assert f"mounted at {meeting_place}" in said
    assert "set SYNCPRIMS_DIR to a directory on a local file system" in said
    assert not any(meeting_place.iterdir())


def test_locks_that_hold_nobody_off_are_refused_with_the_cure(meeting_place: Path) -> None:
    def fail(fd: int) -> bool:
        raise OSError(37, "No locks available")

    said = refusal(meeting_place, {"try_lock": lambda fd: True})
    assert "could be locked twice at the same time" in said
    assert "set SYNCPRIMS_DIR to a directory on a local file system" in said
    said = refusal(meeting_place, {"try_lock": fail})
    assert "cannot be locked: [Errno 37] No locks available; set SYNCPRIMS_DIR" in said
    assert not any(meeting_place.iterdir())


def test_without_proc_the_probe_must_do(meeting_place: Path) -> None:
    class Nowhere(type(meeting_place)):  # type: ignore[misc]
        def read_text(self, *how: Any, **more: Any) -> str:
            raise FileNotFoundError(2, "No such file or directory", str(self))

    def program() -> list[int]:
        vars(filesystems)["Path"] = Nowhere
        with sp.init():
            return sp.all_gather(1)

    assert Ranks(Kind("file", 2), meeting_place).run_alone(program) == [[1, 1]] * 2


@pytest.fixture
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Path]:
    """A file system mounted for this test, with the given type and options."""
    if sys.platform != "linux":
        pytest.skip("mounts as Linux does")
    kind, options = request.param
    point = tmp_path / "mounted"
    point.mkdir(mode=0o700)
    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir(mode=0o700)
    options = options.format(at=tmp_path)
    mount = ["mount", "-t", kind, "-o", options, kind, str(point)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{kind} cannot be mounted here: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


LOCAL = [
    ("tmpfs", "mode=700"),
    ("ramfs", "mode=700"),
    ("overlay", "lowerdir={at}/lower,upperdir={at}/upper,workdir={at}/work"),
]


@needs_root
@pytest.mark.parametrize("mounted", LOCAL, ids=[one[0] for one in LOCAL], indirect=True)
def test_local_file_systems_will_do(mounted: Path) -> None:
    world = Ranks(Kind("file", 2), mounted)
    assert world.run(lambda: sp.all_gather("x" * 5000)[1][:2]) == ["xx", "xx"]
    assert not any(mounted.iterdir())


def fill(directory: Path, left: int) -> None:
    """Leave at most so many bytes in the file system of `directory`."""
    found = os.statvfs(directory)
    size = found.f_bavail * found.f_frsize - left
    with (directory / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(size, 1))


@needs_root
@pytest.mark.parametrize("mounted", [("tmpfs", "mode=700,size=1m")], ids=[""], indirect=True)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_too_full_to_join_is_told_and_nothing_is_left(mounted: Path, ranks: int) -> None:
    """Every amount of room, from none to enough."""

    def program() -> str:
        try:
            with sp.init():
                return "joined"
        except sp.BackendUnavailable as error:
            return str(error)
        except (sp.SyncTimeout, sp.PeerLost, sp.PeerFailed) as error:
            return type(error).__name__  # the other had no room

    page = os.sysconf("SC_PAGE_SIZE")
    outcomes = []
    for left in range(0, 80 * page, 8 * page):
        fill(mounted, left)
        said = Ranks(Kind("file", ranks), mounted).run_alone(program, SYNCPRIMS_JOIN_TIMEOUT="0.3")
        assert [path.name for path in mounted.iterdir()] == ["filler"]
        (mounted / "filler").unlink()
        full = [one for one in said if "No space left" in one]
        assert all("free some space, or set SYNCPRIMS_DIR" in one for one in full), said
        assert full or said == ["joined"] * ranks, said
        outcomes.append("joined" if not full else "full")
    assert outcomes[0] == "full"
    assert outcomes[-1] == "joined"


@needs_root
@pytest.mark.parametrize("mounted", [("tmpfs", "mode=700,size=1m")], ids=[""], indirect=True)
@pytest.mark.parametrize("call", ["all_reduce", "broadcast"])
def test_a_large_number_finds_a_full_disk_on_all_ranks(mounted: Path, call: str) -> None:
    large = 1 << 400_000

    def program() -> str:
        with sp.init():
            if sp.is_main():
                fill(mounted, 0)
            sp.barrier("full")
            try:
                found = getattr(sp, call)(large)
            except sp.SyncError as error:
                return str(error)
            return "" if found == large * (2 if call == "all_reduce" else 1) else "wrong"

    said = Ranks(Kind("file", 2), mounted).run_alone(program)
    assert said == ["", ""] or all("No space left" in one for one in said), said
