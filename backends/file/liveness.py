"""Who sits at the table: one seat per rank, its proof of life, and its last word.

A seat is a lock file that its rank holds locked for as long as it lives. The kernel frees the lock
when the process ends, however it ends, so nothing has to be touched while all is well and nobody is
ever declared dead by the clock: a stopped or swapping rank still holds its lock.

A forked child would inherit the lock and outlive its rank with it. So the core lets go of the seat
in forked children (:meth:`Seats.abandon`), and, for forks that Python does not see, the process
itself is watched too.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import select
import struct
import time
import zlib
from typing import TYPE_CHECKING

from syncprims import errors
from syncprims.errors import ConfigurationError, Failure, PeerFailed

from .memory import lay
from .processes import Identity, Watch, describe_exit, myself
from .wakeup import Bells

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncprims.interface import State

    from .private_dir import PrivateDirectory

_TABLE = "seats"
_MAGIC = b"syncprims seats 1"
_FAMILY = _MAGIC.rstrip(b"0123456789")  # of all versions
_HEADER = struct.Struct("<32sI")  # magic, world size
_PAGE = 4096
_PERSON = struct.Struct("<BxxxIQQ")  # state, pid, start, pid namespace
_TEXT = struct.Struct("<II")  # length, checksum
_WORD_AT, _WORD_SIZE = 64, 4096 - 64
_FAILURE_AT, _FAILURE_SIZE = 4096, 48 * 1024
_SEAT_SIZE = _FAILURE_AT + _FAILURE_SIZE
_EMPTY, _ALIVE, _FINISHED, _FAILED = range(4)
_EXIT_GRACE = 5.0  # seconds to learn the exit code of a rank that said it has finished
#: Seconds for a process that has lost its lock to be gone: all it has left to do is to end. (One
#: that let go of the lock and lives on, by running another program, is lost all the same.)
_DYING = 0.2


class Seats:
    """The table of one world, seen from one of its ranks. Made under the run's join lock."""

    def __init__(self, directory: PrivateDirectory, rank: int, world_size: int) -> None:
        """Take seat `rank`.

        :raises ConfigurationError: if the table is of another version or number of ranks.
        :raises OSError: if the table cannot be written, as on a full disk.
        """
        self._directory = directory
        self._rank = rank
        self._world_size = world_size
        self._watches: dict[int, Watch] = {}
        self._finished_at: dict[int, float] = {}
        self._ended: dict[int, tuple[State, str, bytes]] = {}  # what is known for good
        self._eyes = select.poll()  # on all watches at once
        self._eye_of: dict[int, int] = {}  # descriptor -> rank
        with contextlib.ExitStack() as undo:
            self.bells = Bells(directory, rank)
            undo.callback(self.bells.close)
            self._table = self._open_table()
            undo.callback(self._table.close)
            self._lock_fd = directory.open_file(seat_name(rank), os.O_RDWR | os.O_CREAT)
            undo.callback(os.close, self._lock_fd)
            _lock(self._lock_fd)
            self._write_person(_ALIVE)
            undo.pop_all()

    def _open_table(self) -> mmap.mmap:
        size = _size(self._world_size)
        fd = self._directory.open_file(_TABLE, os.O_RDWR | os.O_CREAT)
        try:
            lay(fd, size, _HEADER.pack(_MAGIC, self._world_size))
            magic, world_size = _header(fd)
            if magic != _MAGIC or world_size != self._world_size:
                raise self._no_table(magic)
            if os.fstat(fd).st_size != size:
                raise self._no_table(b"")  # cut off: to touch what is missing would kill
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)

    def _no_table(self, magic: bytes) -> ConfigurationError:
        path = self._directory.path / _TABLE
        if magic != _MAGIC and magic.startswith(_FAMILY):
            return ConfigurationError(
                f"{path} is of another version of syncprims; start all ranks from one installation"
            )
        return ConfigurationError(
            f"{path} is no table of {self._world_size} ranks of this version: it is damaged, or "
            f"something else; end what is left of the run, and remove {path.parent.parent}"
        )

    # -- one's own seat -----------------------------------------------------------------------

    def say(self, word: bytes) -> None:
        """Let others read `word`; one that is too long is left unsaid."""
        self._write_text(self._at(self._rank) + _WORD_AT, _WORD_SIZE, word)

    def say_end(self, failure: bytes | None) -> None:
        """Say how this rank ends."""
        if failure is not None:
            self._write_text(self._at(self._rank) + _FAILURE_AT, _FAILURE_SIZE, failure)
        self._write_person(_FINISHED if failure is None else _FAILED)

    def leave(self) -> None:
        """Let go of the seat. In a forked child, the parent keeps sitting on it."""
        # Closing is enough: the lock belongs to the open file, which the parent of a fork shares.
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()
        self._eye_of.clear()
        self.bells.close()
        os.close(self._lock_fd)
        self._table.close()

    # -- the others' ----------------------------------------------------------------------------

    def heard(self, rank: int) -> bytes:
        """Return the latest word of `rank`."""
        return self._read_text(self._at(rank) + _WORD_AT, _WORD_SIZE)

    def watch(self) -> None:
        """Open an eye on every other rank, while all are known to live."""
        for rank in range(self._world_size):
            if rank != self._rank:
                self._eye_on(rank)
                self.bells.find(rank)

    def _eye_on(self, rank: int) -> Watch | None:
        """Return the eye on `rank`, opening it if it sits there; None while it does not."""
        watch = self._watches.get(rank)
        if watch is None:
            state, *who = self._person(rank)
            # One that has finished too: it may still have to show its exit code.
            if state in (_ALIVE, _FINISHED) and (watch := Watch(Identity(*who))).sees:
                self._watches[rank] = watch
                self.bells.wake_for(watch.fd)
                self._eyes.register(watch.fd, select.POLLIN)
                self._eye_of[watch.fd] = rank
        return watch

    def departed(self, ranks: Iterable[int]) -> list[tuple[int, State]]:
        """Return those of `ranks` that are no longer there, and how they went."""
        events = self._eyes.poll(0) if self._eye_of else []
        closed = {self._eye_of[fd] for fd, event in events if event & select.POLLIN}
        found: list[tuple[int, State]] = []
        for rank in ranks:
            watched = rank in self._watches and self._watches[rank].sees
            if rank == self._rank or (
                watched and rank not in closed and self._person(rank)[0] == _ALIVE
            ):
                continue  # the common case, at the price of one system call for all
            state = self.state(rank)[0]
            if state not in ("alive", "unknown"):
                found.append((rank, state))
        return found

    def state(self, rank: int) -> tuple[State, str, bytes]:
        """Return the state of `rank`, how it ended where known, and the failure it left."""
        known = self._ended.get(rank)
        if known is None:
            known = self._look(rank)
            if known[0] not in ("alive", "unknown"):
                self._ended[rank] = known
        return known

    def _look(self, rank: int) -> tuple[State, str, bytes]:
        # It is lost if it was here, then gone, and still has said nothing: read before and after.
        # It may be just sitting down (its lock comes before its word), or just leaving.
        before = self._person(rank)[0]
        # Not only once all have come: who dies while others still join is to be named as well.
        watch = self._eye_on(rank) if rank != self._rank else None
        ended = watch is not None and watch.ended()
        gone = ended or (rank != self._rank and is_free(self._directory, rank))
        said = self._person(rank)[0]
        if said == _EMPTY:
            return "unknown", "", b""
        if said == _FAILED:
            return "failed", "", self._read_text(self._at(rank) + _FAILURE_AT, _FAILURE_SIZE)
        if said == _FINISHED:
            return self._finished(rank, watch, ended)
        if gone and before == _ALIVE:
            # The lock goes a moment before the process does; its exit code comes with the process.
            return "lost", describe_exit(self._await_exit_status(watch)), b""
        return "alive", "", b""

    def _finished(self, rank: int, watch: Watch | None, ended: bool) -> tuple[State, str, bytes]:
        """Tell a normal end from ``raise SystemExit(3)``, which Python lets no hook see."""
        since = self._finished_at.setdefault(rank, time.monotonic())
        if watch is not None and watch.sees and not ended:
            if time.monotonic() - since < _EXIT_GRACE:
                return "alive", "", b""
            return "finished", "", b""  # it called shutdown() and went on with other things
        status = self._await_exit_status(watch) if ended else None
        if not status:
            return "finished", "", b""
        if status < 0:
            return "lost", describe_exit(status), b""
        failure = Failure(rank, "SystemExit", str(status), "")
        return "failed", "", errors.dump(PeerFailed.from_failure(failure))

    def _await_exit_status(self, watch: Watch | None) -> int | None:
        if watch is None or not watch.sees:
            return None
        watch.ended(_DYING)
        deadline = time.monotonic() + 0.02
        while (status := watch.exit_status()) is None and time.monotonic() < deadline:
            time.sleep(0.0005)
        return status

    def is_taken(self, rank: int) -> bool:
        """Tell whether `rank` sits there; may be asked from another thread."""
        return self._person(rank)[0] == _ALIVE and not is_free(self._directory, rank)

    def has_left(self, rank: int) -> bool:
        """Tell whether `rank` has said that it has finished; may be asked from another thread."""
        return self._person(rank)[0] == _FINISHED

    def is_deserted(self, rank: int) -> bool:
        """Tell whether `rank` went without a word; may be asked from another thread."""
        before = self._person(rank)[0]
        return (
            before == _ALIVE
            and is_free(self._directory, rank)
            and self._person(rank)[0] == _ALIVE  # and has not said a word while it went
        )

    # -- bytes --------------------------------------------------------------------------------

    def _at(self, rank: int) -> int:
        return _PAGE + rank * _SEAT_SIZE

    def _person(self, rank: int) -> tuple[int, int, int, int]:
        return _PERSON.unpack_from(self._table, self._at(rank))

    def _write_person(self, state: int) -> None:
        # In one piece: packing in place would clear the bytes first, for others to see.
        at = self._at(self._rank)
        self._table[at : at + _PERSON.size] = _PERSON.pack(state, *myself())

    def _write_text(self, at: int, size: int, text: bytes) -> None:
        if len(text) > size - _TEXT.size:
            text = b""
        self._table[at + _TEXT.size : at + _TEXT.size + len(text)] = text
        self._table[at : at + _TEXT.size] = _TEXT.pack(len(text), zlib.crc32(text))

    def _read_text(self, at: int, size: int) -> bytes:
        """Return the text at `at`, whole: one that is being written is waited for, briefly."""
        deadline = time.monotonic() + 0.1
        while True:
            length, check = _TEXT.unpack_from(self._table, at)
            if length <= size - _TEXT.size:
                text = self._table[at + _TEXT.size : at + _TEXT.size + length]
                if zlib.crc32(text) == check:
                    return text
            if time.monotonic() > deadline:
                return b""
            time.sleep(0.0005)


