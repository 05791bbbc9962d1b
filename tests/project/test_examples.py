"""The examples: training gives the same weights on any number of ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from support import ROOT
from support.rank_environment import PATIENCE, clean_environ, run_python


@pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn's digits")
def test_digits_learn_the_same_on_one_and_four_ranks(tmp_path: Path) -> None:
    learned = []
    for ranks in (1, 4):
        weights = tmp_path / f"{ranks}.npz"
        places = ["--cache", tmp_path / f"cache-{ranks}" / "digits.npz", "--save", weights]
        script = ROOT / "examples" / "digits.py"
        done = run_python("-m", "syncprims", "run", "-n", ranks, script, *places)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("prepared 1797 digits") == 1
        right = re.findall(r"([\d.]+)% right", done.stdout)
        assert float(right[-1]) >= 93
        assert "stopped after epoch" in done.stdout
        learned.append(dict(np.load(weights)))
    one, four = learned
    assert four.keys() == one.keys()
    for name in one:
        np.testing.assert_allclose(four[name], one[name], rtol=1e-9, atol=1e-12)


def preempt(folder: Path, steps: int, *options: object) -> list[str]:
    """Return the command of a training in `folder` that fails and starts again as told."""
    line = ["-n", 2, "--max-restarts", 1, ROOT / "examples" / "preempt.py", *options]
    line += ["--directory", folder, "--steps", steps, "--save-every", 10]
    return ["-m", "syncprims", "run", *map(str, line)]


def test_a_training_that_is_preempted_and_then_fails_goes_on_bit_for_bit(tmp_path: Path) -> None:
    clean = {**clean_environ(), "OMP_NUM_THREADS": "1"}

    def finish(command: list[str]) -> subprocess.CompletedProcess[str]:
        done = run_python(*command, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr
        return done

    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, *preempt(run, 10**9)], env=clean, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        while not list(run.glob("step-*")):  # it is training
            assert process.poll() is None
            time.sleep(0.01)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    [saved] = re.findall(r"saved step (\d+): SIGTERM on ranks \[\d\]", out)
    assert (run / f"step-{saved}").exists()

    fails, end = int(saved) + 17, int(saved) + 40
    more = finish(preempt(run, end, "--fail-at", fails))
    assert f"generation 0 continues after step {saved}" in more.stdout
    cause = f"RuntimeError: a failure in step {fails}"
    assert f"rank 1 failed first (exit code 1): {cause}" in more.stderr
    assert "syncprims run: restart 1 of 1" in more.stderr
    assert f"generation 1 continues after step {(fails - 1) // 10 * 10}" in more.stdout

    whole = finish(preempt(tmp_path / "whole", end))
    sums = [re.findall(r"add up to (\S+)", done.stdout) for done in (more, whole)]
    assert sums[0] == sums[1]
    assert len(sums[0]) == 1
