"""Log lines that say which rank they come from."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from .world import topology

if TYPE_CHECKING:
    from collections.abc import MutableMapping


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines begin with the rank; ``main_only=True`` keeps a line to rank 0."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log as :meth:`logging.Logger.log`, with the rank in front."""
        main_only = kwargs.pop("main_only", False)
        if not self.isEnabledFor(level) or (main_only and topology().rank != 0):
            return
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        text, extras = self.process(msg, kwargs)
        self.logger.log(level, text, *args, **extras)

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[str, MutableMapping[str, Any]]:
        """Put the rank in front."""
        place = topology()
        if place.world_size == 1:
            return str(msg), kwargs
        return f"[rank {place.rank}] {msg}", kwargs
