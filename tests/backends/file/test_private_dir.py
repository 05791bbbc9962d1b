"""Files planted by another user in the directory of a run: refused, or without effect."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
from support.intruders import (
    KINDS_OF_FILES,
    OTHER_USER,
    RUN,
    RUN_NAME,
    Remains,
    Victim,
    as_intruder,
    attempt,
    bind,
    needs_root,
    outcome_of,
    start_intruder,
)
from support.rank_worlds import Kind, Ranks, environment, fork

# The backend is imported before the ranks are forked.
from syncprims._system.processes import load_libc
from syncprims._world.registry import load_backend

pytestmark = needs_root


class Place:
    """A world-writable directory like /tmp, with room for ranks to meet below it."""

    def __init__(self, common: Path) -> None:
        self.common = common / "common"
        self.common.mkdir()
        self.common.chmod(0o1777)
        self.base = self.common / "meet"
        self.victim = Victim(common / "victim")

    @property
    def run(self) -> Path:
        """The directory of the run."""
        return self.base / RUN_NAME

    def own_base(self, mode: int = 0o700) -> None:
        """Make the base as its user would."""
        self.base.mkdir()
        self.base.chmod(mode)


@pytest.fixture
def place() -> Generator[Place]:
    # Not pytest's own directory, which no other user can reach.
    common = Path(tempfile.mkdtemp(prefix="intruders-"))
    common.chmod(0o755)
    try:
        yield Place(common)
    finally:
        shutil.rmtree(common)


def below(place: Place, mode: int, owner: int, *, levels: int = 1) -> None:
    """Put the base `levels` below a directory like this."""
    weak = place.common / "weak"
    weak.mkdir()
    os.chown(weak, owner, owner)
    weak.chmod(mode)
    inner = weak
    for number in range(levels - 1):
        inner /= f"level-{number}"
        inner.mkdir(mode=0o755)
    place.base = inner / "meet"
    place.own_base()


def through_a_link(place: Place) -> None:
    as_intruder(lambda: (place.common / "way").symlink_to(place.victim.folder))
    place.base = place.common / "way" / "meet"


#: Name, how it is made, and what is said.
BASES: list[tuple[str, Callable[[Place], object], str]] = [
    ("group may write", lambda p: p.own_base(0o770), "chmod 700"),
    ("all may write", lambda p: p.own_base(0o777), "chmod 700"),
    ("all may write, sticky", lambda p: p.own_base(0o1777), "chmod 700"),
    ("parent another's", lambda p: below(p, 0o755, OTHER_USER), "belongs to user 65534, who"),
    ("parent another's, sticky", lambda p: below(p, 0o1777, OTHER_USER), "belongs to user 65534"),
    ("far above another's", lambda p: below(p, 0o711, OTHER_USER, levels=3), "to user 65534, who"),
    ("another's link on the way", through_a_link, "is a link that belongs to user 65534"),
]


@pytest.mark.parametrize(("plant", "says"), [b[1:] for b in BASES], ids=[b[0] for b in BASES])
def test_places_of_others(place: Place, plant: Callable[[Place], object], says: str) -> None:
    plant(place)
    said = outcome_of(place.base)
    assert said.startswith("ConfigurationError")
    assert says in said
    assert "SYNCPRIMS_DIR" in said
    place.victim.check()


DIRECTORIES: list[tuple[str, Callable[[Path, Victim], object], str]] = [
    ("squatted", lambda path, _: path.mkdir(0o755), "belongs to user 65534"),
    ("squatted, right mode", lambda path, _: path.mkdir(0o700), "belongs to user 65534"),
    ("squatted, open to all", lambda path, _: path.mkdir(0o777), "belongs to user 65534"),
    ("link", lambda path, victim: path.symlink_to(victim.folder), "a link"),
    ("dangling link", lambda path, victim: path.symlink_to(victim.folder / "new"), "a link"),
    ("pipe", lambda path, _: os.mkfifo(path), "not a directory"),
    ("file", lambda path, _: path.touch(), "not a directory"),
    ("socket", lambda path, _: bind(path), "not a directory"),
]


@pytest.mark.parametrize("where", ["base", "run", "world"])
@pytest.mark.parametrize(
    ("plant", "says"), [d[1:] for d in DIRECTORIES], ids=[d[0] for d in DIRECTORIES]
)
def test_directories(
    place: Place, where: str, plant: Callable[[Path, Victim], object], says: str
) -> None:
    """The base of the ranks or their run was open to all when this was planted, and is no more."""
    path = {"base": place.base, "run": place.run, "world": place.run / "world-1"}[where]
    if where != "base":
        place.own_base(0o755)
    if where == "world":
        place.run.mkdir(0o700)
    mode = path.parent.stat().st_mode
    path.parent.chmod(0o777)
    as_intruder(lambda: plant(path, place.victim))
    path.parent.chmod(mode)
    said = outcome_of(place.base)
    assert said.startswith("ConfigurationError")
    assert says in said
    assert "SYNCPRIMS_DIR" in said
    place.victim.check()


@pytest.mark.parametrize(("mode", "levels"), [(0o775, 1), (0o777, 1), (0o2777, 3)])
def test_a_directory_of_ones_own_will_do_below_one_that_is_open(
    place: Place, mode: int, levels: int
) -> None:
    """Volumes of pods are open to all; what others put into one is refused, as everywhere."""
    below(place, mode, 0, levels=levels)
    assert outcome_of(place.base) == "joined"
    place.base.rmdir()
    top = place.common / "weak"
    if levels == 1:
        if mode & 0o002:
            as_intruder(lambda: place.base.mkdir(0o700))
            assert "belongs to user 65534" in outcome_of(place.base)
            as_intruder(lambda: place.base.rename(top / "theirs"))
            as_intruder(lambda: place.base.symlink_to(place.victim.folder))
            assert "a link" in outcome_of(place.base)
    else:
        as_intruder(lambda: (top / "level-0").rename(top / "gone"))
        as_intruder(lambda: place.base.mkdir(parents=True))
        assert "belongs to user 65534" in outcome_of(place.base)
        as_intruder(lambda: (top / "level-0").rename(top / "theirs"))
        as_intruder(lambda: (top / "level-0").symlink_to("gone"))
        assert "is a link that belongs to user 65534" in outcome_of(place.base)
    place.victim.check()


def test_a_place_like_tmp_will_do_and_so_will_roots_links(place: Place) -> None:
    as_intruder(lambda: (place.common / f"{RUN_NAME}.lock").touch())
    assert outcome_of(place.base) == "joined"
    (place.common / "way").symlink_to("./meet/../meet")
    assert outcome_of(place.common / "way" / "new" / "below") == "joined"
    assert list((place.base / "new" / "below").iterdir()) == []
    (place.common / "round").symlink_to("round")
    assert "links" in outcome_of(place.common / "round" / "below")


def test_memory_of_another_user_is_no_default(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_backend("file")
    default_base = import_module("syncprims.backends.file.private_dir").default_base
    assert default_base(str(place.common)) == place.common / "syncprims"
    os.chown(place.common, OTHER_USER, OTHER_USER)  # root's session inherits another's, as with su
    assert place.common not in default_base(str(place.common)).parents
    assert default_base("/proc/nowhere") == default_base(None)


def test_what_another_user_has_made_first_is_passed_over(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_backend("file")
    module = import_module("syncprims.backends.file.private_dir")
    next_place = place.common / "next"
    next_place.mkdir(mode=0o1777)
    monkeypatch.setattr(module, "list_common_places", lambda: [place.common, next_place])
    base = module.default_base(None)
    assert base.parent == place.common
    as_intruder(base.mkdir)
    assert module.default_base(None) == next_place / base.name
    base.rmdir()
    as_intruder(lambda: base.symlink_to(place.victim.folder))
    assert module.default_base(None) == next_place / base.name


REFUSED = 77  # exit code of a child that gets no user namespace


def join_in_container_of(user: int) -> None:
    """Join as the root of a user namespace in which nobody but this user exists."""
    assert attempt() == "joined"  # afterwards this process cannot read all that it would load
    os.environ |= {"SYNCPRIMS_RUN_ID": "inside"}
    libc = load_libc()
    os.setuid(user)
    libc.prctl(4, 1)  # PR_SET_DUMPABLE: so that its files in /proc are its own
    if libc.unshare(0x10000000):  # CLONE_NEWUSER
        os._exit(REFUSED)
    Path("/proc/self/uid_map").write_text(f"0 {user} 1\n")
    assert os.geteuid() == 0
    assert attempt() == "joined"


@pytest.mark.skipif(sys.platform != "linux", reason="user namespaces are of Linux")
def test_containers_of_several_users_share_a_place() -> None:
    """As ranks by hand in rootless containers with --ipc=host: each user is its own root there."""
    variables = environment(Kind("file", 1), 0, Path("/nowhere"), "before")
    del variables["SYNCPRIMS_DIR"]
    users = [os.getpid() + number for number in (1 << 24, 1 << 25)]  # of no other test
    try:
        for user in users:
            pid = fork(partial(join_in_container_of, user), variables)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code == REFUSED:
                pytest.skip("this system refuses user namespaces")
            assert code == 0
    finally:
        for user in users:
            with contextlib.suppress(FileNotFoundError):
                Path(f"/dev/shm/syncprims-{user}").rmdir()


def test_own_directories_with_a_loose_mode_are_refused(place: Place) -> None:
    place.own_base()
    for mode in (0o770, 0o777, 0o750, 0o705):
        place.run.mkdir()
        place.run.chmod(mode)
        said = outcome_of(place.base)
        assert f"has mode {mode:04o}" in said
        assert f"chmod 700 {place.run}" in said
        place.run.rmdir()


@pytest.mark.parametrize("kind", KINDS_OF_FILES)
def test_a_planted_lock_is_refused(place: Place, kind: str) -> None:
    place.own_base(0o755)
    lock = place.base / f"{RUN_NAME}.lock"
    KINDS_OF_FILES[kind](lock, place.victim)
    place.victim.folder.chmod(0o755)
    before = lock.lstat()
    said = outcome_of(place.base)
    assert said.startswith("ConfigurationError")
    assert str(lock) in said
    assert lock.lstat()[:6] == before[:6]
    if kind == "hard link":
        lock.unlink()
    place.victim.check()


@pytest.mark.parametrize("mode", [0o644, 0o666])
def test_a_lock_that_another_user_holds_is_refused_at_once(place: Place, mode: int) -> None:
    """Any user who may read a file may lock it, and need not unlock it."""
    place.own_base(0o755)
    lock = place.base / f"{RUN_NAME}.lock"
    lock.touch()
    lock.chmod(mode)
    reader, writer = os.pipe()

    def hold() -> None:
        fd = os.open(lock, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(writer, b"held")
        signal.pause()

    pid = start_intruder(hold)
    try:
        assert os.read(reader, 4) == b"held"
        assert f"has mode {mode:04o}" in outcome_of(place.base, patience=30)
        lock.chmod(0o600)  # too late: it is open
        said = outcome_of(place.base, patience=0.2)
        assert said.startswith("BackendUnavailable: another process has held")
        assert "SYNCPRIMS_RUN_ID" in said
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)
    assert outcome_of(place.base) == "joined"


@pytest.mark.parametrize("kind", KINDS_OF_FILES)
@pytest.mark.parametrize("alive", [False, True], ids=["of a dead run", "of a living run"])
def test_planted_files_are_refused_or_harmless(place: Place, kind: str, alive: bool) -> None:
    remains = Remains.capture(place.base)
    place.base.rmdir()
    world = next(name for name in remains.directories if "world" in name)
    names = {*remains.files, f"{world}/alive-1"} - {f"{RUN_NAME}.lock"}
    if alive:
        names -= remains.locked  # who holds the lock, and what stands there now, are two things
    assert len(names) >= 3
    for name in sorted(names):
        with remains.laid(place.base, alive=alive):
            (place.base / name).unlink(missing_ok=True)
            KINDS_OF_FILES[kind](place.base / name, place.victim)
            said = outcome_of(place.base, rank=1, ranks=2, patience=0.1)
            # Alone at a clean world, or beside a rank that only seems to live. A doorbell is not
            # touched before all have come, and need not work.
            told = alive and not Path(name).name.startswith("doorbell-")
            met = said.startswith("SyncTimeout") and "ranks [0] did not come" in said
            assert (met and not told) or Path(name).name in said, (name, said)
        place.victim.check()


def test_sweeping_and_clearing_remove_nothing_outside(place: Place) -> None:
    place.own_base(0o777)
    inner = place.victim.folder

    def plant() -> None:
        (place.base / "syncprims-a").symlink_to(inner)
        (place.base / "syncprims-b.lock").symlink_to(inner / "precious")
        (place.base / "syncprims-c").symlink_to("..")
        (place.base / "syncprims-d").mkdir(0o777)
        (place.base / "syncprims-d" / "world-1").symlink_to(inner)
        os.mkfifo(place.base / "syncprims-f.lock")
        (place.base / "syncprims-..lock").touch()

    as_intruder(plant)
    place.base.chmod(0o755)
    for name in "ace":
        (place.base / f"syncprims-{name}.lock").touch(0o600)
    ours = place.base / "syncprims-e" / "world-1"
    for folder in (ours.parent, ours, ours / "deep"):
        folder.mkdir(mode=0o700)
    (ours / "deep" / "file").touch()
    (ours / "liveness").symlink_to(inner / "precious")
    (ours / "link").symlink_to(inner)
    (ours.parent / "world-2").symlink_to(inner)
    assert outcome_of(place.base) == "joined"
    place.victim.check()
    assert (ours / "deep" / "file").exists()


def swap_for_ever(path: Path, victim: Victim) -> None:
    """Put one thing after the other at `path`, as fast as can be."""
    spare = path.with_name("spare")
    while True:
        for kind in ("link", "own", "dangling", "file", "pipe"):
            with contextlib.suppress(OSError):
                if kind == "own":
                    spare.mkdir(0o777)
                elif kind == "file":
                    spare.touch()
                elif kind == "pipe":
                    os.mkfifo(spare)
                else:
                    spare.symlink_to(victim.folder / ("" if kind == "link" else "new"))
            with contextlib.suppress(OSError):
                spare.rename(path)
            for left in (spare, path):
                with contextlib.suppress(OSError):
                    left.unlink()
                with contextlib.suppress(OSError):
                    left.rmdir()


def race(place: Place, where: str, tries: int) -> None:
    if where == "open":
        place.common.chmod(0o777)
    swapped = place.common / ("way" if where == "on the way" else "meet")
    base = swapped / "meet" if where == "on the way" else swapped

    def program() -> dict[str, int]:
        said: dict[str, int] = {}
        for _ in range(tries):
            if where == "open":
                with contextlib.suppress(OSError):
                    base.mkdir(mode=0o700)
            outcome = attempt().split(":")[0]
            said[outcome] = said.get(outcome, 0) + 1
            place.victim.check()
            for ours in (base, swapped):
                with contextlib.suppress(OSError):
                    ours.rmdir()
        assert set(said) <= {"joined", "ConfigurationError", "BackendUnavailable"}, said
        return said

    pid = start_intruder(lambda: swap_for_ever(swapped, place.victim))
    try:
        (said,) = Ranks(Kind("file", 1), place.common).run_alone(
            program, SYNCPRIMS_RUN_ID=RUN, SYNCPRIMS_DIR=str(base), SYNCPRIMS_JOIN_TIMEOUT="1"
        )
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    place.victim.check()
    assert sum(said.values()) == tries


@pytest.mark.parametrize("where", ["sticky", "on the way", "open"])
def test_what_is_swapped_between_a_look_and_a_use_harms_nobody(place: Place, where: str) -> None:
    race(place, where, 300)
