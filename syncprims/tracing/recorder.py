"""Records the rounds of one rank in a file, as they happen: what ``SYNCPRIMS_TRACE`` turns on.

Each entry is written by a system call of its own: what a rank has recorded is there whatever ends
it. An error, as of a full disk, stops the record and nothing else. When a file has half of the size
that is allowed, it becomes the ``.old`` one, in place of an earlier one, and a new file begins.

In a file, processes have the place of ranks: they keep their numbers when `reform` changes ranks.
All entries have 40 bytes. A text stands in entries before the first one that names its number; text
0 has the facts of the record, in JSON. A world without a trace loads nothing of this.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from syncprims import errors
from syncprims._protocol.rounds import Rounds
from syncprims.errors import format_ranks
from syncprims.interface import Backend, Board, Label, Note

T = TypeVar("T")

ENTRY = struct.Struct("<QQQQQ")  # posted, since, done, round, tag
_pack = ENTRY.pack
# A tag: kind in the lowest byte, then the number of the outcome's text, and of the call's. A later
# entry of a kind replaces an earlier one of the same round, and a higher kind a lower one.
TEXT, WAITING, ROUND, LEFT, LOST = 1, 2, 3, 4, 5
OUTCOME, CALL = 8, 32
FORMAT = "syncprims trace 2: "  # at the beginning of text 0, before a check of the facts
_PIECE = 32  # bytes of a text in one entry
_LONGEST_TEXT = 1 << 16  # bytes
_MOST_TEXTS = 1000  # to remember: a program may make names from a counter
_LONG_WAIT = 1.0  # seconds after which it is recorded for whom this rank waits
_REPEAT_AFTER = 0.5  # seconds, and then again


class _File:
    """A file of entries, and the texts that it defines."""

    def __init__(self, path: str, facts: dict[str, Any]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o666)
        self.size = 0
        self._numbers = itertools.count()  # of texts: two threads never take the same
        self._texts: dict[str, int] = {}
        # By the identity of a label, which is kept here: no other one has it meanwhile. Groups may
        # share one, as calls on one line do.
        self._tags: dict[tuple[int, str], tuple[int, Label]] = {}
        text = json.dumps(facts)
        self.text(f"{FORMAT}{zlib.crc32(text.encode()):x} {text}")

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it could not be opened
            os.close(self._fd)

    def put(self, entries: bytes) -> None:
        """Write entries.

        :raises OSError: if the disk is full.
        """
        if os.write(self._fd, entries) < len(entries):
            raise OSError(28, "No space left on device")
        self.size += len(entries)

    def tag(self, label: Label, group: str) -> int:
        """Return what the tag of a round of `label` has beside its kind."""
        key = id(label), group
        known = self._tags.get(key)
        if known is None:
            if len(self._tags) > _MOST_TEXTS:
                self._tags.clear()
            facts = [group, label.kind, label.name, label.src, label.op, label.site]
            known = self._tags[key] = self.text(json.dumps(facts)) << CALL, label
        return known[0]

    def text(self, text: str) -> int:
        """Return the number of `text`, having written it here."""
        number = self._texts.get(text)
        if number is None:
            if len(self._texts) > _MOST_TEXTS:
                self._texts.clear()
            number = next(self._numbers)
            data = text.encode("utf-8", "backslashreplace")[:_LONGEST_TEXT]
            tag = (TEXT | number << CALL).to_bytes(8, "little")
            pieces = (data[at : at + _PIECE] for at in range(0, len(data), _PIECE))
            self.put(b"".join(piece.ljust(_PIECE, b"\0") + tag for piece in pieces))
            self._texts[text] = number
        return number


class Recorder:
    """One process's record of one run, with the rounds of each board, in all epochs.

    It is kept in memory until the ranks have met: only then rank 0 names the directory.
    """

    def __init__(self, directory: str, limit: int, backend: Backend) -> None:
        """Record into `directory`, at most `limit` bytes of it, what `backend` takes part in."""
        self._directory = os.path.abspath(directory)  # noqa: PTH100 - pathlib is slow to import
        self._most = limit // 2 - 2 * _LONGEST_TEXT  # bytes of a file, before the last entry
        self.backend = backend
        self._world_size = backend.topology.world_size  # in the first epoch of this process
        #: If rank 0's.
        self.run: str = f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{os.urandom(3).hex()}"
        self.virtual = False  #: the clock is a test's
        self._early: list[tuple[Any, ...]] = []  # entries before there is a file
        self._file: _File | None = None
        self._path = ""
        self._count = 0  # files begun
        self._turning = threading.RLock()
        self._stopped = False
        self._started = time.time_ns(), time.monotonic_ns()
        self._rounds: dict[Board, RecordedRounds] = {}

    # -- called by the world ------------------------------------------------------------------

    def make_rounds(self, *args: Any) -> Rounds:
        """Return rounds that are recorded; the arguments are those of :class:`Rounds`."""
        rounds = RecordedRounds(*args)
        rounds.begin(self)
        self._rounds[rounds.board] = rounds
        return rounds

    def release(self, board: Board) -> None:
        """End the record of `board`, whose last round is over."""
        self._rounds.pop(board).end()

    def end_epoch(self, board: Board, left: Sequence[int]) -> None:
        """End the record of all boards; of the processes at that of all ranks, these are left."""
        now = max(rounds.end() for rounds in self._rounds.values())
        for rank, process in enumerate(self.backend.members):
            if process not in left:
                self.record("", None, now, now, now, process, board.status(rank).detail, LOST)

    def open(self, run: str | None) -> None:
        """Continue in the file of `run`, or of a start that has failed."""
        if self._file is not None or self._stopped:
            return
        self.run = run or "failed-start-" + _safe(self.backend.topology.run_id or self.run)
        folder = f"{self._directory}/{self.run}"
        self._path = f"{folder}/rank-{self.backend.process}.trace"
        try:
            os.makedirs(folder, exist_ok=True)  # noqa: PTH103
            if run is None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)  # noqa: PTH108 - of an earlier one
            self._file = self._begin_file()
        except OSError as error:
            self._stop(error)
        for entry in self._early:
            self.record(*entry)

    def leave(self, error: BaseException | None) -> None:
        """End the record: this rank leaves its world, because of `error` if that is given."""
        self.close(error, max(rounds.end() for rounds in self._rounds.values()))

    def close(self, error: BaseException | None, now: int) -> None:
        """End the record, at this time."""
        self.open(None)  # unless it is
        outcome = type(error).__name__ if error is not None else ""
        self.record("", None, now, now, now, 0, outcome, LEFT)
        self.abandon()

    def abandon(self) -> None:
        """Stop writing; also for a forked child, as the file is its parent's."""
        self._stopped, self._file = True, None

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
    ) -> None:
        """Record a round: when it was posted, waited for since, and done; its outcome if bad."""
        file = self._file
        if file is None:
            if not self._stopped:
                self._early.append((group, label, posted, since, done, number, outcome, kind))
            return
        try:
            if file.size > self._most:
                file = self._next_file(file)
            tag = kind if label is None else file.tag(label, group) | kind
            if outcome:
                tag |= file.text(outcome) << OUTCOME
            file.put(_pack(posted, since, done, number, tag))
        except OSError as error:
            self._stop(error)

    def _next_file(self, full: _File) -> _File:
        """Return the file after the one that is full.

        A signal handler may run inside of this, and an interrupt may have left the lock taken.
        """
        if not self._turning.acquire(timeout=1.0):
            return full
        try:
            if self._file is full:
                os.replace(self._path, f"{self._path}.old")  # noqa: PTH105
                self._file = self._begin_file()
            return self._file or full  # another thread may have stopped the record
        finally:
            self._turning.release()

    def _begin_file(self) -> _File:
        host = os.uname().nodename
        facts = {
            "rank": self.backend.process,
            "world_size": self._world_size,
            "host": host[:80],
            "clock": f"virtual-{os.getpid()}" if self.virtual else _clock(host),
            "wall": self._started[0],
            "monotonic": self._started[1],
            "dropped": self._count > 1,
        }
        file = _File(self._path, facts)
        self._count += 1
        return file

    def _stop(self, error: BaseException) -> None:
        """Stop recording, and log that once. What is written stays."""
        if self._stopped:
            return  # another thread has had the same error
        import logging  # slow to import

        self.abandon()
        what = f"the trace of rank {self.backend.topology.rank} ends: cannot write {self._path}"
        more = f"{error}. The run goes on; free some space there"
        logging.getLogger("syncprims").warning(f"{what}: {more}")


