"""The rounds of a call that takes several."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncprims.interface import Label, Note

    from .rounds import Rounds


_SOON = 0.01  # seconds of work before this rank looks around
_CAUSE = 1.0  # seconds for the death that an engine has met to be known
_FAREWELL = 1.0  # seconds for a thread whose work was stopped to end


class Steps:
    """One call's rounds, one after another; within :meth:`Rounds.as_one`."""

    def __init__(self, rounds: Rounds, timeout: float | None) -> None:
        self._rounds = rounds
        self._timeout = timeout
        self._before = rounds.posted
        self.members = rounds.members
        self.index = rounds.members.index(rounds.rank)  #: of this rank among the members

    @property
    def posted(self) -> int:
        """How many rounds this rank has posted to."""
        return self._rounds.posted

    def post(self, note: Note) -> None:
        """Post a note, having made room for it.

        :raises OSError: if there is none on the disk; the others are told.
        """
        self._rounds.post(note, self._timeout)

    def fail(self, label: Label, error: BaseException) -> None:
        """Post that this rank failed, and is about to raise `error`."""
        try:
            self.post(self._rounds.failure_note(label, error))
        except OSError as full:
            if full is not self._rounds.told:
                raise  # else there was room to say it in few words
        self._rounds.told = error

    def agree(self, step: Note) -> None:
        """Return once all members have come to this step, and none has failed in this call."""
        self.post(step)
        self.reach(self.posted)

    def stand_by(self, work: Callable[[], None], stop: Callable[[], None]) -> None:
        """Have `work` done on a thread, and see to it that no member is lost meanwhile.

        What waits for others in there hears of nothing: this rank must be free to. It calls `stop`,
        which ends the work, if there is no need for it any more.

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

        thread = threading.Thread(target=run, name="syncprims-engine", daemon=True)
        thread.start()
        try:
            if not done.wait(_SOON):
                self._rounds.stand_by(lambda seconds: done.wait(seconds) or None, self._timeout)
            if raised:
                self._look_for_the_cause()
                raise raised[0]
        except BaseException:
            stop()
            raise
        finally:
            thread.join(_FAREWELL)

    def _look_for_the_cause(self) -> None:
        """Return if no member turns out to be lost within a moment."""
        until = time.monotonic() + _CAUSE

        def look(seconds: float) -> bool | None:
            time.sleep(min(seconds, _SOON))
            return time.monotonic() >= until or None

        self._rounds.stand_by(look, None)

    def reach(self, number: int) -> Sequence[Note]:
        """Collect the rounds up to `number`, and return the notes of the last.

        :raises PeerFailed: if another member failed in one that is of this call.
        """
        rounds = self._rounds
        notes: Sequence[Note] = ()
        while rounds.collected < number:
            notes = rounds.collect(self._timeout)
            if rounds.collected > self._before:
                rounds.raise_shared(notes)
        return notes
