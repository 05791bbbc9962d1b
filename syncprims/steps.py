"""The rounds of a call that takes several."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .interface import Label, Note
    from .rounds import Rounds


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
        self.post(self._rounds.failure_note(label, error))
        self._rounds.told = error

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