def seat_name(rank: int) -> str:
    """Return the name of a rank's lock file."""
    return f"seat-{rank}"


def world_size_of(directory: PrivateDirectory) -> int | None:
    """Return the number of ranks the table in `directory` was laid for; None if it is damaged.

    The same if it is not laid yet.
    """
    try:
        fd = directory.open_file(_TABLE, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        magic, world_size = _header(fd)
        # A number that the file is not made for is damaged, and might be absurd.
        right = magic == _MAGIC and os.fstat(fd).st_size == _size(world_size)
    finally:
        os.close(fd)
    return world_size if right else None


def taken(directory: PrivateDirectory) -> dict[int, bool]:
    """Return the seats that were ever taken at this table, and whether their ranks still live."""
    found = [re.fullmatch(r"seat-(0|[1-9][0-9]{0,8})", name) for name in directory.names()]
    ranks = [int(name[1]) for name in found if name is not None]
    return {rank: not is_free(directory, rank) for rank in sorted(ranks)}


def _header(fd: int) -> tuple[bytes, int]:
    """Return the magic and the world size in the file's header; of a shorter file, neither."""
    header = os.pread(fd, _HEADER.size, 0)
    if len(header) < _HEADER.size:
        return b"", 0
    magic, world_size = _HEADER.unpack(header)
    return magic.rstrip(b"\0"), world_size


def _size(world_size: int) -> int:
    return _PAGE + world_size * _SEAT_SIZE


def is_free(directory: PrivateDirectory, rank: int) -> bool:
    """Tell whether nobody holds the lock of seat `rank`: its process is gone."""
    try:
        fd = directory.open_file(seat_name(rank), os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        # Shared, so that two ranks that look at the same moment do not see each other.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _lock(fd: int) -> None:
    """Take the lock; somebody may be looking at it for a moment."""
    deadline = time.monotonic() + 5.0
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.0005)
