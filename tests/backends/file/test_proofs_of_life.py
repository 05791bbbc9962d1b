"""What proves that a rank lives, however its process, its children and its user change."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.intruders import needs_root
from support.rank_worlds import Died, Kind, Ranks, Signs

import syncprims as sp

_NOBODY = 65534


@pytest.fixture
def pair(meeting_place: Path) -> Ranks:
    """Two ranks of the file backend."""
    return Ranks(Kind("file", 2), meeting_place)


def lost(call: str) -> str:
    """Return the error of a barrier in which another rank is lost."""
    with pytest.raises(sp.PeerLost) as caught:
        sp.barrier(call)
    assert caught.value.rank == 1
    return str(caught.value)


def test_a_rank_that_runs_a_new_program_is_lost(pair: Ranks, signs: Signs, tmp_path: Path) -> None:
    seen = str(tmp_path / "signs/seen")
    waits = f"import os, time\nwhile not os.path.exists({seen!r}): time.sleep(.01)"

    def program() -> Any:
        sp.barrier("start")
        if sp.get_rank() == 1:
            os.execv(sys.executable, [sys.executable, "-S", "-c", waits])
        said = lost("in vain")
        signs.give("seen")
        return said

    said = pair.outcomes(program)[0]
    assert "rank 1 was lost: its process runs another program now" in said


@needs_root
def test_privileges_may_be_dropped_after_the_start(pair: Ranks) -> None:
    def program() -> Any:
        sp.barrier("start")
        rank = sp.get_rank()
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
        time.sleep(0.1 * rank)  # the other one sleeps, and looks
        sp.barrier("as nobody")
        assert sp.all_reduce(1) == 2
        time.sleep(0.1 * (1 - rank))
        assert sp.all_gather("x" * 100) == ["x" * 100] * 2
        with pytest.raises((sp.SharedMemoryError, sp.PeerFailed), match="drop privileges before"):
            sp.broadcast(b"x" * 100_000)  # needs a new file
        with pytest.raises((sp.BackendUnavailable, sp.PeerFailed), match="drop privileges before"):
            sp.group([0])
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return lost("in vain")

    said, dead = pair.outcomes(program)
    assert "rank 1 was lost" in said
    assert "exit code 0" not in said  # this user may not know how it ended
    assert isinstance(dead, Died)


def test_ranks_with_few_descriptors_find_a_dead_one_all_the_same(meeting_place: Path) -> None:
    def program() -> Any:
        sp.barrier("start")
        soft = len(os.listdir("/dev/fd"))  # noqa: PTH208
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
        with contextlib.suppress(OSError):  # none is left
            while True:
                os.dup(0)
        for number in range(3):
            time.sleep(0.05 * (sp.get_rank() == number))  # the others sleep, and look
            sp.barrier("without descriptors")
        if sp.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return lost("in vain")

    said = Ranks(Kind("file", 3), meeting_place).outcomes(program)
    for one in (said[0], said[2]):
        assert "rank 1 was lost" in one
