"""Scratch directories: where they are, and what becomes of them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

# What killed launches leave, without a launch for each case.
from syncprims import ConfigurationError
from syncprims._world import scratch
from syncprims._world.scratch import scratch_directory


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place for scratch directories."""
    path = tmp_path / "place"
    path.mkdir()
    monkeypatch.setattr(scratch, "list_common_places", lambda: [Path("/nowhere"), path])
    scratch._remove_dead.cache_clear()
    return path


def test_a_directory_is_private_and_goes_with_its_content(place: Path) -> None:
    with scratch_directory("run") as path:
        assert path.parent == place
        assert path.stat().st_mode & 0o077 == 0
        (path / "inner").mkdir()
        with scratch_directory("run", path / "inner") as inner:
            assert inner.parent == path / "inner"
        assert not inner.exists()
    assert not any(place.iterdir())


@pytest.mark.parametrize(("above", "works"), [(0o700, True), (0o711, False), (0o755, False)])
def test_a_place_for_a_group_will_do_where_no_other_user_comes(
    above: int, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a umask of 002 makes it; what is above pytest's own directories is closed."""
    with tempfile.TemporaryDirectory() as top:
        place = Path(top, "place")
        place.mkdir()
        place.chmod(0o775)
        Path(top).chmod(above)
        monkeypatch.setattr(scratch, "list_common_places", lambda: [place])
        if works:
            with scratch_directory("run") as path:
                assert path.parent == place
        else:
            with pytest.raises(ConfigurationError, match=r"mode 0775.*mktemp -d"):
                scratch_directory("run").__enter__()


def test_those_of_killed_processes_are_removed_and_no_others(place: Path) -> None:
    pid = os.fork()
    if not pid:
        try:
            with scratch_directory("test"):
                os._exit(0)
        finally:
            os._exit(1)  # or this process would go on as a second pytest
    assert os.waitpid(pid, 0)[1] == 0
    [dead] = place.iterdir()
    left = {"another", "syncprims-of-another-host", "syncprims-without-lock"}
    for name in left:
        (place / name).mkdir()
    # Its lock may be held there, and be free here: TMPDIR may be a directory that hosts share.
    (place / "syncprims-of-another-host" / scratch.LOCK).write_text("1 its-boot-id")
    with scratch_directory("run") as living:
        assert not dead.exists()
        scratch._remove_dead.cache_clear()
        with scratch_directory("run"):
            assert living.exists()
    assert {path.name for path in place.iterdir()} == left