def _clock(host: str) -> str:
    """Return a text that processes share exactly if they read the same monotonic clock."""
    clock = host
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:  # noqa: PTH123
        clock = file.read().strip()
    with contextlib.suppress(OSError):
        clock += " " + os.readlink("/proc/self/ns/time")  # noqa: PTH115
    return clock


def _safe(run_id: str) -> str:
    """Return a file name for a run id that no other run id has."""
    name = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in run_id)
    if name != run_id or len(name) > 60:
        name = f"{name[:60]}-{zlib.crc32(run_id.encode('utf-8', 'backslashreplace')):08x}"
    return name


class RecordedRounds(Rounds):
    """The rounds of one rank at one board, of which each is recorded when it is over."""

    def begin(self, recorder: Recorder) -> None:
        """Record into `recorder` from now on."""
        board = self.board
        self.observed = True
        self._processes = recorder.backend.members  # by rank, in this epoch
        members = format_ranks(self._processes[rank] for rank in board.members)
        group = f"{members}@{recorder.backend.epoch} {board.name}".rstrip()
        self._write = partial(recorder.record, group)
        self._open: dict[int, tuple[Label, int]] = {}  # rounds that are posted and not collected
        self._failed: dict[int, str] = {}  # of these: the error that this rank reports in it
        self._last: tuple[Label, int, int, int, int] | None = None  # the last round that is over
        self._now: Callable[[], int] = time.monotonic_ns
        if board.virtual_time:
            recorder.virtual = True
            self._now = lambda: int(board.now() * 1e9)

    def meet(
        self,
        note: Note,
        timeout: float | None = None,
        read: Callable[[Sequence[Note]], Any] | None = None,
        write: Callable[[], object] | None = None,
    ) -> Any:
        """As :meth:`Rounds.meet`.

        The round is recorded as a part of the call: an exception in between breaks the group.
        """
        number, label, begin = self.board.posted + 1, note[0], self._now()
        self._open[number] = label, begin

        def record(notes: Sequence[Note]) -> Any:
            self._record(label, begin, begin, self._now(), number)
            return notes if read is None else read(notes)

        try:
            return super().meet(note, timeout, record, write)
        finally:
            self._open.pop(number, None)

    def post(self, note: Note, timeout: float | None) -> None:
        """As :meth:`Rounds.post`; remember when."""
        self.make_room(timeout)  # before the time counts
        number = self.board.posted + 1
        if note[3]:
            failure = errors.load(note.failure).failures.get(self.rank)
            self._failed[number] = failure.type if failure is not None else "failed"
        self._open[number] = note[0], self._now()
        super().post(note, timeout)

    def collect(self, timeout: float | None) -> Sequence[Note]:
        """As :meth:`Rounds.collect`; the round is recorded."""
        number = self.board.collected + 1
        is_deferred = number in self._pending
        late = bool(self._pending) or number < self.board.posted
        since = self._now() if late else None
        notes = super().collect(timeout)
        if number in self._open:
            error = self._shared_failure(notes) if is_deferred else None
            label, posted = self._open[number]
            outcome = self._failed.pop(number, "" if error is None else type(error).__name__)
            begin = posted if since is None else since
            self._record(label, posted, begin, self._now(), number, outcome)
        return notes

    def wait(
        self,
        attempt: Callable[[float], T | None],
        timeout: float | None,
        begin: float,
        *,
        obstacle: Callable[[], str | None] | None = None,
    ) -> T:
        """As :meth:`Rounds.wait`; record for which ranks this one waits, and until when.

        So a trace says who made others wait in a round that never completes, also if this rank is
        killed meanwhile.
        """
        board, number = self.board, self.board.collected + 1
        if obstacle is not None or board.virtual_time or number not in self._open:
            return super().wait(attempt, timeout, begin, obstacle=obstacle)
        label, since = self._open[number][0], self._now() - int((board.now() - begin) * 1e9)
        self._write(label, since, since, 0, number, "", WAITING)
        again = since + _LONG_WAIT * 1e9

        def watched(seconds: float) -> T | None:
            nonlocal again
            result = attempt(seconds)
            now = self._now()
            if result is None and now > again:
                again = now + _REPEAT_AFTER * 1e9
                missing = [rank for rank in board.members if board.status(rank).rounds < number]
                late = format_ranks(self._processes[rank] for rank in missing)
                self._write(label, since, since, now, number, late, WAITING)
            return result

        return super().wait(watched, timeout, begin)

    def _end_call(self, token: object, error: BaseException, before: int, collected: int) -> None:
        """Record the rounds that a call leaves behind when it raises, and with what."""
        if before >= 0:
            self._record_failed(error, before)
        super()._end_call(token, error, before, collected)

    def _record_failed(self, error: BaseException, before: int) -> None:
        first, now, failed = before + 1, self._now(), type(error).__name__
        left = [number for number in self._open if number >= first]
        for number in left:
            label, posted = self._open[number]
            outcome = self._failed.pop(number, failed)
            if number <= self.board.posted:
                self._record(label, posted, posted, now, number, outcome)
            else:  # it was about to be posted
                del self._open[number]
        number = self.board.collected
        if not left and self._last is not None and self._last[-1] == number >= first:
            self._record(*self._last, failed)  # it was complete; now the call's outcome is known

    def end(self) -> int:
        """Record what was posted and will never be collected; return the time."""
        for number, (label, posted) in sorted(self._open.items()):
            outcome = self._failed.pop(number, "")
            self._write(label, posted, posted, 0, number, outcome, WAITING)
        self._open.clear()
        return self._now()

    def _record(
        self, label: Label, posted: int, since: int, done: int, number: int, outcome: str = ""
    ) -> None:
        self._last = label, posted, since, done, number
        self._write(label, posted, since, done, number, outcome)
        self._open.pop(number, None)
