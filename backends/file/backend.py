"""Ranks of one host that meet through files: no server, no port, no torch.

Joining. Ranks find each other in a directory named after the run. Each directory in it is one
*world*, with a liveness entry per process. A rank joins the newest world if it never was in it and
all that have joined it live. Otherwise that world is over, and the rank creates a new one. All of
this happens under one lock, held for milliseconds.

Leaving. The last rank of a world removes its directory, and the last of a run that of the run. What
a killed world left behind is removed by the next one: the locks of its processes are provably free.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import ClassVar

from syncprims import errors
from syncprims._system.locks import try_lock, unlock
from syncprims.errors import BackendUnavailable, ConfigurationError, PeerLost, SyncError
from syncprims.interface import (
    NOTHING,
    UNKNOWN,
    Awaited,
    Backend,
    Board,
    Settings,
    State,
    Topic,
    Topology,
)

from .board import FIRST_NAP, LONGEST_NAP, SharedMemoryBoard, abort_from_outside
from .description import FILE as DESCRIPTION
from .description import OF_BOARD, BoardDescription, WorldDescription, describe
from .early_ends import EarlyEnd, RankRecord, read_records, record_rank, remove_records
from .filesystems import refuse_remote, refuse_useless_locks
from .liveness import Liveness, joined, world_size_of
from .private_dir import PrivateDirectory, base_path, cure_for

_PREFIX, _LOCK = "syncprims-", ".lock"  # of our files in a directory that may hold others
_LOCK_TIMEOUT = 30.0  # seconds; the lock is held for milliseconds
_LOCK_PAUSE = 0.002  # seconds between two attempts
_ENTRY_TIMEOUT = 5.0  # seconds for the last process of this rank to end


class FileBackend(Backend):
    """A rank among the processes of one host."""

    name = "file"
    spans_hosts = False
    detects_death = True
    can_reform = True
    _met: ClassVar[set[str]] = set()  # elastic worlds that this process was in

    def __init__(
        self, topology: Topology, settings: Settings, description: WorldDescription | None = None
    ) -> None:
        """Join the world; `description` says what this is a part of, if it is one.

        With rank :data:`UNKNOWN`, join a world that goes on, in place of any lost rank.
        """
        self.check(topology, settings)
        super().__init__(topology, settings)
        self._run_path = _run_path(topology, settings)
        self.meeting_place = str(self._run_path)
        size = topology.world_size
        run_id, ranks = topology.run_id or self._run_path.name, errors.format_ranks(range(size))
        self._description = description or WorldDescription(run_id, self.name, size, ranks)
        self._boards: list[SharedMemoryBoard] = []
        self.liveness: Liveness  #: of this world
        with self._explained_os_errors():
            self._base = PrivateDirectory.open(self._run_path.parent)
            try:
                refuse_remote(self._base.path, self._base.fd)
                self._join()
            except BaseException:
                self._base.close()
                raise
        self.process = self.liveness.process
        self._next = self.capacity = self.liveness.world_size  # the first that may wait to join

    @classmethod
    def check(cls, topology: Topology, settings: Settings) -> None:
        """Refuse a run without a name."""
        _run_path(topology, settings)

    @classmethod
    def record_end(
        cls, topology: Topology, settings: Settings, how: str | None, failure: bytes | None = None
    ) -> None:
        """Record in the directory of the run that a rank has ended, or is about to."""
        record = RankRecord.own(joined=bool(settings.first_call), ends=True)
        if how is not None:
            record = RankRecord.seen(how)
        if record is None:
            return
        record = record._replace(failure=(failure or b"").decode())
        here = topology.local_world_size
        here = topology.world_size if here == UNKNOWN else here
        with _opened_run(topology, settings) as (base, run):
            record_rank(run, topology.rank, record)
            if how is None and len(read_records(run)) == here:
                remove_records(run)  # no rank of this host is left to read them
                _remove_ended(base, run)

    @classmethod
    def remove_run(cls, topology: Topology, settings: Settings) -> None:
        """Remove the directory of the run, and what its ranks have left there."""
        with _opened_run(topology, settings) as (base, run):
            remove_records(run)
            _remove_ended(base, run)

    def board(self, members: Sequence[int], name: str = "") -> SharedMemoryBoard:
        """Return the board of `members`, creating it if this is the first of them."""
        processes = [self.members[rank] for rank in members]
        return self.open_board(members, name, processes, members)

    def close_board(self, board: Board) -> None:
        """Unmap the board; the last member that does it removes its files."""
        self.release(board.members, board)

    def file_of(self, members: Sequence[int], name: str) -> str:
        """Return the file of the board of `members` in this epoch."""
        return board_file(members, name, self.epoch)

    def release(self, members: Sequence[int], board: Board) -> None:
        """Close `board`, this host's part of that of `members`.

        The last rank of this host removes the files of both: others may still have to read them.
        """
        assert isinstance(board, SharedMemoryBoard)
        self._boards.remove(board)
        board.close()
        file = self.file_of(members, board.name)
        # Without room or lock they are removed with the world.
        with contextlib.suppress(OSError, SyncError), self.locked_directory() as directory:
            directory.write(f"{file}-left-{board.rank}", b"")
            found = [name for name in directory.names() if name.startswith(file)]
            if sum(name.startswith(f"{file}-left-") for name in found) == len(board.members):
                for name in found:
                    directory.remove(name)

    def open_board(
        self, members: Sequence[int], name: str, processes: Sequence[int], everywhere: Sequence[int]
    ) -> SharedMemoryBoard:
        """Return the board `name` of members that are these `processes`.

        They are this host's part of those that are members `everywhere`.
        """
        every, here = map(errors.format_ranks, (everywhere, members))
        file = self.file_of(everywhere, name)
        file += "-here" if len(members) < len(everywhere) else ""
        with self.locked_directory() as directory:
            board = SharedMemoryBoard(file, members, self.liveness, processes, name)
            describe(directory, file + OF_BOARD, BoardDescription(every, here, name))
        self._boards.append(board)
        return board

    @contextlib.contextmanager
    def locked_directory(self) -> Generator[PrivateDirectory]:
        """Hold the run's lock: meanwhile no other rank creates a file in this world's directory."""
        directory = self.liveness.directory
        if directory.is_removed:
            raise BackendUnavailable(str(directory.removed("opening a group")))
        with self._explained_os_errors(), _locked(self._base, self._run_path.name):
            yield directory

    def is_broken(self) -> bool:
        """Return whether a group of this rank is broken."""
        return any(board.verdict() is not None for board in self._boards)

    def publish_end(self, failure: bytes | None) -> None:
        """Publish how this rank ends; it may still take its time until it leaves."""
        self.liveness.publish_end(failure)
        for board in self._boards:
            board.wake()  # a rank that waits for this one raises now

    def close(self, failure: bytes | None = None) -> None:
        """Publish how this rank ends, and remove the files that no rank needs any more."""
        self.publish_end(failure)
        self._close_files()
        name = self._run_path.name
        # What cannot be removed now, the next run removes: an end must not fail or hang for it.
        with (
            contextlib.closing(self._base),
            contextlib.suppress(OSError, SyncError),
            _locked(self._base, name, timeout=2.0) as run,
        ):
            _remove_ended(self._base, run)

    def decide(self, name: str, value: str = "") -> str:
        """Return what is claimed, and wake those that may wait for it."""
        decision = self.liveness.claims.decide(name, value)
        if value:
            self._wake()
        return decision

    def publish(self, topic: Topic, value: bytes) -> None:
        """Write `value` for the others, and wake them for a call of `reform`."""
        self.liveness.write(topic, value)
        if topic == "reform":
            self._wake()

    def published(self, topic: Topic, process: int) -> bytes:
        """Read what `process` has written."""
        return self.liveness.read(process, topic)

    def _wake(self) -> None:
        for process in range(self.liveness.count_processes()):
            if process != self.process and self.liveness.peek(process) == "alive":
                self.liveness.doorbell.wake(process)

    def wait(self, ready: Callable[[], bool], until: float, awaited: Awaited = NOTHING) -> bool:
        """Look again and again; without boards, sleep until another process wakes this one."""
        if awaited.boards:
            return super().wait(ready, until, awaited)
        nap = FIRST_NAP
        while not ready():
            left = until - time.monotonic()
            if left <= 0:
                return False
            self.liveness.doorbell.sleep(min(nap, left))
            nap = min(2 * nap, LONGEST_NAP)
        return True

    def state(self, process: int) -> State:
        """Return the state of `process`."""
        return self.liveness.state(process)[0]

    def arrived(self) -> list[int]:
        """Return the processes that wait to join."""
        if not self.settings.elastic:
            return []
        count = self.liveness.count_processes()
        found = [p for p in range(self._next, count) if p not in self.members]
        living = [process for process in found if self.state(process) == "alive"]
        if found and not living:
            self._next = found[-1] + 1
        return living

    def enter(
        self,
        epoch: int,
        members: Sequence[int],
        topology: Topology,
        description: WorldDescription | None = None,
    ) -> None:
        """Close all boards; those of this epoch have other files, and the others' are removed."""
        super().enter(epoch, members, topology)
        self._next = max(self._next, *members)
        while self._boards:
            self._boards.pop().close()
        self.publish("waits", b"")
        if description is None:
            size = topology.world_size
            ranks = errors.format_ranks(range(size))
            description = self._description._replace(world_size=size, ranks=ranks)
        self._description = description._replace(processes=self.members)
        if topology.rank == 0:  # what it cannot remove now goes with the world
            with contextlib.suppress(OSError, SyncError), self.locked_directory() as directory:
                ours = board_prefix(epoch)
                for name in directory.names():
                    if name.startswith(board_prefix()) and not name.startswith(ours):
                        directory.remove(name)
                describe(directory, DESCRIPTION, self._description, replace=True)

    def abandon(self) -> None:
        """Release entry and boards in a forked child."""
        self._close_files()
        self._base.close()

    def _close_files(self) -> None:
        self.liveness.close()
        while self._boards:
            self._boards.pop().close()
        self.liveness.directory.close()

    @contextlib.contextmanager
    def _explained_os_errors(self) -> Generator[None]:
        """Raise the system's errors about files as errors that say what the user can do."""
        try:
            yield
        except OSError as error:
            if isinstance(error, SyncError) or error.errno is None:
                raise  # a signal handler has raised it, if it has no number
            raise BackendUnavailable(
                f"{self._run_path} cannot hold the files of the run: {error}; {cure_for(error)}"
            ) from error

    # -- joining --------------------------------------------------------------------------------

    def _join(self) -> None:
        timeout = min(_LOCK_TIMEOUT, self.settings.join_timeout)
        deadline = time.monotonic() + min(_ENTRY_TIMEOUT, self.settings.join_timeout)
        while True:
            with _locked(self._base, self._run_path.name, timeout, probe=True) as run:
                try:
                    elastic = self.settings.elastic and self._newest(run) not in self._met
                    name = _world_to_join(run, self.topology.rank, elastic=elastic)
                    if name is not None:
                        self._join_world(run, name)
                        if self.settings.elastic:
                            self._met.add(self._newest(run))
                        break
                except BaseException:
                    with contextlib.suppress(OSError, SyncError):
                        _remove_ended(self._base, run)  # leave nothing incomplete (full disk)
                    raise
            if time.monotonic() > deadline:
                raise self._cannot_join()
            time.sleep(0.02)  # the process that is in the way may be ending
        if name == _world_name(1):
            _remove_ended_runs(self._base)

    def _newest(self, run: PrivateDirectory) -> str:
        return f"{self._run_path}/{max(_worlds(run), default=0)}"

    def _join_world(self, run: PrivateDirectory, name: str) -> None:
        top = self.topology
        directory = run.sub(name)
        try:
            found = world_size_of(directory)
            if found is not None and found != top.world_size:
                error = ConfigurationError(
                    f"rank {top.rank} was started with world_size={top.world_size}, and ranks that "
                    f"came before it with world_size={found}; start all ranks of a run with one "
                    f"world size",
                    rank=top.rank,
                )
                # Those that have joined this world raise it as well.
                abort_from_outside(directory, board_file(range(found)), found, errors.dump(error))
                raise error
            describe(directory, DESCRIPTION, self._description)
            replaces = top.rank == UNKNOWN or top.rank in joined(directory)
            process = None if replaces else top.rank
            elastic = self.settings.elastic
            self.liveness = Liveness(directory, process, top.world_size, elastic=elastic)
        except BaseException:
            directory.close()
            raise
        launched = self.settings.error_file is not None  # by `syncprims run`
        record = RankRecord.own(joined=True, ends=False) if launched else None
        if record is not None:
            with contextlib.suppress(OSError, SyncError):  # it only helps to word an error
                record_rank(run, top.rank, record)
        with contextlib.suppress(OSError, SyncError):  # then the next rank does it
            _remove_ended(self._base, run, keep=name)

    def _cannot_join(self) -> SyncError:
        rank = self.topology.rank
        with _locked(self._base, self._run_path.name) as run:
            _, alive = _newest_world(run)
        if alive.get(rank):
            return ConfigurationError(
                f"rank {rank} of this run is taken by another living process, in "
                f"{self._run_path}: give every process its own rank, and every run its own "
                f"SYNCPRIMS_RUN_ID. If one of the two has started the other, start that without "
                f"the variables of the rank, or with others"
            )
        dead = [other for other, lives in alive.items() if not lives]
        who = "this process" if rank == UNKNOWN else f"rank {rank}"
        return PeerLost(
            f"ranks {dead} of this run, in {self._run_path}, ended before {who} joined; look at "
            f"their output, then restart the run",
            rank=dead[0] if dead else None,
            missing=dead,
        )


