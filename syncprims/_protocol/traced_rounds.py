"""Rounds that are written down: what ``SYNCPRIMS_TRACE`` turns on.

Everything about it is here, so that a world without a trace pays nothing.
"""

from __future__ import annotations

import sys
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from syncprims import errors
from syncprims.errors import ConcurrentCall, ForkedProcess, WorldClosed, format_ranks
from syncprims.interface import Label

from .call_site import describe, users_frame
from .rounds import Rounds
from .trace_file import END, ENTRY, FURTHER, POSTED, RESULT, ROUND, WAITING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import CodeType, FrameType

    from syncprims.interface import Note

    from .trace_file import Recorder

_pack_into = ENTRY.pack_into
#: What a call is refused with before it has come to a round.
_REFUSED = (ConcurrentCall, ForkedProcess, WorldClosed)


class TracedRounds(Rounds):
    """One rank's rounds at one board, each written down when it is over."""

    traced = True

    def __init__(self, recorder: Recorder, *args: Any) -> None:
        super().__init__(*args)
        self._recorder = recorder
        self._group = format_ranks(self.members)
        self._places: dict[tuple[int, int], tuple[Label, CodeType]] = {}  # of barriers of one
        self._open: dict[int, tuple[Label, int]] = {}  # rounds that are posted and not collected
        self._odd: dict[int, tuple[int, str]] = {}  # of these: flags, and how this rank failed
        self._label: Label | None = None  # of the note posted last
        self._now: Callable[[], int] = monotonic_ns
        board = self._board
        if board.virtual_time:
            recorder.virtual = True
            self._now = lambda: int(board.now() * 1e9)

    def meet(self, note: Note, timeout: float | None = None) -> Sequence[Note]:
        """Return the notes of the round that `note` is posted to, and write it down."""
        board, label = self._board, note[0]
        self._label = label
        before, begin = board.posted, self._now()
        try:
            notes = Rounds.meet(self, note, timeout)
        except BaseException as error:
            if board.posted > before and not isinstance(error, _REFUSED):
                self._write(label, begin, begin, self._now(), before + 1, 0, _name(error))
            raise
        done = self._now()
        segment = self._recorder.segment
        tag = segment.tags.get(id(label))
        # What the recorder's `record` does, written out: this is the way of every barrier.
        if tag is not None and (at := next(segment.slots)) <= END:
            _pack_into(segment.memory, at, begin, begin, done, board.collected, tag)
        else:
            self._write(label, begin, begin, done, board.collected)
        return notes

    def pass_alone(self) -> None:
        """Write down a barrier of one, which no board needs: its round is 0."""
        frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage] - of who called `barrier`
        known = self._places.get((id(frame.f_code), frame.f_lasti))
        label = known[0] if known is not None else self._learn(frame)
        segment, now = self._recorder.segment, self._now()
        tag = segment.tags.get(id(label))
        if tag is not None and (at := next(segment.slots)) <= END:
            _pack_into(segment.memory, at, now, now, now, 0, tag)
        else:
            self._write(label, now, now, now, 0)

    def _learn(self, frame: FrameType) -> Label:
        user = users_frame(frame)
        label = Label("barrier", site=describe(user))
        if user is frame:  # the code is kept, so that its id stays its own
            self._places[id(frame.f_code), frame.f_lasti] = label, frame.f_code
        return label

    def post(self, note: Note, timeout: float | None) -> None:
        """Post a note, and keep in mind when."""
        board = self._board
        self.make_room(timeout)
        label, number = note[0], board.posted + 1
        self._label = label
        if note[3] or number > self._before + 1:
            failed = self._failure(note) if note[3] else ""
            self._odd[number] = FURTHER if number > self._before + 1 else 0, failed
        self._open[number] = label, self._now()
        Rounds.post(self, note, timeout)

    def collect(self, timeout: float | None) -> Sequence[Note]:
        """Collect the oldest round, and write it down."""
        board = self._board
        number = board.collected + 1
        if self._meetings or number < board.posted:
            return self._collect_older(number, timeout)
        notes = Rounds.collect(self, timeout)
        done = self._now()
        found = self._open.pop(number, None)
        if found is not None:  # else it is that of a `meet`
            label, posted = found
            segment = self._recorder.segment
            tag = segment.tags.get(id(label))
            if tag is not None and not self._odd and (at := next(segment.slots)) <= END:
                _pack_into(segment.memory, at, posted, posted, done, number, tag)
            else:
                self._write(label, posted, posted, done, number, *self._oddity(number))
        return notes

    def _collect_older(self, number: int, timeout: float | None) -> Sequence[Note]:
        """Collect a round that this rank has not waited for since it was posted."""
        since = self._now()
        meeting = self._meetings.get(number)
        notes = Rounds.collect(self, timeout)
        found = self._open.pop(number, None)
        if found is not None:
            flags, outcome = self._oddity(number)
            if meeting is not None and meeting.error is not None:
                outcome = outcome or _name(meeting.error)
            self._write(found[0], found[1], since, self._now(), number, flags, outcome)
        return notes

    def _oddity(self, number: int) -> tuple[int, str]:
        return self._odd.pop(number, (0, ""))

    def waits(self, waited: float) -> None:
        """Write down what this rank waits for: should it be killed meanwhile, that is known."""
        board = self._board
        if not board.virtual_time:
            number, since = board.collected + 1, self._now() - int(waited * 1e9)
            label = self._open[number][0] if number in self._open else self._label
            if label is not None:
                self._write(label, since, since, 0, number, kind=WAITING)

    def ends_with(self, error: BaseException, before: int) -> None:
        """Write down the rounds that a call leaves behind when it raises, and with what."""
        if isinstance(error, _REFUSED):
            return
        first = before + 1
        for kept in (self._open, self._odd):
            for number in [number for number in kept if number > self._board.posted]:
                del kept[number]  # it was about to be posted
        now = self._now()
        left = [number for number in self._open if number >= first]
        for number in left:
            label, posted = self._open.pop(number)
            flags, failed = self._oddity(number)
            self._write(label, posted, posted, now, number, flags, failed or _name(error))
        number = self._board.collected
        if not left and number >= first and self._label is not None:
            # The round was whole, and is written down; what came of it was not.
            self._write(self._label, now, now, now, number, 0, _name(error), RESULT)

    def _failure(self, note: Note) -> str:
        failure = errors.load(note.failure).failures.get(self.rank)
        return failure.type if failure is not None else "failed"

    def end(self) -> int:
        """Write down what was posted and will never be collected; return the time."""
        for number, (label, posted) in sorted(self._open.items()):
            self._write(label, posted, posted, 0, number, *self._oddity(number), POSTED)
        self._open.clear()
        return self._now()

    def _write(
        self,
        label: Label,
        posted: int,
        since: int,
        done: int,
        number: int,
        flags: int = 0,
        outcome: str = "",
        kind: int = ROUND,
    ) -> None:
        record = self._recorder.record
        record(label, self._group, posted, since, done, number, kind, flags, outcome)


def _name(error: BaseException) -> str:
    return type(error).__name__
