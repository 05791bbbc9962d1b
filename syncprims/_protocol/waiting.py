"""Waiting for the others, with an eye on why they do not come."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

from syncprims import errors

from .deadlock import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncprims.errors import SyncError
    from syncprims.interface import Board, Settings

    from .deadlock import Whereabouts
    from .diagnosis import Diagnosis, Look

T = TypeVar("T")

FIRST_LOOK = 0.01  # seconds of waiting after which a rank asks why; the pauses then grow
_LONGEST_PAUSE = 0.25
#: After which differing labels are a mismatch even if some are still to come. A message that shows
#: every rank's call is worth this much.
_PATIENCE_FOR_ALL = 0.3
_LOOK_AROUND = 1.0  # after which boards are compared


def _warn(text: str) -> None:
    import logging  # slow to import, and only who waits for long needs it

    logging.getLogger("syncprims").warning(text)


class _Rounds(Waiter, Protocol):
    """The rounds of one board, as far as this module needs them."""

    settings: Settings

    def tear(self, verdict: bytes) -> NoReturn:
        """Break the group with this verdict."""
        ...


class Waiting:
    """How one rank waits at one board."""

    def __init__(
        self, rounds: _Rounds, board: Board, diagnosis: Diagnosis, whereabouts: Whereabouts
    ) -> None:
        self._rounds = rounds
        self._board = board
        self._diagnosis = diagnosis
        self._whereabouts = whereabouts
        self._first_pause = math.inf if board.virtual_time else FIRST_LOOK

    def on(
        self,
        attempt: Callable[[float], T | None],
        timeout: float | None,
        begin: float,
        *,
        at_board: bool = True,
    ) -> T:
        """Wait on: for what comes, a verdict, a death, a deadlock or the deadline."""
        board = self._board
        number = board.collected + at_board  # not at it, nobody is missing
        deadline = math.inf if timeout is None else begin + timeout
        warn_every = self._rounds.settings.warn_after
        pause = self._first_pause
        # Where time is virtual, whoever waits without a deadline waits for ever.
        warn_at = begin + (warn_every if deadline < math.inf or pause < math.inf else math.inf)
        board.waits_until = deadline
        try:
            while True:
                verdict = board.verdict()
                if verdict is not None:
                    self._rounds.tear(verdict)
                now = board.now()
                if now >= deadline:
                    board.inform()
                look = self._diagnosis.look(number, now - begin)
                error = self._explain(look, now - begin, now >= deadline, at_board)
                if error is not None:
                    board.abort(errors.dump(error))
                    if board.verdict() is not None:
                        continue
                    if not look.missing and now >= deadline + _LOOK_AROUND:
                        # All notes have long been up, and one cannot be read.
                        self._rounds.tear(errors.dump(error))
                elif now >= warn_at:
                    _warn(look.warning)
                    warn_every *= 2
                    warn_at = now + warn_every
                until = min(now + pause, warn_at, deadline if now < deadline else math.inf)
                came = attempt(max(until - now, 0.001))
                if came is not None:
                    return came
                if board.now() < until and not board.virtual_time:
                    time.sleep(0.001)  # it gave up early: what it saw is seen here soon
                pause = max(self._first_pause, min(2 * pause, _LONGEST_PAUSE))
        finally:
            board.waits_until = None
            self._whereabouts.moved_on()

    def _explain(self, look: Look, waited: float, late: bool, at_board: bool) -> SyncError | None:
        """Return why this round will not complete, or None while there is hope."""
        error = self._whereabouts.told_deadlock(self._rounds, look.missing)
        if error is None:
            error = look.absence()
        if error is None and waited >= _PATIENCE_FOR_ALL:
            error = look.early_mismatch()
        if error is None and late:
            error = look.timeout()
        if error is None and waited >= _LOOK_AROUND and look.missing and at_board:
            error = self._whereabouts.deadlock(self._rounds)
        return error
