"""Loggers that write on rank 0, on every rank, or on one rank after another."""

from __future__ import annotations

import logging
import os
from typing import Any

from syncprims._api.rank_logger import RankLogger


class MultiProcessAdapter(RankLogger):
    """A logger whose messages begin with their rank, as in ``[RANK 0] done``.

    By default rank 0 logs. With ``main_process_only=False`` every rank does; with ``in_order=True``
    every rank does, one after the other, and all ranks make the call.
    """

    def __init__(self, logger: logging.Logger, extra: object = None) -> None:
        super().__init__(logger)

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log on rank 0, unless the arguments say otherwise."""
        main_only = kwargs.pop("main_process_only", True)
        kwargs["main_only"] = main_only and not kwargs.get("in_order", False)
        kwargs.setdefault("stacklevel", 2)  # as there: the line of the call
        super().log(level, msg, *args, **kwargs)

    def process(self, msg: object, kwargs: Any) -> tuple[str, Any]:
        """Put the rank in front, and into the record."""
        _, kwargs = super().process(msg, kwargs)
        return f"[RANK {kwargs['extra']['rank']}] {msg}", kwargs

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Warn, unless this rank has already warned with this text."""
        self.warning(*args, once=True, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger for all ranks.

    `log_level`, by default ``ACCELERATE_LOG_LEVEL``, becomes the level of the logger and of the
    root logger.
    """
    level = os.environ.get("ACCELERATE_LOG_LEVEL") if log_level is None else log_level
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger)
