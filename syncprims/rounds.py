"""Rounds at a board: every synchronization is one.

A barrier is a round of empty notes, a broadcast one in which a single note carries a payload, a
flag one reduced with OR, and an exception a note that says "failed, and this is how". This module
does what all of them need: labels that must agree, failures that arrive, deadlines, warnings, and a
verdict that stands. Backends below only pin up notes and read them.
"""

from __future__ import annotations

import contextlib
import math
import threading
from typing import TYPE_CHECKING, NoReturn

from . import errors
from .callsite import calling_frame, describe
from .errors import CollectiveMismatch, ConcurrentCall, Failure, PeerFailed, PeerLost, SyncTimeout
from .interface import Label, Note

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta
    from types import CodeType

    from .errors import SyncError
    from .interface import Board, Settings, Status
    from .whereabouts import Whereabouts

_LOOK_AROUND = 1.0  # seconds of waiting after which boards are compared
_LOOK_AGAIN = 0.25
_CURE_MISMATCH = (
    "Every rank must make the same calls in the same order: look for a branch, an early return or "
    "a loop count that differs between ranks."
)


def seconds(timeout: float | timedelta | None) -> float | None:
    """Return a user's `timeout` in seconds.

    :raises ValueError: if it is not a positive number.
    """
    if timeout is None:
        return None
    value = float(timeout) if isinstance(timeout, int | float) else timeout.total_seconds()
    if not value > 0:
        raise ValueError(f"timeout={timeout!r}: it takes seconds above 0, or None for the default")
    return value


def _check_name(name: object) -> None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name={name!r}: a name is a str")
    if name is not None and ("\0" in name or len(name) > 200):
        raise ValueError(f"name={name!r}: a name has at most 200 characters, none of them NUL")


class Meeting:
    """A round that this rank has posted to and will collect later."""

    __slots__ = ("error", "notes", "timeout")

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.notes: Sequence[Note] | None = None
        self.error: SyncError | None = None


