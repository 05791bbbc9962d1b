"""Which threads of this process have something to do, and may still make a call.

A rank that waits in one thread may continue in another. So a search for deadlocks must know every
thread, including those that have made no call yet. The system says what each of them does: Linux
shows its call of the system, and how long it has run. Elsewhere a thread shows only its line.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

#: The name of boards at which only threads of the library wait: those of the program may go on.
BACKGROUND_SAVES = "saves in the background"

#: Functions of threads that never run the code of users.
_NEVER_CALL = {("torch.utils.data._utils.pin_memory", "do_one_step"), ("tqdm._monitor", "run")}
#: The number of the system's call in which a thread waits for memory to change, see futex(2).
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(os.uname().machine if os.name == "posix" else "")
_PRIVATE, _WAITS = 128, (0, 9)  # its operations, for memory of this process alone
_supervisors: set[int] = set()  # threads that make no call now


class Activity(NamedTuple):
    """What a thread does. On Linux, equal ones mean that it has not run in between."""

    call: str  #: of the system, with its arguments, or "running"; elsewhere the line
    runs: str  #: how often and how long it has run; "" if the system does not say
    used: int  #: nanoseconds in which it used a processor or waited for a free one

    @classmethod
    def of(cls, thread: threading.Thread) -> Activity:
        """Return that of a thread of this process."""
        found = cls.of_task(_number(thread))
        if found.runs:
            return found
        lines = look_at_threads(lambda frame: f"{id(frame.f_code)}, {frame.f_lasti}")
        return cls(lines.get(thread.ident or 0, ""), "", time.process_time_ns())  # of all threads

    @classmethod
    def of_task(cls, number: str) -> Activity:
        """Return that of the thread which has this number in the system, if that shows it."""
        task = f"/proc/self/task/{number}"
        try:
            with open(f"{task}/syscall") as call, open(f"{task}/schedstat") as runs:  # noqa: PTH123
                shown = cls(call.read(), runs.read(), 0)
            return shown._replace(used=sum(map(int, shown.runs.split()[:2])))
        except (OSError, ValueError):
            return cls("", "", 0)

    @property
    def runs_now(self) -> bool:
        """Whether it uses a processor, or would if there were a free one."""
        return self.call.startswith("running")

    @property
    def waits_for_thread(self) -> bool:
        """Whether only another thread of this process can wake it, for certain."""
        number, *arguments = self.call.split()[:5] or [""]
        if number != _FUTEX or len(arguments) < 4:
            return False
        operation, limit = int(arguments[1], 16), int(arguments[3], 16)
        return bool(operation & _PRIVATE) and operation % _PRIVATE in _WAITS and not limit


@contextlib.contextmanager
def supervises() -> Generator[None]:
    """Return a context in which this thread waits for others, and makes no call."""
    ident = threading.get_ident()
    _supervisors.add(ident)
    try:
        yield
    finally:
        _supervisors.discard(ident)


def threads_that_may_call() -> set[int | None]:
    """Return the identifiers of the other threads that may make a call.

    A thread that waits for another one, without a time limit, makes none before that one goes on.
    The library's own threads, named ``syncprims-...``, make none.
    """
    own = {t.ident for t in threading.enumerate() if t.name.startswith("syncprims-")}
    return busy_threads() - waiting_threads() - own - _supervisors


def busy_threads() -> set[int | None]:
    """Return the identifiers of the other threads that have something to do, or wait for that.

    That of a thread which begins is None.
    """
    threads = {thread.ident: thread for thread in threading.enumerate()}
    # One that begins has no frame.
    found: dict[int | None, bool] = dict.fromkeys(threads, False)
    found |= {ident: never for ident, never in look_at_threads(_never_calls).items()}  # noqa: C416
    for ident, is_worker in look_at_threads(_is_worker).items():
        if is_worker and ident in threads:
            activity = Activity.of(threads[ident])
            # One that has just been given work runs, or is about to.
            found[ident] = activity.waits_for_thread or not activity.runs
    return {ident for ident, idle in found.items() if not idle} - {threading.get_ident()}


def waiting_threads() -> set[int]:
    """Return the identifiers of the other threads that only a thread of this process can wake.

    All of them have slept at one moment, since none has run between two looks at each. There are
    none while any thread runs: it may hold a lock of Python's own, for which they wait so briefly.
    """
    threads = threading.enumerate()
    alone = look_at_threads(_is_idle_loop)
    before, after = _other_tasks(), _other_tasks()
    listed = {_number(thread): thread.ident for thread in threads if thread.ident is not None}
    # One that begins or ends is not listed.
    unlisted = [{n: a for n, a in tasks.items() if n not in listed} for tasks in (before, after)]
    if unlisted[0] != unlisted[1] or any(task.runs_now for task in after.values()):
        return set()
    return {
        listed[number]
        for number, task in after.items()
        if number in listed and task == before.get(number)
        if task.waits_for_thread or alone.get(listed[number])
    }


def waits_for_thread(thread: threading.Thread, activity: Activity) -> bool:
    """Return whether only another thread of this process can wake one that does this."""
    alone = look_at_threads(_is_idle_loop)
    return activity.waits_for_thread or bool(activity.runs and alone.get(thread.ident or 0))


def _number(thread: threading.Thread) -> str:
    """Return the number that the system has given to a thread."""
    # Python does not renew that of a thread that has become the main one of a fork.
    return str(os.getpid() if thread is threading.main_thread() else thread.native_id)


def _other_tasks() -> dict[str, Activity]:
    """Return what each thread of this process does except this one, by the system's numbers."""
    try:
        numbers = set(os.listdir("/proc/self/task"))  # noqa: PTH208
    except OSError:
        return {}
    return {n: Activity.of_task(n) for n in numbers - {str(threading.get_native_id())}}


def _place(frame: FrameType) -> tuple[object, str]:
    return frame.f_globals.get("__name__"), frame.f_code.co_name


def _is_worker(frame: FrameType) -> bool:
    """Return whether a thread of a pool waits for work there."""
    return _place(frame) == ("concurrent.futures.thread", "_worker")


def _never_calls(frame: FrameType) -> bool:
    outer: FrameType | None = frame
    while outer is not None and _place(outer) not in _NEVER_CALL:
        outer = outer.f_back
    return outer is not None


def _is_idle_loop(frame: FrameType) -> bool:
    """Return whether an event loop waits there, and only other threads can wake it."""
    if _place(frame) != ("selectors", "select"):
        return False  # and leave it alone: to read the variables of a frame that runs may crash
    values = frame.f_locals
    loop: Any = None if frame.f_back is None else frame.f_back.f_locals.get("self")
    # Its one descriptor is that by which other threads wake it.
    alone = values.get("timeout") in (None, -1) and len(values["self"].get_map() or ()) == 1
    return alone and hasattr(loop, "_run_once") and not loop._ready


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
