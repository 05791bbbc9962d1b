"""Aborts of a board: all members agree on the outcome, and no member can delay it.

An abort names a round. No member passes that round or a later one; earlier ones stay collectable.
Two questions must be answered without a lock, since a stopped process could hold it.

*Has the last note come after all?* A member that wants an abort writes this intent into the board,
pauses, and only then checks whether all notes have come. Every other member checks the notes first
and the intents afterwards. So either the first one sees the last note, or each member that sees
that note also sees the intent. The pause, a millisecond, is ten thousand times what a store needs
to reach the other processors, so this holds on weakly ordered ones, too.

*What do all agree on?* Any member that sees an intent may propose an outcome: the abort stands, or
it is void because all notes have come. The proposal is a claim (`claims.py`), one for each round,
and the first claim holds for all. Notes do not disappear, so no member can find an abort void that
another has rightly found to stand, except in the moment between; and there the claim decides.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .claims import Claims
    from .memory import AbortRecords

_PAUSE = 0.001
_VOID = "void"


class Aborts:
    """The aborts of the board `name`, as member number `index` sees and makes them.

    ``is_complete(number)`` says whether all that a round needs is there. Once true, it stays true.
    """

    def __init__(
        self,
        records: AbortRecords,
        claims: Claims,
        name: str,
        index: int,
        is_complete: Callable[[int], bool],
    ) -> None:
        self._records = records
        self._claims = claims
        self._name = name
        self._index = index
        self._is_complete = is_complete
        self._void: set[int] = set()  # rounds whose abort is known to be void

    def abort(self, number: int, text: bytes) -> None:
        """Abort round `number` with `text`, unless it is complete or another abort came first."""
        if self.verdict(number) is None:
            self._records.write_text(self._index, text)
            self._records.write_intent(self._index, number)
            self._decide(number, self._index)

    def verdict(self, number: int) -> bytes | None:
        """Return the text of the abort that covers round `number`; None if there is none."""
        for member, intended in enumerate(self._records.read_intents()):
            if 0 < intended <= number and intended not in self._void:
                author = self._decide(intended, member)
                if author is not None:
                    return self._records.read_text(author)
        return None

    def _decide(self, number: int, member: int) -> int | None:
        """Return whose abort of round `number` stands, or None if it is void."""
        name = f"{self._name}-verdict-{number}"
        outcome = self._claims.claimed(name)
        if outcome is None:
            if not self._is_complete(number):
                time.sleep(_PAUSE)
            proposal = _VOID if self._is_complete(number) else str(member)
            try:
                outcome = self._claims.claim(name, proposal)
            except OSError:  # no space for a claim: then each member relies on what it sees
                outcome = proposal
        if outcome != _VOID:
            return int(outcome)
        self._void.add(number)
        if self._records.read_intents()[self._index] == number:
            self._records.write_intent(self._index, 0)
        return None
