"""The threads that a rank starts: they belong to it, and it fails with what ends them.

In production a thread of a process calls as the process's rank. A rank that is a thread must pass
its context on for that, so in a test each thread, and each task of a pool of threads, gets the
context of the rank that starts it. An error of this library that ends a thread is only printed by
Python; here it is kept, so that no verdict is lost.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from types import FrameType
from typing import Any, NoReturn

from syncprims._protocol.call_site import is_standard
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


# -- a thread that waits outside of the library ----------------------------------------------------

_when_back: dict[int, Callable[[], None]] = {}  # by the identifier of a thread
_anywhere: set[int] = set()  # of these, the threads that stop at once
_hooks = threading.Lock()  # held while profile functions are set


def find_state() -> int | None:
    """Return the address of Python's own state of this thread, where `call_when_back` needs it."""
    if sys.version_info >= (3, 12):
        return None
    get: Any = ctypes.pythonapi.PyThreadState_Get
    get.restype = ctypes.c_void_p
    return int(get())


def call_when_back(thread: threading.Thread, state: int | None, fn: Callable[[], None]) -> None:
    """Make `thread` call ``fn()`` once, before any other function; it may be in C now.

    :param state: what :func:`find_state` has returned there.
    """
    with _hooks:
        _when_back[thread.ident or 0] = fn
        if sys.version_info >= (3, 12):
            of_new_threads = threading.getprofile()
            threading.setprofile_all_threads(_be_back)
            threading.setprofile(of_new_threads)  # type: ignore[arg-type]
        else:
            ctypes.pythonapi._PyEval_SetProfile(ctypes.c_void_p(state), _BE_BACK, None)


def forget_to_call(thread: threading.Thread) -> None:
    """Undo :func:`call_when_back`."""
    _when_back.pop(thread.ident or 0, None)
    _anywhere.discard(thread.ident or 0)


def will_call(thread: threading.Thread, anywhere: bool = False) -> bool:
    """Return whether `thread` will call a function when it is back, or calls it.

    With `anywhere`, it does so within Python's own modules, too.
    """
    if anywhere:
        _anywhere.add(thread.ident or 0)
    return thread.ident in _when_back


def _be_back(frame: FrameType, event: str, _: object) -> None:
    ident = threading.get_ident()
    if ident not in _when_back:
        sys.setprofile(None)  # that of this thread
        return
    outer = frame.f_back if event in ("call", "return") else None
    # A thread that stopped within Python's own modules could hold a lock of theirs.
    if ident in _anywhere or not is_standard(frame) or not (outer is None or is_standard(outer)):
        sys.setprofile(None)
        fn = _when_back.get(ident, int)
        fn()
        if _when_back.get(ident) is fn:  # else it has lost the turn again meanwhile
            _when_back.pop(ident, None)


def _be_back_in_c(_: object, frame: FrameType, event: int, __: object) -> int:
    try:
        _be_back(frame, "call" if event == 0 else "return" if event == 3 else "", None)
    except WorldAborted:  # ctypes would only print it
        sys.setprofile(_abort)
    return 0


def _abort(*_: object) -> NoReturn:
    raise WorldAborted  # Python sets no profile function after that


def raise_in(ident: int, error: type[BaseException]) -> None:
    """Raise `error` in a thread, as soon as it is between two steps of Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(error))


_BE_BACK = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.py_object, ctypes.c_int, ctypes.c_void_p
)(_be_back_in_c)


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