class Rounds:
    """One rank's rounds at one board."""

    def __init__(
        self, board: Board, rank: int, settings: Settings, whereabouts: Whereabouts
    ) -> None:
        self.rank = rank
        self.members = board.members
        self.posted = 0
        self.collected = 0
        self.settings = settings
        self._index = board.members.index(rank)
        self._board = board
        self._whereabouts = whereabouts
        self._meetings: dict[int, Meeting] = {}  # round -> who still wants its notes
        self._labels: dict[tuple[object, ...], tuple[Label, CodeType]] = {}
        self._turnstile = threading.Lock()  # never waited for: it only tells two threads apart
        self._barred: Callable[[], SyncError] | None = None  # closed, forked or torn: why
        self._first_look = min(_LOOK_AROUND, settings.warn_after)
        whereabouts.add(self)

    # -- what the primitives use ------------------------------------------------------------

    def label(
        self, kind: str, name: str | None = None, src: int | None = None, op: str | None = None
    ) -> Label:
        """Return the label of a call, with the user's call site."""
        frame = calling_frame()
        code = frame.f_code
        key = (kind, name, src, op, id(code), frame.f_lasti)
        found = self._labels.get(key)
        if found is None:
            _check_name(name)
            if len(self._labels) > 4096:  # names made from a counter: forget, do not grow
                self._labels.clear()
            # The code object is kept, so that its id stays its own.
            found = Label(kind, name, src, op, describe(frame)), code
            self._labels[key] = found
        return found[0]

    def meet(self, note: Note, timeout: float | None = None) -> Sequence[Note]:
        """Return the notes of the round that `note` is posted to, once all members have posted.

        :raises PeerFailed: if another member's note says that it failed; the group stays whole.
        :raises CollectiveMismatch, SyncTimeout, PeerLost, PeerFailed: if the group breaks, or was
            broken before.
        """
        if not self._turnstile.acquire(blocking=False):
            raise self._two_at_once(note.label)
        try:
            if self._barred is not None:
                raise self._barred()
            self._make_room(timeout)
            self._post(note)
            mine = self.posted
            while True:
                notes = self._collect(timeout)
                if self.collected == mine:
                    break
        finally:
            self._turnstile.release()
        for other in notes:
            if other.failure:
                error = self._shared_failure(notes)
                if error is not None:
                    raise error
        return notes

    def defer(self, note: Note, timeout: float | None = None) -> Meeting:
        """Post `note` and return at once; :meth:`settle` collects its round."""
        if not self._turnstile.acquire(blocking=False):
            raise self._two_at_once(note.label)
        try:
            if self._barred is not None:
                raise self._barred()
            self._make_room(timeout)
            self._post(note)
            meeting = self._meetings[self.posted] = Meeting(timeout)
            return meeting
        finally:
            self._turnstile.release()

    def settle(self, meeting: Meeting) -> Sequence[Note]:
        """Return the notes of a deferred round, as :meth:`meet` would have."""
        if not self._turnstile.acquire(blocking=False):
            raise self._two_at_once(None)
        try:
            while meeting.notes is None:
                if self._barred is not None:
                    raise self._barred()
                self._collect(meeting.timeout)
        finally:
            self._turnstile.release()
        if meeting.error is not None:
            raise meeting.error
        return meeting.notes

    def fail(self, label: Label, error: BaseException) -> None:
        """Tell the others, in the round of `label`, that this rank raised `error`.

        Does not wait, and never raises: the caller is about to raise `error` itself.
        """
        if self.torn:
            return  # everybody knows already
        failed = PeerFailed.from_failure(Failure.of(self.rank, error), str(label))
        # If the group is broken, or the disk full, what is about to be raised says enough.
        with contextlib.suppress(errors.SyncError, OSError):
            self.defer(Note(label, failure=errors.dump(failed)))

    @property
    def torn(self) -> bool:
        """True once the group is broken, closed or forked: no round will pass any more."""
        return self._barred is not None

    def bar(self, why: Callable[[], SyncError]) -> None:
        """Let every later call raise ``why()``."""
        self._barred = why

    def _post(self, note: Note) -> None:
        """Post the note; if it does not fit on the disk, post that instead, and raise."""
        try:
            self._board.post(note)
        except OSError as error:
            failed = PeerFailed.from_failure(Failure.of(self.rank, error), str(note.label))
            self._board.post(Note(note.label, failure=errors.dump(failed)))
            self.posted += 1
            raise
        self.posted += 1

    # -- waiting ------------------------------------------------------------------------------

    def _make_room(self, timeout: float | None) -> None:
        while self.posted - self.collected >= self._board.depth:
            self._collect(timeout)

    def _collect(self, timeout: float | None) -> Sequence[Note]:
        """Collect the oldest round, check that all came for the same, and count it."""
        begin = self._board.now()
        limit = self._first_look if timeout is None else min(self._first_look, timeout)
        notes = self._board.collect(limit)
        if notes is None:
            notes = self._wait(timeout, begin)
        self.collected += 1
        mine = notes[self._index]
        for note in notes:
            if note is not mine and note.label is not mine.label and note.label != mine.label:
                self._tear(errors.dump(self._mismatch(notes)))
        if self._meetings:
            meeting = self._meetings.pop(self.collected, None)
            if meeting is not None:
                meeting.notes = notes
                meeting.error = self._shared_failure(notes)
        return notes

    def _wait(self, timeout: float | None, begin: float) -> Sequence[Note]:
        """Wait on: for the notes, a verdict, a death, a deadlock or the deadline."""
        board = self._board
        deadline = math.inf if timeout is None else begin + timeout
        warn_every = self.settings.warn_after
        warn_at = begin + warn_every
        try:
            while True:
                verdict = board.verdict()
                if verdict is not None:
                    self._tear(verdict)
                missing = self._missing()
                now = board.now()
                if missing:
                    error = self._explain_absence(missing, now - begin)
                    if error is None and now >= deadline:
                        error = self._timeout(missing, now - begin)
                    if error is None and now - begin >= _LOOK_AROUND:
                        error = self._whereabouts.deadlock(self)
                    if error is not None:
                        board.abort(errors.dump(error))
                        if board.verdict() is not None:
                            continue
                    elif now >= warn_at:
                        self._warn(missing, now - begin)
                        warn_every *= 2
                        warn_at = now + warn_every
                pause = min(_LOOK_AGAIN, max(0.0, deadline - now), max(0.0, warn_at - now))
                notes = board.collect(pause)
                if notes is not None:
                    return notes
        finally:
            self._whereabouts.moved_on()

    def _missing(self) -> list[int]:
        number = self.collected + 1
        return [r for r in self.members if self._board.status(r).rounds < number]

    def _explain_absence(self, missing: list[int], waited: float) -> SyncError | None:
        """Return why a missing rank will never come, the likeliest root cause first."""
        told = self._whereabouts.told_deadlock(missing)
        if told is not None:
            return told
        statuses = {rank: self._board.status(rank) for rank in missing}
        number = self.collected + 1
        consequence: SyncError | None = None
        for rank, status in statuses.items():
            if status.state == "failed" and status.rounds < number:
                error = self._failed(rank, status, waited)
                if not error.failures[rank].consequence:
                    return error
                consequence = consequence or error
        for state in ("lost", "finished"):
            for rank, status in statuses.items():
                if status.state == state and status.rounds < number:
                    return self._lost(rank, status, waited)
        return consequence

    # -- what to say ----------------------------------------------------------------------------

    def here(self) -> str:
        """Return the call this rank is in, with its call site."""
        label = self._board.status(self.rank).label
        return str(label) if label is not None else "its first call"

    def _seen(self, rank: int) -> str:
        status = self._board.status(rank)
        if status.label is not None:
            return f"rank {rank} was last seen at {status.label}"
        if status.state == "unknown":
            return f"rank {rank} never joined"
        return f"rank {rank} has made no call in this group"

    def _warn(self, missing: list[int], waited: float) -> None:
        import logging  # only who waits for long pays for it

        seen = "; ".join(self._seen(rank) for rank in missing[:8])
        logging.getLogger("syncprims").warning(
            "still waiting for ranks %s at %s for %.0f s; %s", missing, self.here(), waited, seen
        )

    def _timeout(self, missing: list[int], waited: float) -> SyncTimeout:
        call = self.here()
        arrived = [rank for rank in self.members if rank not in missing]
        lines = "\n".join(f"  {self._seen(rank)}" for rank in missing)
        return SyncTimeout(
            f"{call} timed out after {waited:.1f} s: ranks {missing} did not come, "
            f"ranks {arrived} did\n{lines}\n"
            f"See what keeps ranks {missing}. If they are only slow, allow more: timeout=, "
            f"or SYNCPRIMS_TIMEOUT (SYNCPRIMS_JOIN_TIMEOUT for the start).",
            rank=self.rank,
            call=call,
            missing=missing,
            arrived=arrived,
            waited=waited,
        )

    def _failed(self, rank: int, status: Status, waited: float) -> PeerFailed:
        left = errors.load(status.failure).failures if status.failure else {}
        unknown = Failure(rank, "an exception", "its words were lost", "")
        error = PeerFailed.from_failure(left.get(rank, unknown), waiting=self.here())
        error.missing, error.arrived = self._gone_and_arrived()
        error.waited = waited
        return error

    def _lost(self, rank: int, status: Status, waited: float) -> PeerLost:
        call = self.here()
        if status.state == "finished":
            what = f"rank {rank} finished after round {status.rounds} while others wait in {call}"
            cure = f"Rank {rank} made fewer calls than the others. {_CURE_MISMATCH}"
        else:
            how = f": {status.detail}" if status.detail else ""
            what = f"rank {rank} was lost{how}, while others wait in {call}"
            cure = (
                f"Look at the output of rank {rank} and the system log (out of memory?), "
                f"then restart the run."
            )
        missing, arrived = self._gone_and_arrived()
        return PeerLost(
            f"{what}\n  {self._seen(rank)}\n{cure}",
            rank=rank,
            call=call,
            missing=missing,
            arrived=arrived,
            waited=waited,
        )

    def _gone_and_arrived(self) -> tuple[list[int], list[int]]:
        """Return the ranks that will never come, and those that have; others are on their way."""
        missing = self._missing()
        states = {rank: self._board.status(rank).state for rank in missing}
        gone = [rank for rank in missing if states[rank] not in ("alive", "unknown")]
        return gone, [rank for rank in self.members if rank not in missing]

    def _mismatch(self, notes: Sequence[Note]) -> CollectiveMismatch:
        lines = "\n".join(
            f"  rank {rank}: {note.label}" for rank, note in zip(self.members, notes, strict=True)
        )
        return CollectiveMismatch(
            f"ranks met in different calls (round {self.collected}):\n{lines}\n{_CURE_MISMATCH}",
            rank=self.rank,
            call=str(notes[self._index].label),
            arrived=list(self.members),
        )

    def _two_at_once(self, label: Label | None) -> ConcurrentCall:
        return ConcurrentCall(
            f"two threads call primitives of the same group at once: one is in {self.here()}, and "
            f"thread {threading.current_thread().name!r} comes with {label or 'another call'}. "
            f"Rounds have one order: call from one thread, or give the other a group of its own",
            rank=self.rank,
            call=str(label),
        )

    # -- failures -------------------------------------------------------------------------------

    def _shared_failure(self, notes: Sequence[Note]) -> SyncError | None:
        """Return the failure of the lowest other rank that failed in this round, if any."""
        for rank, note in zip(self.members, notes, strict=True):
            if note.failure and rank != self.rank:
                return errors.load(note.failure)
        return None

    def _tear(self, verdict: bytes) -> NoReturn:
        """Break the group: this call raises the verdict, and so does every later one."""
        self._barred = lambda: errors.load(verdict)
        raise errors.load(verdict)
