"""Ranks of one host that meet through files: no server, no port, no torch.

Joining. Ranks find each other in a directory named after the run. In it, each *table* is one world:
a directory with a seat and a cell per rank. A rank sits down at the newest table if its seat there
was never taken and everybody who sits there lives; otherwise that table belongs to a world that has
been, and the rank lays a new one. All of this happens under one lock, held for milliseconds.

Leaving. The last to leave a table clears it away, and the last to leave the run its directory. What
a killed world left behind is cleared by the next one that comes by: its seats are provably free.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from syncprims import errors
from syncprims.errors import BackendUnavailable, ConfigurationError, PeerLost, SyncError
from syncprims.interface import Backend, Settings, Topology

from .board import SlotBoard, refuse
from .filesystems import refuse_remote, refuse_useless_locks
from .liveness import Seats, taken, world_size_of
from .private_dir import PrivateDirectory, default_base

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

_PREFIX, _LOCK = "syncprims-", ".lock"  # of what we make, beside whatever else stands there
_LOCK_PATIENCE = 30.0  # seconds; the lock is held for milliseconds
_LOCK_PAUSE = 0.002  # seconds between two attempts
_SEAT_PATIENCE = 5.0  # seconds for the last holder of a seat to end


class FileBackend(Backend):
    """A rank among the processes of one host."""

    name = "file"
    spans_hosts = False
    detects_death = True

    def __init__(self, topology: Topology, settings: Settings) -> None:
        self.check(topology, settings)
        super().__init__(topology, settings)
        self._run_path = _run_path(topology, settings)
        self._boards: list[SlotBoard] = []
        self._table: PrivateDirectory
        self.seats: Seats  #: of this world, once it is made
        with self._telling_of_the_disk():
            self._base = PrivateDirectory.open(self._run_path.parent)
            try:
                refuse_remote(self._base.path, self._base.fd)
                self._take_seat(topology.rank, topology.world_size)
            except BaseException:
                self._base.close()
                raise

    @classmethod
    def check(cls, topology: Topology, settings: Settings) -> None:
        """Refuse a system without file locks, and a run without a name."""
        if sys.platform == "win32":
            raise BackendUnavailable(
                "the file backend needs POSIX file locks, which Windows does not have; "
                "use SYNCPRIMS_BACKEND=single, or torch under torchrun"
            )
        _run_path(topology, settings)

    @property
    def meeting_place(self) -> str:
        """The directory of this run."""
        return str(self._run_path)

    def board(self, members: Sequence[int]) -> SlotBoard:
        """Return the board of `members`, making it if this is the first of them."""
        return self.board_of(members, _board_name(members))

    def board_of(
        self, members: Sequence[int], name: str, seat_numbers: Sequence[int] | None = None
    ) -> SlotBoard:
        """Return the board `name`, of members that may sit elsewhere than at their ranks."""
        seats = tuple(members if seat_numbers is None else seat_numbers)
        rank = members[seats.index(self.topology.rank)]
        with self.table() as table:
            board = SlotBoard(table, name, members, rank, self.seats, seats)
        self._boards.append(board)
        return board

    @contextlib.contextmanager
    def table(self) -> Generator[PrivateDirectory]:
        """Hold the directory of this world, and let no other rank make anything in it meanwhile."""
        with self._telling_of_the_disk(), _locked(self._base, self._run_path.name):
            yield self._table

    def is_torn(self) -> bool:
        """Tell whether a group of this rank is broken."""
        return any(board.verdict() is not None for board in self._boards)

    def say_end(self, failure: bytes | None) -> None:
        """Say how this rank ends; it may take its time until it leaves."""
        self.seats.say_end(failure)
        for board in self._boards:
            board.wake()  # who still waits for this rank hears it now

    def close(self, failure: bytes | None = None) -> None:
        """Say how this rank ends, and clear away what nobody needs any more."""
        self.say_end(failure)
        self.seats.leave()
        self._let_go()
        name = self._run_path.name
        # What cannot be cleared now, the next run clears: an end must not fail or hang for it.
        with (
            contextlib.closing(self._base),
            contextlib.suppress(OSError, SyncError),
            _locked(self._base, name, patience=2.0) as run,
        ):
            _clear(self._base, run)

    def path_for(self, name: str) -> Path:
        """Return the path of a file that goes with this world."""
        return self._table.path / name

    def publish(self, word: bytes) -> None:
        """Let others read `word`."""
        self.seats.say(word)

    def published(self, rank: int) -> bytes:
        """Return the latest word of `rank`."""
        return self.seats.heard(rank)

    def abandon(self) -> None:
        """Let go of seat and boards in a forked child."""
        self.seats.leave()
        self._let_go()
        self._base.close()

    def _let_go(self) -> None:
        for board in self._boards:
            board.close()
        self._boards.clear()
        self._table.close()

    @contextlib.contextmanager
    def _telling_of_the_disk(self) -> Generator[None]:
        """Turn what the system says of files into what the user can do about it."""
        try:
            yield
        except OSError as error:
            if isinstance(error, SyncError):
                raise
            room = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            cure = "free some space" if room else "make it readable and writable for its owner"
            raise BackendUnavailable(
                f"{self._run_path} cannot hold what the ranks need to meet: {error}; {cure}, or "
                f"set SYNCPRIMS_DIR to another place"
            ) from error

    def _take_seat(self, rank: int, world_size: int) -> None:
        patience = min(_LOCK_PATIENCE, self.settings.join_timeout)
        deadline = time.monotonic() + min(_SEAT_PATIENCE, self.settings.join_timeout)
        while True:
            with _locked(self._base, self._run_path.name, patience, probe=True) as run:
                try:
                    name = _table_for(run, rank)
                    if name is not None:
                        self._sit_down(run, name, rank, world_size)
                        break
                except BaseException:
                    with contextlib.suppress(OSError, SyncError):
                        _clear(self._base, run)  # nothing half made is left, as on a full disk
                    raise
            if time.monotonic() > deadline:
                raise self._no_seat()
            time.sleep(0.02)  # it may be on its way out
        if name == _table(1):
            _sweep(self._base)

    def _sit_down(self, run: PrivateDirectory, name: str, rank: int, world_size: int) -> None:
        self._table = run.sub(name)
        try:
            self._check_world_size()
            self.seats = Seats(self._table, rank, world_size)
        except BaseException:
            self._table.close()
            raise
        with contextlib.suppress(OSError, SyncError):  # else the next one does
            _clear(self._base, run, but=name)

    def _no_seat(self) -> SyncError:
        rank = self.topology.rank
        with _locked(self._base, self._run_path.name) as run:
            numbers = _tables(run)
            newest = run.sub(_table(numbers[-1] if numbers else 1))
            seats = taken(newest)
            newest.close()
        if seats.get(rank):
            return ConfigurationError(
                f"rank {rank} of this run is taken by another living process, in "
                f"{self._run_path}: give every process its own rank, and every run its own "
                f"SYNCPRIMS_RUN_ID"
            )
        dead = [other for other, lives in seats.items() if not lives]
        return PeerLost(
            f"ranks {dead} of this run, in {self._run_path}, ended before rank {rank} joined; look "
            f"at their output, then restart the run",
            rank=dead[0] if dead else None,
            missing=dead,
        )

    def _check_world_size(self) -> None:
        """Refuse a table laid for another number of ranks, and tell those who sit there."""
        top = self.topology
        laid_for = world_size_of(self._table)
        if laid_for is None or laid_for == top.world_size:
            return
        error = ConfigurationError(
            f"rank {top.rank} was started with world_size={top.world_size}, and ranks that came "
            f"before it with world_size={laid_for}; start all ranks of a run with one world size",
            rank=top.rank,
        )
        refuse(self._table, _board_name(range(laid_for)), laid_for, errors.dump(error))
        raise error


@contextlib.contextmanager
def _locked(
    base: PrivateDirectory, name: str, patience: float = _LOCK_PATIENCE, *, probe: bool = False
) -> Generator[PrivateDirectory]:
    """Hold the lock of run `name`, and its directory open. With `probe`, see that locks work.

    The lock file stands beside the directory and not in it, so that whoever leaves last can remove
    both while others wait: they find that their lock has no name any more, and start over.
    """
    lock = name + _LOCK
    fd = _acquire(base, lock, patience)
    try:
        try:
            if probe:
                _probe(base, lock)
            run = base.sub(name)
        except BaseException:
            base.remove(lock)  # whoever waits for it starts over
            raise
        try:
            yield run
        finally:
            run.close()
    finally:
        # Not by closing alone: a child that another thread forked meanwhile shares the descriptor.
        with contextlib.suppress(OSError):
            filelock.unlock_descriptor(fd)
        os.close(fd)


def _probe(base: PrivateDirectory, lock: str) -> None:
    """See that the file `lock`, which this process holds, cannot be locked once more."""
    second = base.open_file(lock, os.O_RDWR)
    try:
        refuse_useless_locks(base.path / lock, second)
    finally:
        os.close(second)


def _acquire(base: PrivateDirectory, lock: str, patience: float) -> int:
    """Return a descriptor of the file `lock`, locked; it has that name as long as it is."""
    deadline = time.monotonic() + patience
    while True:
        fd = base.open_file(lock, os.O_RDWR | os.O_CREAT)
        try:
            held = filelock.lock_descriptor(fd, blocking=False)
            if held and os.fstat(fd).st_nlink:
                return fd
        except (NotImplementedError, OSError) as error:
            os.close(fd)
            raise BackendUnavailable(
                f"{base.path / lock} cannot be locked: {error}. Set SYNCPRIMS_DIR to a directory "
                f"on a local file system with working locks"
            ) from error
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        if time.monotonic() > deadline:
            raise BackendUnavailable(
                f"another process has held {base.path / lock} for {patience:g} s, where "
                f"milliseconds would do: is a rank of this run stopped? End it, or set another "
                f"SYNCPRIMS_RUN_ID"
            )
        time.sleep(_LOCK_PAUSE)


def base_of(settings: Settings) -> PrivateDirectory:
    """Open the directory in which runs have theirs."""
    path = settings.directory or default_base(settings.runtime_directory)
    return PrivateDirectory.open(Path(path).absolute())


def _run_path(topology: Topology, settings: Settings) -> Path:
    """Return the directory of this run, the same for all its ranks and no other's."""
    run_id = topology.run_id
    if run_id is None and topology.world_size == 1:
        run_id = f"alone-{os.getpid()}"
    if run_id is None and settings.directory is None:
        raise ConfigurationError(
            f"the ranks of this run need a name to find each other by, and {topology.launcher} "
            f"gives none; set SYNCPRIMS_RUN_ID to the same fresh value on all ranks"
        )
    base = Path(settings.directory or default_base(settings.runtime_directory)).absolute()
    name = run_id or "run"
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:60]
    if safe != name:
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=6)
        safe = f"{safe}-{digest.hexdigest()}"
    return base / f"{_PREFIX}{safe}"


