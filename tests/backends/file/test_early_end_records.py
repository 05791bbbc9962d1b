"""When the record of a rank that has ended early is of no use to any other rank."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest

RankRecord: Any = import_module("syncprims.backends.file.early_ends").RankRecord
ProcessIdentity: Any = import_module("syncprims._system.identity").ProcessIdentity


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_record_is_void_when_the_launcher_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as launcher:
        identity = ProcessIdentity.of(launcher.pid)
        assert identity is not None
        end = RankRecord.seen("exit code 0")._replace(launcher=[*identity])
        assert not end.is_void()
        launcher.kill()
        os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)
        assert end.is_void()  # as soon as it has ended, although its parent has not reaped it
    assert end.is_void()


def test_without_proc_a_record_is_never_void(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system does not say whether the launcher lives: so it may."""
    monkeypatch.setattr(ProcessIdentity, "of", _unknown)
    assert not RankRecord.seen("exit code 0").is_void()


def _unknown(pid: int) -> None:
    """Say nothing of a process, as a system without proc(5)."""
