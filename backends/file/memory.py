"""What the ranks of a host share: mapped cells, claims, the window for arrays, pipes that wake.

Each member has :data:`CELLS` cells. Only it writes them, and it uses them in turn. A cell is a
*word* and a *body*. The words of one round stand side by side, so one comparison covers all of
them. A word holds the number of its round and a check of itself and of its body. The body holds
the label, and the payload if it fits.

Nothing relies on the order in which another processor sees the stores. A note is accepted only if
its word and its body prove each other whole, round included. A half-written or stale note reads as
"not there yet".
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import struct
import threading
import time
import zlib
from collections.abc import Callable

from syncprims.errors import ConfigurationError
from syncprims.interface import Board, WaitView, Window

from .private_dir import PrivateDirectory

#: A member posts at most `depth` notes ahead of what it has collected. So a rank that has collected
#: round k knows that all have collected round k - depth, and a cell is free again after twice that.
CELLS = 2 * Board.depth
BODY_SIZE = 2048
_SHORT_BODY = 256  # bytes; most bodies fit
_SMALL_SLOT = 4096  # bytes for the small values of a member in each of two rounds
TEXT_SIZE = 16 * 1024  #: bytes of a verdict

WORD = struct.Struct("<QII")  #: round, flags, check
_WAIT = struct.Struct("<Qd?7x")  # the fields of a WaitView
HEAD = struct.Struct("<IIII")  #: lengths of label, payload and failure; checksum of the last two
#: Of a word's flags. `MARK` is the note's. `AHEAD` is how many rounds the writer was ahead, and
#: `DIGEST`, of a note that has only a label, a part of the label's digest: so the words of
#: different labels differ.
MARK, CONTENT, SPILLED, AHEAD, DIGEST = 3, 4, 8, 0xF << 8, 0xFFFFF << 12
AHEAD_SHIFT = 8

BOARD_MAGIC = b"syncprims board 6"
_HEADER = struct.Struct("<32sI")  # magic, number of ranks
HEADER_SIZE = 64
_RECORD = struct.Struct("<II")  # length, checksum
RECORD_HEAD = _RECORD.size
_RECORD_TIMEOUT = 0.1  # seconds until a record that is being written must be whole
_CACHE_LINE = 64
_MOST_CLAIMS = 1 << 20  # bytes: thousands, where a run makes a few
ROUND_FACTOR, FLAGS_FACTOR, MASK = 0x9E3779B1, 0x85EBCA6B, 0xFFFFFFFF

#: Bytes of a window, by preference. Each member uses a part of it, so many members need more.
_WINDOW_SIZES, _LEAST_PER_MEMBER = (8 << 20, 2 << 20, 1 << 19), 64 << 10


def word_of(number: int, flags: int, body_check: int) -> bytes:
    """Return the word of a note: equal for equal notes, and never equal for different rounds."""
    check = body_check + number * ROUND_FACTOR + flags * FLAGS_FACTOR
    return WORD.pack(number, flags, check & MASK)


class CellReader:
    """The cells of a board with `count` members: mapped by one of them, or copied from outside."""

    def __init__(self, memory: mmap.mmap | bytes, count: int) -> None:
        self._memory = memory
        self.count = count
        # One more than members: an outsider may abort a board that can never be complete.
        self.intents = slice(HEADER_SIZE, HEADER_SIZE + 8 * (count + 1))
        asleep_at = _round_up(self.intents.stop, _CACHE_LINE)
        self.asleep = slice(asleep_at, asleep_at + count)  #: one byte per member: it sleeps
        self.waits_at = _round_up(self.asleep.stop, _CACHE_LINE)
        words_at = _round_up(self.waits_at + count * _WAIT.size, _CACHE_LINE)
        row = _round_up(count * WORD.size, _CACHE_LINE)
        #: where the words of each round are, of all members
        self.rows = [
            slice(words_at + cell * row, words_at + cell * row + count * WORD.size)
            for cell in range(CELLS)
        ]
        self.split = struct.Struct(f"{WORD.size}s" * count).unpack  #: a row into its words
        self.texts_at = _round_up(words_at + CELLS * row, mmap.PAGESIZE)  #: of verdicts
        self._bodies_at = self.texts_at + (count + 1) * TEXT_SIZE
        bodies_end = self._bodies_at + CELLS * count * BODY_SIZE
        self._small_at = _round_up(bodies_end, mmap.ALLOCATIONGRANULARITY)
        self.size = self._small_at + 2 * count * _SMALL_SLOT  #: bytes

    def word_at(self, cell: int, index: int) -> slice:
        """Return where the word of member number `index` is."""
        at = self.rows[cell].start + index * WORD.size
        return slice(at, at + WORD.size)

    def body_at(self, cell: int, index: int) -> int:
        """Return where the body of member number `index` begins."""
        return self._bodies_at + (cell * self.count + index) * BODY_SIZE

    def read_body(
        self, cell: int, index: int, word: bytes
    ) -> tuple[bytes, int, int, int, bytes] | None:
        """Return the content of a body, or None unless `word` proves it whole.

        The content is the label, the length of the payload, the length of the failure, the
        checksum of these two, and the bytes that begin with them. Those are not yet proved.
        """
        number, flags, _ = WORD.unpack(word)
        at = self.body_at(cell, index)
        body = self._memory[at : at + _SHORT_BODY]  # another processor's cache holds each line
        text, payload, failure, check = HEAD.unpack_from(body)
        end = HEAD.size + text
        if end + payload + failure > _SHORT_BODY:
            body = self._memory[at : at + BODY_SIZE]
        if word_of(number, flags, zlib.crc32(body[:end])) != word:
            return None
        return body[HEAD.size : end], payload, failure, check, body[end:]

    def holds_body(self, cell: int, index: int, body: bytes) -> bool:
        """Return whether the body of a member begins with these bytes."""
        at = self.body_at(cell, index)
        return self._memory[at : at + len(body)] == body

    def last_word(self, index: int) -> bytes:
        """Return the latest word of a member; one of round 0 if it has posted nothing."""
        words = [self._memory[self.word_at(cell, index)] for cell in range(CELLS)]
        return max(words, key=WORD.unpack)

    def word_of(self, number: int, index: int) -> bytes:
        """Return the word of a member in the cell for round `number`, which may be of another."""
        return bytes(self._memory[self.word_at(number % CELLS, index)])

    def posted(self, index: int) -> int:
        """Return how many rounds a member has posted."""
        return int(WORD.unpack(self.last_word(index))[0])

    def all_posted(self, number: int) -> bool:
        """Return whether every member has posted round `number`."""
        return all(self.posted(index) >= number for index in range(self.count))

    def read_wait(self, index: int) -> WaitView:
        """Return what a member waits for."""
        return WaitView(*_WAIT.unpack_from(self._memory, self.waits_at + index * _WAIT.size))


class Cells(CellReader):
    """The cells of a board with `count` members, in the file `name` of `directory`."""

    def __init__(self, directory: PrivateDirectory, name: str, count: int) -> None:
        """Map the file, creating it if it is not there; under the run's lock.

        :raises ConfigurationError: if the file is something else.
        :raises OSError: if there is no space for it.
        """
        size = CellReader(b"", count).size
        self.memory = map_file(directory, name, BOARD_MAGIC, count, size)
        super().__init__(self.memory, count)
        # Mapped by itself: arrays in it do not prevent the rest from being closed.
        with directory.opened(name, os.O_RDWR) as fd:
            small = mmap.mmap(fd, self.size - self._small_at, offset=self._small_at)
        self.small_window = Window(memoryview(small), make_window_fence())

    def write_body(self, cell: int, index: int, body: bytes) -> None:
        """Write the body of this member's own cell."""
        at = self.body_at(cell, index)
        self.memory[at : at + len(body)] = body

    def write_wait(self, index: int, wait: WaitView) -> None:
        """Record what `index` waits for."""
        at = self.waits_at + index * _WAIT.size
        self.memory[at : at + _WAIT.size] = _WAIT.pack(*wait[:3])

    def close(self) -> None:
        """Unmap the file."""
        unmap(self.memory)
        with contextlib.suppress(BufferError):  # an array in it is still in use: its end unmaps it
            self.small_window.memory.release()


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


