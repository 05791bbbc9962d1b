"""Under every umask all starts, and no other user can write to what ranks share."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launches import Launches
from support.rank_worlds import Kind, Ranks

import syncprims as sp
from syncprims.testing import once_per_session, run_world
from syncprims.training import load_state, save_state

MASKS = [0o000, 0o002, 0o027, 0o077]


@pytest.fixture(params=MASKS, ids=lambda mask: f"{mask:03o}")
def umask(request: pytest.FixtureRequest) -> Generator[int]:
    """The umask of this process and its children."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """Return the mode of each file and directory below `folder`."""
    return {str(p.relative_to(folder)): stat.S_IMODE(p.stat().st_mode) for p in folder.rglob("*")}


@pytest.mark.parametrize("backend", ["file", "torch"])
def test_ranks_by_hand_a_trace_and_a_checkpoint(umask: int, tmp_path: Path, backend: str) -> None:
    meet, saved = tmp_path / "new" / "meet", tmp_path / "saved"

    def program() -> Any:
        model = torch.nn.Linear(2, 1)
        save_state(saved, {"model": model})
        load_state(saved, {"model": model})
        sp.all_gather("x" * 100_000)
        sp.group([0, 1]).barrier()
        return modes(meet)

    ranks = Ranks(Kind(backend, 2), meet)
    for found in ranks.run(program, SYNCPRIMS_TRACE=str(tmp_path / "trace")):
        assert found or backend == "torch"
        assert not {name: mode for name, mode in found.items() if mode & 0o077}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) & 0o022 == 0
    # What belongs to the user has the mode that the user has asked for.
    for path in [*saved.rglob("*"), *(tmp_path / "trace").rglob("*")]:
        asked = (0o777 if path.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(path.stat().st_mode) == asked, path


def test_worlds_of_processes_and_values_of_a_session(umask: int) -> None:
    assert run_world(lambda: sp.all_reduce(1), 2, kind="processes") == [2, 2]
    assert once_per_session(f"umask {umask}", lambda: umask) == umask


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_launcher(umask: int, tmp_path: Path) -> None:
    done = Launches(tmp_path / "job.py").run(
        """
        barrier()
        board = os.environ["SYNCPRIMS_DIR"]
        for path in (board, os.path.dirname(board), os.path.dirname(os.path.dirname(board))):
            assert os.stat(path).st_mode & 0o077 == 0, path
        """,
        f"--log-dir={tmp_path / 'logs'}",
        n=2,
    )
    assert done.code == 0, done.err
