"""Workers of prepared loaders, which a signal to every process of a job does not end.

A scheduler that stops a job may signal all of its processes. A rank that saves first needs its
workers until then. So only the rank itself ends them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import signal
import weakref
from collections.abc import Callable
from typing import Any

from syncprims.training.private_names import NAMES

_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PLAIN = (signal.SIG_DFL, signal.default_int_handler)


class WorkerInit:
    """Initializes a worker, as `worker_init_fn`: signals that stop jobs do not end it."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self.init = init  #: the program's own

    def __call__(self, worker: int) -> None:
        """Initialize the worker of this number."""
        for signum in _STOPPING:
            if signal.getsignal(signum) in (*_PLAIN, None):  # None: torch's, which ends on SIGTERM
                signal.signal(signum, _pass)  # and not ignored: programs that it starts are plain
        if self.init is not None:
            self.init(worker)


def _pass(signum: int, frame: object) -> None:
    """Do nothing."""


_running = weakref.WeakSet[Any]()


def end_with_rank(iterator: Any) -> None:
    """Register the workers of a loader's `iterator`; this rank ends them, at its exit or before."""
    for worker in NAMES.of(iterator, "_MultiProcessingDataLoaderIter._workers", ()):
        process = NAMES.of(worker, "BaseProcess._popen")
        process.terminate = process.kill  # they take SIGTERM for another's
    _end_at_exit()
    _running.add(iterator)


@functools.cache
def _end_at_exit() -> None:
    atexit.register(_end_all)  # after that of multiprocessing, so it runs before


def _end_all() -> None:
    for iterator in list(_running):
        with contextlib.suppress(Exception):
            NAMES.of(iterator, "_MultiProcessingDataLoaderIter._shutdown_workers")()
