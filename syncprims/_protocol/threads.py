"""Which threads of this process may still make a call.

A rank that waits in one thread may continue in another. So a search for deadlocks must know every
thread, including those that have made no call yet.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

#: Functions in which a thread waits for nothing that ends in a call of ours: another thread would
#: have to give it work, or it never runs the code of users.
_IDLE = {
    ("concurrent.futures.thread", "_worker"),  # and its pool has no work
    ("multiprocessing.queues", "_feed"),
    ("syncprims.testing.outcomes", "await_threads"),
    ("torch.utils.data._utils.pin_memory", "do_one_step"),
    ("tqdm._monitor", "run"),
}
#: Modules in whose functions these wait.
_WAITS = {"multiprocessing.connection", "multiprocessing.queues", "queue", "selectors", "threading"}


def threads_that_may_call() -> set[int]:
    """Return the identifiers of the other threads that may make a call.

    The library's own threads, named ``syncprims-...``, make none.
    """
    threads = threading.enumerate()
    own = {t.ident for t in threads if t.name.startswith("syncprims-")}
    own.add(threading.get_ident())
    # First the work, then where the threads are: one that takes work in between is seen at it.
    with_work = {t.ident for t in threads if _has_work(t)}
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    return {
        ident
        for ident, at in frames.items()
        if ident not in own and (ident in with_work or not _is_idle(at))
    }


def _has_work(thread: threading.Thread) -> bool:
    """Return whether the pool of `thread` has work that no thread has begun."""
    pools = sys.modules.get("concurrent.futures.thread")
    queue = getattr(pools, "_threads_queues", {}).get(thread)
    return queue is not None and not queue.empty()


def _is_idle(frame: FrameType | None) -> bool:
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if (module, frame.f_code.co_name) in _IDLE:
            return True
        if module not in _WAITS:
            return False
        frame = frame.f_back
    return False  # it is about to begin
