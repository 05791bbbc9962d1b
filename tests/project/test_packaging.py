"""The installed package works outside the checkout, also in spawned children."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import filelock
import pytest
from support import ROOT
from support.rank_environment import run_python

JOB = """
import multiprocessing as mp, os, syncprims

def work(rank):
    os.environ.update(SYNCPRIMS_RANK=str(rank), SYNCPRIMS_WORLD_SIZE="2", SYNCPRIMS_RUN_ID="job",
                      SYNCPRIMS_BACKEND="file")
    assert syncprims.all_gather(rank) == [0, 1]

if __name__ == "__main__":
    assert "site" in syncprims.__file__, syncprims.__file__
    ranks = [mp.get_context("spawn").Process(target=work, args=(r,)) for r in range(2)]
    [rank.start() for rank in ranks]
    [rank.join() for rank in ranks]
    print([rank.exitcode for rank in ranks])
"""


def pip(*words: str) -> None:
    done = run_python("-m", "pip", "--disable-pip-version-check", *words)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel once, from a copy of what is under version control or new."""
    pytest.importorskip("setuptools_scm")
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    dist = root / "dist"
    with filelock.FileLock(root / "dist.lock"):
        if not dist.exists():
            source = root / "source"
            ignore = shutil.ignore_patterns(
                ".venv", "*.egg-info", "build", "__pycache__", ".*_cache"
            )
            shutil.copytree(ROOT, source, ignore=ignore)
            build_wheel(source, dist)
    return dist


def build_wheel(source: Path, dist: Path) -> None:
    script = f"from setuptools import build_meta as b; b.build_wheel({str(dist)!r})"
    done = run_python("-c", script, cwd=source, SOURCE_DATE_EPOCH="1700000000")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wheel_built_again_is_equal_bit_for_bit(built: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"  # another folder, whose files have other times
    ignore = shutil.ignore_patterns("build", "*.egg-info")
    shutil.copytree(built.parent / "source", again, ignore=ignore, copy_function=shutil.copy)
    build_wheel(again, tmp_path)
    (first,), (second,) = built.glob("*.whl"), tmp_path.glob("*.whl")
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()


def test_the_wheel_keeps_its_budget(built: Path) -> None:
    """Its target is 520 kB; lower the limit after each cut."""
    (wheel,) = built.glob("*.whl")
    files = sorted(zipfile.ZipFile(wheel).infolist(), key=lambda file: -file.compress_size)
    lines = "\n".join(f"  {file.compress_size:,} {file.filename}" for file in files[:8])
    found, most = wheel.stat().st_size, 599_500
    assert found <= most, f"{found:,} bytes, at most {most:,}: cut elsewhere, as in\n{lines}"


def test_the_wheel_holds_the_packages_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    modules = {n for n in names if n.endswith((".py", "py.typed")) and ".dist-info" not in n}
    expected = {str(p.relative_to(ROOT)) for p in (ROOT / "syncprims").rglob("*.py")}
    expected |= {f"syncprims/{p.relative_to(ROOT)}" for p in (ROOT / "backends").rglob("*.py")}
    # Torch imports the module of its entry point, which must not import the library.
    assert modules == {*expected, "syncprims/py.typed", "_syncprims_c10d.py"}
    tops = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"syncprims", "_syncprims_c10d.py"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    metadata = (
        zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("/METADATA"))).decode()
    )
    assert "Requires-Dist: filelock" in metadata
    for extra in ("numpy", "progress", "torch", "test", "trace", "all"):
        assert f"Provides-Extra: {extra}" in metadata


def test_installed_it_works_outside_the_checkout(built: Path, tmp_path: Path) -> None:
    (package,) = built.glob("*.whl")
    site = tmp_path / "site"
    pip("install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation",
        "--root-user-action=ignore", "--target", str(site), str(package))  # fmt: skip
    script = tmp_path / "job.py"
    script.write_text(JOB)
    place = {"PYTHONPATH": str(site), "SYNCPRIMS_DIR": str(tmp_path / "meet")}
    done = run_python(script, cwd=tmp_path, **place)
    assert done.stdout == "[0, 0]\n", done.stderr
    shown = run_python(site / "bin" / "syncprims", "run", "--help", cwd=tmp_path, **place)
    assert "usage: syncprims run" in shown.stdout, shown.stderr


def test_a_bare_checkout_says_what_to_do(tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__")  # which other tests change
    shutil.copytree(ROOT / "syncprims", tmp_path / "syncprims", ignore=ignore)
    done = run_python("-S", "-c", "import syncprims; syncprims.barrier()", cwd=tmp_path)
    assert done.returncode == 1
    assert "pip install -e ." in done.stderr
