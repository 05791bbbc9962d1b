"""A progress bar on main, for what takes more than a second."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

from syncprims import is_main

if TYPE_CHECKING:
    from collections.abc import Generator

_PATIENCE = 1.0  # seconds


class Meter:
    """Counts bytes, and shows them once that takes long. Called from any one thread.

    A bar is a courtesy: where it cannot be shown (any more), the work goes on without.
    """

    def __init__(self, doing: str, total: int, *, quiet: bool = False) -> None:
        self._doing = doing
        self._total = total
        self._begin = time.monotonic()
        self._done = 0
        self._bar: Any = None
        self._may_show = is_main() and not quiet

    def __call__(self, done: int) -> None:
        """Count some more bytes."""
        self._done += done
        if self._bar is not None:
            with self._courteously():
                self._bar.update(done)
        elif self._may_show and time.monotonic() - self._begin > _PATIENCE:
            self._show()

    def _show(self) -> None:
        self._may_show = False
        if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison] - of a daemon
            return
        with self._courteously():
            from tqdm.auto import tqdm

            self._bar = tqdm(
                total=self._total, initial=self._done, desc=self._doing,
                unit="B", unit_scale=True, unit_divisor=1024, leave=False,
            )  # fmt: skip

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            with self._courteously():
                self._bar.close()

    @contextlib.contextmanager
    def _courteously(self) -> Generator[None]:
        """Do without the bar from now on if the block fails."""
        try:
            yield
        except Exception:
            if self._bar is not None:
                self._bar.disable = True  # or it would try to close itself once more
                self._bar = None


@contextlib.contextmanager
def metered(doing: str, total: int, *, quiet: bool = False) -> Generator[Meter]:
    """Show a bar for the block, if it takes long and is not to be `quiet`."""
    meter = Meter(doing, total, quiet=quiet)
    try:
        yield meter
    finally:
        meter.close()
