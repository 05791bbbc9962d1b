"""Threads of a rank that use the memory of its world at one time, also without Python's lock."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.rank_environment import PATIENCE

# No call of a program makes the two threads open the same thing at one time.
from syncprims._world.registry import load_backend


def liveness_module() -> Any:
    load_backend("file")
    return sys.modules["syncprims.backends.file.liveness"]


def test_two_threads_open_one_pipe_and_one_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, both = liveness_module(), threading.Barrier(2, timeout=PATIENCE)

    def slowly(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any) -> Any:
            thing = make(*args)
            both.wait()
            return thing

        return made

    before = len([*Path("/dev/fd").iterdir()])
    directory = module.PrivateDirectory.open(tmp_path / "run")
    ranks = [module.Liveness(directory, rank, 2, elastic=False) for rank in range(2)]
    monkeypatch.setattr(module, "ProcessWatch", slowly(module.ProcessWatch))
    monkeypatch.setattr(directory, "open_pipe", slowly(directory.open_pipe))
    with ThreadPoolExecutor(2) as pool:
        states = [state for state, *_ in pool.map(ranks[0].state, [1, 1])]
        list(pool.map(ranks[0].doorbell.wake, [1, 1]))
    for rank in ranks:
        rank.close()
    directory.close()
    assert states == ["alive"] * 2
    assert len([*Path("/dev/fd").iterdir()]) == before


def test_a_rank_leaves_while_another_thread_reads(tmp_path: Path) -> None:
    module = liveness_module()
    directory = module.PrivateDirectory.open(tmp_path / "run")
    rank = module.Liveness(directory, 0, 1, elastic=False)
    with memoryview(rank._memory):  # as `struct` holds it for the time of a look
        rank.close()
    directory.close()
