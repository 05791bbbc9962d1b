"""Damaged and foreign files: a clear error or a clean start, no crash and no hang.

The tests do not know the layout of the files, so they also cover a new layout.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.intruders import RUN, RUN_NAME, Remains, attempt, outcome_of
from support.rank_worlds import Kind, Ranks, fork

import syncprims as sp

# Only the launcher sets these variables.
from syncprims._world.launchers import make_rank_variables

Damage = tuple[str, "Callable[[Path], object]"]

TERABYTE = 1 << 40


@pytest.fixture(scope="module")
def remains(tmp_path_factory: pytest.TempPathFactory) -> Remains:
    found = Remains.capture(tmp_path_factory.mktemp("remains") / "meet")
    assert {Path(name).name for name in found.files} >= {f"{RUN_NAME}.lock", "liveness", "alive-0"}
    assert len(found.files) >= 4
    assert found.locked
    return found


def overwritten(content: bytes, at: int = 0) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(content)

    return damage


def cut(size: int) -> Callable[[Path], object]:
    return lambda path: os.truncate(path, size)


def emptied(path: Path, size: int) -> None:
    path.write_bytes(b"")
    os.truncate(path, size)


def replaced(path: Path) -> None:
    path.unlink()
    path.mkdir(mode=0o700)


def replaced_with_more(path: Path) -> None:
    replaced(path)
    (path / "more").touch()


def sizes(content: bytes) -> Iterator[int]:
    """Give the lengths at which a file may be cut off: all in its header, and around pages."""
    yield from range(min(len(content), 80))
    for page in range(4096, len(content), 4096):
        yield from (page - 1, page, page + 1)
    yield max(0, len(content) - 1)


def damages(content: bytes) -> Iterator[Damage]:
    """Give what may have become of a file."""
    size, chance = len(content), random.Random(5)
    for length in sizes(content):
        yield f"cut to {length}", cut(length)
    yield "all zero", overwritten(bytes(size))
    yield "all ones", overwritten(b"\xff" * size)
    for number in range(10):
        yield f"random bytes {number}", overwritten(chance.randbytes(size))
        yield f"random head {number}", overwritten(chance.randbytes(chance.choice([8, 36, 64])))
    yield "random and short", lambda path: path.write_bytes(chance.randbytes(100))
    yield "a terabyte more", cut(TERABYTE)
    yield "a terabyte of nothing", lambda path: emptied(path, TERABYTE)
    yield "as long, of nothing", lambda path: emptied(path, size)
    yield "read-only", lambda path: path.chmod(0o400)
    yield "closed", lambda path: path.chmod(0)
    yield "a directory", replaced
    yield "a directory with something in it", replaced_with_more
    yield "not there", lambda path: path.unlink()
    for at in range(min(size, 64)):  # magic, version and sizes are here, whatever their order
        for bits in (0x01, 0xFF):
            yield f"byte {at} ^ {bits}", overwritten(bytes([content[at] ^ bits]), at)


#: Every how many-th damage is tried; a prime, so that all kinds of damage come up.
strides = pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.soak)])


def join_each(
    remains: Remains, directory: Path, stride: int, *, alive: bool, patience: float
) -> list[str]:
    """Join after damages to each file, and return what was said."""
    said: list[str] = []
    variables = {
        "SYNCPRIMS_RUN_ID": RUN,
        "SYNCPRIMS_DIR": str(directory / "meet"),
        "SYNCPRIMS_JOIN_TIMEOUT": str(patience),
    }
    world = Ranks(Kind("file", 1), directory)
    for name in sorted(remains.files):

        def program(name: str = name) -> list[str]:
            os.environ.update(make_rank_variables(1, 2) if alive else make_rank_variables(0, 1))
            return [*join_despite(remains, directory / "meet", name, stride, alive=alive)]

        said += world.run_alone(program, **variables)[0]
    return said


def join_despite(
    remains: Remains, base: Path, name: str, stride: int, *, alive: bool
) -> Iterator[str]:
    """Join after damages to one file, all in this process; give what was said."""
    fds = len(list(Path("/dev/fd").iterdir()))
    for what, damage in itertools.islice(damages(remains.files[name]), 0, None, stride):
        with remains.laid(base, alive=alive):
            damage(base / name)
            try:
                outcome = attempt()
            except BaseException as error:
                error.add_note(f"{name}: {what}")
                raise
        yield f"{Path(name).name}: {what}: {outcome}"
    assert len(list(Path("/dev/fd").iterdir())) == fds


@strides
def test_damage_of_a_dead_run_is_cleared(remains: Remains, stride: int, tmp_path: Path) -> None:
    """Unless something stands there that cannot be read or cleared away: then a clear error."""
    said = join_each(remains, tmp_path, stride, alive=False, patience=1)
    assert len(said) > 600 / stride
    refused = [one for one in said if not one.endswith("joined")]
    expected = ("a directory", "a directory with something in it", "read-only", "closed")
    assert all(one.split(": ")[1] in expected for one in refused), refused
    kinds = {one.split(": ")[2] for one in refused}
    assert kinds <= {"ConfigurationError", "BackendUnavailable"}


@strides
def test_damage_of_a_living_run_is_an_error(remains: Remains, stride: int, tmp_path: Path) -> None:
    """What is not damaged enough to be told is a rank that is waited for, for as long as asked."""
    said = join_each(remains, tmp_path, stride, alive=True, patience=0.001)
    assert len(said) > 600 / stride
    kinds = {one.split(": ")[2] for one in said}
    assert kinds <= {
        "joined",
        "ConfigurationError",
        "SyncTimeout",
        "PeerLost",
        "BackendUnavailable",
    }
    assert {"ConfigurationError", "SyncTimeout"} <= kinds
    liveness = [one for one in said if one.startswith("liveness: ")]
    cut_off = [one for one in liveness if ": cut to " in one and ": cut to 0:" not in one]
    assert all("ConfigurationError" in one and "liveness" in one for one in cut_off), cut_off


def test_another_version_is_told(remains: Remains, tmp_path: Path) -> None:
    base = tmp_path / "meet"
    (name,) = [name for name in remains.files if Path(name).name == "liveness"]
    head = remains.files[name][:32]
    other = head.replace(b"liveness ", b"liveness 9")[:32]
    assert other != head
    with remains.laid(base, alive=True):
        overwritten(other)(base / name)
        said = outcome_of(base, rank=1, ranks=2, patience=0.1)
    assert said.startswith("ConfigurationError")
    assert "of this version of syncprims: start all ranks from one installation" in said


def flip(directory: Path, chance: random.Random) -> None:
    """Flip a bit of one of the files below; often where something is written."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    if not files:
        return
    with contextlib.suppress(FileNotFoundError), chance.choice(files).open("r+b") as file:
        content = file.read()
        if not content:
            return
        at = chance.randrange(len(content))
        if chance.random() < 0.7:
            written = re.search(rb"[^\0]+", content[at:])
            at += chance.randrange(*written.span()) if written else 0
        file.seek(at)
        file.write(bytes([content[at] ^ 1 << chance.randrange(8)]))