# -- mapped files -----------------------------------------------------------------------------


def map_file(
    directory: PrivateDirectory, name: str, magic: bytes, count: int, size: int
) -> mmap.mmap:
    """Map the file `name` of `size` bytes for `count` ranks, creating it; under the run's lock.

    A rank that is killed in here leaves a file without a header. The next one creates it again.

    :raises ConfigurationError: if the file is something else, or has another version or count.
    :raises OSError: if there is no space for it.
    """
    with directory.opened(name, os.O_RDWR | os.O_CREAT) as fd:
        if os.pread(fd, _HEADER.size, 0) in (b"", bytes(_HEADER.size)):
            _allocate(fd, size)
            os.pwrite(fd, _HEADER.pack(magic, count), 0)
        # Access to mapped memory beyond the end of a truncated file kills the process.
        if read_header(fd) != (magic, count) or os.fstat(fd).st_size != size:
            path, kind = directory.path / name, magic.decode().split()[1]
            raise ConfigurationError(
                f"{path} is not a {kind} file of {count} ranks of this version of syncprims: start "
                f"all ranks from one installation. If they are, the file is damaged: end the "
                f"ranks that still run, and remove {path.parent.parent}"
            )
        return mmap.mmap(fd, size)


def unmap(memory: mmap.mmap) -> None:
    """Unmap a file now, or when no other thread of this rank reads it any more.

    Such a thread can only be met without Python's global lock.
    """
    with contextlib.suppress(BufferError):
        memory.close()


