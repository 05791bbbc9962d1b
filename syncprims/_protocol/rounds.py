"""Rounds at a board: every synchronization is one.

A barrier is a round of empty notes, a broadcast one in which a single note carries a payload, a
flag one reduced with OR, and an exception a note that says "failed, and this is how". This module
does what all of them need: labels that must agree, failures that arrive, deadlines, warnings, and a
verdict that stands. Backends below only pin up notes and read them.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, NoReturn, TypeAlias, TypeVar, overload

from syncprims import errors
from syncprims.errors import ConcurrentCall, Failure, PeerFailed, PeerLost, SyncError
from syncprims.interface import Awaited, Board, Label, Note, Settings, WaitView, ends_round

from .background import Background
from .call_site import NoteCache
from .deadlock import search_after
from .diagnosis import Snapshot, compare_sites, mismatch_error
from .threads import log_stacks

T = TypeVar("T")

#: Seconds of waiting after which a rank asks why; the pauses then grow. In virtual time it need not
#: ask: there, `collect` returns early if the round can never complete.
_FIRST_LOOK = 0.01
_LONGEST_PAUSE = 0.25
_LONGEST_PAUSE_OF_TEST = 0.02  # a test is to fail soon
#: Members up to which these hold. With more, all times grow: each rank looks at each, and if they
#: share processors, the looks of all would take longer than what they wait for.
_FEW_MEMBERS = 16
#: Seconds after which differing labels are a mismatch even if some are still to come. The wait is
#: worth it: then the message usually shows every rank's call.
_EARLY_MISMATCH = 0.3
#: A round that this rank has posted to and collects later: holds its notes once it is collected.
PendingRound: TypeAlias = list[Sequence[Note]]
_TIME_FOR_CAUSE = 1.0  # seconds within which the death that an engine has met is known
_UNREADABLE_AFTER = 1.0  # seconds after the deadline, if all notes are up and one cannot be read
_TIME_TO_END = 1.0  # seconds for a thread whose work was stopped


class Rounds:
    """One rank's rounds at one board."""

    def __init__(
        self,
        board: Board,
        rank: int,
        settings: Settings,
        background: Background,
        library_rounds: int = 0,
        between: tuple[str, ...] = (),
    ) -> None:
        """Use `board`, whose first `library_rounds` rounds are not the user's.

        Frames of files below the folders `between` stand between the user's line and a call.
        """
        self.board = board
        self.rank = rank
        self.members: tuple[int, ...] = board.members
        self.index: int = board.members.index(rank)  #: of this rank among the members
        self.settings = settings
        self._library_rounds = library_rounds
        scale = max(1.0, len(board.members) / _FEW_MEMBERS)
        self._first_look = math.inf if board.virtual_time else _FIRST_LOOK * scale
        longest = _LONGEST_PAUSE_OF_TEST if board.observed else _LONGEST_PAUSE
        self._longest_pause = longest * scale
        self._search_after = search_after(board)
        self._deadlocks = background.deadlocks
        self._background, self._tasks = background, background.tasks
        self._pending: dict[int, PendingRound] = {}  # by the number of the round
        #: :mod:`syncprims._protocol.call_site` says what it asks of its caller.
        self.note: Callable[..., Note] = NoteCache(between).note
        # The calls under way, with the thread and the label of each. A call adds itself first and
        # removes itself last, and only if the group is whole. So a call that an exception
        # has ended is found by the next one, whatever interrupted its own handling of that
        # exception. A dict, since one operation on it is atomic, also for an interrupt.
        self._calls: dict[object, tuple[int, Label | None]] = {}
        #: Every later call raises ``closed()``: the world is closed, forked or broken.
        self.closed: Callable[[], SyncError] | None = None
        #: The error of the call under way that all ranks have, or learn of in the next round.
        self.shared_error: BaseException | None = None
        self.prepared: object = None  #: what the layer above keeps for this board, while it is open
        #: Whether a barrier of one member is a round, too, since something observes every round.
        self.observed: bool = board.observed
        self._takes_no_names = bool(between)  # calls of torch: a name there shows the tensors
        self._deadlocks.add(board)

    def close(self, why: Callable[[], SyncError]) -> None:
        """Make every later call raise ``why()``, and release prepared calls."""
        self.closed = why
        self.prepared = None

    @property
    def local_rank(self) -> int:
        """This process's number on its node."""
        return self._background.backend.topology.local_rank

    # -- what the primitives use ------------------------------------------------------------

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
        """Return the notes of the round that `note` is posted to, once all members have posted.

        With `read`, return ``read(notes)``, which belongs to the call as in :meth:`atomic_call`.
        With `write`, call it first, once this rank has collected all older rounds.

        :raises PeerFailed: if another member's note says that it failed; the group stays whole.
        :raises CollectiveMismatch, SyncTimeout, PeerLost, PeerFailed: if the group breaks, or was
            broken before.
        """
        # What `atomic_call`, `post` and `collect` do, written out: every barrier takes this path,
        # and the calls between them would make it slower by a third.
        board, token = self.board, object()
        before = collected = -1
        try:
            self._calls[token] = get_ident(), note[0]
            if len(self._calls) > 1 or self.closed is not None:
                self._refuse(token)
            collected, before = board.collected, board.posted
            self.shared_error = None
            if before != collected:
                self.make_room(timeout)
            if write is not None:
                while board.collected < before:
                    self.collect(timeout)
                write()
            try:
                board.post(note)
            except OSError as error:
                self._post_failure(note, error, before)
                raise
            while board.collected < before:  # older rounds first; there is nearly never one
                self.collect(timeout)
            limit = self._first_look
            if timeout is not None and timeout < limit:
                limit = min(timeout, self.settings.warn_after)
            notes = self._collect(limit) if self._tasks else board.collect(limit)
            found = notes
            if notes is not None:
                for other in notes:
                    if other is not note:
                        found = None
                        break
            if found is None:  # it is not complete, or not all notes are this very one
                found = self._complete(notes, limit, timeout)
                for other in found:
                    if other.failure and other is not note:
                        self.raise_shared(found)
            if read is not None:
                found = read(found)
            # The last act. Python runs no signal handler between here and the caller: it does so
            # after calls into C, at jumps backwards, and at the start of functions.
            del self._calls[token]
            return found
        except BaseException as error:
            self._end_call(token, error, before, collected)
            raise

    def atomic_call(self, label: Label | None, steps: Callable[[], T]) -> T:
        """Return ``steps()``, with no other call of this rank between its rounds.

        An exception on the way breaks the group, unless all ranks have it: the others may have
        gone on, and all later rounds would be paired wrongly.
        """
        board, token = self.board, object()
        before = collected = -1
        try:
            self._calls[token] = get_ident(), label
            if len(self._calls) > 1 or self.closed is not None:
                self._refuse(token)
            collected, before = board.collected, board.posted
            self.shared_error = None
            result = steps()
            del self._calls[token]  # the last act, as in `meet`
            return result
        except BaseException as error:
            self._end_call(token, error, before, collected)
            raise

    def post_deferred(self, note: Note, timeout: float | None) -> PendingRound:
        """Post `note` to a round that a later call collects; within :meth:`atomic_call`."""
        self.post(note, timeout)
        pending: PendingRound = []
        self._pending[self.board.posted] = pending
        return pending

    def collect_deferred(self, pending: PendingRound, timeout: float | None) -> Sequence[Note]:
        """Return the notes of a deferred round as :meth:`meet`; within :meth:`atomic_call`."""
        while not pending:
            self.collect(timeout)
        self.raise_shared(pending[0])
        return pending[0]

    def fail(self, label: Label, error: BaseException) -> None:
        """Report to the others, in the round of `label`, that this rank raised `error`.

        Raises no exception of its own: the caller is about to raise `error`. Waits only if as many
        rounds are outstanding as the board can hold.
        """
        if self.closed is not None:
            return  # the others have a verdict already
        # If the group is broken, or the disk full, the coming error says enough.
        with contextlib.suppress(Exception):
            note = self.failure_note(label, error)
            self.atomic_call(label, lambda: self.post(note, None))

    def failure_note(self, label: Label, error: BaseException) -> Note:
        """Return the note which says that this rank raised `error`."""
        failed = PeerFailed.from_failure(Failure.of(self.rank, error), str(label))
        return Note(label, failure=errors.dump(failed))

    def _refuse(self, token: object) -> NoReturn:
        """Raise why this call cannot be made: another is under way, or the group is closed.

        Ask nothing of the board: a signal handler may have interrupted it where it holds a lock.
        """
        others = self._calls.copy()
        thread, label = others.pop(token)
        if self.closed is None:
            self._find_left_call(others)
        if self.closed is not None:
            raise self.closed()
        calls = list(others.values())
        first = calls[0][1] if calls else None
        if not calls or any(other != thread for other, _ in calls):
            who = f"thread {threading.current_thread().name!r} comes with"
            what = "two threads call"
            cure = "make these calls from one thread; another may call a group of other members"
        else:
            who, what = "a signal handler of the same thread comes with", "a signal handler calls"
            cure = "let the handler set a flag, as Trigger.set_on_signal does"
        raise ConcurrentCall(
            f"{what} primitives of one group at once: one is in {first or 'a call'}, and {who} "
            f"{label or 'another call'}. Rounds have one order: {cure}",
            rank=self.rank,
            call=str(label),
        )

    def _find_left_call(self, calls: dict[object, tuple[int, Label | None]]) -> None:
        """Break the group if an exception has ended a call, and nothing could be done about it."""
        left = [token for token, (thread, _) in calls.items() if not _is_running(token, thread)]
        # One that has ended well meanwhile has removed itself.
        if any(token in self._calls for token in left):
            self._tear(None)

    def post(self, note: Note, timeout: float | None) -> None:
        """Post a note, after making room for it.

        :raises OSError: if the disk has no room; the others get a `PeerFailed`.
        """
        board = self.board
        self.make_room(timeout)
        before = board.posted
        try:
            board.post(note)
        except OSError as error:
            self._post_failure(note, error, before)
            raise

    def _post_failure(self, note: Note, error: OSError, before: int) -> None:
        """Post why this rank cannot post `note`: the disk has no room for it."""
        if self.board.posted != before:
            return  # the note is up: a signal handler has raised this
        # Short, so that it fits into the room that is set aside for every note.
        failure = Failure.of(self.rank, error)
        failure = failure._replace(message=failure.message[:150], traceback="")
        failed = PeerFailed.from_failure(failure, note.label.call)
        self.board.post(Note(note.label, failure=errors.dump(failed)))
        self.shared_error = error

    # -- waiting ------------------------------------------------------------------------------

    def make_room(self, timeout: float | None) -> None:
        """Collect until another note may be posted."""
        while self.board.posted - self.board.collected >= self.board.depth:
            self.collect(timeout)

    def collect(self, timeout: float | None) -> Sequence[Note]:
        """Collect the oldest round, and check that all members made the same call."""
        look = self._first_look
        limit = look if timeout is None else min(look, timeout, self.settings.warn_after)
        return self._complete(self._collect(limit), limit, timeout)

    def _collect(self, limit: float) -> Sequence[Note] | None:
        """Return as :meth:`Board.collect`, and go on meanwhile with what is under way."""
        board = self.board
        if not self._tasks:
            return board.collect(limit)
        notes, until = board.collect(0.0), board.now() + limit
        if notes is None and self._background.wait(
            lambda: _is_settled(board), until, Awaited(boards=[board])
        ):
            notes = board.collect(0.0)
        return notes

    def _complete(
        self, notes: Sequence[Note] | None, limit: float, timeout: float | None
    ) -> Sequence[Note]:
        """Return the notes of a round of one call; if they are None, wait for them first.

        :param limit: seconds for which it has waited already if `notes` is None.
        """
        board = self.board
        if notes is None:
            begin = board.waiting_since if board.virtual_time else board.now() - limit
            notes = self.wait(self._collect, timeout, begin)
        number = board.collected
        first = notes[0]
        for note in notes:
            if note is not first and note.label is not first.label and note.label != first.label:
                calls = {r: str(n.label) for r, n in zip(self.members, notes, strict=True)}
                error = mismatch_error(self.rank, number - self._library_rounds, calls)
                self._break_group(errors.dump(error))
        strict = self.settings.strict and number > self._library_rounds
        if strict and (self._takes_no_names or first.label.name is None):
            labels = {r: n.label for r, n in zip(self.members, notes, strict=True)}
            refused = compare_sites(self.rank, number - self._library_rounds, labels)
            if refused is not None:
                self._break_group(errors.dump(refused))
        if self._deadlocks.holds_verdict:
            self._deadlocks.withdraw_verdict()
        if number in self._pending:
            self._pending.pop(number).append(notes)
        return notes

    def wait(
        self,
        attempt: Callable[[float], T | None],
        timeout: float | None,
        begin: float,
        *,
        obstacle: Callable[[], str | None] | None = None,
    ) -> T:
        """Return what ``attempt(seconds)`` gives, once that is not None.

        Between the attempts this rank looks for a verdict, a lost member, a deadlock and the
        deadline. `begin` is when the wait began. With `obstacle`, of an engine, it does not wait
        for a note.
        """
        at_board = obstacle is None
        board = self.board
        number = board.collected + at_board  # elsewhere, all notes of the round are collected
        deadline = math.inf if timeout is None else begin + timeout
        warn_every = self.settings.warn_after
        pause = self._first_look
        # Where time is virtual, a wait without a deadline lasts forever.
        warn_at = begin + (warn_every if deadline < math.inf or pause < math.inf else math.inf)
        dump_at = math.inf if board.virtual_time else begin + self.settings.dump_after
        board.publish_wait(WaitView(number, begin, not at_board, deadline))
        try:
            while True:
                verdict = board.verdict()
                if verdict is not None:
                    self._break_group(verdict)
                now = board.now()
                if now >= deadline:
                    board.inform()
                seen, error = self._look(number, now - begin, now >= deadline, obstacle)
                if error is not None:
                    board.abort(errors.dump(error))
                    if board.verdict() is not None:  # this one, or another rank's: all raise it
                        continue
                    if not seen.missing and now >= deadline + _UNREADABLE_AFTER:
                        # All notes have long been up, and one cannot be read.
                        self._break_group(errors.dump(error))
                elif now >= warn_at:
                    self._warn(seen)
                    warn_every *= 2
                    warn_at = now + warn_every
                if now >= dump_at:
                    log_stacks(f"after {now - begin:.0f} s in {seen.call}")
                    dump_at = math.inf
                ends = deadline if now < deadline else math.inf
                until = min(now + pause, warn_at, dump_at, ends)
                came = attempt(max(until - now, 0.001))
                if came is not None:
                    return came
                if board.now() < until and not board.virtual_time:
                    time.sleep(0.001)  # it gave up early: what it saw is seen here soon
                pause = max(self._first_look, min(2 * pause, self._longest_pause))
        finally:
            board.publish_wait(WaitView(0))
            self._deadlocks.end_wait()

    def _look(
        self, number: int, waited: float, late: bool, obstacle: Callable[[], str | None] | None
    ) -> tuple[Snapshot, SyncError | None]:
        """Return the state of a round, and why it will not complete, or None while it still may."""
        board, at_board = self.board, obstacle is None
        first_call = self.settings.first_call if number <= self._library_rounds else None
        statuses = {member: board.status(member) for member in self.members}
        seen = Snapshot(statuses, self.rank, number, waited, self._library_rounds, first_call)
        searches = at_board and waited >= self._search_after  # else no rank knows of this wait
        error = self._deadlocks.verdict_for(board, seen.missing) if searches else None
        error = error or seen.absence()
        if error is None and waited >= _EARLY_MISMATCH:
            error = seen.early_mismatch()
        if error is None and late:
            error = seen.timeout()
        if error is None and searches and seen.missing:
            error = self._deadlocks.search(board, seen.call, seen.missing)
        if error is None and obstacle is not None and (why := obstacle()):
            cure = "Look at the network between them, then restart the run."
            error = PeerLost(f"{why}, in {seen.call}\n{cure}", call=str(seen.call))
        return seen, error

    def _warn(self, seen: Snapshot) -> None:
        """Log why this rank has waited for so long."""
        import logging  # slow to import, and only a long wait needs it

        hint = f"; `syncprims who {os.getpid()}` shows what each rank does"
        hint = hint if self.board.seen_outside else ""
        logging.getLogger("syncprims").warning(seen.warning + hint)

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
            self.raise_shared_error(failed)

    def raise_shared_error(self, error: SyncError) -> NoReturn:
        """Raise `error`, which all members raise in this round, or learn of in the next one."""
        self.shared_error = error
        raise error

    def _break_group(self, verdict: bytes) -> NoReturn:
        """Break the group: this call raises the verdict, and so does every later one."""
        self.closed = lambda: errors.load(verdict)
        raise errors.load(verdict)

    def _end_call(self, token: object, error: BaseException, before: int, collected: int) -> None:
        """End a call that raises `error`; break the group, unless all ranks go on alike.

        They do if all have this error, or if nothing has happened: the call was refused, or no
        round was posted or collected since there were so many. Otherwise the others may have gone
        on: if this rank made the call again, all its later rounds would be paired off by one.
        """
        board = self.board
        unchanged = board.posted == before and board.collected == collected
        if before < 0 or unchanged or error is self.shared_error:
            self._calls.pop(token, None)
        elif self.closed is None:
            with contextlib.suppress(Exception):  # no memory or no stack: the next call does it
                self._tear(error)
        elif isinstance(error, (ValueError, OSError)) and not isinstance(error, SyncError):
            # A signal handler has shut the world down, or this is a child that it has forked: what
            # was waited on is closed. What the handler itself raised is not changed.
            raise self.closed() from error

    def _tear(self, error: BaseException | None) -> None:
        """Break the group, since `error` has ended a call of this rank alone."""
        if error is None:
            lost = "it was interrupted, and the text of the exception was lost"
            failure = Failure(self.rank, "an exception", lost, "")
        else:
            failure = Failure.of(self.rank, error)
        call = str(self.board.status(self.rank).label or "its first call")
        verdict = errors.dump(PeerFailed.from_failure(failure, call))
        standing: list[bytes] = []  # the verdict of the board, once it is known

        def closed() -> SyncError:
            if not standing:  # the first attempt was interrupted
                standing.append(self.abort(verdict))
            return errors.load(standing[0])

        self.closed = closed
        closed()

    def abort(self, verdict: bytes) -> bytes:
        """Abort the board at this rank's oldest incomplete round; return the verdict that stands.

        If this rank cannot read a complete round (no memory, no descriptors), the others pass that
        one, and no round that this rank has not posted to. What cannot be reported here, they learn
        when this process ends.
        """
        board = self.board
        for _ in range(board.depth + 1):
            with contextlib.suppress(Exception):
                while board.collected < board.posted and board.collect(0.0) is not None:
                    pass  # complete, so that it can no longer be aborted
            with contextlib.suppress(Exception):
                board.abort(verdict)
                found = board.verdict()
                if found is not None:
                    return found  # else the round has completed at this very moment
        with contextlib.suppress(Exception):
            board.collected = board.posted
            board.abort(verdict)
            return board.verdict() or verdict
        return verdict


