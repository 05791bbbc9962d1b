"""Two small training jobs: the same result on any number of ranks, and on every backend."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.rank_environment import run_python
from support.training_models import TRAINED

EXAMPLES = ROOT / "examples"
KINDS = [str(kind) for kind in TRAINED if kind.ranks < 4]


def daily(*kinds: str) -> list[Any]:
    """Return all kinds of worlds, of which the daily tests try these."""
    return [k if k in kinds else pytest.param(k, marks=pytest.mark.soak) for k in KINDS]


def run(kind: str, script: str, *options: object) -> str:
    """Return what a job prints on main."""
    backend, _, ranks = kind.partition("-")
    start = ["-m", "syncprims", "run", "-n", ranks, "--backend", backend]
    start = [] if backend == "single" else start
    done = run_python(*start, EXAMPLES / script, *options, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn's digits")
@pytest.mark.parametrize("kind", daily("file-2"))
def test_digits_are_learnt_saved_and_resumed(kind: str, tmp_path: Path) -> None:
    places = ["--cache", tmp_path / "cache.pt", "--checkpoint", tmp_path / "saved"]
    first = run(kind, "train_digits.py", *places, "--epochs", 6, "--pause-after", 4)
    assert first.count("prepared 1797 digits") == 1
    again = run(kind, "train_digits.py", *places, "--epochs", 6)
    assert "continues after epoch 4" in again
    assert "epoch  4" not in again
    found = re.search(r"best ([\d.]+)% correct of 360", again)
    assert found is not None
    assert float(found[1]) >= 97


@pytest.mark.parametrize("kind", daily("torch-2")[1:])
def test_text_is_learnt_alike_on_one_rank_and_on_several(kind: str) -> None:
    small = ["--steps", 20, "--every", 10, "--width", 32, "--layers", 1]
    losses = []
    for where in ("single-1", kind):
        out = run(where, "train_text.py", *small)
        losses.append([float(x) for x in re.findall(r"held-out (?:loss )?([\d.]+)", out)])
        assert "it writes" in out
    alone, together = losses
    assert len(alone) == 3
    assert together == pytest.approx(alone, abs=0.01)
    assert together[-1] < together[0] - 0.3