def read_header(fd: int) -> tuple[bytes, int]:
    """Return the magic and the number of ranks in a file's header; (b"", 0) if it is too short."""
    header = os.pread(fd, _HEADER.size, 0)
    if len(header) < _HEADER.size:
        return b"", 0
    magic, count = _HEADER.unpack(header)
    return magic.rstrip(b"\0"), count


def _allocate(fd: int, size: int) -> None:
    """Give the file `size` bytes that really exist: an access to its map can never fault."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:  # macOS: only what is missing, since others may use the rest already
        end = os.fstat(fd).st_size
        while end < size:
            end += os.pwrite(fd, b"\0" * min(1 << 20, size - end), end)


def write_record(memory: mmap.mmap, at: int, data: bytes) -> None:
    """Write `data` at `at` so that a reader knows whether it sees all of it."""
    begin = at + _RECORD.size
    memory[begin : begin + len(data)] = data
    memory[at:begin] = _RECORD.pack(len(data), zlib.crc32(data))


def read_record(memory: mmap.mmap | bytes, at: int, size: int) -> bytes | None:
    """Return the record at `at`, of at most `size` bytes; None while it is not whole."""
    length, check = _RECORD.unpack_from(memory, at)
    if length > size - _RECORD.size:
        return None
    data = memory[at + _RECORD.size : at + _RECORD.size + length]
    return data if zlib.crc32(data) == check else None


def await_record(memory: mmap.mmap, at: int, size: int) -> bytes:
    """Return the record at `at`; one that is being written is waited for, briefly."""
    deadline = time.monotonic() + _RECORD_TIMEOUT
    while (data := read_record(memory, at, size)) is None:
        if time.monotonic() > deadline:
            return b""
        time.sleep(0.0005)
    return data


# -- claims -----------------------------------------------------------------------------------


class Claims:
    """The claims in a file of `directory`: the first process to claim a name decides for all.

    A claim is a line that a process appends. The kernel puts the lines of all processes one after
    another, and the first line about a name holds. No lock is held, so a process that is stopped or
    killed on the way delays no other. The file stays open, so claims also work when the directory
    has been removed under the run.
    """

    def __init__(self, directory: PrivateDirectory, file: str = "claims") -> None:
        """Open `file`, by default that of the world, creating it if it is not there.

        :raises ConfigurationError: if it is something else.
        """
        self._fd = directory.open_file(file, os.O_RDWR | os.O_APPEND | os.O_CREAT)

    def decide(self, name: str, value: str = "") -> str:
        """Return what `name` stands for; with `value`, claim it first, unless it is claimed.

        :raises OSError: if there is no space for another claim.
        """
        found = self._find(name)
        if not found and value:
            # Between two line ends: a line that a full disk has cut off damages no other line.
            os.write(self._fd, b"\n%s\n" % _claim(name, value))
            found = self._find(name)
            if not found:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        return found

    def _find(self, name: str) -> str:
        for line in os.pread(self._fd, _MOST_CLAIMS, 0).splitlines():
            claim = line.decode(errors="replace").split()
            if len(claim) == 3 and claim[1] == name and line == _claim(*claim[1:]):
                return claim[2]
        return ""

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _claim(name: str, value: str) -> bytes:
    text = f"{name} {value}".encode()
    return b"%08x %s" % (zlib.crc32(text), text)


# -- the window -------------------------------------------------------------------------------


def make_fence() -> Callable[[], object]:
    """Return a memory barrier: it orders the loads and stores before a call before those after."""
    # This lock is always held. To release and acquire it is a full fence, on weakly ordered
    # processors too (a release, then an acquire; either alone would let stores pass).
    lock = threading.Lock()
    lock.acquire()

    def fence() -> None:
        lock.release()
        lock.acquire()

    return fence


def make_window_fence() -> Callable[[], object]:
    """Return a barrier between the bytes in a window and the word that announces them.

    On x86 there is nothing to do: another processor sees stores in their order, and neither loads
    nor stores pass an older load.
    """
    return int if os.uname().machine in ("x86_64", "i686") else make_fence()


def open_window(directory: PrivateDirectory, name: str, count: int) -> Window:
    """Map the window of a board with `count` members, the file `name` of `directory`.

    Arrays pass through it in pieces. So it stays in the processors' caches, and its size does not
    depend on the array. It is made for the first array, as large as the free space allows. No lock
    is used, since a stopped rank could hold it. The file is unmapped when the last view of it ends.

    :raises ConfigurationError: if the file is something else.
    :raises SharedMemoryError: if there is no space for the smallest window.
    """
    with contextlib.ExitStack() as stack:
        with directory.explained("opening the memory for arrays", name):
            fd = stack.enter_context(directory.opened(name, os.O_RDWR | os.O_CREAT))
            claims = stack.enter_context(contextlib.closing(Claims(directory, f"{name}-claims")))
        # All members use one size: the one that the first of them has allocated.
        agreed = claims.decide("size")
        if not agreed:
            size = str(_allocate_window(fd, directory, name, count))
            agreed = claims.decide("size", size)
        if os.fstat(fd).st_size < int(agreed):  # to touch what is missing would kill the process
            raise ConfigurationError(
                f"{directory.path / name} was truncated; end the ranks that still run"
            )
        return Window(memoryview(mmap.mmap(fd, int(agreed))), make_window_fence())


def _allocate_window(fd: int, directory: PrivateDirectory, name: str, count: int) -> int:
    """Allocate the largest size there is space for. Other members may do so at this moment."""
    *larger, least = [max(size, count * _LEAST_PER_MEMBER) for size in _WINDOW_SIZES]
    for size in larger:
        with contextlib.suppress(OSError):
            _allocate(fd, size)
            return size
    with directory.explained(f"reserving {least} bytes that arrays pass through", name):
        _allocate(fd, least)
    return least


# -- sleeping and waking --------------------------------------------------------------------------


class Doorbell:
    """The doorbell of `process`, and those of other ranks that it has rung.

    It is a named pipe. Correctness does not depend on it: a sleeping rank checks now and then.
    """

    def __init__(self, directory: PrivateDirectory, process: int) -> None:
        """Create the pipe of this rank.

        :raises OSError: if there is no space for it.
        """
        self._directory = directory
        self._own = directory.open_pipe(f"doorbell-{process}", create=True)
        self._fds = {process: self._own}
        self._poll = select.poll()
        self._poll.register(self._own, select.POLLIN)

    def also_wake_for(self, fd: int) -> None:
        """End a sleep also when `fd` becomes readable; once."""
        self._poll.register(fd, select.POLLIN)

    def sleep(self, seconds: float) -> bool:
        """Return whether another rank wakes this one, or a watched process ends, in this time."""
        events = poll_unless_busy(self._poll, seconds)
        if events is None:  # another thread of this rank sleeps: one poll serves one thread
            poll = select.poll()
            poll.register(self._own, select.POLLIN)
            events = poll.poll(seconds * 1000)
        for fd, _ in events:
            if fd == self._own:
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 4096)
            else:
                self._poll.unregister(fd)
        return bool(events)

    def wake(self, process: int) -> None:
        """Wake `process` if it sleeps. A thread may wake its own."""
        # There may be no pipe, or a full one, so that it wakes anyway.
        with contextlib.suppress(OSError, ConfigurationError):
            if process not in self._fds:
                fd = self._directory.open_pipe(f"doorbell-{process}")
                if self._fds.setdefault(process, fd) != fd:  # another thread was faster
                    os.close(fd)
            os.write(self._fds[process], b"!")

    def close(self) -> None:
        """Close all pipes."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def poll_unless_busy(poll: select.poll, seconds: float) -> list[tuple[int, int]] | None:
    """Return the events of `poll` within so many seconds; None if another thread uses it now."""
    try:
        return poll.poll(seconds * 1000)
    except RuntimeError as error:
        if error.args != ("concurrent poll() invocation",):
            raise  # a signal handler has raised it
        return None
