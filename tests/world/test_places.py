"""On every kind of machine it works, or the advice of the error does, carried out to the letter."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
from conftest import soak
from support.intruders import needs_root
from support.rank_environment import clean_environ

pytestmark = [
    needs_root,
    pytest.mark.skipif(sys.platform != "linux" or not shutil.which("setpriv"), reason="Linux only"),
]
USER = 54321
#: Begins with mounts of its own; the user finds Python and the library, wherever they are.
BEGIN = """set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755,uid=$USER none /mnt
for place in /var/tmp /usr/tmp; do [ ! -d $place ] || mount -t tmpfs -o ro none $place; done
cd /proc
"""
SHM = {
    **{mode: f"mount -t tmpfs -o mode={mode} none /dev/shm\n" for mode in ("1777", "777", "2777")},
    "755": "mount -t tmpfs -o mode=755 none /dev/shm\n",
    "absent": """mount --bind /dev /media; mount -t tmpfs -o mode=755 none /dev
for n in null zero random urandom; do touch /dev/$n; mount --bind /media/$n /dev/$n; done
ln -s /proc/self/fd /dev/fd\n""",
    "full": """mount -t tmpfs -o mode=1777,size=64k none /dev/shm
dd if=/dev/zero of=/dev/shm/full bs=1k 2>/dev/null || true\n""",
}
TMP = {mode: f"mount -t tmpfs -o {mode} none /tmp\n" for mode in ("mode=1777", "mode=777", "ro")}
AS_USER = (
    "setpriv --reuid=$USER --regid=$USER --clear-groups "
    "--inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search "
)
RANK = "import os, syncprims as sp; assert sp.all_gather('x' * 9999)[1]; "
START = {
    "run": "from syncprims.cli import main; sys.exit(main(['run', '-n', '2', '/mnt/rank.py']))",
    "world": (
        "from syncprims.testing import run_world\n"
        "def rank(): return len(sp.all_gather('x' * 9999))\n"
        "run_world(rank, 2, kind='processes')"
    ),
    "by hand": (
        "os.environ |= {'SYNCPRIMS_BACKEND': 'file', 'SYNCPRIMS_RUN_ID': 'x',"
        " 'SYNCPRIMS_JOIN_TIMEOUT': '60', 'WORLD_SIZE': '2', 'RANK': '1', 'LOCAL_RANK': '1',"
        " 'LOCAL_WORLD_SIZE': '2'}\n"
        "if pid := os.fork(): os.environ |= {'RANK': '0', 'LOCAL_RANK': '0'}\n"
        "sp.all_gather('x' * 9999)\n"
        "if pid: sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    ),
}


def call(
    user: bool, mounts: str, how: str, before: str = "", space: str = "-m"
) -> subprocess.CompletedProcess[str]:
    """Start ranks in this way, after these mounts and commands."""
    program = f"import os, sys; import syncprims as sp\n{START[how]}\n"
    environ = {k: v for k, v in clean_environ().items() if k not in ("TMPDIR", "XDG_RUNTIME_DIR")}
    script = (
        f"{BEGIN}echo \"import syncprims as sp; sp.barrier()\" > /mnt/rank.py\n{mounts}"
        f'exec {AS_USER * user}sh -c \'{before}\nexec "$0" -c "$PROGRAM"\' "$PYTHON"'
    )  # fmt: skip
    return subprocess.run(
        ["unshare", *space.split(), "sh", "-c", script],
        env={
            **environ, "HOME": "/mnt", "USER": str(USER if user else 0), "PYTHON": sys.executable,
            "PROGRAM": program,
        },
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def start(user: bool, mounts: str, how: str, before: str = "", space: str = "-m") -> str:
    """Start ranks as :func:`call`, and return what is said if they fail."""
    done = call(user, mounts, how, before, space)
    said = done.stdout + done.stderr
    if done.returncode == 0:
        return ""
    assert done.returncode == (2 if how == "run" else 1), said
    assert said
    return said


def advice(said: str) -> list[str]:
    """Return the commands that carry out what the error advises, each of them alone."""
    [error] = re.findall(r"^.*(?:cannot be used|cannot hold|there is no place).*$", said, re.M)[-1:]
    found = re.findall(r"`([^`]+)`", error)
    if "set SYNCPRIMS_DIR" in error:
        found.append("export SYNCPRIMS_DIR=/mnt/new/meet")
    return found


@pytest.mark.parametrize("how", ["run", soak("world"), "by hand"])
@pytest.mark.parametrize("user", [soak(False), True], ids=["root", "user"])
@pytest.mark.parametrize("tmp", [soak("mode=1777"), soak("mode=777"), "ro"])
@pytest.mark.parametrize("shm", ["755", *map(soak, SHM.keys() - {"755"})])
def test_places(shm: str, tmp: str, user: bool, how: str) -> None:
    said = start(user, SHM[shm] + TMP[tmp], how)
    works = "777" in shm or tmp != "ro" or (shm == "755" and not user)
    if (shm, tmp, user, how) == ("absent", "ro", False, "by hand"):
        works = True  # root makes /dev/shm
    if shm == "full" and how == "by hand":
        works = False  # the ranks agree on a place whatever is free there
    assert works == (not said), said
    if said:
        found = advice(said)
        assert found, said
        for command in found:
            assert not start(user, SHM[shm] + TMP[tmp], how, command), command


@pytest.mark.parametrize("tmp", ["mode=777", soak("ro")])
@pytest.mark.parametrize("space", ["-mi", soak("-mpi --fork --mount-proc")])  # are pids shared
@pytest.mark.parametrize("user", [True, False], ids=["user", "root"])
def test_volumes_of_a_pod(user: bool, space: str, tmp: str) -> None:
    """The mounts of docs/how-to/kubernetes.md, and nothing else to which anybody may write."""
    for how in START:
        assert not start(user, SHM["2777"] + TMP[tmp], how, space=space)


RENAMES = """
import subprocess, syncprims as sp
sp.barrier()
if sp.is_main():
    subprocess.run(["setpriv", "--reuid=12345", "--clear-groups", "sh", "-ec",
        "cd /dev/shm; top=$(echo syncprims-run-*); mv $top was; ln -s /mnt/precious $top"],
        check=True)
    raise ValueError("after the swap")
sp.barrier()
"""


def test_what_another_user_renames_in_a_volume_changes_nothing() -> None:
    """Neither what the ranks report, nor what is removed in the end."""
    mounts = "mkdir /mnt/precious; touch /mnt/precious/file\n"
    mounts += f"cat > /mnt/rank.py <<'END'{RENAMES}END\n"
    look = '"$0" -c "$PROGRAM"; code=$?; ls /dev/shm/was /mnt/precious; exit $code'
    done = call(False, SHM["777"] + TMP["ro"] + mounts, "run", look)
    assert done.returncode == 1, done.stderr
    assert "rank 0 failed first (exit code 1): ValueError: after the swap" in done.stderr
    assert done.stdout == "/dev/shm/was:\n\n/mnt/precious:\nfile\n"


@pytest.mark.parametrize("backend", ["file", "torch"])
def test_a_system_that_lists_no_descriptors(backend: str) -> None:
    """As in a chroot or a sandbox: a limit that cannot be read stops no start."""
    rank = "import syncprims as sp; sp.current().open_process_group()"
    mounts = f"echo '{rank if backend == 'torch' else ''}' > /mnt/rank.py\n{SHM['absent']}"
    mounts += TMP["mode=1777"] + "cd /; rm /dev/fd; mount -t tmpfs none /proc\n"
    assert not start(False, mounts, "run", f"export SYNCPRIMS_BACKEND={backend}")
