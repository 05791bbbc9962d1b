"""Which processes of a world live: an entry for each, with its proof of life and what it publishes.

Each rank holds a lock for as long as it lives. The kernel frees the lock when the process ends,
however it ends. So nothing has to be touched while all is well, and no rank is ever declared dead
by a clock: a stopped or swapping rank still holds its lock.

A forked child inherits the lock, so the core closes it in the child. On Linux, the members of a
world also watch each other's processes (pidfd), which needs neither a path nor a permission.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import struct
import time
from collections.abc import Collection, Iterable
from typing import Literal

from syncprims import errors
from syncprims._system.locks import is_free, lock, try_lock
from syncprims._system.processes import ProcessIdentity, ProcessWatch
from syncprims.errors import ConfigurationError, Failure, PeerFailed, describe_exit
from syncprims.interface import State, Topic

from .early_ends import find_early_end
from .memory import (
    RECORD_HEAD,
    Claims,
    Doorbell,
    await_record,
    map_file,
    poll_unless_busy,
    read_header,
    read_record,
    unmap,
    write_record,
)
from .private_dir import PrivateDirectory

FILE = "liveness"
MAGIC = b"syncprims liveness 5"
_HEADER_SIZE = 4096
_ENTRY = struct.Struct("<BxxxIQQ")  # state, pid, start, pid namespace
#: What a process publishes in its entry, beside its state: where it begins, and how long it may be.
_PLACES: dict[Topic | Literal["failure"], tuple[int, int]] = {
    "waits": (64, 4096 - 64),
    "failure": (4096, 48 * 1024),
    "reform": (52 * 1024, 256),
    "activity": (53 * 1024, 512),
}
_ENTRY_SIZE = 56 * 1024
_TAKEN_AT = 64  # in the header: how many entries processes have taken that joined later
_SPARE = 64  # entries for them
_EMPTY, _ALIVE, _FINISHED, _FAILED = range(4)
_STATES: dict[int, State] = {_ALIVE: "alive", _FINISHED: "finished", _FAILED: "failed"}
_EXIT_GRACE = 5.0  # seconds to learn the exit code of a rank that published a normal end
#: Seconds for a process that has lost its lock to be gone: all it has left to do is to end, unless
#: it runs another program.
_DYING = 0.2
#: A process that lives may have lost its lock: it runs another program. Seconds between two looks.
_LOCK_EVERY = 2.0


class Liveness:
    """The entries of one world's processes, as one of them uses them. Made under the run's lock."""

    def __init__(
        self, directory: PrivateDirectory, rank: int | None, world_size: int, *, elastic: bool
    ) -> None:
        """Take the entry of process `rank`; with None a new one, as a process that joins later.

        :raises ConfigurationError: if the file is of another version or number of ranks, or no
            entry is left.
        :raises OSError: if the file cannot be written, as on a full disk.
        """
        self.directory = directory  #: of the world
        self.world_size = world_size  #: when it began
        self._watches: dict[int, ProcessWatch] = {}
        self._finished_at: dict[int, float] = {}
        self._ended: dict[int, tuple[State, str, bytes]] = {}  # final states
        self._poll = select.poll()  # on all watches at once
        self._process_of_fd: dict[int, int] = {}
        self._trusted: dict[int, float] = {}  # until when a watched process has its lock
        with contextlib.ExitStack() as undo:
            size = _entry_at(world_size + _SPARE * elastic)
            self._memory = map_file(directory, FILE, MAGIC, world_size, size)
            undo.callback(self._memory.close)
            if rank is None:
                rank = self.count_processes()
                if rank == world_size + _SPARE:
                    raise ConfigurationError(
                        f"{_SPARE} processes have joined this run in place of lost ranks, and no "
                        f"more can join: restart it from a checkpoint"
                    )
            self.process = rank  #: the number of this one
            self.doorbell = Doorbell(directory, rank)
            undo.callback(self.doorbell.close)
            self.claims = Claims(directory)  #: of the world
            undo.callback(self.claims.close)
            self._lock_fd = directory.open_file(_lock_name(rank), os.O_RDWR | os.O_CREAT)
            undo.callback(os.close, self._lock_fd)
            lock(self._lock_fd, timeout=5.0)  # another rank may be checking it for a moment
            self._write_state(_ALIVE)
            if rank >= world_size:
                self._memory[_TAKEN_AT : _TAKEN_AT + 4] = (rank + 1 - world_size).to_bytes(4)
            undo.pop_all()

    # -- this process ---------------------------------------------------------------------------

    def write(self, topic: Topic | Literal["failure"], text: bytes) -> None:
        """Publish `text` for the others; empty if it is too long."""
        at, size = _PLACES[topic]
        fits = len(text) <= size - RECORD_HEAD
        write_record(self._memory, _entry_at(self.process) + at, text if fits else b"")

    def publish_end(self, failure: bytes | None) -> None:
        """Publish how this rank ends."""
        if failure is not None:
            self.write("failure", failure)
        self._write_state(_FINISHED if failure is None else _FAILED)

    def close(self) -> None:
        """Leave the entry. In a forked child, the parent keeps it."""
        # Closing is enough: the lock belongs to the open file, which the parent of a fork shares.
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()
        self._process_of_fd.clear()
        self.doorbell.close()
        os.close(self._lock_fd)
        self.claims.close()
        unmap(self._memory)

    # -- the others -----------------------------------------------------------------------------

    def read(self, process: int, topic: Topic | Literal["failure"]) -> bytes:
        """Return the latest text of this kind that `process` has published."""
        at, size = _PLACES[topic]
        return await_record(self._memory, _entry_at(process) + at, size)

    def count_processes(self) -> int:
        """Return how many processes there are, with those that have joined later."""
        return self.world_size + int.from_bytes(self._memory[_TAKEN_AT : _TAKEN_AT + 4])

    def watch_all(self) -> None:
        """Watch every other rank, while all are known to live."""
        for process in range(self.count_processes()):
            if process != self.process:
                self._watch(process)

    def _watch(self, process: int) -> ProcessWatch | None:
        """Return the watch on `process`; None while it has not joined, or cannot be watched."""
        watch = self._watches.get(process)
        if watch is None:
            state, *who = _ENTRY.unpack_from(self._memory, _entry_at(process))
            # One that has finished too: its exit code may still come.
            if state not in (_ALIVE, _FINISHED):
                return None
            watch = ProcessWatch(ProcessIdentity(*who))
            if watch.fd < 0:
                return None
            if (other := self._watches.setdefault(process, watch)) is not watch:
                watch.close()  # another thread was faster
                return other
            self._trusted[process] = time.monotonic() + _LOCK_EVERY
            self._process_of_fd[watch.fd] = process  # before a look of another thread can find it
            self.doorbell.also_wake_for(watch.fd)
            self._poll.register(watch.fd, select.POLLIN)
        return watch

    def ended(self, processes: Iterable[int]) -> list[tuple[int, State]]:
        """Return those of `processes` that are no longer there, and how they ended."""
        closed = self._closed()
        found: list[tuple[int, State]] = []
        for process in processes:
            if process == self.process or self._is_seen_alive(process, closed):
                continue  # the common case, for one system call in all
            state = self.state(process)[0]
            if state not in ("alive", "unknown"):
                found.append((process, state))
        return found

    def _closed(self) -> set[int]:
        """Return the watched processes that have ended."""
        # If another thread is looking, the next look will do.
        events = poll_unless_busy(self._poll, 0.0) or [] if self._process_of_fd else []
        return {self._process_of_fd[fd] for fd, event in events if event & select.POLLIN}

    def _is_seen_alive(self, process: int, closed: Collection[int]) -> bool:
        watched = process in self._watches and process not in closed
        return watched and self._read_state(process) == _ALIVE

    def distrust(self) -> None:
        """Make the next look at each process ask for its lock, too."""
        self._trusted.clear()

    def state(self, process: int) -> tuple[State, str, bytes]:
        """Return the state of `process`, how it ended where known, and the failure it published."""
        known = self._ended.get(process)
        if known is None:
            known = self._examine(process)
            if known[0] not in ("alive", "unknown"):
                self._ended[process] = known
        return known

    def _examine(self, process: int) -> tuple[State, str, bytes]:
        now = time.monotonic()
        if now < self._trusted.get(process, now) and self._is_seen_alive(process, self._closed()):
            return "alive", self.read(process, "activity").decode(), b""
        if process in self._watches:
            self._trusted[process] = now + _LOCK_EVERY
        # A rank is lost if it was here, is gone, and has published no end: so its state is read
        # before and after. It may be just joining (its lock comes before its state) or leaving.
        before = self._read_state(process)
        # Not only once all have joined: a rank that dies while others still join is named as well.
        watch = self._watch(process) if process != self.process else None
        ended = watch is not None and watch.has_ended()
        gone = process != self.process and self._has_left(process)
        after = self._read_state(process)
        if after == _EMPTY:
            end = find_early_end(self.directory, process)
            if end is None:
                return "unknown", "", b""
            if end.failure:
                return "failed", "", end.failure
            return "finished" if end.joined else "lost", end.how, b""
        if after == _FAILED:
            return "failed", "", self.read(process, "failure")
        if after == _FINISHED:
            return self._examine_finished(process, watch, ended)
        if gone and before == _ALIVE:
            # The lock is freed a moment before the process is gone and its exit code is known.
            status = _await_exit_status(watch)
            if watch is not None and not watch.has_ended():
                return "lost", "its process runs another program now", b""
            return "lost", describe_exit(status), b""
        return "alive", self.read(process, "activity").decode(), b""

    def _examine_finished(
        self, process: int, watch: ProcessWatch | None, ended: bool
    ) -> tuple[State, str, bytes]:
        """Distinguish a normal end from ``raise SystemExit(3)``, for which Python has no hook."""
        since = self._finished_at.setdefault(process, time.monotonic())
        if watch is not None and not ended and time.monotonic() - since < _EXIT_GRACE:
            return "alive", "", b""  # after that, it called shutdown() and does something else
        return _end_of(process, _await_exit_status(watch) if ended else None)

    # -- for another thread ---------------------------------------------------------------------

    def peek(self, process: int) -> State:
        """Return the state of `process`, and not how it ended."""
        gone = self._read_state(process) == _ALIVE and self._has_left(process)
        state = self._read_state(process)  # it may have published its end meanwhile
        return "lost" if gone and state == _ALIVE else _STATES.get(state, "unknown")

    def _has_left(self, process: int) -> bool:
        """Return whether `process` has ended, or runs another program."""
        watch = self._watches.get(process)
        return (watch is not None and watch.has_ended()) or is_free(
            _lock_name(process), self.directory.fd
        )

    # -- bytes ----------------------------------------------------------------------------------

    def _read_state(self, process: int) -> int:
        return self._memory[_entry_at(process)]

    def _write_state(self, state: int) -> None:
        # In one piece: packing in place would clear the bytes first, and others would see that.
        at = _entry_at(self.process)
        self._memory[at : at + _ENTRY.size] = _ENTRY.pack(state, *ProcessIdentity.own())


def _end_of(rank: int, status: int | None) -> tuple[State, str, bytes]:
    """Return the state of a rank that published a normal end, by the exit status of its process."""
    if not status:
        return "finished", "", b""
    if status < 0:
        return "lost", describe_exit(status), b""
    failure = Failure(rank, "SystemExit", str(status), "")
    return "failed", "", errors.dump(PeerFailed.from_failure(failure))


def _await_exit_status(watch: ProcessWatch | None) -> int | None:
    if watch is None:
        return None
    watch.has_ended(_DYING)
    deadline = time.monotonic() + 0.02
    while (status := watch.exit_status()) is None and time.monotonic() < deadline:
        time.sleep(0.0005)
    return status


def world_size_of(directory: PrivateDirectory) -> int | None:
    """Return the number of ranks the world in `directory` has; None if unknown or damaged."""
    with contextlib.suppress(FileNotFoundError), directory.opened(FILE, os.O_RDONLY) as fd:
        magic, world_size = read_header(fd)
        # A number that does not fit the size of the file is damaged, and might be absurd.
        sizes = (_entry_at(world_size), _entry_at(world_size + _SPARE))
        if magic == MAGIC and os.fstat(fd).st_size in sizes:
            return world_size
    return None


def examine_from_outside(
    directory_fd: int, fd: int, process: int, namespace: int
) -> tuple[ProcessIdentity | None, State, str, bytes]:
    """Return who took an entry of the liveness file `fd`, and its state; None if no process has.

    For processes that are no rank, in this namespace of pids. Nothing is locked that a rank needs:
    the lock of a rank that has published that it lives is held by that rank, or needed by none.
    """
    at = _entry_at(process)
    entry = os.pread(fd, _ENTRY.size, at)
    before, *who = _ENTRY.unpack(entry.ljust(_ENTRY.size, b"\0"))
    if before not in (_ALIVE, _FINISHED, _FAILED):
        return None, "unknown", "", b""
    identity = ProcessIdentity(*who)
    gone = before == _ALIVE and (
        identity.is_gone(namespace) or is_free(_lock_name(process), directory_fd)
    )
    after = os.pread(fd, 1, at)[0]  # it may have published its end before it was gone
    if after == _FAILED:
        begin, size = _PLACES["failure"]
        failure = read_record(os.pread(fd, size, at + begin), 0, size)
        return identity, "failed", "", failure or b""
    if after == _ALIVE and not gone:
        begin, size = _PLACES["activity"]
        doing = read_record(os.pread(fd, size, at + begin), 0, size) or b""
        return identity, "alive", doing.decode(), b""
    watch = ProcessWatch(identity)
    try:
        status = watch.exit_status()
    finally:
        watch.close()
    if after == _FINISHED:
        return identity, *_end_of(process, status)
    return identity, "lost", describe_exit(status), b""


def joined(directory: PrivateDirectory) -> dict[int, bool]:
    """Return the ranks that have ever joined the world in `directory`, and whether they live."""
    found = [re.fullmatch(r"alive-(0|[1-9][0-9]{0,8})", name) for name in directory.names()]
    ranks = sorted(int(name[1]) for name in found if name is not None)
    return {rank: not _is_unlocked(directory, rank) for rank in ranks}


def _is_unlocked(directory: PrivateDirectory, rank: int) -> bool:
    """Return whether no process holds the lock of `rank`: its process is gone.

    Without the file this is not known, and False: something has removed it.

    :raises ConfigurationError: if the file is something else.
    """
    try:
        with directory.opened(_lock_name(rank), os.O_RDWR) as fd:
            return try_lock(fd, shared=True)
    except FileNotFoundError:
        return False


def _lock_name(rank: int) -> str:
    return f"alive-{rank}"


def _entry_at(process: int) -> int:
    """Return where the entry of a process begins; for their number, the size of the file."""
    return _HEADER_SIZE + process * _ENTRY_SIZE