@contextlib.contextmanager
def _locked(
    base: PrivateDirectory, name: str, timeout: float = _LOCK_TIMEOUT, *, probe: bool = False
) -> Generator[PrivateDirectory]:
    """Hold the lock of run `name`, and its directory open. With `probe`, check that locks work.

    The lock file is beside the directory and not in it, so the last rank can remove both while
    others wait. These find that their lock file has no name any more, and begin again.
    """
    lock = name + _LOCK
    held: list[int] = []  # the descriptor of the lock file, wherever an exception comes
    try:
        _acquire(base, lock, timeout, held)
        try:
            if probe:
                refuse_useless_locks(base, lock)
            run = base.sub(name)
        except BaseException:
            base.remove(lock)  # those that wait for it begin again
            raise
        with contextlib.closing(run):
            yield run
    finally:
        try:
            # To close is not enough: a child that another thread has forked shares the descriptor.
            for fd in held:
                unlock(fd)
        finally:
            _close_all(held)


def _close_all(held: list[int]) -> None:
    while held:
        os.close(held.pop())


def _acquire(base: PrivateDirectory, lock: str, timeout: float, held: list[int]) -> None:
    """Lock the file `lock`, which keeps its name while it is locked; its descriptor is `held`."""
    deadline = time.monotonic() + timeout
    while True:
        held.append(base.open_file(lock, os.O_RDWR | os.O_CREAT))
        try:
            if try_lock(held[0]) and os.fstat(held[0]).st_nlink:
                return
        except (NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.errno is None:
                raise  # a signal handler has raised it
            raise BackendUnavailable(
                f"{base.path / lock} cannot be locked: {error}. Set SYNCPRIMS_DIR to a directory "
                f"on a local file system with working locks"
            ) from error
        _close_all(held)
        if time.monotonic() > deadline:
            raise BackendUnavailable(
                f"another process has held {base.path / lock} for {timeout:g} s, and "
                f"a rank needs it for milliseconds: is a rank of this run stopped? End "
                f"it, or set another SYNCPRIMS_RUN_ID"
            )
        time.sleep(_LOCK_PAUSE)


@contextlib.contextmanager
def _opened_run(
    topology: Topology, settings: Settings
) -> Generator[tuple[PrivateDirectory, PrivateDirectory]]:
    """Hold the lock of a run that this process need not have joined."""
    path = _run_path(topology, settings)
    base = PrivateDirectory.open(path.parent)
    with contextlib.closing(base), _locked(base, path.name, timeout=2.0) as run:
        yield base, run


@contextlib.contextmanager
def _opened_existing(topology: Topology, settings: Settings) -> Generator[PrivateDirectory | None]:
    """Hold the directory of a run open; None if there is none."""
    path = _run_path(topology, settings)
    if not path.exists():
        yield None
        return
    with (
        contextlib.closing(PrivateDirectory.open(path.parent)) as base,
        contextlib.closing(base.sub(path.name, create=False)) as run,
    ):
        yield run


def lives_here(run_id: str, settings: Settings) -> bool:
    """Return whether a rank of this run lives on this host."""
    try:
        with _opened_existing(Topology(run_id=run_id), settings) as run:
            return run is not None and any(_newest_world(run)[1].values())
    except FileNotFoundError:  # its last rank is removing it
        return False


def find_early_ends(topology: Topology, settings: Settings) -> dict[int, EarlyEnd]:
    """Return how the ranks ended that this run has a record of."""
    if topology.run_id is None:  # then no rank has recorded its end
        return {}
    with _opened_existing(topology, settings) as run:
        if run is None:
            return {}
        ends = {rank: record.find_end() for rank, record in read_records(run).items()}
        return {rank: end for rank, end in ends.items() if end is not None}


def _run_path(topology: Topology, settings: Settings) -> Path:
    """Return the directory of this run: the same for all its ranks, another one for other runs."""
    run_id = topology.run_id
    if run_id is None and topology.world_size == 1:
        run_id = f"alone-{os.getpid()}"
    if run_id is None and settings.directory is None:
        raise ConfigurationError(
            f"the ranks of this run need a run id, and {topology.launcher} "
            f"gives none; set SYNCPRIMS_RUN_ID to the same new value on all ranks"
        )
    name = run_id or "run"
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:60]
    if safe != name:
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=6)
        safe = f"{safe}-{digest.hexdigest()}"
    return base_path(settings) / f"{_PREFIX}{safe}"


