"""All our backends and a third-party backend fulfil `BackendContract`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

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
    backend = "tiny"

    @pytest.fixture(autouse=True)
    def installed(self, tiny_site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(tiny_site))


def test_a_limit_for_objects_beside_a_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_backend("file").name == "file"  # and it is imported
    board = vars(sys.modules["syncprims.backends.file.board"])["SharedMemoryBoard"]
    monkeypatch.setattr(board, "note_limit", 1 << 20)
    with pytest.raises(AssertionError, match="a window is for arrays"):
        TestFile().test_windows_are_shared()
