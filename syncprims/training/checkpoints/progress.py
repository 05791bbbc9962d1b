"""A progress bar on main, for work that takes more than a second."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from syncprims import is_main

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

_DELAY = 1.0  # seconds


@functools.cache
def _bar_class() -> Any:
    """Return tqdm's class with a lock of this process, and without its thread.

    Forked ranks share tqdm's own lock, and it stays locked if one of them is killed inside. Its
    thread would stay until the process ends.
    """
    from tqdm.auto import tqdm

    return type("ProgressBar", (tqdm,), {"_lock": threading.RLock(), "monitor_interval": 0})


@contextlib.contextmanager
def progress_bar(
    doing: str, total: int, *, quiet: bool = False
) -> Generator[Callable[[int], object]]:
    """Yield a function that adds a number of bytes to the bar. Only one thread calls it.

    Where no bar can be shown, or not any more, the work goes on without one.
    """
    bar: Any = None
    done, begin = 0, time.monotonic()
    hidden = quiet or sys.stderr is None or not is_main()  # None: of a daemon

    def add(size: int) -> None:
        nonlocal bar, done, hidden
        done += size
        if hidden or (bar is None and time.monotonic() - begin < _DELAY):
            return
        try:
            if bar is None:
                bar = _bar_class()(
                    total=total, initial=done - size, desc=doing, leave=False,
                    unit="B", unit_scale=True, unit_divisor=1024,
                )  # fmt: skip
            bar.update(size)
        except Exception:  # as when the reader of stderr is gone
            hidden = True

    try:
        yield add
    finally:
        if bar is not None:
            try:
                bar.close()
            except Exception:
                bar.disable = True  # else it closes itself once more
