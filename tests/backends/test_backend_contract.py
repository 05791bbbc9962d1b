"""All our backends and a third-party backend fulfil `BackendContract`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.rank_environment import clean_environ

# The class of a backend: no public call returns it.
from syncprims._world.registry import load_backend
from syncprims.testing import BackendContract


class TestSingle(BackendContract):
    backend = "single"
    ranks = 1


class TestThreads(BackendContract):
    backend = "threads"
    kind = "threads"


class TestFile(BackendContract):
    backend = "file"


class TestFileOfFive(BackendContract):
    backend = "file"
    ranks = 5


class TestAThirdPartys(BackendContract):
    backend = "mine"

    @pytest.fixture(autouse=True)
    def installed(self, backend_site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(backend_site))


def test_a_limit_for_objects_beside_a_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_backend("file").name == "file"  # and it is imported
    board = vars(sys.modules["syncprims.backends.file.board"])["SharedMemoryBoard"]
    monkeypatch.setattr(board, "note_limit", 1 << 20)
    with pytest.raises(AssertionError, match="a window is for arrays"):
        TestFile().test_windows_are_shared()


#: By what is wrong: a line of the backend, and what stands there instead.
MUTANTS = {
    "an abort breaks a complete round": (
        "if self.missing(number):",
        "if True:",
    ),
    "a round counts without its notes": (
        "gone or self.now() >= deadline:",
        "gone or self.now() >= deadline:\n                self.collected = number",
    ),
    "a note appears before it is whole": (
        "self.posted += 1\n",
        (
            "self.posted += 1\n        (self.folder / f'{self.posted}-{self.rank}').touch()\n"
            "        time.sleep(0.02)\n"
        ),
    ),
    "a wait for a lost member goes on": (
        "gone = any(self.is_in_vain(rank, missing) for rank in self.members)",
        "gone = False",
    ),
    "a note is gone before all have read it": (
        "self.collected = number\n",
        (
            "self.collected = number\n"
            "                    (self.folder / f'{number}-{self.rank}').write_bytes(b'')\n"
        ),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_is_easily_got_wrong_fails(mutant: str, backend_site: Path, tmp_path: Path) -> None:
    """Each of the five things that the page about backends names."""
    right, wrong = MUTANTS[mutant]
    shutil.copytree(backend_site, tmp_path / "site")
    source = tmp_path / "site" / "my_backend.py"
    assert source.read_text().count(right) == 1
    source.write_text(source.read_text().replace(right, wrong))
    (tmp_path / "test_it.py").write_text(
        "from syncprims.testing import BackendContract\n"
        "class TestIt(BackendContract):\n    backend = 'mine'\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:randomly", "test_it.py"],
        cwd=tmp_path, env={**clean_environ(), "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "1 failed" in done.stdout
