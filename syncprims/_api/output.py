"""Output once, not once per rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, overload

from .collectives import is_local_main, is_main

if TYPE_CHECKING:
    from tqdm.auto import tqdm

    from .rank_logger import RankLogger

T = TypeVar("T")

_LOG_EVERY = 5.0  # seconds between two lines of a bar that goes into a log


def print_main(*args: object, local: bool = False, **options: Any) -> None:
    """Print on rank 0 only; with `local`, on the first rank of each node. Waits for no rank.

    Options as `print`.
    """
    if is_local_main() if local else is_main():
        print(*args, **options)  # noqa: T201


@overload
def progress(iterable: Iterable[T], *, local: bool = False, **options: object) -> tqdm[T]: ...
@overload
def progress(iterable: None = None, *, local: bool = False, **options: object) -> tqdm[Any]: ...
def progress(iterable: object = None, *, local: bool = False, **options: object) -> tqdm[Any]:
    """Return `iterable` behind one progress bar: rank 0's; with `local`, one on each node.

    It is tqdm's own object; on the other ranks one that shows nothing. All of its methods
    (`set_postfix`, `update`, `write`, ...) and options work. Without an iterable there is
    ``progress(total=100)`` and `update`. If the output is not a terminal, the bar is a line at
    most every 5 seconds, unless `mininterval` says otherwise. The call waits for no rank, and does
    not start the world.

    Without tqdm it prints such lines, also on a terminal, and has tqdm's most used methods:
    `update`, `set_postfix`, `set_postfix_str`, `set_description`, `write`, `refresh`, `close`.
    """
    bar: Any
    try:
        from tqdm.auto import tqdm as bar  # slow to import
    except ImportError:
        bar = _ProgressLines

    if not (is_local_main() if local else is_main()):
        options["disable"] = True
    elif not getattr(options.get("file") or sys.stderr, "isatty", bool)():
        options.setdefault("mininterval", _LOG_EVERY)
    return bar(iterable, **options)  # type: ignore[no-any-return]


class _ProgressLines:
    """Shows progress as lines; has the names of tqdm, and ignores its other options."""

    def __init__(
        self, iterable: Any = None, *, desc: str = "", total: float | None = None,
        disable: bool = False, initial: float = 0, mininterval: float = _LOG_EVERY,
        unit: str = "it", file: Any = None, **_ignored: object,
    ) -> None:  # fmt: skip
        self.iterable, self.desc, self.disable, self.n = iterable, desc, disable, initial
        self.total = len(iterable) if total is None and hasattr(iterable, "__len__") else total
        self.mininterval = mininterval
        self._unit, self._file, self._postfix = unit, file, ""
        self._first = self.n
        self._began = self._shown_at = time.monotonic()
        self._shown: float | None = None

    def __iter__(self) -> Iterator[Any]:
        with self:
            for item in self.iterable:
                yield item
                self.update()

    def __len__(self) -> int:
        return int(self.total or 0)

    def __enter__(self) -> _ProgressLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, n: float = 1) -> None:
        if not self.disable:
            self.n += n
            if time.monotonic() - self._shown_at >= self.mininterval:
                self.refresh()

    def refresh(self) -> None:
        if self.disable:
            return
        self._shown, self._shown_at = self.n, time.monotonic()
        count = f"{self.n:g}" if not self.total else f"{self.n:g}/{self.total:g}"
        share = f" ({self.n / self.total:.0%})" if self.total else ""
        rate = (self.n - self._first) / max(self._shown_at - self._began, 1e-9)
        line = f"{count}{share}, {rate:.3g} {self._unit}/s{self._postfix}"
        self.write(f"{self.desc}: {line}" if self.desc else line, self._file or sys.stderr)

    def close(self) -> None:
        if self._shown != self.n:
            self.refresh()

    def set_description(self, desc: str = "", refresh: bool = True) -> None:
        self.desc = desc

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        self._postfix = f", {s}" if s else ""

    def set_postfix(self, ordered_dict: Any = (), refresh: bool = True, **numbers: object) -> None:
        facts = {**dict(ordered_dict), **numbers}
        texts = (f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in facts.items())
        self.set_postfix_str(", ".join(texts))

    @staticmethod
    def write(s: str, file: Any = None) -> None:
        print(s, file=file or sys.stdout, flush=True)


def get_logger(name: str, level: int | str | None = None) -> RankLogger:
    """Return the logger `name`, whose lines carry the rank, and may be kept to rank 0.

    ``logger.info("saved", main_only=True)``; see :class:`RankLogger` for `local`, `once` and
    `in_order`. Underneath is `logging.getLogger(name)`, with its handlers and levels; `level` sets
    its level, and no other logger's. Waits for no rank, and does not start the world.
    """
    from .rank_logger import make_rank_logger  # logging is slow to import

    logger = make_rank_logger(name)
    if level is not None:
        logger.setLevel(level)
    return logger
