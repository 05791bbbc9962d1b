"""A connection to the rendezvous store, on a thread of its own.

A store's client waits inside C++: no signal, no deadline and no death reaches it there, and on a
link that was cut it waits for ever. So nobody but this thread ever waits for the store. The rank
itself waits for an answer as it waits for everything else: with a deadline, and interruptibly.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

#: Seconds that a thread gets to end; one that waits on a link that was cut never does, and stays
#: behind in C++ until the process ends.
_FAREWELL = 1.0


class StoreGone(Exception):
    """The store did not answer in time, or never will."""


class _Job:
    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


class StoreLink:
    """One connection: what is asked of it happens in order, on its thread."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Any],
        *,
        before: Callable[[threading.Event], None] | None = None,
        every: float | None = None,
        pulse: Callable[[Any], None] | None = None,
    ) -> None:
        """Connect at the first request; from then on, do `pulse` with the store every so often.

        `before` that the store is waited for, where Python can still be heard: it returns when the
        store is there, or raises when the event that it gets is set.
        """
        self._name = name
        self._connect = connect
        self._before = before
        self._closing = threading.Event()
        self._every = every
        self._pulse = pulse
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._busy_since: float | None = None
        self.broken: BaseException | None = None  #: why the store will never answer again

    @property
    def silent_for(self) -> float:
        """Seconds for which the oldest unanswered request has been waiting."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def idle(self) -> bool:
        """Tell whether nothing is under way."""
        return self._busy_since is None and self._jobs.empty()

    def submit(self, work: Callable[[Any], Any]) -> _Job:
        """Have `work` done with the store, without waiting for it."""
        job = _Job(work)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name=f"syncprims-{self._name}", daemon=True
            )
            self._thread.start()
        self._jobs.put(job)
        return job

    def ask(self, work: Callable[[Any], T], patience: float) -> T:
        """Return what `work` returns for the store.

        :raises StoreGone: if there is no answer within `patience` seconds, or no store any more.
        """
        if self.broken is not None:
            raise StoreGone(str(self.broken).partition("\n")[0])
        job = self.submit(work)
        if not job.done.wait(patience):
            raise StoreGone(f"no answer for {patience:g} s")
        if job.error is not None:
            if self.broken is not None:
                raise StoreGone(str(job.error).partition("\n")[0]) from job.error
            raise job.error
        return job.result  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the thread, and with it the connection."""
        self._closing.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(_FAREWELL)

    def _serve(self) -> None:
        store: Any = None
        next_pulse = time.monotonic()
        while True:
            job = None
            with contextlib.suppress(queue.Empty):
                beats = self._every is not None and self.broken is None
                wait = max(0.0, next_pulse - time.monotonic()) if beats else None
                job = self._jobs.get(timeout=wait)
                if job is None:
                    return
            self._busy_since = time.monotonic()
            try:
                if self.broken is not None:
                    raise StoreGone(str(self.broken))  # itself it would grow by a frame each time
                if store is None:
                    if self._before is not None:
                        self._before(self._closing)
                    store = self._connect()
                if self._every is not None and time.monotonic() >= next_pulse:
                    next_pulse = time.monotonic() + self._every
                    if self._pulse is not None:
                        with contextlib.suppress(OSError, ValueError):  # the next one may do it
                            self._pulse(store)
                if job is not None:
                    job.result = job.work(store)
            except BaseException as error:
                # What torch says when the connection has failed, and of nothing else we ask for.
                if isinstance(error, RuntimeError) and self.broken is None:
                    self.broken = error
                if job is not None:
                    job.error = error
            self._busy_since = None
            if job is not None:
                job.done.set()
