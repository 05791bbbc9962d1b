"""Which threads of this process may still make a call.

A rank that waits in one thread may go on in another. So a search for deadlocks must know of every
thread, also of those that have made no call yet.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import FrameType

#: Functions in which a thread waits for nothing that ends in a call of ours: another thread would
#: have to give it work, or it never runs the code of users.
_IDLE = {
    ("concurrent.futures.thread", "_worker"),
    ("multiprocessing.queues", "_feed"),
    ("syncprims.testing.outcomes", "await_threads"),
    ("torch.utils.data._utils.pin_memory", "do_one_step"),
    ("tqdm._monitor", "run"),
}
#: Modules in whose functions these wait.
_WAITS = {"multiprocessing.connection", "multiprocessing.queues", "queue", "selectors", "threading"}


def may_call_elsewhere(waiting: Collection[int] = ()) -> bool:
    """Return whether a thread may make a call that is not this one, nor one of those `waiting`.

    Threads are given by their identifiers. The library's own, named ``syncprims-...``, make none.
    """
    own = {t.ident for t in threading.enumerate() if t.name.startswith("syncprims-")}
    known = {threading.get_ident(), *waiting, *own}
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    return any(ident not in known and not _is_idle(at) for ident, at in frames.items())


def _is_idle(frame: FrameType | None) -> bool:
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if (module, frame.f_code.co_name) in _IDLE:
            return True
        if module not in _WAITS:
            return False
        frame = frame.f_back
    return False  # it is about to begin
