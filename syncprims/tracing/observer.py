"""Rounds that are recorded: what ``SYNCPRIMS_TRACE`` turns on.

A `RoundRecorder` observes the rounds of one rank at one board. A world without a trace has none,
loads nothing of this and pays nothing for it.
"""

from __future__ import annotations

from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, TypeVar

from syncprims import errors
from syncprims.errors import ConcurrentCall, ForkedProcess, WorldClosed, format_ranks

from .trace_file import END, ENTRY, POSTED, RESULT, WAITING, Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncprims.errors import SyncError
    from syncprims.interface import Board, Label, Note

    from .trace_file import Segment

T = TypeVar("T")

_LONG_WAIT = 1.0  # seconds after which it is recorded for whom this rank waits
_pack_into = ENTRY.pack_into
#: With these a call is refused before its first round.
_REFUSED = (ConcurrentCall, ForkedProcess, WorldClosed)


class WorldRecorder(Recorder):
    """One rank's record of one world, with an observer for each board."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._observers: dict[Board, RoundRecorder] = {}

    def observe(self, board: Board, rank: int) -> RoundRecorder:
        """Return what records the rounds of `rank` at `board`."""
        self._observers[board] = RoundRecorder(self, board, rank)
        return self._observers[board]

    def release(self, board: Board) -> None:
        """End the observer of `board`, whose last round is over."""
        self._observers.pop(board).end()

    def leave(self, error: BaseException | None) -> None:
        """End the record: this rank leaves its world, because of `error` if that is given."""
        self.close(error, max(observer.end() for observer in self._observers.values()))


class RoundRecorder:
    """Records the rounds of one rank at one board, each when it is over."""

    def __init__(self, recorder: Recorder, board: Board, rank: int) -> None:
        self._recorder = recorder
        self._board = board
        self._rank = rank
        group = f"{format_ranks(board.members)} {board.name}".rstrip()
        self._write = partial(recorder.record, group)
        self._open: dict[int, tuple[Label, int]] = {}  # rounds that are posted and not collected
        self._failed: dict[int, str] = {}  # of these: the error that this rank reports in it
        self._label: Label | None = None  # of the note posted last
        self._meeting: tuple[Label, int] | None = None  # the round of `meet`, and since when
        self._since: int | None = None  # when the wait for a round began, if not when it was posted
        self._now: Callable[[], int] = monotonic_ns
        if board.virtual_time:
            recorder.virtual = True
            self._now = lambda: int(board.now() * 1e9)

    def watch_meet(self, meet: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `meet` that records its round.

        The round is recorded as a part of the call: an exception in between breaks the group.
        """
        board, now = self._board, self._now

        def watched(
            note: Note,
            timeout: float | None = None,
            read: Callable[[Sequence[Note]], Any] | None = None,
            write: Callable[[], object] | None = None,
        ) -> Any:
            self._label = label = note[0]
            begin = now()
            self._meeting = label, begin

            def record(notes: Sequence[Note]) -> Any:
                self._record(label, begin, now(), board.collected)
                self._meeting = None
                return notes if read is None else read(notes)

            try:
                return meet(note, timeout, record, write)
            finally:
                self._meeting = None

        return watched

    def posting(self, note: Note) -> None:
        """Remember when a note is posted."""
        number = self._board.posted + 1
        self._label = note[0]
        if note[3]:
            failure = errors.load(note.failure).failures.get(self._rank)
            self._failed[number] = failure.type if failure is not None else "failed"
        self._open[number] = note[0], self._now()

    def collecting(self, *, late: bool) -> None:
        """Remember since when this rank waits for the oldest round."""
        self._since = self._now() if late else None

    def collected(self, error: SyncError | None) -> None:
        """Record a round."""
        number, done, since = self._board.collected, self._now(), self._since
        call = self._open.pop(number, None)
        if call is None:
            return
        label, posted = call
        if since is None and not self._failed:
            self._record(label, posted, done, number)
            return
        outcome = self._failed.pop(number, "" if error is None else type(error).__name__)
        self._write(label, posted, posted if since is None else since, done, number, outcome)

    def watch_wait(
        self, attempt: Callable[[float], T | None], begin: float
    ) -> Callable[[float], T | None]:
        """Return an `attempt` that records for which ranks this one waits, and until when.

        So a trace says who made others wait in a round that never completes, also if this rank is
        killed meanwhile.
        """
        board = self._board
        if board.virtual_time:
            return attempt
        since = self._now() - int((board.now() - begin) * 1e9)
        self._write_wait(since, 0)
        seen: tuple[str, tuple[Segment, int] | None] = "", None

        def watched(seconds: float) -> T | None:
            nonlocal seen
            result = attempt(seconds)
            now = self._now()
            if result is None and now - since > _LONG_WAIT * 1e9:
                number = board.collected + 1
                missing = [rank for rank in board.members if board.status(rank).rounds < number]
                late = format_ranks(missing)
                if late != seen[0] or not self._recorder.update(seen[1], now):
                    seen = late, self._write_wait(since, now, late)
            return result

        return watched

    def _write_wait(self, since: int, now: int, late: str = "") -> tuple[Segment, int] | None:
        number = self._board.collected + 1
        label = self._open[number][0] if number in self._open else self._label
        if label is None:
            return None
        return self._write(label, since, since, now, number, outcome=late, kind=WAITING)

    def call_failed(self, error: BaseException, before: int) -> None:
        """Record the rounds that a call leaves behind when it raises, and with what."""
        if isinstance(error, _REFUSED):
            return
        first = before + 1
        for notes in (self._open, self._failed):
            for number in [number for number in notes if number > self._board.posted]:
                del notes[number]  # it was about to be posted
        now = self._now()
        if self._meeting is not None:
            if self._board.posted > before:
                label, posted = self._meeting
                self._write(label, posted, posted, now, first, type(error).__name__)
            return
        left = [number for number in self._open if number >= first]
        for number in left:
            label, posted = self._open.pop(number)
            failed = self._failed.pop(number, type(error).__name__)
            self._write(label, posted, posted, now, number, failed)
        number = self._board.collected
        if not left and number >= first and self._label is not None:
            # The round was complete, and is recorded; the call's outcome was not.
            self._write(self._label, now, now, now, number, type(error).__name__, RESULT)

    def end(self) -> int:
        """Record what was posted and will never be collected; return the time."""
        for number, (label, posted) in sorted(self._open.items()):
            outcome = self._failed.pop(number, "")
            self._write(label, posted, posted, 0, number, outcome, POSTED)
        self._open.clear()
        return self._now()

    def _record(self, label: Label, posted: int, done: int, number: int) -> None:
        """Record a round in which nothing was odd."""
        segment = self._recorder.segment
        tag = segment.tags.get(id(label))
        # What the recorder's `record` does, written out: every barrier takes this path.
        if tag is not None and (at := next(segment.slots)) <= END:
            _pack_into(segment.memory, at, posted, posted, done, number, tag)
        else:
            self._write(label, posted, posted, done, number)
