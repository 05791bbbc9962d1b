"""The primitives need none of the optional libraries; what needs one says how to install it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from support import ROOT
from support.rank_environment import run_python

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
MODULES = {"PyYAML": "yaml", "pytest-xdist": "xdist"}  # the others are named as their packages

#: For every process of Python, the launcher's and its ranks'.
BLOCK = "import sys\nsys.modules.update(dict.fromkeys({modules!r}))\n"

PRIMITIVES = """
import syncprims as sp

with sp.main_first():
    pass
sp.barrier("begin")
facts = {"lr": 0.1, "names": ["a", "b"]}
assert sp.broadcast(facts if sp.is_main() else None) == facts
large = {"text": "x" * (1 << 20)}
assert sp.broadcast(large if sp.is_main() else None) == large
assert sp.all_gather(large) == [large] * sp.get_world_size()
assert sp.all_reduce(2, "prod") == 2 ** sp.get_world_size()
assert sp.all_reduce({"loss": 0.5, "seen": 1}, "max") == {"loss": 0.5, "seen": 1}
assert sp.any_rank(sp.is_last()) and sp.all_ranks(True)
sp.assert_same(facts, "facts")
stop = sp.Trigger("stop")
if sp.is_last():
    stop.set("enough")
assert stop.check() and stop.reason == "enough"
assert sp.on_main(share=True)(lambda: 7)() == 7
with sp.in_turn():
    pass
assert sum(len(sp.split(range(10))) for _ in [0]) in (5, 10)
for _ in sp.progress(range(3), desc="steps", mininterval=0):
    pass
"""


def modules_of(requirements: list[str]) -> list[str]:
    names = [match[0] for r in requirements if (match := re.match(r"[\w-]+", r)) is not None]
    return [MODULES.get(name, name.replace("-", "_")) for name in names if name != "syncprims"]


ALL = sorted({module for extra in EXTRAS.values() for module in modules_of(extra)})


def run_without(modules: list[str], place: Path, *words: str) -> tuple[int, str, str]:
    (place / "sitecustomize.py").write_text(BLOCK.format(modules=modules))
    (place / "primitives.py").write_text(PRIMITIVES)
    done = run_python(*words, cwd=place, PYTHONPATH=str(place))
    return done.returncode, done.stdout, done.stderr


def test_the_package_needs_filelock_alone() -> None:
    assert modules_of(PROJECT["dependencies"]) == ["filelock"]


@pytest.mark.parametrize("blocked", [*ALL, "all of them"])
def test_the_primitives_work_without_an_optional_library(tmp_path: Path, blocked: str) -> None:
    modules = [blocked] if blocked in ALL else ALL
    for words in (["primitives.py"], ["-m", "syncprims", "run", "-n", "2", "primitives.py"]):
        code, _, errors = run_without(modules, tmp_path, *words)
        assert code == 0, errors


def test_progress_prints_lines_without_tqdm(tmp_path: Path) -> None:
    program = """
import sys
from syncprims import progress
for _ in progress("abcd", desc="letters", file=sys.stdout, mininterval=0):
    pass
with progress(total=10, file=sys.stdout, mininterval=3600, colour="red") as bar:
    bar.set_description("rows")
    bar.set_postfix(loss=0.12345, best=None)
    bar.update(4)
for _ in progress([1], disable=True):
    pass
progress((i for i in range(3)), file=sys.stdout).write("said between")
"""
    code, shown, errors = run_without(["tqdm"], tmp_path, "-c", program)
    assert (code, errors) == (0, "")
    assert re.sub(r"[^ ]+(?= it/s)", "R", shown).splitlines() == [
        "letters: 1/4 (25%), R it/s",
        "letters: 2/4 (50%), R it/s",
        "letters: 3/4 (75%), R it/s",
        "letters: 4/4 (100%), R it/s",
        "rows: 4/10 (40%), R it/s, loss=0.123, best=None",
        "said between",
    ]


SENT = """
import sys, syncprims as sp
if sp.is_main():
    import numpy
    value = numpy.zeros({size})
else:
    sys.modules["numpy"] = None
    value = None
try:
    sp.broadcast(value)
except sp.BackendUnavailable as error:
    sys.exit(f"told: {{error}}")
"""


@pytest.mark.parametrize("size", [3, 1 << 18])
def test_a_rank_without_numpy_says_that_arrays_need_it(tmp_path: Path, size: int) -> None:
    program = tmp_path / "send.py"
    program.write_text(SENT.format(size=size))
    _, _, errors = run_without(
        [], tmp_path, "-m", "syncprims", "run", "-n", "2", "--backend", "file", str(program)
    )
    assert "told: arrays and tensors between ranks need numpy" in errors
    assert "pip install '.[numpy]'" in errors


def test_reading_a_trace_says_that_it_needs_numpy(tmp_path: Path) -> None:
    code, _, errors = run_without(["numpy"], tmp_path, "-m", "syncprims", "trace", str(tmp_path))
    assert code == 2
    assert "reading traces needs numpy" in errors
    assert "pip install '.[trace]'" in errors
