"""Other users who create files in the way, victims that must stay intact, and what ranks left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

import syncprims as sp
from support.rank_worlds import Kind, Ranks, fork

# Only the launcher sets these variables.
from syncprims._world.launchers import make_rank_variables

OTHER_USER = 65534
RUN = "planted"
RUN_NAME = f"syncprims-{RUN}"

needs_root = pytest.mark.root


def start_intruder(does: Callable[[], object]) -> int:
    """Return the pid of a process of another user that does this."""

    def become_and_do() -> None:
        os.setgroups([])
        os.setgid(OTHER_USER)
        os.setuid(OTHER_USER)
        os.umask(0)
        does()

    return fork(become_and_do, os.environ.copy())


def as_intruder(does: Callable[[], object]) -> None:
    """Do this as another user."""
    assert os.waitpid(start_intruder(does), 0)[1] == 0


class Victim:
    """A directory with a file in it that only its owner may change."""

    def __init__(self, path: Path) -> None:
        self.folder = path
        path.mkdir(mode=0o755)
        self.file = path / "precious"
        self.file.write_bytes(b"precious" * 1000)
        self.file.chmod(0o640)
        os.utime(self.file, (1, 1))
        self._before = self._state()

    def _state(self) -> list[tuple[str, int, float, bytes]]:
        return [
            (p.name, s.st_mode, s.st_mtime, p.read_bytes() if stat.S_ISREG(s.st_mode) else b"")
            for p in sorted(self.folder.rglob("*"))
            for s in [p.lstat()]
        ]

    def check(self) -> None:
        """Assert that bytes, mode and time are unchanged, and no file is new."""
        assert self._state() == self._before


def bind(path: Path) -> None:
    """Plant a unix socket."""
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def plain_file(path: Path, mode: int, owner: int | None = None) -> None:
    """Plant a file with exactly this mode."""
    path.touch()
    path.chmod(mode)
    if owner is not None:
        os.chown(path, owner, owner)


def null_device(path: Path) -> None:
    """Plant a device."""
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))


#: What may stand in place of a file of ours: created at a path, with a victim at hand.
KINDS_OF_FILES: dict[str, Callable[[Path, Victim], object]] = {
    "link": lambda path, victim: path.symlink_to(victim.file),
    "dangling link": lambda path, victim: path.symlink_to(victim.folder / "new"),
    "hard link": lambda path, victim: path.hardlink_to(victim.file),
    "pipe": lambda path, _: os.mkfifo(path, 0o600),
    "socket": lambda path, _: bind(path),
    "device": lambda path, _: null_device(path),
    "directory": lambda path, _: path.mkdir(mode=0o700),
    "another's": lambda path, _: plain_file(path, 0o600, OTHER_USER),
    "readable": lambda path, _: plain_file(path, 0o644),
    "writable": lambda path, _: plain_file(path, 0o666),
}


def outcome_of(directory: Path, rank: int = 0, ranks: int = 1, patience: float = 1) -> str:
    """Return ``joined``, or the error of a rank that is refused in `directory`."""

    def program() -> str:
        os.environ.update(make_rank_variables(rank, ranks))
        return attempt()

    variables = {"SYNCPRIMS_RUN_ID": RUN, "SYNCPRIMS_JOIN_TIMEOUT": str(patience)}
    (said,) = Ranks(Kind("file", 1), directory).run_alone(program, **variables)
    return str(said)


def attempt() -> str:
    """Join, use all kinds of notes, and leave; return ``joined`` or the error."""
    try:
        with sp.init():
            sp.barrier("through", timeout=1)
            assert sp.broadcast("x" * 5000, timeout=1) == "x" * 5000
    except sp.SyncError as error:
        return f"{type(error).__name__}: {error}"
    return "joined"


class Remains:
    """The files of a run that rank 0 of 2 has joined, and the ones that it has locked."""

    def __init__(self, directories: set[str], files: dict[str, bytes], locked: set[str]) -> None:
        self.directories = directories
        self.files = files
        self.locked = locked

    @classmethod
    def capture(cls, directory: Path) -> Remains:
        """Join `directory` with one rank, record its files, and remove them."""
        directory.mkdir(mode=0o700)

        def program() -> Remains:
            os.environ.update(make_rank_variables(0, 2))
            found: list[Remains] = []

            def look(_: Any) -> None:
                found.append(cls._look(directory))
                raise KeyboardInterrupt  # all files are recorded

            from syncprims._world.world import RunningWorld

            replaced: Any = RunningWorld
            assert replaced.join
            replaced.join = look
            with contextlib.suppress(KeyboardInterrupt):
                sp.init()
            return found[0]

        world = Ranks(Kind("file", 1), directory)
        (seen,) = world.run_alone(program, SYNCPRIMS_RUN_ID=RUN)
        assert isinstance(seen, Remains)
        return seen

    @classmethod
    def _look(cls, directory: Path) -> Remains:
        directories: set[str] = set()
        files: dict[str, bytes] = {}
        locked: set[str] = set()
        for path in directory.rglob("*"):
            name = str(path.relative_to(directory))
            if path.is_dir():
                directories.add(name)
                continue
            files[name] = path.read_bytes() if path.is_file() else b""
            if not path.is_file():  # a pipe: opening it would block until its other end is open
                continue
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    locked.add(name)
        return cls(directories, files, locked)

    @contextlib.contextmanager
    def laid(self, base: Path, *, alive: bool) -> Generator[None]:
        """Write the files to `base`; if `alive`, as if rank 0 still ran."""
        base.mkdir(mode=0o700)
        held: list[int] = []
        try:
            for name in sorted(self.directories):
                (base / name).mkdir(mode=0o700)
            for name, content in self.files.items():
                (base / name).write_bytes(content)
                (base / name).chmod(0o600)
                if alive and name in self.locked:
                    held.append(os.open(base / name, os.O_RDWR))
                    fcntl.flock(held[-1], fcntl.LOCK_EX)
                if alive and Path(name).name == "locks":
                    held.append(os.open(base / name, os.O_RDWR))
                    fcntl.lockf(held[-1], fcntl.LOCK_EX, 1, 0)
            yield
        finally:
            for fd in held:
                os.close(fd)
            shutil.rmtree(base)
