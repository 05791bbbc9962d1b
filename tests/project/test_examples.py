"""The examples: the same results on any number of ranks, and as before they were ported."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import ROOT
from support.pages import blocks
from support.rank_environment import PATIENCE, clean_environ, is_installed, run_python

EXAMPLES = ROOT / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
RUN = ["-m", "syncprims", "run", "-n"]

needs_digits = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn")


def run(*command: object, folder: Path | None = None) -> str:
    """Return what a Python command prints; nothing of this session reaches it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("PYTEST", "COV"))]:
            patch.delenv(name)
        done = run_python(*command, cwd=folder, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_digits
@pytest.mark.soak
def test_digits_learn_the_same_on_one_and_four_ranks(tmp_path: Path) -> None:
    learned = []
    for ranks in (1, 4):
        weights = tmp_path / f"{ranks}.npz"
        places = ["--cache", tmp_path / f"cache-{ranks}" / "digits.npz", "--save", weights]
        out = run(*RUN, ranks, EXAMPLES / "digits.py", *places)
        assert out.count("prepared 1797 digits") == 1
        right = re.findall(r"([\d.]+)% right", out)
        assert float(right[-1]) >= 93
        assert "stopped after epoch" in out
        learned.append(dict(np.load(weights)))
    one, four = learned
    assert four.keys() == one.keys()
    for name in one:
        np.testing.assert_allclose(four[name], one[name], rtol=1e-9, atol=1e-12)


def preempt(ranks: int, folder: Path, steps: int, *options: object) -> list[str]:
    """Return the command of a training in `folder` that fails and starts again as told."""
    line = ["-n", ranks, "--max-restarts", 1, EXAMPLES / "preempt.py", *options]
    line += ["--directory", folder, "--steps", steps, "--save-every", 10]
    return [*RUN[:-1], *map(str, line)]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_training_that_is_preempted_and_then_fails_goes_on_bit_for_bit(
    ranks: int, tmp_path: Path
) -> None:
    clean = {**clean_environ(), "OMP_NUM_THREADS": "1"}

    def finish(command: list[str]) -> subprocess.CompletedProcess[str]:
        done = run_python(*command, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr
        return done

    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, *preempt(ranks, folder, 10**9)], env=clean, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        while not list(folder.glob("step-*")):  # it is training
            assert process.poll() is None
            time.sleep(0.01)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, err  # stopped, and to be started again
    [saved] = re.findall(r"saved step (\d+): SIGTERM on ranks \[\d\]", out)
    assert (folder / f"step-{saved}").exists()

    fails, end = int(saved) + 17, int(saved) + 40
    more = finish(preempt(ranks, folder, end, "--fail-at", fails))
    assert f"generation 0 continues after step {saved}" in more.stdout
    cause = f"RuntimeError: a failure in step {fails}"
    assert f"rank {ranks - 1} failed first (exit code 1): {cause}" in more.stderr
    assert "syncprims run: restart 1 of 1" in more.stderr
    assert f"generation 1 continues after step {(fails - 1) // 10 * 10}" in more.stdout

    whole = finish(preempt(ranks, tmp_path / "whole", end))
    sums = [re.findall(r"add up to (\S+)", done.stdout) for done in (more, whole)]
    assert sums[0] == sums[1]
    assert len(sums[0]) == 1


def test_a_whole_training_goes_on_after_any_step_as_if_it_was_never_stopped(tmp_path: Path) -> None:
    def part(folder: str, *options: object) -> str:
        script = [EXAMPLES / "whole_training.py", "--directory", tmp_path / folder]
        return run(*RUN, 2, *script, "--epochs", 3, *options)

    whole = part("whole")
    assert re.findall(r"epoch +(\d): loss", whole) == ["0", "1", "2"]
    assert "stopped after step 19" in part("parts", "--stop-at", 19)  # in the last batch
    assert "continues after step 19" in part("parts", "--stop-at", 30)
    rest = part("parts")
    assert "continues after step 30" in rest
    assert re.findall(r"epoch +(\d): loss", rest) == ["1", "2"]
    for name in ("epochs.csv", "best/model.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    more = part("parts", "--epochs", 4, "--patience", 0)
    assert "no better for 0 epochs" in more
    assert "epoch" not in more.replace("epochs", "")


def test_the_page_of_the_whole_training_shows_its_script() -> None:
    script = (EXAMPLES / "whole_training.py").read_text()
    shown = [b for b in blocks(ROOT / "docs/how-to/whole-training.md") if b.language == "python"]
    assert len(shown) == 2
    for block in shown:
        assert re.sub(r"(?m)^ +", "", block.code) in re.sub(r"(?m)^ +", "", script)


def result(out: str) -> dict[str, Any]:
    """Return the figures that rank 0 prints."""
    found: dict[str, Any] = json.loads(out[out.index("{") : out.rindex("}") + 1])
    return found


@pytest.mark.skipif(not is_installed("accelerate"), reason="needs accelerate")
@pytest.mark.soak
def test_a_script_moves_over_by_its_import_line_and_gives_the_same_numbers(tmp_path: Path) -> None:
    script = EXAMPLES / "from_accelerate.py"
    line = "from syncprims.accelerate import Accelerator"
    assert script.read_text().count(line) == 1
    original = tmp_path / "original.py"
    # It ends at once: a thread of Gloo that is still at work when Python ends aborts the process.
    end = "    import os, sys\n    sys.stdout.flush()\n    os._exit(0)\n"
    ported = script.read_text() + end
    original.write_text(ported.replace(line, "from accelerate import Accelerator"))
    assert "syncprims.training" not in original.read_text()

    theirs = result(run(*TORCHRUN, original, "--cpu"))
    # In two parts, to try what is saved: the first on DDP, the other on ranks that share files.
    place = ["--cpu", "--project", tmp_path / "state"]
    run(*TORCHRUN, script, *place, "--stop-after", 2)
    resumed = run(*RUN, 2, script, *place, "--resume")
    assert "continues after epoch 2" in resumed

    ours = result(resumed)
    assert theirs["losses"][-1] < theirs["losses"][0]
    assert (ours["right"], ours["of"]) == (theirs["right"], theirs["of"])
    assert ours["of"] == 90
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-6)


@pytest.mark.soak
def test_barriers_and_rank_checks_are_replaced_and_the_weights_stay(tmp_path: Path) -> None:
    weights, printed = [], []
    for name in ("before", "after"):
        script = EXAMPLES / "from_torch_distributed" / f"{name}.py"
        out = run(*TORCHRUN, script, "--directory", tmp_path / name)
        printed.append(re.findall(r"epoch \d: loss [\d.]+", out))
        weights.append(torch.load(tmp_path / name / "weights.pt", weights_only=True))
    assert len(printed[0]) == 3
    assert printed[0] == printed[1]
    before, after = weights
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    code = (EXAMPLES / "from_torch_distributed" / "after.py").read_text()
    assert not re.search(r"dist\.(barrier|all_reduce|broadcast|get_rank)|rank == 0", code)


def outcome(out: str) -> tuple[int, str]:
    """Return how many tests passed, and what else pytest says of them."""
    found = re.findall(r"(\d+) passed(.*) in ", out)
    assert found, out
    return int(found[-1][0]), found[-1][1]


def test_a_project_tests_its_own_ranks(tmp_path: Path) -> None:
    options = ["-p", "no:cacheprovider", "--basetemp", tmp_path / "base"]
    out = run("-m", "pytest", "-q", *options, folder=EXAMPLES / "tested_project")
    assert outcome(out) == (40, "")


def test_a_project_tests_its_training_loops(tmp_path: Path) -> None:
    options = ["-p", "no:cacheprovider", "--basetemp", tmp_path / "base"]
    out = run("-m", "pytest", "-q", *options, folder=EXAMPLES / "tested_training")
    missing = sum(not is_installed(name) for name in ("accelerate", "lightning-fabric"))
    passed, rest = outcome(out)
    assert passed == 7 - 3 * missing
    assert rest == (f", {3 * missing} skipped" if missing else "")


@pytest.mark.skipif(find_spec("xdist") is None, reason="needs pytest-xdist")
def test_workers_share_a_database_that_one_of_them_made(tmp_path: Path) -> None:
    options = ["-p", "no:cacheprovider", "--basetemp", tmp_path / "base", "-n", "2"]
    out = run("-m", "pytest", "-q", "-rN", *options, EXAMPLES / "shared_database", folder=tmp_path)
    assert outcome(out) == (10, "")
    assert len(list((tmp_path / "base").rglob("orders.sqlite"))) == 1


def starts(daily: str) -> list[Any]:
    """Return how a job starts in all kinds of worlds, of which one is tried every day."""
    kinds = {"alone": [], "file-2": [*RUN, "2"], "torch-2": [*RUN, "2", "--backend", "torch"]}
    soak = pytest.mark.soak
    return [pytest.param(s, marks=[soak] * (k != daily), id=k) for k, s in kinds.items()]


@needs_digits
@pytest.mark.parametrize("start", starts("file-2"))
def test_digits_are_learnt_saved_and_resumed(start: list[str], tmp_path: Path) -> None:
    places = ["--cache", tmp_path / "cache.pt", "--checkpoint", tmp_path / "saved"]
    first = run(*start, EXAMPLES / "train_digits.py", *places, "--epochs", 3, "--pause-after", 2)
    assert first.count("prepared 1797 digits") == 1
    again = run(*start, EXAMPLES / "train_digits.py", *places, "--epochs", 3)
    assert "continues after epoch 2" in again
    assert "epoch  2" not in again
    found = re.search(r"best ([\d.]+)% correct of 360", again)
    assert found is not None
    assert float(found[1]) >= 97


@pytest.mark.parametrize("start", starts("torch-2")[1:])
@pytest.mark.soak
def test_text_is_learnt_alike_on_one_rank_and_on_several(start: list[str]) -> None:
    small = ["--steps", 20, "--every", 10, "--width", 32, "--layers", 1]
    losses = []
    for where in ([], start):
        out = run(*where, EXAMPLES / "train_text.py", *small)
        losses.append([float(x) for x in re.findall(r"held-out (?:loss )?([\d.]+)", out)])
        assert "it writes" in out
    alone, together = losses
    assert len(alone) == 3
    assert together == pytest.approx(alone, abs=0.01)
    assert together[-1] < together[0] - 0.3
