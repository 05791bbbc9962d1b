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
from support.rank_environment import clean_environ


@pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn's digits")
def test_digits_learn_the_same_on_one_two_and_four_ranks(tmp_path: Path) -> None:
    learned = []
    for ranks in (1, 2, 4):
        weights = tmp_path / f"{ranks}.npz"
        done = subprocess.run(
            [sys.executable, "-m", "syncprims", "run", "-n", str(ranks),
             str(ROOT / "examples" / "digits.py"),
             "--cache", str(tmp_path / f"cache-{ranks}" / "digits.npz"), "--save", str(weights)],
            env=clean_environ(),
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("prepared 1797 digits") == 1
        right = re.findall(r"([\d.]+)% right", done.stdout)
        assert float(right[-1]) >= 93
        assert "stopped after epoch" in done.stdout
        learned.append(dict(np.load(weights)))
    one, *others = learned
    for other in others:
        assert other.keys() == one.keys()
        for name in one:
            np.testing.assert_allclose(other[name], one[name], rtol=1e-9, atol=1e-12)


def preempt(folder: Path, steps: int) -> list[str]:
    return [
        sys.executable, "-m", "syncprims", "run", "-n", "2", str(ROOT / "examples" / "preempt.py"),
        "--directory", str(folder), "--steps", str(steps), "--save-every", "50",
    ]  # fmt: skip


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_a_preempted_training_saves_on_all_ranks_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    clean = {**clean_environ(), "OMP_NUM_THREADS": "1"}

    def finish(folder: Path, steps: int) -> str:
        command = preempt(folder, steps)
        done = subprocess.run(
            command, env=clean, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run = tmp_path / "run"
    process = subprocess.Popen(
        preempt(run, 10**9), env=clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        while not (run / "step-50").exists():  # it is training
            assert process.poll() is None
            time.sleep(0.01)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    [step] = re.findall(r"saved step (\d+): SIGTERM on ranks \[\d\]", out)
    assert (run / f"step-{step}").exists()
    more = finish(run, int(step) + 40)
    assert f"continues after step {step}" in more
    whole = finish(tmp_path / "whole", int(step) + 40)
    sums = [re.findall(r"add up to (\S+)", text) for text in (more, whole)]
    assert sums[0] == sums[1]
    assert len(sums[0]) == 1


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_a_failed_training_is_started_again_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    sums = []
    for name, failing in (("whole", []), ("failed", ["--fail-at", "17"])):
        done = subprocess.run(
            [sys.executable, "-m", "syncprims", "run", "-n", "2", "--max-restarts", "1",
             str(ROOT / "examples" / "preempt.py"), "--directory", str(tmp_path / name),
             "--steps", "30", "--save-every", "10", *failing],
            env={**clean_environ(), "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        sums += re.findall(r"add up to (\S+)", done.stdout)
    assert "rank 1 failed first (exit code 1): RuntimeError: a failure in step 17" in done.stderr
    assert "syncprims run: restart 1 of 1" in done.stderr
    assert "generation 1 continues after step 10" in done.stdout
    assert sums[0] == sums[1]