def _board_name(members: Sequence[int]) -> str:
    digest = hashlib.blake2b(repr(tuple(members)).encode(), digest_size=8)
    return f"board-{digest.hexdigest()}"


def _table(number: int) -> str:
    return f"table-{number}"


def _table_for(run: PrivateDirectory, rank: int) -> str | None:
    """Return the table where `rank` sits down, or None while that is not settled."""
    numbers = _tables(run)
    if not numbers:
        return _table(1)
    newest = run.sub(_table(numbers[-1]))
    try:
        seats = taken(newest)
    finally:
        newest.close()
    lives = any(seats.values())
    if seats.get(rank) or (lives and rank not in seats and not all(seats.values())):
        # Somebody has this seat, or somebody died while the others still waited for this rank:
        # in both cases the living are about to leave.
        return None
    if lives and rank not in seats:
        return _table(numbers[-1])
    return _table(numbers[-1] + 1)


def _tables(run: PrivateDirectory) -> list[int]:
    return sorted(int(n[6:]) for n in run.names() if re.fullmatch(r"table-[1-9][0-9]{0,8}", n))


def _clear(base: PrivateDirectory, run: PrivateDirectory, but: str | None = None) -> None:
    """Remove the tables where nobody sits any more, and the run's directory with the last."""
    left = False
    for number in _tables(run):
        name = _table(number)
        table = run.sub(name)
        try:
            used = name == but or any(taken(table).values())
        finally:
            table.close()
        if used:
            left = True
        else:
            run.remove_tree(name)
    if not left and base.remove_directory(run.path.name):
        base.remove(run.path.name + _LOCK)


def _sweep(base: PrivateDirectory) -> None:
    """Clear away runs of which nobody is left: killed ones cannot do it themselves."""
    for name in base.names():
        if not (name.startswith(_PREFIX) and name.endswith(_LOCK)):
            continue
        with (
            contextlib.suppress(OSError, SyncError),
            _locked(base, name.removesuffix(_LOCK), patience=0) as run,
        ):
            _clear(base, run)
