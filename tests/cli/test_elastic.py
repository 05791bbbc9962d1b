"""`syncprims run --elastic`: the run goes on without lost ranks, and replaces them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import ROOT
from support.launches import Launches
from support.rank_environment import PATIENCE, clean_environ

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills ranks by pid")

#: Ranks count steps together until 3 of them have met in epoch `EPOCH` and 10 steps more are done.
LOOP = """
from syncprims import *
import signal
me = int(os.environ["RANK"])
change = init().change
replaces = change is not None
state, stop = {"step": 0, "end": None}, Trigger("stop")
while state["end"] is None or state["step"] < state["end"]:
    try:
        if change is not None:
            state, change = hand_over(state, change), None
        if state["step"] == 5 and me in DIE and not replaces:
            os.kill(os.getpid(), signal.SIGKILL)
        step = state["step"] + all_reduce(1) // get_world_size()
        end = step + 10 if current().epoch >= EPOCH and state["end"] is None else state["end"]
        state = {"step": step, "end": end}
        stop.check()
        if stop.joiners:
            change = reform()
    except (PeerLost, PeerFailed):
        change = reform(min_ranks=LEAST)
print("done", get_rank(), get_world_size(), replaces)
"""


@pytest.fixture
def launches(tmp_path: Path) -> Launches:
    return Launches(tmp_path / "job.py")


def loop(*die: int, epoch: int, least: int = 1) -> str:
    return f"DIE, EPOCH, LEAST = {die}, {epoch}, {least}\n{LOOP}"


def test_the_others_go_on_without_a_lost_rank(launches: Launches) -> None:
    done = launches.run(loop(1, epoch=1), "--elastic", "2:3")
    assert done.code == 0, done.err
    assert sorted(done.out.split("\n")[:2]) == [
        "[rank 0] done 0 2 False",
        "[rank 2] done 1 2 False",
    ]
    assert "lost rank 1 (killed by SIGKILL); 2 ranks left, no replacement is left" in done.err


def test_a_replacement_joins(launches: Launches) -> None:
    done = launches.run(
        loop(1, epoch=1).replace("epoch >= EPOCH", "world_size == 3 and current().epoch"),
        "--elastic", "2:3", "--max-restarts", "2",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == [
        "[rank 0] done 0 3 False", "[rank 1] done 2 3 True", "[rank 2] done 1 3 False"
    ]  # fmt: skip
    assert "2 ranks left, replacement 1 of 2" in done.err


def test_the_run_ends_when_too_few_are_left(launches: Launches) -> None:
    done = launches.run(loop(0, 1, epoch=1, least=2), "--elastic", "2:3")
    assert done.code in (1, 137), done.err
    assert re.search(r"ranks? (0|1|0-1) failed", done.err)


@pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn's digits")
def test_the_digits_are_learned_without_a_rank_that_is_killed(tmp_path: Path) -> None:
    """As a user who ends a process by hand, in the middle of the training."""
    with subprocess.Popen(
        [sys.executable, "-m", "syncprims", "run", "--elastic", "2:4", "--max-restarts", "1",
         str(ROOT / "examples" / "digits.py"), "--cache", str(tmp_path / "digits.npz")],
        env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        assert launcher.stdout is not None
        said = ""
        while "epoch  0" not in said:
            line = launcher.stdout.readline()
            assert line, launcher.communicate()
            said += line
        children = subprocess.run(
            ["pgrep", "-P", str(launcher.pid), "-f", "digits.py"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        os.kill(int(children.stdout.split()[2]), signal.SIGKILL)
        out, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 0, err
    assert re.search(r"step \d+: 1 lost, [01] joined, [34] ranks continue", said + out)
    assert re.search(r"[34] ranks hold the same weights, bit for bit", out)
    assert float(re.findall(r"([\d.]+)% right", out)[-1]) >= 93
