"""The main job does its job: the same weights on any number of ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn's digits")
def test_digits_learn_the_same_on_one_two_and_four_ranks(tmp_path: Path) -> None:
    learnt = []
    for ranks in (1, 2, 4):
        weights = tmp_path / f"{ranks}.npz"
        done = subprocess.run(
            [sys.executable, "-m", "syncprims", "run", "-n", str(ranks),
             str(ROOT / "examples" / "digits.py"),
             "--cache", str(tmp_path / f"cache-{ranks}" / "digits.npz"), "--save", str(weights)],
            env={k: v for k, v in os.environ.items() if "SYNCPRIMS" not in k},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("prepared 1797 digits") == 1
        right = re.findall(r"([\d.]+)% right", done.stdout)
        assert float(right[-1]) >= 93
        assert "stopped after epoch" in done.stdout
        learnt.append(dict(np.load(weights)))
    one, *others = learnt
    for other in others:
        assert other.keys() == one.keys()
        for name in one:
            np.testing.assert_allclose(other[name], one[name], rtol=1e-9, atol=1e-12)
