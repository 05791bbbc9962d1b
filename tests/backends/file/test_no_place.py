"""A host without any directory that ranks could meet in."""

from __future__ import annotations

import os
import tempfile
from importlib import import_module
from pathlib import Path

import pytest

import syncprims as sp


def test_ranks_do_not_meet_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private_dir = import_module("syncprims.backends.file.private_dir")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(private_dir, "_may_host", lambda path, owners: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # The user has named it in TMPDIR, since there are others.
    assert private_dir.default_base(None).parent == tmp_path
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(sp.ConfigurationError, match=r"have no place to meet.* set SYNCPRIMS_DIR"):
        private_dir.default_base(None)
    monkeypatch.setattr(tempfile, "tempdir", str(Path("/proc/somewhere")))
    assert private_dir.default_base(None).parent == Path("/proc/somewhere")
