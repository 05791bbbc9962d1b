"""Rounds at a board: every synchronization is one.

A barrier is a round of empty notes, a broadcast one in which a single note carries a payload, a
flag one reduced with OR, and an exception a note that says "failed, and this is how". This module
does what all of them need: labels that must agree, failures that arrive, deadlines, warnings, and a
verdict that stands. Backends below only pin up notes and read them.
"""

from __future__ import annotations

import contextlib
import math
from threading import get_ident
from typing import TYPE_CHECKING, NoReturn, TypeVar

from syncprims import errors
from syncprims.errors import Failure, PeerFailed
from syncprims.interface import Note

from .diagnosis import Diagnosis
from .note_cache import Notes
from .waiting import FIRST_LOOK, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncprims.errors import SyncError
    from syncprims.interface import Board, DeviceEngine, Engine, Label, Settings, Window

    from .deadlock import Whereabouts

T = TypeVar("T")


class Meeting:
    """A round that this rank has posted to and will collect later."""

    __slots__ = ("error", "notes", "timeout")

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.notes: Sequence[Note] | None = None
        self.error: SyncError | None = None


class Rounds:
    """One rank's rounds at one board."""

    traced = False  #: what it does is written down

    def __init__(
        self,
        board: Board,
        rank: int,
        settings: Settings,
        whereabouts: Whereabouts,
        local_rank: int,
        own: int = 0,
    ) -> None:
        """Meet at `board`; the first `own` rounds there are not the user's."""
        self.rank = rank
        self.local_rank = local_rank
        self.members = board.members
        self.posts_alone = board.posts_alone
        self.settings = settings
        self._board = board
        self._first_look = math.inf if board.virtual_time else FIRST_LOOK
        self._diagnosis = Diagnosis(board, rank, own)
        self._whereabouts = whereabouts
        self._meetings: dict[int, Meeting] = {}  # round -> who still wants its notes
        self.note = Notes().of  #: the note of a call: see there
        self.inside_main_first = 0  # how many such blocks this rank is in, as the first
        self.thread = 0  # that called last
        # Who is in a call. A dict, since one operation on it is atomic, also for an interrupt: a
        # lock taken just before a `try` can stay taken for ever.
        self._inside: dict[object, int] = {}
        self._barred: Callable[[], SyncError] | None = None  # closed, forked or torn: why
        self._before = 0  # rounds posted to before the call under way
        self.told: BaseException | None = None  #: of the call under way: what the others know of
        whereabouts.add(self)
        self._waiting = Waiting(self, board, self._diagnosis, whereabouts)

    # -- what the primitives use ------------------------------------------------------------

    def meet(self, note: Note, timeout: float | None = None) -> Sequence[Note]:
        """Return the notes of the round that `note` is posted to, once all members have posted.

        :raises PeerFailed: if another member's note says that it failed; the group stays whole.
        :raises CollectiveMismatch, SyncTimeout, PeerLost, PeerFailed: if the group breaks, or was
            broken before.
        """
        # What `as_one` does, written out: this is the way of every barrier.
        board, turn = self._board, object()
        before, told = board.posted, None
        try:
            thread = self._inside[turn] = get_ident()
            if len(self._inside) > 1 or self._barred is not None:
                self._refuse(note.label)
            self.thread = thread
            if before != board.collected:
                self.make_room(timeout)
            try:
                board.post(note)
            except OSError as error:
                told = error
                self._post_instead(note, error)
                raise
            notes = None
            if board.collected == before:  # nothing older to collect first, as nearly always
                limit = self._first_look
                if timeout is not None and timeout < limit:
                    limit = min(timeout, self.settings.warn_after)
                notes = board.collect(limit)
                for other in notes or (None,):
                    if other is not note:  # else all are the same: nothing to look for
                        notes = self._examine(notes, limit, timeout)
                        break
            while notes is None or board.collected <= before:
                notes = self.collect(timeout)
        except errors.SyncError:
            raise
        except BaseException as error:
            if error is not told and board.posted > before:
                self._break_off(error)
            raise
        finally:
            self._inside.pop(turn, None)
        for other in notes:
            if other is not note and other.failure:
                self.raise_shared(notes)
        return notes

    def pass_alone(self) -> None:
        """Hear of a barrier of one, which needs no round. Called by what the user calls."""

    def as_one(self, label: Label | None, steps: Callable[[], T]) -> T:
        """Return ``steps()``, with no other call of this rank between them.

        An exception on the way breaks the group, unless all ranks have it: the others may have
        gone on, and all later rounds would be paired off wrongly.
        """
        board, turn = self._board, object()
        before = board.posted
        try:
            thread = self._inside[turn] = get_ident()
            if len(self._inside) > 1 or self._barred is not None:
                self._refuse(label)
            self.thread, self.told, self._before = thread, None, before
            return steps()
        except BaseException as error:
            self.ends_with(error, before)
            whole = isinstance(error, errors.SyncError) or error is self.told
            if not whole and board.posted > before:
                self._break_off(error)
            raise
        finally:
            self._inside.pop(turn, None)

    def defer(self, note: Note, timeout: float | None, before: Meeting | None = None) -> Meeting:
        """Post `note` and return what :meth:`settle` collects; settle `before` on the way."""

        def post() -> Meeting:
            self.post(note, timeout)
            meeting = self._meetings[self._board.posted] = Meeting(timeout)
            if before is not None:
                self._collect_for(before)
            return meeting

        return self.as_one(note.label, post)

    def settle(self, meeting: Meeting) -> Sequence[Note]:
        """Return the notes of a deferred round, as :meth:`meet` would have."""
        if meeting.notes is None:
            self.as_one(None, lambda: self._collect_for(meeting))
        if meeting.error is not None:
            raise meeting.error
        assert meeting.notes is not None
        return meeting.notes

    def _collect_for(self, meeting: Meeting) -> None:
        while meeting.notes is None:
            self.collect(meeting.timeout)

    def fail(self, label: Label, error: BaseException) -> None:
        """Tell the others, in the round of `label`, that this rank raised `error`.

        Never raises: the caller is about to raise `error` itself. Waits only if as many rounds
        are outstanding as the board can hold.
        """
        if self.torn:
            return  # everybody knows already
        # If the group is broken, or the disk full, what is about to be raised says enough.
        with contextlib.suppress(errors.SyncError, OSError):
            self.defer(self.failure_note(label, error), None)

    def failure_note(self, label: Label, error: BaseException) -> Note:
        """Return the note that says so."""
        failed = PeerFailed.from_failure(Failure.of(self.rank, error), str(label))
        return Note(label, failure=errors.dump(failed))

    @property
    def torn(self) -> bool:
        """True once the group is broken, closed or forked: no round will pass any more."""
        return self._barred is not None

    def bar(self, why: Callable[[], SyncError]) -> None:
        """Let every later call raise ``why()``."""
        self._barred = why

    def _refuse(self, label: Label | None) -> NoReturn:
        """Let one call in at a time, and none that is barred."""
        if len(self._inside) > 1:
            raise self._diagnosis.two_at_once(label, self._inside.values())
        assert self._barred is not None
        raise self._barred()

    def post(self, note: Note, timeout: float | None) -> None:
        """Post a note, having made room for it.

        :raises OSError: if there is none on the disk; the others are told.
        """
        board = self._board
        if board.posted - board.collected >= board.depth:
            self.make_room(timeout)
        try:
            board.post(note)
        except OSError as error:
            self._post_instead(note, error)
            raise

    def _post_instead(self, note: Note, error: OSError) -> None:
        """Post, where a disk has no room for `note`, why this rank cannot."""
        self.told = error
        # Short, so that it needs no room but what was set aside for every note.
        failure = Failure.of(self.rank, error)
        failure = failure._replace(message=failure.message[:150], traceback="")
        failed = PeerFailed.from_failure(failure, note.label.call)
        self._board.post(Note(note.label, failure=errors.dump(failed)))

    def carriers(self) -> tuple[Window | Engine | None, DeviceEngine | None]:
        """Return what arrays travel through, and tensors from device to device, if anything."""
        return self._board.window() or self._board.engine, self._board.devices

    @property
    def note_limit(self) -> int | None:
        """Bytes of payload from which on it travels as an array."""
        return self._board.note_limit

    def stand_by(self, job: Callable[[float], T | None], timeout: float | None) -> T:
        """Return what ``job(seconds)`` gives, unless a member is lost meanwhile."""
        return self._waiting.on(job, timeout, self._board.now(), at_board=False)

    @property
    def posted(self) -> int:
        """How many rounds this rank has posted to."""
        return self._board.posted

    @property
    def collected(self) -> int:
        """How many it has collected."""
        return self._board.collected

    # -- waiting ------------------------------------------------------------------------------

    def make_room(self, timeout: float | None) -> None:
        """Collect until another note may be posted."""
        while self._board.posted - self._board.collected >= self._board.depth:
            self.collect(timeout)

    def collect(self, timeout: float | None) -> Sequence[Note]:
        """Collect the oldest round, check that all came for the same, and count it."""
        limit = self._first_look
        if timeout is not None and timeout < limit:
            limit = min(timeout, self.settings.warn_after)
        return self._examine(self._board.collect(limit), limit, timeout)

    def _examine(
        self, notes: Sequence[Note] | None, waited: float, timeout: float | None
    ) -> Sequence[Note]:
        """Wait on if these notes are None; look whether they are of one call; count the round."""
        board = self._board
        if notes is None:
            begin = board.waiting_since if board.virtual_time else board.now() - waited
            self.waits(waited)
            notes = self._waiting.on(board.collect, timeout, begin)
        number = board.collected
        first = notes[0]
        for note in notes:
            if note is not first and note.label is not first.label and note.label != first.label:
                self.tear(errors.dump(self._diagnosis.mismatch(number, notes)))
        if self._whereabouts.told:
            self._whereabouts.take_back()
        if self._meetings:
            meeting = self._meetings.pop(number, None)
            if meeting is not None:
                meeting.notes = notes
                meeting.error = self._shared_failure(notes)
        return notes

    def ends_with(self, error: BaseException, before: int) -> None:
        """Hear that a call raises, which `before` rounds had been posted to when it began."""

    def waits(self, waited: float) -> None:
        """Hear that a round has not come for so long that there is time for other things."""

    def _break_off(self, error: BaseException) -> None:
        """Break the group after an exception in the middle of a wait.

        This rank's note is up, and the others may have gone on: if it made the call again, all
        later rounds would be paired off by one. So nobody passes another.
        """
        if self._barred is not None:
            # A signal handler has shut the world down, or this is a child that it has forked: what
            # was waited on is closed. What the handler itself raised goes its own way.
            if isinstance(error, (ValueError, OSError)):
                raise self._barred() from error
            return
        failed = PeerFailed.from_failure(Failure.of(self.rank, error), self.here())
        verdict = errors.dump(failed)
        self._barred = lambda: errors.load(verdict)
        board = self._board
        # What cannot be done here, the end of this process tells the others.
        for _ in range(board.depth + 1):
            with contextlib.suppress(Exception):
                while board.collected < board.posted and board.collect(0.0) is not None:
                    pass  # complete, so that it can no longer be aborted
            with contextlib.suppress(Exception):
                board.abort(verdict)
                if board.verdict() is not None:
                    break  # else the round has completed at this very moment: abort the next

    def here(self) -> str:
        """Return the call this rank is in, with its call site."""
        return self._diagnosis.here()

    # -- failures -------------------------------------------------------------------------------

    def _shared_failure(self, notes: Sequence[Note]) -> SyncError | None:
        """Return the failure of the lowest other rank that failed in this round, if any."""
        for rank, note in zip(self.members, notes, strict=True):
            if note.failure and rank != self.rank:
                return errors.load(note.failure)
        return None

    def raise_shared(self, notes: Sequence[Note]) -> None:
        """Raise what another member failed with in this round, if one did."""
        failed = self._shared_failure(notes)
        if failed is not None:
            raise failed

    def tear(self, verdict: bytes) -> NoReturn:
        """Break the group: this call raises the verdict, and so does every later one."""
        self._barred = lambda: errors.load(verdict)
        raise errors.load(verdict)