def board_file(members: Sequence[int], name: str = "", epoch: int = 0) -> str:
    """Return the file of the board `name` of `members` in an epoch."""
    digest = hashlib.blake2b(repr((tuple(members), name)).encode(), digest_size=6)
    return board_prefix(epoch) + digest.hexdigest()


def board_prefix(epoch: int | None = None) -> str:
    """Return how the names of all boards' files begin, or of those of one epoch."""
    return "board-" if epoch is None else f"board-{epoch & 0xFFFF:04x}"


# -- worlds of a run ------------------------------------------------------------------------------


def _world_name(number: int) -> str:
    return f"world-{number}"


def _worlds(run: PrivateDirectory) -> list[int]:
    return [int(n[6:]) for n in run.names() if re.fullmatch(r"world-[1-9][0-9]{0,8}", n)]


def _newest_world(run: PrivateDirectory) -> tuple[int, dict[int, bool]]:
    """Return the number of the newest world, and which ranks have joined it and live; 0 if none."""
    number = max(_worlds(run), default=0)
    if not number:
        return 0, {}
    with contextlib.closing(run.sub(_world_name(number), create=False)) as world:
        return number, joined(world)


def _world_to_join(run: PrivateDirectory, rank: int, *, elastic: bool) -> str | None:
    """Return the name of the world that `rank` joins, or None while that is not decided.

    :param elastic: it may join a world that goes on, in place of a lost rank.
    """
    number, alive = _newest_world(run)
    lives = any(alive.values())
    if elastic and lives and not alive.get(rank, rank != UNKNOWN):
        return _world_name(number)  # in place of the process that had this rank
    # In an elastic run, the living go on without one that died.
    waits = lives and rank not in alive and not all(alive.values()) and not elastic
    if rank == UNKNOWN or alive.get(rank) or waits:
        # Another process has this rank, or a rank died while the others still waited for this one:
        # in both cases the living are about to leave.
        return None
    return _world_name(number if lives and rank not in alive else number + 1)


def _remove_ended(base: PrivateDirectory, run: PrivateDirectory, keep: str | None = None) -> None:
    """Remove the worlds in which no rank lives, and with the last one the run's directory."""
    left = False
    for number in _worlds(run):
        name = _world_name(number)
        with contextlib.closing(run.sub(name)) as world:
            alive = any(joined(world).values())
        if name == keep or alive:
            left = True
        else:
            run.remove_tree(name)
    if left:
        return
    if all(record.is_void() for record in read_records(run).values()):
        remove_records(run)  # else ranks that may still come need them
    if base.remove_directory(run.path.name):
        base.remove(run.path.name + _LOCK)


def _remove_ended_runs(base: PrivateDirectory) -> None:
    """Remove runs in which no rank lives: killed ones cannot do it themselves."""
    for name in base.names():
        if not (name.startswith(_PREFIX) and name.endswith(_LOCK)):
            continue
        with (
            contextlib.suppress(OSError, SyncError),
            _locked(base, name.removesuffix(_LOCK), timeout=0) as run,
        ):
            _remove_ended(base, run)
