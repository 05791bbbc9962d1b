"""Waits of a rank outside of the library, in a world of threads: other ranks run meanwhile.

A rank may wait for what another one does outside of a call: a file that it writes, an event that it
sets. In production that one runs. Here the wait gives up the turn, if it has a time limit. A rank
that has started threads gives it up in `time.sleep` alone: they may end its other waits.
"""

from __future__ import annotations

import contextlib
import functools
import select
import selectors
import threading
import time
from collections.abc import Callable
from typing import Any

from .rank_threads import Replacement
from .scheduler import RankThread, Turn, never

_sleep = time.sleep
_condition_wait: Any = threading.Condition.wait


def _turn_to_give(seconds: float | None) -> Turn | None:
    """Return the turn that this thread can give up for so many seconds, if it has one."""
    thread = threading.current_thread()
    turn = thread.turn if isinstance(thread, RankThread) else None
    return turn if seconds is not None and seconds > 0 and turn and turn.is_outside() else None


def _sleep_outside(seconds: float, /) -> None:
    turn = _turn_to_give(seconds)
    if turn is None:
        _sleep(seconds)
    else:
        turn.wait_outside(never, seconds)


def _wait_for_condition(self: Any, timeout: float | None = None) -> bool:
    turn = _turn_to_give(timeout)
    if turn is None or turn.has_threads() or not self._is_owned():
        return bool(_condition_wait(self, timeout))
    waiter = threading.Lock()  # as the original, which waits in C
    waiter.acquire()
    self._waiters.append(waiter)
    saved = self._release_save()
    try:
        turn.wait_outside(lambda: not waiter.locked(), timeout or 0.0)
    finally:
        self._acquire_restore(saved)
        came = not waiter.locked()
        if not came:
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)
    return came


def _selecting(original: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return `original` as ranks call it; its timeout comes after so many arguments."""

    @functools.wraps(original)
    def call(*args: Any, **named: Any) -> Any:
        timeout = named.get("timeout", args[count] if len(args) > count else None)
        turn = _turn_to_give(timeout)
        if turn is None or timeout is None or turn.has_threads():
            return original(*args, **named)
        look = functools.partial(original, *args[:count], 0)
        turn.wait_outside(lambda: any(look()), timeout)
        return look()

    return call


# Of asyncio, and of child processes and their queues.
_SELECTORS = {
    selectors.DefaultSelector,
    getattr(selectors, "PollSelector", selectors.SelectSelector),
}

#: While worlds of threads run.
waits_give_turn: Replacement = Replacement(
    lambda: [
        (time, "sleep", _sleep_outside),
        (threading.Condition, "wait", _wait_for_condition),
        (select, "select", _selecting(select.select, 3)),
        *((kind, "select", _selecting(kind.select, 1)) for kind in _SELECTORS),
    ]
)
