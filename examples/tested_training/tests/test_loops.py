"""Each loop on several ranks, as it is: in threads, in processes, and with a rank that dies."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from pathlib import Path

import pytest
import torch

from syncprims import PeerLost
from syncprims.testing import Kill, run_world

LIBRARIES = {"by_accelerate": "accelerate", "by_fabric": "lightning_fabric"}


@pytest.fixture(params=LIBRARIES)
def loop(request: pytest.FixtureRequest) -> str:
    """Return the name of a loop whose library is installed."""
    name: str = request.param
    if importlib.util.find_spec(LIBRARIES[name]) is None:
        pytest.skip(f"needs {LIBRARIES[name]}")
    return name


def train(loop: str, folder: Path) -> float:
    """Run a loop on this rank; its library is imported here, as in a process of its own."""
    mean: float = importlib.import_module(f"loops.{loop}").train(folder)
    return mean


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_learn_the_same(loop: str, ranks: int, tmp_path: Path) -> None:
    program = functools.partial(train, loop, tmp_path)
    means = run_world(program, ranks, torch=True)
    assert len(set(means)) == 1
    assert means[0] < 4
    assert (tmp_path / "model.pt").exists()
    assert run_world(program, ranks, torch=True, kind="processes") == means


def test_the_others_learn_of_a_rank_that_dies(loop: str, tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match="rank 1"):
        run_world(
            functools.partial(train, loop, tmp_path),
            2,
            torch=True,
            faults=[Kill(rank=1, at="all_reduce")],
        )
    assert not (tmp_path / "model.pt").exists()


def test_torch_is_as_before() -> None:
    assert not torch.distributed.is_initialized()
