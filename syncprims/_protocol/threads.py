"""Which threads of this process have something to do, and may still make a call.

A rank that waits in one thread may continue in another. So a search for deadlocks must know every
thread, including those that have made no call yet.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

#: The name of boards at which only threads of the library wait: those of the program may go on.
BACKGROUND_SAVES = "saves in the background"

#: Functions in which a thread waits for nothing that ends in a call of ours: another thread would
#: have to give it work, or it never runs the code of users.
_IDLE = {
    ("concurrent.futures.thread", "_worker"),  # and its pool has no work
    ("multiprocessing.queues", "_feed"),
    ("syncprims.testing.process_world", "await_threads"),
    ("syncprims.testing.thread_world", "run_threads"),  # until another world has ended
    ("torch.utils.data._utils.pin_memory", "do_one_step"),
    ("tqdm._monitor", "run"),
}
#: Functions in which a thread may wait for another thread.
_WAITS_FOR_THREAD = {
    ("selectors", "select"),
    ("threading", "_wait_for_tstate_lock"),
    ("threading", "join"),
    ("threading", "wait"),
}
#: Modules in whose functions these wait.
_WAITS = {
    "multiprocessing.connection", "multiprocessing.queues", "queue", "selectors", "threading",
    "syncprims.testing.scheduler",
}  # fmt: skip


def threads_that_may_call() -> set[int]:
    """Return the identifiers of the other threads that may make a call.

    A thread that waits for another one, without a time limit, makes none before that one goes on.
    The library's own threads, named ``syncprims-...``, make none.
    """
    own = {t.ident for t in threading.enumerate() if t.name.startswith("syncprims-")}
    return busy_threads() - waiting_threads() - own


def busy_threads() -> set[int]:
    """Return the identifiers of the other threads that have something to do, or wait for that."""
    # The queues are read before the positions: a thread that takes work in between is then seen
    # working.
    with_work = _threads_with_work(threading.enumerate())
    idle = look_at_threads(_is_idle)
    busy = {ident for ident, is_idle in idle.items() if ident in with_work or not is_idle}
    return busy - {threading.get_ident()}


def waiting_threads(*, with_limit: bool = False) -> set[int]:
    """Return the identifiers of the threads that only another thread of this process can wake.

    `with_limit` adds those that also a time limit wakes. Python shows that of ``join``, and of all
    that waits by a `threading.Condition`: events, queues, results of futures, barriers; and of an
    event loop without open connections. A lock alone does not show it, nor does code in C.
    """
    waits = look_at_threads(lambda frame: _waits_for_thread(frame, with_limit))
    return {ident for ident, is_waiting in waits.items() if is_waiting}


def _place(frame: FrameType) -> tuple[object, str]:
    return frame.f_globals.get("__name__"), frame.f_code.co_name


def _caller(frame: FrameType) -> FrameType | None:
    """Return the frame that called this one, and not that of a world of threads in between."""
    caller = frame.f_back
    while caller is not None and caller.f_globals.get("__name__") == "syncprims.testing.scheduler":
        caller = caller.f_back
    return caller


def _waits_for_thread(frame: FrameType, with_limit: bool) -> bool:
    """Return whether this innermost frame waits for a thread, and has not been woken."""
    place = _place(frame)
    if place not in _WAITS_FOR_THREAD:
        return False  # and leave it alone: to read the variables of a frame that runs may crash
    values = frame.f_locals
    if not with_limit and values.get("timeout") not in (None, -1):
        return False
    match place:
        case "threading", "wait":  # of a condition; the thread that notifies it removes the waiter
            if values.get("waiter") not in getattr(values["self"], "_waiters", ()):
                return False
            caller = _caller(frame.f_back) if frame.f_back else None
            # Else it waits until a new thread has begun.
            return caller is None or _place(caller) != ("threading", "start")
        case "threading", "join" | "_wait_for_tstate_lock":
            return values["self"] in threading.enumerate()  # else it has ended
        case "selectors", "select":
            caller = _caller(frame)
            loop: Any = None if caller is None else caller.f_locals.get("self")
            # Its one descriptor is that by which other threads wake it.
            alone = len(values["self"].get_map() or ()) == 1
            return alone and hasattr(loop, "_run_once") and not loop._ready
        case _:
            return False


def look_at_threads(look: Callable[[FrameType], T]) -> dict[int, T]:
    """Return what `look` returns for the innermost frame of each thread, by its identifier."""
    collects = gc.isenabled()
    frames: dict[int, FrameType] = {}
    try:
        # A collection runs finalizers, in which other threads may go on. If it came while Python
        # reads such a frame in C, that frame would be gone: a segmentation fault.
        gc.disable()
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        return {ident: look(frame) for ident, frame in frames.items()}
    finally:
        if collects:
            gc.enable()
        # This frame is one of them. In such a cycle all frames would keep their variables, and
        # those of their callers, until the garbage collector runs.
        frames.clear()


def log_stacks(when: str) -> None:
    """Log where each thread of this process is, its innermost call last."""
    import logging  # slow to import, as the other one is
    import traceback

    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = look_at_threads(lambda frame: "".join(traceback.format_stack(frame)))
    text = "".join(f"thread {names.get(ident, ident)}:\n{at}" for ident, at in stacks.items())
    logging.getLogger("syncprims").warning(f"all threads of this rank {when}:\n{text}")


def _threads_with_work(threads: Iterable[threading.Thread]) -> set[int | None]:
    """Return the threads of pools that have work which no thread has begun."""
    module = sys.modules.get("concurrent.futures.thread")
    if module is None:
        return set()
    queues = ((thread.ident, module._threads_queues.get(thread)) for thread in threads)
    found = {ident for ident, queue in queues if queue is not None and not queue.empty()}
    if sys.version_info >= (3, 13):
        # Such a queue gives work to a waiting thread at once, and is empty before that thread runs.
        # But each thread that waits has counted itself, and each work takes one off.
        waiting: dict[Any, set[int]] = {}
        pools = look_at_threads(
            lambda at: (
                at.f_locals["executor_reference"] if at.f_code is module._worker.__code__ else None
            )
        )
        for ident, pool in pools.items():
            if pool is not None:
                waiting.setdefault(pool(), set()).add(ident)
        for pool, idents in waiting.items():
            # If the pool is gone or closed, its threads are about to end.
            if pool is None or pool._shutdown or pool._idle_semaphore._value < len(idents):
                found |= idents
    return found


def _is_idle(frame: FrameType | None) -> bool:
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if (module, frame.f_code.co_name) in _IDLE:
            return True
        if module not in _WAITS:
            return False
        frame = frame.f_back
    return False  # it is about to begin


def is_from_signal_handler(error: BaseException) -> bool:
    """Return whether a handler of a signal has raised `error`, and not the code it interrupted."""
    import signal  # slow to import

    codes: set[object] = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while hasattr(handler, "func"):  # functools.partial
            handler = handler.func
        if not hasattr(handler, "__code__"):
            handler = getattr(handler, "__call__", None)  # noqa: B004 - the method
        codes.add(getattr(handler, "__code__", None))
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False
