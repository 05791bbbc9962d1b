"""The file in which one rank records its rounds, as they happen: ``docs/trace.md`` has the format.

Written through mapped memory: what a rank has recorded is there whatever ends it, without a system
call, a thread or a moment to flush. Disk space is reserved before it is mapped, so that a
full disk is an error at that point, which stops the record and nothing else. The file is a ring of
segments, each of which can be read without the others: so it never grows beyond its limit, names
that are made from a counter take no memory forever, and what is damaged costs one segment.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import struct
import sys
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from syncprims.interface import Label, Topology

MAGIC = b"SYNCTRC1"
SEGMENT = 256 << 10  # bytes
HEADER = struct.Struct("<8sQII")  # magic, number of the segment, length of the facts, their check
START = 1024  # of the first entry, behind the header and the facts
ENTRY = struct.Struct("<QQQQQ")  # posted, since, done, round, tag
END = SEGMENT - ENTRY.size  # of what can be the last entry

# A tag: kind in the lowest byte, then a text's length, the outcome's text, and the label's.
ROUND, TEXT, WAITING, POSTED, RESULT, LEFT = 1, 2, 3, 4, 5, 6
LENGTH, OUTCOME, TEXT_ID = 8, 16, 32
_PIECE = 32  # bytes of a text in one entry
_MOST_TEXTS = 1 << 16


class Full(Exception):
    """The segment has no space for another entry."""


class Segment:
    """Some memory, and the texts that have been defined in it."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.slots = itertools.count(START, ENTRY.size)  # one step of Python, so that threads share
        self.tags: dict[int, int] = {}  #: by the identity of a label that is kept here
        self._kept: list[Label] = []
        self._texts: dict[str, int] = {}
        self._numbers = itertools.count(1)  # of texts: two threads never take the same

    def put(self, a: int, b: int, c: int, d: int, tag: int) -> int:
        """Write an entry, and return where.

        The tag is its last word, so that a kill leaves it whole or unseen.
        """
        at = next(self.slots)
        if at > END:
            raise Full
        ENTRY.pack_into(self.memory, at, a, b, c, d, tag)
        return at

    def tag(self, label: Label, group: str) -> int:
        """Return the tag of a round of `label`, having defined it here."""
        tag = self.tags.get(id(label))
        if tag is None:
            facts = [self.text(group), label.kind, label.name, label.src, label.op, label.site]
            tag = ROUND | self.text(json.dumps(facts)) << TEXT_ID
            self._kept.append(label)
            self.tags[id(label)] = tag
        return tag

    def text(self, text: str) -> int:
        """Return the number of `text`, having written it here."""
        number = self._texts.get(text)
        if number is None:
            number = next(self._numbers)
            if number >= _MOST_TEXTS:
                raise Full
            data = text.encode("utf-8", "backslashreplace")[: SEGMENT // 4]
            for at in range(0, len(data), _PIECE):
                piece = data[at : at + _PIECE]
                a, b, c, d = struct.unpack("<QQQQ", piece.ljust(_PIECE, b"\0"))
                self.put(a, b, c, d, TEXT | len(piece) << LENGTH | number << TEXT_ID)
            self._texts[text] = number
        return number


class Recorder:
    """One rank's record of one world.

    It is kept in memory until the ranks have met: only then rank 0 names the directory.
    """

    def __init__(self, directory: str, limit: int, topology: Topology) -> None:
        """Record into `directory`, at most `limit` bytes of it."""
        self._directory = os.path.abspath(directory)  # noqa: PTH100 - pathlib is slow to import
        self._most = max(2, limit // SEGMENT)
        self.topology = topology
        self.run = f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{os.urandom(3).hex()}"  #: if rank 0's
        self.virtual = False  #: the clock is a test's
        self.segment = _in_memory()  #: where entries go now
        self._fd = -1
        self._path = ""
        self._count = 0  # segments begun in the file
        self._turning = threading.RLock()
        self._stopped = False
        self._started = time.time_ns(), time.monotonic_ns()

    # -- entries ------------------------------------------------------------------------------

    def record(
        self,
        group: str,
        label: Label | None,
        posted: int,
        since: int,
        done: int,
        number: int,
        outcome: str = "",
        kind: int = ROUND,
    ) -> tuple[Segment, int] | None:
        """Record a round: when it was posted, waited for since, and done; its outcome if bad.

        Without a label, it is an event of another `kind`. Returns where the entry is.
        """
        while True:
            segment = self.segment
            try:
                tag = kind if label is None else segment.tag(label, group) - ROUND + kind
                if outcome:
                    tag |= segment.text(outcome) << OUTCOME
                return segment, segment.put(posted, since, done, number, tag)
            except Full:
                if not self._turn(segment):
                    return None

    def update(self, entry: tuple[Segment, int] | None, done: int) -> bool:
        """Change when an entry was done; return False where it can no longer be changed."""
        if entry is None or entry[0] is not self.segment:
            return False  # that part of the file may hold another segment
        segment, at = entry
        struct.pack_into("<Q", segment.memory, at + 16, done)  # its third word
        return True

    def _turn(self, full: Segment) -> bool:
        """Continue in the next segment, unless another thread has done so; return False if stuck.

        A signal handler may run inside of this, and an interrupt may have left the lock taken.
        """
        if not self._turning.acquire(timeout=1.0):
            return False
        try:
            if self.segment is full:
                self.segment = _in_memory() if self._fd < 0 else self._next()
        finally:
            self._turning.release()
        return True

    # -- the file -----------------------------------------------------------------------------

    def open(self, run: str | None) -> None:
        """Continue in the file of `run`, or of a start that has failed."""
        if self._fd >= 0 or self._stopped:
            return
        self.run = run or "failed-start-" + _safe(self.topology.run_id or self.run)
        folder = f"{self._directory}/{self.run}"
        self._path = f"{folder}/rank-{self.topology.rank}.trace"
        try:
            os.makedirs(folder, exist_ok=True)  # noqa: PTH103
            if run is None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)  # noqa: PTH108 - of an earlier one
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o666)
        except OSError as error:
            self._stop(error)
            return
        first, begun = self._next(), self.segment
        if not self._stopped:
            # The slots go with it: a thread that has claimed one still writes to the old memory.
            first.memory[START:] = begun.memory[START:]
            begun.memory, self.segment = first.memory, begun

    def _next(self) -> Segment:
        """Return the next segment of the file, or, if that fails, one that is never read."""
        if self._stopped:
            return _in_memory()
        at = self._count % self._most * SEGMENT
        try:
            if self._count < self._most:
                _reserve(self._fd, at)
            mapped = memoryview(mmap.mmap(self._fd, SEGMENT, offset=at))
        except (OSError, ValueError) as error:
            self._stop(error)
            return _in_memory()
        facts = json.dumps(self._facts()).encode()[: START - HEADER.size]
        check = zlib.crc32(facts, self._count)
        if self._count >= self._most:
            mapped[:] = bytes(SEGMENT)
        head = HEADER.pack(MAGIC, self._count, len(facts), check) + facts
        mapped[: len(head)] = head
        self._count += 1
        return Segment(mapped)

    def _facts(self) -> dict[str, Any]:
        """Return the facts of the whole record that stand in each segment."""
        host = os.uname().nodename
        return {
            "rank": self.topology.rank,
            "world_size": self.topology.world_size,
            "host": host[:80],
            "clock": f"virtual-{os.getpid()}" if self.virtual else _clock(host)[:160],
            "wall": self._started[0],
            "monotonic": self._started[1],
        }

    def _stop(self, error: BaseException) -> None:
        """Stop recording, and log that once. What is written stays."""
        import logging  # slow to import

        self._close()
        logging.getLogger("syncprims").warning(
            f"the trace of rank {self.topology.rank} ends here, and the run goes on without: "
            f"cannot write {self._path}: {error}. Free some space there, or let SYNCPRIMS_TRACE "
            f"name a directory that can be written"
        )

    def close(self, error: BaseException | None, now: int) -> None:
        """End the record: this rank leaves its world, because of `error` if that is given."""
        self.open(None)  # unless it is
        if self._stopped:
            return
        outcome = type(error).__name__ if error is not None else ""
        self.record("", None, now, now, now, 0, outcome=outcome, kind=LEFT)
        last, fd = self.segment, self._fd
        used = (self._count - 1) * SEGMENT + min(next(last.slots), SEGMENT)
        # What the last segment does not need is given back, unless another thread still writes.
        self._stopped, self.segment = True, _in_memory()
        if self._count <= self._most and sys.getrefcount(last) == 2:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, used)
        self._close()

    def abandon(self) -> None:
        """Stop writing to the file: this is a forked child, and the file is its parent's."""
        self.segment = _in_memory()
        self._close()

    def _close(self) -> None:
        self._stopped = True
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def _in_memory() -> Segment:
    return Segment(memoryview(bytearray(SEGMENT)))


def _reserve(fd: int, at: int) -> None:
    """Reserve a segment's bytes on the disk at `at`.

    :raises OSError: if the disk is full.
    """
    give = getattr(os, "posix_fallocate", None)
    if give is not None:
        try:
            give(fd, at, SEGMENT)
            return
        except OSError as error:
            import errno

            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    written = 0
    while written < SEGMENT:
        written += os.pwrite(fd, bytes(SEGMENT - written), at + written)


def _clock(host: str) -> str:
    """Return a text that processes share exactly if they read the same monotonic clock."""
    found = host
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:  # noqa: PTH123
        found = file.read().strip()
    with contextlib.suppress(OSError):
        found += " " + os.readlink("/proc/self/ns/time")  # noqa: PTH115
    return found


def _safe(run_id: str) -> str:
    """Return a file name for a run id that no other run id has."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in run_id)
    if kept != run_id or len(kept) > 60:
        kept = f"{kept[:60]}-{zlib.crc32(run_id.encode('utf-8', 'backslashreplace')):08x}"
    return kept
