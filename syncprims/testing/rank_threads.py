"""The threads that a rank starts: they belong to it, and it fails with what ends them.

In production a thread of a process calls as the process's rank. A rank that is a thread must pass
its context on for that, so in a test each thread, and each task of a pool of threads, gets the
context of the rank that starts it. An error of this library that ends a thread is only printed by
Python; here it is kept, so that no verdict is lost.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

from syncprims.errors import SyncError

from .errors import Killed, WorldAborted


class StartedThreads:
    """The threads that one rank has started, and those of the pools that it has given tasks."""

    def __init__(self) -> None:
        self.started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self.errors: list[SyncError] = []  #: that have ended them

    def run(self, fn: Callable[[], object]) -> None:
        """Run `fn` in a new thread of this rank."""
        try:
            fn()
        except SyncError as error:
            self.errors.append(error)
        except (Killed, WorldAborted):
            pass  # the rank ends with that by itself


#: Those of the rank that runs in this context.
rank_threads: ContextVar[StartedThreads | None] = ContextVar("syncprims_rank_threads", default=None)

_start, _submit = threading.Thread.start, ThreadPoolExecutor.submit


class Replacement:
    """Replaces attributes of modules and classes while any world needs that.

    `find` returns their owners, their names, and what replaces them.
    """

    def __init__(self, find: Callable[[], list[tuple[Any, str, Any]]]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._worlds = 0
        self._undo = contextlib.ExitStack()

    @contextlib.contextmanager
    def __call__(self) -> Generator[None]:
        """Return a context in which they are replaced."""
        with self._lock:
            if not self._worlds:
                for owner, name, value in self._find():
                    self._undo.callback(setattr, owner, name, getattr(owner, name))
                    setattr(owner, name, value)
            self._worlds += 1
        try:
            yield
        finally:
            with self._lock:
                self._worlds -= 1
                if not self._worlds:
                    self._undo.close()


def _start_in_rank(self: threading.Thread) -> None:
    threads = rank_threads.get()
    if threads is not None:
        context, run = contextvars.copy_context(), self.run

        def run_in_rank() -> None:
            del self.run  # of this object: it is freed at once without it
            threads.run(lambda: context.run(run))

        self.run = run_in_rank  # type: ignore[method-assign]
        threads.started.add(self)
    _start(self)


def _submit_in_rank(
    self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Future[Any]:
    threads = rank_threads.get()
    if threads is None:
        return _submit(self, fn, *args, **kwargs)
    future = _submit(self, contextvars.copy_context().run, fn, *args, **kwargs)
    pool: Any = self
    for thread in pool._threads.copy():
        threads.started.add(thread)  # a rank that has ended may have started it
    return future


#: Threads belong to the ranks that start them, and tasks of a pool to those that submit them.
threads_belong_to_ranks: Replacement = Replacement(
    lambda: [
        (threading.Thread, "start", _start_in_rank),
        (ThreadPoolExecutor, "submit", _submit_in_rank),
    ]
)


def wake(thread: threading.Thread) -> None:
    """Wake a thread that waits for an event, a queue or a result, so that it can be ended."""
    from syncprims._protocol.threads import look_at_threads

    waiters = look_at_threads(
        lambda frame: frame.f_locals.get("waiter") if frame.f_code is _CONDITION_WAIT else None
    )
    waiter = waiters.get(thread.ident or 0)
    if waiter is not None:
        with contextlib.suppress(RuntimeError):  # it is awake already
            waiter.release()


_CONDITION_WAIT = threading.Condition.wait.__code__
