"""The verdict on a board: once it is broken, everybody hears the same, and nobody can hold it up.

An abort names a round. Nobody passes that round or a later one; earlier ones stay collectable. Two
questions are to settle, without a lock that a stopped process could hold.

*Has the last note come after all?* Whoever wants an abort says so in the board, pauses, and only
then looks whether all notes have come. Every other member looks for notes first and for such
intents afterwards. So either the one sees the last note, or whoever sees that note also sees the
intent. The pause, a millisecond, is ten thousand times what a store needs to reach the other
processors, so this holds on weakly ordered ones, too.

*What do all agree on?* Whoever meets an intent, its giver or not, may look and propose an outcome:
the abort stands, or it is void because all notes have come. The proposal is a name in the
directory, one for each round, which only one process can be the first to make: that one holds for
all. Notes do not go away, so nobody can find an abort void that another has rightly found to stand,
except in the moment between; and there the name decides.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .memory import Cells
    from .private_dir import PrivateDirectory

_PAUSE = 0.001
_VOID = "void"
_TEXT_PATIENCE = 0.1  # seconds for a text to be seen whole, once its intent has been


class Verdicts:
    """The aborts of the board `name` in `cells`, as member number `index` sees and makes them."""

    def __init__(self, cells: Cells, directory: PrivateDirectory, name: str, index: int) -> None:
        self._cells = cells
        self._directory = directory
        self._name = name
        self._index = index
        self._void: set[int] = set()  # rounds known to stay whole

    def give(self, number: int, text: bytes) -> None:
        """Abort round `number` with `text`, unless it is too late or another came first."""
        if self.on(number) is None:
            self._cells.write_text(self._index, text)
            self._cells.intend(self._index, number)
            self._stands(number, self._index)

    def on(self, number: int) -> bytes | None:
        """Return the text that bars round `number`; None if nothing does."""
        for giver, intended in enumerate(self._cells.intended()):
            if 0 < intended <= number and intended not in self._void:
                by = self._stands(intended, giver)
                if by is not None:
                    return self._text(by)
        return None

    def _stands(self, number: int, giver: int) -> int | None:
        """Return whose abort of round `number` stands, or None if it is void."""
        name = f"{self._name}-verdict-{number}"
        outcome = self._directory.claimed(name)
        if outcome is None:
            if not self._cells.all_posted(number):
                time.sleep(_PAUSE)
            proposal = _VOID if self._cells.all_posted(number) else str(giver)
            try:
                outcome = self._directory.claim(name, proposal)
            except OSError:  # no room for a name: then everybody goes by what is seen
                outcome = self._directory.claimed(name) or proposal
        if outcome != _VOID:
            return int(outcome)
        self._void.add(number)
        if self._cells.intended()[self._index] == number:
            self._cells.intend(self._index, 0)
        return None

    def _text(self, index: int) -> bytes:
        deadline = time.monotonic() + _TEXT_PATIENCE
        while (text := self._cells.read_text(index)) is None and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        return text or b""
