"""Output once, not once per rank."""

from __future__ import annotations

import sys
from collections.abc import Iterable
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
def progress(iterable: Iterable[T], *, local: bool = False, **options: Any) -> tqdm[T]: ...
@overload
def progress(iterable: None = None, *, local: bool = False, **options: Any) -> tqdm[Any]: ...
def progress(iterable: Any = None, *, local: bool = False, **options: Any) -> tqdm[Any]:
    """Return `iterable` behind one progress bar: rank 0's; with `local`, one on each node.

    It is tqdm's own object; on the other ranks one that shows nothing. All of its methods
    (`set_postfix`, `update`, `write`, ...) and options work. Without an iterable there is
    ``progress(total=100)`` and `update`. If the output is not a terminal, the bar is a line at
    most every 5 seconds, unless `mininterval` says otherwise. The call waits for no rank, and does
    not start the world.
    """
    from tqdm.auto import tqdm as bar  # slow to import

    if not (is_local_main() if local else is_main()):
        options["disable"] = True
    elif not getattr(options.get("file") or sys.stderr, "isatty", bool)():
        options.setdefault("mininterval", _LOG_EVERY)
    return bar(iterable, **options)


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
