"""The ported examples: same results as before, and the gains that they demonstrate."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.rank_environment import clean_environ

EXAMPLES = ROOT / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FILE = ["-m", "syncprims", "run", "-n", "2"]


def run(*command: object, folder: Path | None = None, **more: str) -> str:
    """Return what a Python command prints; nothing of this session reaches it."""
    clean = {k: v for k, v in clean_environ().items() if not k.startswith(("PYTEST", "COV"))}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder, env={**clean, "OMP_NUM_THREADS": "1", **more},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def result(out: str) -> dict[str, Any]:
    """Return the figures that rank 0 prints."""
    found: dict[str, Any] = json.loads(out[out.index("{") : out.rindex("}") + 1])
    return found


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
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
    resumed = run(*FILE, script, *place, "--resume")
    assert "continues after epoch 2" in resumed

    ours = result(resumed)
    assert theirs["losses"][-1] < theirs["losses"][0]
    assert (ours["right"], ours["of"]) == (theirs["right"], theirs["of"])
    assert ours["of"] == 90
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-6)


def test_barriers_and_rank_checks_are_replaced_and_the_weights_stay(tmp_path: Path) -> None:
    import torch

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
    missing = sum(find_spec(name) is None for name in ("accelerate", "lightning_fabric"))
    passed, rest = outcome(out)
    assert passed == 7 - 3 * missing
    assert rest == (f", {3 * missing} skipped" if missing else "")


@pytest.mark.skipif(find_spec("xdist") is None, reason="needs pytest-xdist")
def test_workers_share_a_database_that_one_of_them_made(tmp_path: Path) -> None:
    options = ["-p", "no:cacheprovider", "--basetemp", tmp_path / "base", "-n", "2"]
    out = run("-m", "pytest", "-q", "-rN", *options, EXAMPLES / "shared_database", folder=tmp_path)
    assert outcome(out) == (10, "")
    assert len(list((tmp_path / "base").rglob("orders.sqlite"))) == 1
