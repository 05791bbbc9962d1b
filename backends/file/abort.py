"""Aborts of a board: all members agree on the outcome, and no member can delay it.

An abort names a round. No member passes that round or a later one; earlier ones stay collectable.
Two questions must be answered without a lock, since a stopped process could hold it.

*Has the last note come after all?* A member that wants an abort writes this intent into the board,
pauses, and only then checks whether all notes have come. Every other member checks the notes first
and the intents afterwards. So either the first one sees the last note, or each member that sees
that note also sees the intent. The pause, a millisecond, is ten thousand times what a store needs
to reach the other processors, so this holds on weakly ordered ones, too.

*What do all agree on?* Any member that sees an intent may propose an outcome: the abort stands, or
it is void because all notes have come. The proposal is a claim (`Claims`), one for each round,
and the first claim holds for all. Notes do not disappear, so no member can find an abort void that
another has rightly found to stand, except in the moment between; and there the claim decides.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable

from .memory import RECORD_HEAD, TEXT_SIZE, Claims, await_record, write_record

_PAUSE = 0.001
_VOID = "void"


class Aborts:
    """The aborts of the board `name`, as number `index` of `count` processes sees and makes them.

    In `memory` each process writes which round it wants to abort, and why. ``is_complete(number)``
    says whether all that a round needs is there. Once true, it stays true.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        intents_at: int,
        texts_at: int,
        count: int,
        claims: Claims,
        name: str,
        index: int,
        is_complete: Callable[[int], bool],
    ) -> None:
        self._memory = memory
        self._intents_at = intents_at
        self._texts_at = texts_at
        self._intents = struct.Struct(f"<{count}Q")
        self._claims = claims
        self._name = name
        self._index = index
        self._is_complete = is_complete
        self._void: set[int] = set()  # rounds whose abort is known to be void

    def abort(self, number: int, text: bytes) -> None:
        """Abort round `number` with `text`, unless it is complete or another abort came first."""
        if self.verdict(number) is None:
            at = self._texts_at + self._index * TEXT_SIZE
            write_record(self._memory, at, text[: TEXT_SIZE - RECORD_HEAD])
            self._write_intent(number)
            self._decide(number, self._index)

    def verdict(self, number: int) -> bytes | None:
        """Return the text of the abort that covers round `number`; None if there is none."""
        for member, intended in enumerate(self._read_intents()):
            if 0 < intended <= number and intended not in self._void:
                author = self._decide(intended, member)
                if author is not None:
                    at = self._texts_at + author * TEXT_SIZE
                    return await_record(self._memory, at, TEXT_SIZE)
        return None

    def _write_intent(self, number: int) -> None:
        """Record that this process wants to abort round `number`; 0 withdraws it."""
        at = self._intents_at + 8 * self._index
        self._memory[at : at + 8] = number.to_bytes(8, "little")

    def _read_intents(self) -> tuple[int, ...]:
        """Return the round that each process wants to abort, or 0."""
        return self._intents.unpack_from(self._memory, self._intents_at)

    def _decide(self, number: int, member: int) -> int | None:
        """Return whose abort of round `number` stands, or None if it is void."""
        name = f"{self._name}-verdict-{number}"
        outcome = self._claims.decide(name)
        if not outcome:
            if not self._is_complete(number):
                time.sleep(_PAUSE)
            proposal = _VOID if self._is_complete(number) else str(member)
            try:
                outcome = self._claims.decide(name, proposal)
            except OSError:  # no space for a claim: then each member relies on what it sees
                outcome = proposal
        if outcome != _VOID:
            return int(outcome)
        self._void.add(number)
        if self._read_intents()[self._index] == number:
            self._write_intent(0)
        return None
