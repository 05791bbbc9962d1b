"""Rounds that are recorded: what ``SYNCPRIMS_TRACE`` turns on.

Everything about it is here, so that a world without a trace pays nothing.
"""

from __future__ import annotations

from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, TypeVar, overload

from syncprims import errors
from syncprims.errors import ConcurrentCall, ForkedProcess, WorldClosed, format_ranks

from .rounds import Rounds
from .trace_file import END, ENTRY, FURTHER, POSTED, RESULT, WAITING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncprims.interface import Label, Note

    from .trace_file import Recorder, Segment

T = TypeVar("T")

_LONG_WAIT = 1.0  # seconds after which it is recorded for whom this rank waits
_pack_into = ENTRY.pack_into
#: With these a call is refused before its first round.
_REFUSED = (ConcurrentCall, ForkedProcess, WorldClosed)


class TracedRounds(Rounds):
    """One rank's rounds at one board, each recorded when it is over."""

    traced = True

    def __init__(self, recorder: Recorder, *args: Any) -> None:
        super().__init__(*args)
        self._recorder = recorder
        group = f"{format_ranks(self.members)} {self.board.name}".rstrip()
        self._write = partial(recorder.record, group)
        self._open: dict[int, tuple[Label, int]] = {}  # rounds that are posted and not collected
        self._odd: dict[int, tuple[int, str]] = {}  # of these: flags, and how this rank failed
        self._label: Label | None = None  # of the note posted last
        self._first: Label | None = None  # of the call's first note
        self._meeting: tuple[Label, int] | None = None  # the round of `meet`, and since when
        self._now: Callable[[], int] = monotonic_ns
        board = self.board
        if board.virtual_time:
            recorder.virtual = True
            self._now = lambda: int(board.now() * 1e9)

    @overload
    def meet(self, note: Note, timeout: float | None = None) -> Sequence[Note]: ...
    @overload
    def meet(
        self,
        note: Note,
        timeout: float | None,
        read: Callable[[Sequence[Note]], T],
        write: Callable[[], object] | None = None,
    ) -> T: ...
    def meet(
        self,
        note: Note,
        timeout: float | None = None,
        read: Callable[[Sequence[Note]], Any] | None = None,
        write: Callable[[], object] | None = None,
    ) -> Any:
        """Return the notes of the round that `note` is posted to, or what `read` makes of them.

        The round is recorded as a part of the call: an exception in between breaks the group.
        """
        board, label = self.board, note[0]
        self._label = self._first = label
        self._before = board.posted
        begin = self._now()
        self._meeting = label, begin

        def record(notes: Sequence[Note]) -> Any:
            self._record(label, begin, self._now(), board.collected)
            self._meeting = None
            return notes if read is None else read(notes)

        try:
            return Rounds.meet(self, note, timeout, record, write)
        finally:
            self._meeting = None

    def skip_barrier(self) -> None:
        """Record a barrier in a group of one, which needs no round: its number is 0.

        Call it only in a `barrier` function that the user calls: that is where the search for the
        call site begins.
        """
        label, now = self.note("barrier").label, self._now()
        self._record(label, now, now, 0)

    def post(self, note: Note, timeout: float | None) -> None:
        """Post a note, and remember when."""
        self.make_room(timeout)
        label, number = note[0], self.board.posted + 1
        self._label = label
        if number == self._before + 1:
            self._first = label
        further = number > self._before + 1 and label == self._first
        if note[3] or further:
            failed = self._failure(note) if note[3] else ""
            self._odd[number] = FURTHER if further else 0, failed
        self._open[number] = label, self._now()
        Rounds.post(self, note, timeout)

    def collect(self, timeout: float | None) -> Sequence[Note]:
        """Collect the oldest round, and record it."""
        board = self.board
        number = board.collected + 1
        # This rank has waited for an older round only since now, not since it was posted.
        since = self._now() if self._pending or number < board.posted else None
        pending = self._pending.get(number)
        notes = Rounds.collect(self, timeout)
        done = self._now()
        found = self._open.pop(number, None)
        if found is not None:
            label, posted = found
            if since is None and not self._odd:
                self._record(label, posted, done, number)
            else:
                flags, outcome = self._odd.pop(number, (0, ""))
                if pending is not None and pending.error is not None:
                    outcome = outcome or type(pending.error).__name__
                since = posted if since is None else since
                self._write(label, posted, since, done, number, flags, outcome)
        return notes

    def _wait_is_long(self, waited: float) -> None:
        """Record what this rank waits for: that is known even if the rank is killed meanwhile."""
        if not self.board.virtual_time:
            self._write_wait(self._now() - int(waited * 1e9), 0)

    def wait(
        self,
        attempt: Callable[[float], T | None],
        timeout: float | None,
        begin: float,
        *,
        obstacle: Callable[[], str | None] | None = None,
    ) -> T:
        """Wait as `Rounds` does; record for which ranks, and when this rank was last seen waiting.

        So a trace says who made others wait in a round that never completes.
        """
        board = self.board
        since = self._now() - int((board.now() - begin) * 1e9)
        seen: tuple[str, tuple[Segment, int] | None] = "", None

        def watched(seconds: float) -> T | None:
            nonlocal seen
            found = attempt(seconds)
            now = self._now()
            if found is None and now - since > _LONG_WAIT * 1e9:
                number = board.collected + 1
                missing = [rank for rank in self.members if board.status(rank).rounds < number]
                late = format_ranks(missing)
                if late != seen[0] or not self._recorder.update(seen[1], now):
                    seen = late, self._write_wait(since, now, late)
            return found

        chosen = watched if obstacle is None and not board.virtual_time else attempt
        return Rounds.wait(self, chosen, timeout, begin, obstacle=obstacle)

    def _write_wait(self, since: int, now: int, late: str = "") -> tuple[Segment, int] | None:
        number = self.board.collected + 1
        label = self._open[number][0] if number in self._open else self._label
        if label is None:
            return None
        return self._write(label, since, since, now, number, outcome=late, kind=WAITING)

    def _call_failed(self, error: BaseException, before: int) -> None:
        """Record the rounds that a call leaves behind when it raises, and with what."""
        if isinstance(error, _REFUSED):
            return
        first = before + 1
        for kept in (self._open, self._odd):
            for number in [number for number in kept if number > self.board.posted]:
                del kept[number]  # it was about to be posted
        now = self._now()
        if self._meeting is not None:
            if self.board.posted > before:
                label, posted = self._meeting
                self._write(label, posted, posted, now, first, 0, type(error).__name__)
            return
        left = [number for number in self._open if number >= first]
        for number in left:
            label, posted = self._open.pop(number)
            flags, failed = self._odd.pop(number, (0, ""))
            self._write(label, posted, posted, now, number, flags, failed or type(error).__name__)
        number = self.board.collected
        if not left and number >= first and self._label is not None:
            # The round was complete, and is recorded; the call's outcome was not.
            self._write(self._label, now, now, now, number, 0, type(error).__name__, RESULT)

    def _failure(self, note: Note) -> str:
        failure = errors.load(note.failure).failures.get(self.rank)
        return failure.type if failure is not None else "failed"

    def end(self) -> int:
        """Record what was posted and will never be collected; return the time."""
        for number, (label, posted) in sorted(self._open.items()):
            flags, outcome = self._odd.pop(number, (0, ""))
            self._write(label, posted, posted, 0, number, flags, outcome, POSTED)
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