def calls(number: int) -> None:
    """Make calls of all kinds, each of which raises or is right."""
    rank, size = sp.get_rank(), sp.get_world_size()
    sp.barrier(f"barrier {number % 3}", timeout=0.2)
    assert sp.all_gather((rank, number), timeout=0.2) == [(i, number) for i in range(size)]
    assert sp.broadcast("x" * 5000 if rank == number % size else None, src=number % size,
                        timeout=0.2) == "x" * 5000  # fmt: skip
    assert sp.all_reduce(rank, timeout=0.2) == sum(range(size))
    assert sp.any_rank(rank == 0, timeout=0.2)


def damaged_world(directory: Path, seed: int, ranks: int = 2) -> set[str]:
    """Run a world in which each rank damages the files; return how it ended."""

    def program() -> str:
        chance = random.Random(1000 * seed + int(os.environ["SYNCPRIMS_RANK"]))
        said = "went on"
        try:
            with sp.init():
                calls(0)
                for number in range(1, 15):
                    flip(directory, chance)
                    calls(number)
        except sp.SyncError as error:
            said = type(error).__name__ if str(error) else "no word"
        return said

    world = Ranks(Kind("file", ranks), directory)
    outcomes = world.outcomes(program, start=False, SYNCPRIMS_JOIN_TIMEOUT="1")
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            outcome.add_note(f"seed {seed}")
            raise outcome
    assert "no word" not in outcomes
    return set(outcomes)


@contextlib.contextmanager
def vandal(directory: Path, seed: int) -> Generator[None]:
    """Flip bits in another process without pause, so also while ranks wait and read."""

    def flip_for_ever() -> None:
        chance = random.Random(seed)
        while True:
            with contextlib.suppress(OSError):
                flip(directory, chance)
            time.sleep(0.001)  # the rate of the damage

    pid = fork(flip_for_ever, os.environ.copy())
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def flips(directory: Path, seeds: range, *, always: bool) -> set[str]:
    seen: set[str] = set()
    for seed in seeds:
        with vandal(directory, seed) if always else contextlib.nullcontext():
            seen |= damaged_world(directory, seed)
    for path in sorted(directory.rglob("*"), reverse=True):
        # A rank whose own word was damaged may seem to be there until the next run comes by.
        path.rmdir() if path.is_dir() else path.unlink()
    return seen


def test_flipped_bits_give_right_results_or_clear_errors(meeting_place: Path) -> None:
    seen: set[Any] = flips(meeting_place, range(6), always=False)
    seen |= flips(meeting_place, range(50, 53), always=True)
    assert "went on" in seen