_CALLS = Rounds.meet.__code__, Rounds.atomic_call.__code__


def _is_running(token: object, thread: int) -> bool:
    """Return whether the call `token` is on the stack of its thread."""
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code in _CALLS and frame.f_locals.get("token") is token:
            return True
        frame = frame.f_back
    return False


def _is_settled(board: Board) -> bool:
    """Return whether the oldest uncollected round is complete, or never will be."""
    if board.verdict() is not None:
        return True
    seen = [board.status(member) for member in board.members]
    missing = [status.rounds <= board.collected for status in seen]
    ended = any(ends_round(s.state, absent) for s, absent in zip(seen, missing, strict=True))
    return ended or not any(missing)


class RoundSequence:
    """One call's rounds, one after another. All have the label of `note`, the call's plain note."""

    def __init__(self, rounds: Rounds, note: Note, timeout: float | None) -> None:
        self.rounds = rounds
        self.note = note
        self.index = rounds.index
        self._timeout = timeout
        self._before = rounds.board.posted

    @classmethod
    def run(
        cls, rounds: Rounds, note: Note, timeout: float | None, call: Callable[[RoundSequence], T]
    ) -> T:
        """Return ``call(sequence)``, run as by :meth:`Rounds.atomic_call`."""
        return rounds.atomic_call(note.label, lambda: call(cls(rounds, note, timeout)))

    def post(self, note: Note | None = None) -> int:
        """Post a note, by default the plain one, and return the number of its round.

        :raises OSError: if the disk has no room; the others get a `PeerFailed`.
        """
        self.rounds.post(note or self.note, self._timeout)
        return self.rounds.board.posted

    def fail(self, error: BaseException) -> None:
        """Post that this rank failed; the caller is about to raise `error`."""
        try:
            self.post(self.rounds.failure_note(self.note.label, error))
        except OSError as full:
            if full is not self.rounds.shared_error:
                raise  # else a shorter note has been posted
        self.rounds.shared_error = error

    def attempt(self, step: Callable[[], T]) -> T:
        """Return ``step()``, after which all members meet again; they raise there what it raises.

        The step itself has no rounds.
        """
        try:
            return step()
        except BaseException as error:
            self.fail(error)
            raise

    def agree(self, step: Callable[[], T]) -> T:
        """Return ``step()`` if it succeeds on all members; otherwise all raise."""
        result = self.attempt(step)
        self.meet()
        return result

    def meet(self, note: Note | None = None) -> Sequence[Note]:
        """Return the notes of all members in the next round, to which this rank posts `note`.

        :raises PeerFailed: if another member failed in this call.
        """
        return self.collect_until(self.post(note))

    def collect_until(self, number: int) -> Sequence[Note]:
        """Collect the rounds up to `number`, and return the notes of the last.

        :raises PeerFailed: if another member failed in one that is of this call.
        """
        rounds, board = self.rounds, self.rounds.board
        notes: Sequence[Note] = ()
        while board.collected < number:
            notes = rounds.collect(self._timeout)
            if board.collected > self._before:
                rounds.raise_shared(notes)
        return notes

    def run_watched(
        self,
        work: Callable[[], None],
        stop: Callable[[], object] = lambda: None,
        obstacle: Callable[[], str | None] = lambda: "",
    ) -> None:
        """Run `work` on a thread, while this one looks for lost members.

        `work` may wait for the other members without noticing that one is lost. If it is not needed
        any more, ``stop()`` is called to end it. `obstacle` is as :meth:`Engine.obstacle`.

        :raises BaseException: what `work` raises; but a `PeerLost`, if a lost member or a cut link
            is why.
        """
        done = threading.Event()
        raised: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:
                raised.append(error)
            done.set()

        def until_cause_is_known(seconds: float) -> bool | None:
            time.sleep(min(seconds, _FIRST_LOOK))
            late = time.monotonic() >= failed_at + _TIME_FOR_CAUSE
            return (late and obstacle() is not None) or None

        def watch(attempt: Callable[[float], bool | None], timeout: float | None) -> None:
            begin = self.rounds.board.now()
            self.rounds.wait(attempt, timeout, begin, obstacle=obstacle)

        thread = threading.Thread(target=run, name="syncprims-engine", daemon=True)
        thread.start()
        try:
            if not done.wait(_FIRST_LOOK):
                watch(lambda seconds: done.wait(seconds) or None, self._timeout)
            if raised:
                failed_at = time.monotonic()
                watch(until_cause_is_known, None)
                raise raised[0]
        except BaseException:
            stop()
            raise
        finally:
            thread.join(_TIME_TO_END)
