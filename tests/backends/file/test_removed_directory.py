"""Something removes the directory where the ranks meet, while they use it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rank_worlds import Died, Kind, Ranks, Signs

import syncprims as sp

# The backend is imported before the ranks are forked.
from syncprims._world.registry import load_backend
from syncprims._world.runtime import get_world

KINDS = [Kind("file", 2), Kind("torch", 2), Kind("torch", 4, hosts=2)]
on_each = pytest.mark.parametrize("kind", KINDS, ids=str)


def remove_all(rank: int = 0) -> None:
    """Have one rank of each host remove what its directory holds, while all others wait."""
    sp.barrier("before")
    if sp.get_local_rank() == rank:
        for path in Path(os.environ["SYNCPRIMS_DIR"]).iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    sp.barrier("after")


@on_each
def test_ranks_that_live_go_on(kind: Kind, meeting_place: Path, signs: Signs) -> None:
    def program() -> Any:
        pair = sp.group(range(sp.get_world_size()))
        remove_all()
        if sp.is_last():
            signs.wait(*range(kind.ranks - 1))
        signs.give(sp.get_rank())
        # The others have looked for the last one by now: with a deadline they look at once.
        sp.barrier("late", timeout=600)
        with pair:
            return sp.all_gather(sp.get_rank())

    assert Ranks(kind, meeting_place).run(program) == [list(range(kind.ranks))] * kind.ranks


@pytest.mark.parametrize("watched", [True, False], ids=["pidfds", "locks"])
def test_a_long_wait_declares_nobody_dead(watched: bool, meeting_place: Path, signs: Signs) -> None:
    def program() -> Any:
        if not watched:
            hide_pidfds()
        with sp.init():
            remove_all()
            if sp.get_rank() == 1:
                signs.wait("timeout")
            try:
                sp.barrier("load", timeout=0.5 if sp.get_rank() == 0 else None)
            except sp.SyncError as error:
                signs.give("timeout")
                return type(error).__name__, error.rank, str(error).split(":")[0]
            return "passed"

    said = Ranks(Kind("file", 2), meeting_place).run_alone(program)
    assert [kind for kind, *_ in said] == ["SyncTimeout"] * 2, "and the late one does not pass"


@pytest.mark.skipif(sys.platform != "linux", reason="needs pidfds")
@pytest.mark.parametrize("kind", [Kind("file", 3), Kind("torch", 4, hosts=2)], ids=str)
def test_a_killed_rank_is_still_named(kind: Kind, meeting_place: Path) -> None:
    last = kind.ranks - 1

    def program() -> Any:
        sp.init()
        remove_all()
        if sp.get_rank() == last:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(sp.PeerLost) as caught:
            sp.barrier("load")
        return caught.value.rank

    outcomes = Ranks(kind, meeting_place).outcomes(program, start=False)
    assert isinstance(outcomes.pop(), Died)
    assert outcomes == [last] * last


def hide_pidfds() -> None:
    """Make this process one that has no pidfds, as on macOS."""
    load_backend("file")
    liveness: Any = sys.modules["syncprims.backends.file.liveness"]

    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError("not on this system")

    os.pidfd_open = refuse
    assert liveness.os.pidfd_open is refuse


NEEDS_A_FILE: dict[str, Callable[[], object]] = {
    "a large object": lambda: sp.broadcast("x" * 100_000 if sp.is_main() else None),
    "an array": lambda: sp.broadcast(np.ones(100_000) if sp.is_main() else None),
    "a group": lambda: sp.group([0]),
}


@pytest.mark.parametrize("what", NEEDS_A_FILE)
def test_what_needs_a_new_file_says_what_has_happened(what: str, meeting_place: Path) -> None:
    def program() -> Any:
        remove_all()
        with pytest.raises((OSError, sp.SyncError)) as caught:
            NEEDS_A_FILE[what]()
        return str(caught.value), sp.all_gather("in step")

    outcomes = Ranks(Kind("file", 2), meeting_place).run(program)
    assert [gathered for _, gathered in outcomes] == [["in step"] * 2] * 2
    own = outcomes[0][0]
    for said, _ in outcomes:
        assert "something has removed" in said
    for part in (str(meeting_place), "during the run", "RemoveIPC", "systemd-tmpfiles"):
        assert part in own
    assert "Set SYNCPRIMS_DIR to" in own


def test_an_object_that_is_removed_on_its_way_is_an_error(meeting_place: Path) -> None:
    def program() -> Any:
        if sp.get_rank() == 0:
            board: Any = get_world().rounds.board
            spill = board._spill

            def spill_and_remove(number: int, content: bytes) -> None:
                spill(number, content)
                for path in meeting_place.rglob(f"board-*-0-{number}"):
                    path.unlink()

            board._spill = spill_and_remove
        try:
            sp.broadcast("x" * 100_000 if sp.is_main() else None)
        except (OSError, sp.SyncError) as error:
            return type(error).__name__, str(error)
        return "passed", ""

    said = Ranks(Kind("file", 2), meeting_place).run(program)
    assert said[1][0] == "SharedMemoryError"
    assert "something has removed" in said[1][1]
    assert said[0][0] == "passed", "it has sent what it had, and raises in its next call"


def test_a_run_whose_directory_is_gone_ends_and_leaves_nothing(meeting_place: Path) -> None:
    Ranks(Kind("file", 2), meeting_place).run(remove_all)
    assert not any(meeting_place.iterdir())
