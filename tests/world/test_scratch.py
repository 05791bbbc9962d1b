"""Scratch directories: where they are, and what becomes of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from support.intruders import Victim, as_intruder, needs_root

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
    with scratch_directory("run") as made:
        path = made.path
        assert path.parent == place
        assert path.stat().st_mode & 0o077 == 0
        (path / "inner").mkdir()
        with scratch_directory("run", path / "inner") as inner:
            assert inner.path.parent == path / "inner"
        assert not inner.path.exists()
    assert not any(place.iterdir())


@pytest.mark.parametrize(("above", "closed"), [(0o700, True), (0o711, False), (0o755, False)])
def test_a_place_for_a_group_needs_no_path_of_its_own_where_no_other_user_comes(
    above: int, closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a umask of 002 makes it; what is above pytest's own directories is closed."""
    with tempfile.TemporaryDirectory() as top:
        place = Path(top, "place")
        place.mkdir()
        place.chmod(0o775)
        Path(top).chmod(above)
        monkeypatch.setattr(scratch, "list_common_places", lambda: [place])
        if closed or Path("/proc/self/fd").exists():
            with scratch_directory("run") as made:
                assert (made.path.parent == place) == closed
                assert place in made.path.resolve().parents
        else:
            with pytest.raises(ConfigurationError, match=r"mode 0775.*mktemp -d"):
                scratch_directory("run").__enter__()


@pytest.fixture
def volume(monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """The only place for scratch directories, and all users can rename what is in it."""
    with tempfile.TemporaryDirectory() as top:  # not pytest's, which no other user can reach
        Path(top).chmod(0o755)
        path = Path(top, "volume")
        path.mkdir()
        path.chmod(0o777)
        monkeypatch.setattr(scratch, "list_common_places", lambda: [path])
        scratch._remove_dead.cache_clear()
        yield path


def replace_by(kind: str, top: Path, victim: Victim) -> None:
    """Replace `top` as another user of the volume that `victim` is in can do it."""
    top.rename(top.with_name("was"))
    if kind == "link":
        top.symlink_to(victim.folder)
    elif kind == "theirs":
        top.mkdir()
    else:
        victim.folder.rename(top)


KINDS = pytest.mark.parametrize("kind", ["link", "theirs", "another of ours"])


@needs_root
@KINDS
def test_what_others_put_in_its_place_is_neither_used_nor_removed(kind: str, volume: Path) -> None:
    victim = Victim(volume / "victim")
    with scratch_directory("run") as made:
        (made.path / "inner").mkdir()
        as_intruder(lambda: replace_by(kind, made.top, victim))
        (made.path / "inner" / "report").write_text("ours")
        assert (volume / "was" / made.top.name / "inner" / "report").read_text() == "ours"
        assert made.path.samefile(volume / "was" / made.top.name)
    if kind == "another of ours":
        victim.folder = made.top
    victim.check()
    assert not list((volume / "was").iterdir())


@needs_root
@KINDS
def test_what_others_put_there_before_it_is_open_is_refused(
    kind: str, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, make = Victim(volume / "victim"), tempfile.mkdtemp

    def make_and_lose(prefix: str, dir: Path) -> str:
        path = make(prefix=prefix, dir=str(dir))
        as_intruder(lambda: replace_by(kind, Path(path), victim))
        if kind == "another of ours":
            victim.folder = Path(path)
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose)
    with pytest.raises(ConfigurationError, match="there is no place for temporary files"):
        scratch_directory("run").__enter__()
    victim.check()


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
            assert living.path.exists()
    assert {path.name for path in place.iterdir()} == left
