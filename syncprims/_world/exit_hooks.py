"""Hooks at the end of a process, which notify the other ranks without a ``try`` in the program.

An uncaught exception passes the excepthook, a normal end atexit, and a fork the at-fork hook.
Children of multiprocessing are special: they catch what they raise, and skip both. Up to Python
3.12 they run finalizers while the exception is still on its way; from 3.13 on they run them after
they have printed it, so the printing is watched instead.

After the script, Python joins threads and processes and calls atexit functions, for as long as they
take. So a failing ``sys.exit`` is reported before that, and otherwise a thread says what keeps the
process. Nothing is left by then of a ``sys.exit(3)``, so the function notes its status. The program
failed by it if its outermost frame did not return.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from syncprims._protocol.call_site import users_part
from syncprims.errors import TORN, Failure, SyncError

from .private_names import NAMES

_LOOK_AGAIN = 0.2  # seconds


def reason(error: BaseException | None) -> BaseException | None:
    """Return `error`, unless it is a ``sys.exit(0)``: that is a normal end."""
    with contextlib.suppress(BaseException):  # the code may be an object of the program
        if isinstance(error, SystemExit):
            code = error.code
            if code is None or (isinstance(code, int) and code == 0):
                return None
    return error


def _at_a_prompt() -> bool:
    """Return whether an interactive prompt, in a program that goes on, shows a mistyped line.

    It calls the excepthook, too. (So do programs that run a script for it, as coverage does: there
    the script has ended.)
    """
    import traceback  # slow to import

    stack = traceback.walk_stack(sys._getframe())  # pyright: ignore[reportPrivateUsage]
    return any(frame.f_globals.get("__name__") == "code" for frame, _ in stack)


def _outermost_frame(frame: FrameType | None = None) -> FrameType:
    frame = frame or sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _what_keeps() -> str:
    """Return what this process waits for, or does, after its script has ended."""
    main = threading.main_thread()
    for one in threading.enumerate():
        if one is not main and not one.daemon:
            return f"it waits for thread {one.name[:200]!r}"
    frame = sys._current_frames().get(main.ident or 0)  # pyright: ignore[reportPrivateUsage]
    if frame is None:
        return ""
    code, module = _outermost_frame(frame).f_code, _outermost_frame(frame).f_globals["__name__"]
    if module not in ("threading", "multiprocessing.util", __name__):
        path = code.co_filename.rpartition("/")[2]
        return f"it is in atexit {code.co_qualname} ({path}:{code.co_firstlineno})"
    children = NAMES["_children"] if "multiprocessing.process" in sys.modules else None
    if pids := sorted(child.pid for child in children or () if not child.daemon):
        return f"it waits for process {', '.join(map(str, pids))}"
    return "it waits until its Queue has been read" if module == "multiprocessing.util" else ""


class ExitHooks:
    """Calls `on_end` with the exception (or None) that ends the process, `on_fork` in children.

    It calls `on_activity` with a text if a thread fails, and with what keeps the process if its
    script has ended well, and it does not.
    """

    def __init__(
        self,
        on_end: Callable[[BaseException | None], None],
        on_fork: Callable[[], None],
        on_activity: Callable[[str], None],
    ) -> None:
        self._on_end = on_end
        self._on_activity = on_activity
        self._on_fork = on_fork
        self._hook: Callable[..., Any] | None = None  # our excepthook
        self._before = sys.excepthook  # the one that was there before
        self._exit_hook: Callable[..., NoReturn] | None = None  # our sys.exit
        self._exit_before = sys.exit
        # Its status, the program's frame, and what was handled then.
        self._exit_call: tuple[Any, FrameType, BaseException | None] | None = None
        self._thread_failure = ""  # the last uncaught error of a thread
        self._ended = threading.Event()
        self._last_value: BaseException | None = None  # what Python kept before
        self._watches_forks = False
        self._brief = False
        # Whose exit is watched. A child of multiprocessing has lost the handlers; one of os.fork
        # keeps them, and a second call does no harm.
        self._process = 0

    def install(self, *, brief: bool = False) -> None:
        """Watch the end of this process.

        With `brief`, an error that only follows from another rank's is shown in one line, as the
        launcher reports it.
        """
        self._brief = brief
        self._ended.clear()
        self.remove()
        # One hook per call, each with its own predecessor: the last one may have been wrapped.
        self._before = sys.excepthook
        self._hook = sys.excepthook = functools.partial(self._uncaught, sys.excepthook)
        self._last_value = getattr(sys, "last_value", None)
        self._exit_before = sys.exit
        self._exit_hook = sys.exit = functools.partial(self._note_exit, sys.exit)
        if self._process != os.getpid():
            self._process = os.getpid()
            atexit.register(self._exit)
            note = functools.partial(self._note_failed_thread, threading.excepthook)
            threading.excepthook = note
            # Python calls this first. What is registered with it may wait, as executors do.
            if shutdown := NAMES["_shutdown"]:
                NAMES.set(threading, "_shutdown", functools.partial(self._after_script, shutdown))
            process = sys.modules.get("multiprocessing.process")
            if process is not None and process.parent_process() is not None:
                self._watch_child_of_multiprocessing()

    def watch_forks(self) -> None:
        """Watch forks; `on_fork` is called in the child."""
        if not self._watches_forks:
            self._watches_forks = True
            if sys.platform != "win32":
                os.register_at_fork(after_in_child=self._on_fork)

    def remove(self) -> None:
        """Restore the hooks that were there before, unless others have replaced ours."""
        if sys.excepthook is self._hook:
            sys.excepthook = self._before
        if sys.exit is self._exit_hook:
            sys.exit = self._exit_before
        self._hook = self._exit_hook = self._exit_call = None

    def _uncaught(
        self,
        show: Callable[..., Any],
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        if issubclass(kind, (SyncError, KeyboardInterrupt)):
            trace = users_part(trace) or trace
        try:
            if not _at_a_prompt():
                self._end(BaseException.with_traceback(error, trace))
                self._exit_call = None  # an earlier one, which was caught
        finally:
            failure = Failure.of(0, error) if self._brief and issubclass(kind, TORN) else None
            if failure and not failure.handled and show is sys.__excepthook__:
                print(failure.headline, file=sys.stderr)  # noqa: T201
            else:
                show(kind, error, trace)

    def _note_failed_thread(self, show: Callable[..., Any], end: Any, /) -> None:
        is_normal = end.exc_type is SystemExit  # which ends a thread without a word
        if end.exc_value is not None and end.thread is not None and not is_normal:
            headline = Failure.of(0, end.exc_value).headline[:200]
            self._thread_failure = f"thread {end.thread.name[:80]!r} has failed: {headline}"
            self._on_activity(self._thread_failure)
        show(end)

    def _note_exit(self, exit_: Callable[[Any], NoReturn], status: object = None, /) -> NoReturn:
        if self._exit_hook is not None and threading.current_thread() is threading.main_thread():
            self._exit_call = status, _outermost_frame(), sys.exc_info()[1]
        exit_(status)

    def _after_script(self, join_threads: Callable[[], None]) -> None:
        """Report a failing ``sys.exit``; else have a thread say what keeps the process."""
        if (error := self._exit_error()) is not None:
            self._end(error)
        elif not self._ended.is_set():
            try:
                threading.Thread(target=self._say_why, name="syncprims-end", daemon=True).start()
            except RuntimeError:  # Python 3.12 starts none any more
                why = _what_keeps() or "it waits, or is in an atexit function"
                self._on_activity(f"its script has ended; {why}")
        join_threads()

    def _say_why(self) -> None:
        published = ""
        while not self._ended.wait(_LOOK_AGAIN):
            with contextlib.suppress(Exception):  # the process ends meanwhile
                if (now := _what_keeps()) not in ("", published):
                    published = now
                    self._on_activity(f"its script has ended; {now}")

    def _exit_error(self) -> BaseException | None:
        status, frame, handled = self._exit_call or (None, None, None)
        if frame is None or frame is _outermost_frame():
            return None  # no sys.exit, or a child of multiprocessing, which reports its own end
        import opcode

        last = opcode.opname[frame.f_code.co_code[frame.f_lasti]]
        error = SystemExit(status)
        error.__context__ = handled
        return None if last.startswith("RETURN") else reason(error)

    def _exit(self) -> None:
        self._ended.set()
        error = sys.exc_info()[1]
        last = getattr(sys, "last_value", None)
        if error is None and sys.excepthook is not self._hook and last is not self._last_value:
            error = last  # another excepthook has replaced ours, but Python kept the exception
        self._end(reason(error or self._exit_error()))

    def _end(self, error: BaseException | None) -> None:
        if self._process != os.getpid():  # a forked child, which is not the rank
            return
        if error is not None and self._thread_failure:
            with contextlib.suppress(Exception):  # an exception may forbid it
                error.add_note(self._thread_failure)
        self._on_end(error)

    def _watch_child_of_multiprocessing(self) -> None:
        from multiprocessing.util import Finalize

        Finalize(None, self._exit, exitpriority=100)
        bootstrap = NAMES["BaseProcess._bootstrap"]
        if sys.version_info < (3, 13) or bootstrap is None:
            return
        import traceback

        print_exc = traceback.print_exc

        def print_exc_and_end(*args: object, **kwargs: object) -> None:
            if sys._getframe(1).f_code is bootstrap.__code__:  # pyright: ignore[reportPrivateUsage]
                self._exit()
            print_exc(*args, **kwargs)

        traceback.print_exc = print_exc_and_end
