"""The rounds of a call that takes several."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncprims.interface import Note

    from .rounds import Rounds

T = TypeVar("T")

_FIRST_LOOK = 0.01  # seconds of work before this rank looks for lost members
_TIME_FOR_CAUSE = 1.0  # seconds within which the death that an engine has met is known
_TIME_TO_END = 1.0  # seconds for a thread whose work was stopped


class RoundSequence:
    """One call's rounds, one after another. All have the label of `note`, the call's plain note."""

    def __init__(self, rounds: Rounds, note: Note, timeout: float | None) -> None:
        self.rounds = rounds
        self.note = note
        self.index = rounds.members.index(rounds.rank)  #: of this rank among the members
        self._timeout = timeout
        self._before = rounds.board.posted

    @classmethod
    def run(
        cls,
        rounds: Rounds,
        note: Note,
        timeout: float | None,
        call: Callable[[RoundSequence], T],
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
            if full is not self.rounds.reported:
                raise  # else a shorter note has been posted
        self.rounds.reported = error

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

    def run_watched(self, work: Callable[[], None], stop: Callable[[], None]) -> None:
        """Run `work` on a thread, while this one looks for lost members.

        `work` may wait for the other members without noticing that one is lost. If it is not needed
        any more, ``stop()`` is called to end it.

        :raises BaseException: what `work` raises; but a lost member's `PeerLost`, if that is why.
        """
        done = threading.Event()
        raised: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:
                raised.append(error)
            done.set()

        def until_done(seconds: float) -> bool | None:
            return done.wait(seconds) or None

        def until_cause_is_known(seconds: float) -> bool | None:
            time.sleep(min(seconds, _FIRST_LOOK))
            return time.monotonic() >= failed_at + _TIME_FOR_CAUSE or None

        thread = threading.Thread(target=run, name="syncprims-engine", daemon=True)
        thread.start()
        try:
            if not done.wait(_FIRST_LOOK):
                self._watch(until_done, self._timeout)
            if raised:
                failed_at = time.monotonic()
                self._watch(until_cause_is_known, None)
                raise raised[0]
        except BaseException:
            stop()
            raise
        finally:
            thread.join(_TIME_TO_END)

    def _watch(self, attempt: Callable[[float], bool | None], timeout: float | None) -> None:
        self.rounds.wait(attempt, timeout, self.rounds.board.now(), at_board=False)
