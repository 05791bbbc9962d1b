"""Loggers that write on rank 0, on every rank, or on one rank after another."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

import syncprims


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger whose messages begin with their rank.

    By default rank 0 logs. With ``main_process_only=False`` every rank does; with ``in_order=True``
    every rank does, one after the other, and all ranks make the call.
    """

    def __init__(self, logger: logging.Logger, extra: Any = None) -> None:
        super().__init__(logger, extra)
        self._warned: set[Any] = set()

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message with its rank."""
        msg, kwargs = super().process(msg, kwargs)
        return f"[RANK {syncprims.get_rank()}] {msg}", kwargs

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log on rank 0, unless the arguments say otherwise."""
        main_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        enabled = self.isEnabledFor(level)
        kwargs.setdefault("stacklevel", 2)  # as there: the line of the call
        if in_order:  # also if this rank logs less than the others: they wait for it
            with syncprims.in_turn():
                if enabled:
                    self._write(level, msg, args, kwargs)
        elif enabled and (syncprims.is_main() or not main_only):
            self._write(level, msg, args, kwargs)

    def _write(self, level: int, msg: Any, args: Any, kwargs: Any) -> None:
        msg, kwargs = self.process(msg, kwargs)
        kwargs["stacklevel"] += 1
        self.logger.log(level, msg, *args, **kwargs)

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Warn, unless a call with the same arguments has done so on this rank."""
        call = (syncprims.get_rank(), args, *kwargs.items())  # ranks may be threads of one process
        if call not in self._warned:
            self._warned.add(call)
            self.warning(*args, **kwargs)


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
    return MultiProcessAdapter(logger, {})
