"""A progress bar on main, for work that takes more than a second."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

from syncprims import is_main

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

_DELAY = 1.0  # seconds


@contextlib.contextmanager
def progress_bar(
    doing: str, total: int, *, quiet: bool = False
) -> Generator[Callable[[int], object]]:
    """Yield a function that adds a number of bytes to the bar. Only one thread calls it.

    Where no bar can be shown, or not any more, the work goes on without one.
    """
    bar: Any = None

    def add(size: int) -> None:
        nonlocal bar
        if bar is not None:
            try:
                bar.update(size)
            except Exception:  # as when the reader of stderr is gone
                bar.disable = True  # else it closes itself once more
                bar = None

    if is_main() and not quiet and sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison] - of a daemon
        with contextlib.suppress(Exception):
            bar = _bar_class()(
                total=total, desc=doing, delay=_DELAY, leave=False,
                unit="B", unit_scale=True, unit_divisor=1024,
            )  # fmt: skip
    try:
        yield add
    finally:
        if bar is not None:
            try:
                bar.close()
            except Exception:
                bar.disable = True


@functools.cache
def _bar_class() -> Any:
    from tqdm.auto import tqdm

    return type("Bar", (tqdm,), {"monitor_interval": 0})  # which starts no thread
