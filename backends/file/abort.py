"""Aborts of a board: all members agree on the outcome, and no member can delay it.

An abort names a round. No member passes that round or a later one; earlier ones stay collectable.
Two questions must be answered without a lock, since a stopped process could hold it.

*Has the last note come after all?* A member that wants an abort writes this intent into the board,
pauses, and only then checks whether all notes have come. Every other member checks the notes first
and the intents afterwards. So either the first one sees the last note, or each member that sees
that note also sees the intent. The pause, a millisecond, is ten thousand times what a store needs
to reach the other processors, so this holds on weakly ordered ones, too.

*What do all agree on?* Any member that sees an intent may propose an outcome: the abort stands, or
it is void because all notes have come. The proposal is a name in the directory, one for each round,
which only one process can be the first to create. That one holds for all. Notes do not disappear,
so no member can find an abort void that another has rightly found to stand, except in the moment
between; and there the name decides.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .memory import Cells
    from .private_dir import PrivateDirectory

_PAUSE = 0.001
_VOID = "void"


class Aborts:
    """The aborts of the board `name` in `cells`, as member number `index` sees and makes them."""

    def __init__(self, cells: Cells, directory: PrivateDirectory, name: str, index: int) -> None:
        self._cells = cells
        self._directory = directory
        self._name = name
        self._index = index
        self._void: set[int] = set()  # rounds whose abort is known to be void

    def abort(self, number: int, text: bytes) -> None:
        """Abort round `number` with `text`, unless it is complete or another abort came first."""
        if self.verdict(number) is None:
            self._cells.write_text(self._index, text)
            self._cells.write_intent(self._index, number)
            self._decide(number, self._index)

    def verdict(self, number: int) -> bytes | None:
        """Return the text of the abort that covers round `number`; None if there is none."""
        for member, intended in enumerate(self._cells.read_intents()):
            if 0 < intended <= number and intended not in self._void:
                author = self._decide(intended, member)
                if author is not None:
                    return self._cells.read_text(author)
        return None

    def _decide(self, number: int, member: int) -> int | None:
        """Return whose abort of round `number` stands, or None if it is void."""
        name = f"{self._name}-verdict-{number}"
        outcome = self._directory.claimed(name)
        if outcome is None:
            if not self._cells.all_posted(number):
                time.sleep(_PAUSE)
            proposal = _VOID if self._cells.all_posted(number) else str(member)
            try:
                outcome = self._directory.claim(name, proposal)
            except OSError:  # no space for a name: then each member relies on what it sees
                outcome = self._directory.claimed(name) or proposal
        if outcome != _VOID:
            return int(outcome)
        self._void.add(number)
        if self._cells.read_intents()[self._index] == number:
            self._cells.write_intent(self._index, 0)
        return None
