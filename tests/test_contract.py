"""Every backend of ours keeps the contract, and so does a third party's."""

from __future__ import annotations

from pathlib import Path

import pytest

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
