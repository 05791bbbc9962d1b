"""Say it once, not once per rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from .world import topology

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .ranklog import RankLogger

T = TypeVar("T")


def print_main(*args: object, local: bool = False, **options: Any) -> None:
    """Print on rank 0 only; with `local`, on the first rank of each node. Options as `print`."""
    place = topology()
    if (place.local_rank if local else place.rank) == 0:
        print(*args, **options)  # noqa: T201


def progress(iterable: Iterable[T], **tqdm: Any) -> Iterable[T]:
    """Return `iterable` behind one progress bar, on rank 0; options as tqdm's.

    :raises ImportError: if tqdm is not installed.
    """
    try:
        from tqdm.auto import tqdm as bar
    except ImportError as error:
        raise ImportError(
            "progress() shows tqdm's bar: pip install 'syncprims[progress]'"
        ) from error
    tqdm.setdefault("disable", topology().rank != 0)
    return bar(iterable, **tqdm)


def get_logger(name: str) -> RankLogger:
    """Return the logger `name`; every line carries the rank, and may be kept to rank 0.

    ``logger.info("saved", main_only=True)``
    """
    import logging  # slow to import

    from .ranklog import RankLogger

    return RankLogger(logging.getLogger(name))
