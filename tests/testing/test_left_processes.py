"""A world of processes ends what its ranks have started, also what has left its process group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.rank_worlds import await_end

import syncprims as sp
from syncprims.testing import Kill, run_world

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def start_program() -> int:
    command = [sys.executable, "-c", "import time; time.sleep(999)"]
    return subprocess.Popen(command, start_new_session=True).pid


def fork_child() -> int:
    pid = os.fork()
    if not pid:
        os.setsid()
        time.sleep(999)
        os._exit(0)
    return pid


def leave_orphan() -> int:
    """Leave a process without a parent, and without the variables of the rank."""
    source = (
        "import subprocess, sys\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(999)']\n"
        "child = subprocess.Popen(sleep, start_new_session=True, env={}, stdout=-3)\n"
        "print(child.pid)\n"
    )
    return int(subprocess.run([sys.executable, "-c", source], stdout=-1, check=True).stdout)


def check_gone(folder: Path, count: int) -> None:
    found = list(folder.iterdir())
    assert len(found) == count
    for path in found:
        with contextlib.suppress(ProcessLookupError):
            await_end(int(path.name))  # it is killed: it may still be ending


@pytest.mark.parametrize("start", [start_program, fork_child, leave_orphan])
def test_nothing_is_left_of_a_world(tmp_path: Path, start: object) -> None:
    def program() -> None:
        (tmp_path / str(start())).touch()  # type: ignore[operator]
        sp.barrier()

    run_world(program, 2, kind="processes")
    check_gone(tmp_path, 2)


@pytest.mark.parametrize("start", [start_program, fork_child])
def test_nothing_is_left_of_a_world_that_fails(tmp_path: Path, start: object) -> None:
    def program() -> None:
        (tmp_path / str(start())).touch()  # type: ignore[operator]
        sp.barrier()
        if sp.is_main():
            raise ValueError("no")
        time.sleep(999)

    with pytest.raises(ValueError, match="no"):
        run_world(program, 2, kind="processes")
    check_gone(tmp_path, 2)
    if start is start_program:  # what a killed rank has forked, and is a session of its own, stays
        with pytest.raises(sp.PeerLost):
            run_world(program, 2, kind="processes", faults=[Kill(rank=0, at=1)])
        check_gone(tmp_path, 4)


def test_a_rank_ends_whatever_its_handler_of_ended_children_does(tmp_path: Path) -> None:
    """Torch's loaders have such a handler. The rank must not go on with the program of the test."""
    test = os.getpid()

    def program() -> str:
        def refuse(*_: object) -> None:
            raise RuntimeError("a child was killed")

        signal.signal(signal.SIGCHLD, refuse)
        (tmp_path / str(start_program())).touch()
        return "done"

    try:
        assert run_world(program, 1, kind="processes") == ["done"]
    finally:
        if os.getpid() != test:
            (tmp_path / "escaped").touch()
            os._exit(1)
    check_gone(tmp_path, 1)
