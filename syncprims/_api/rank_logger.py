"""Log lines that say which rank they come from."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import MutableMapping
from typing import Any

from syncprims._world.runtime import get_active_group, get_topology


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines begin with the rank, and whose records carry it.

    Every method of a logger takes four keywords more: ``main_only=True`` keeps a line to rank 0,
    ``local=True`` to the first rank of each node, ``once=True`` logs a text only the first time on
    this rank, and with ``in_order=True`` the ranks log one after another. The last is a call of all
    ranks, whatever their levels are, and starts the world; the others wait for no rank.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger)
        self._logged: set[tuple[int, int, str]] = set()  # rank, level, text

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log as :meth:`logging.Logger.log`, with the rank in front."""
        main_only, local, once, in_order = (
            kwargs.pop(name, False) for name in ("main_only", "local", "once", "in_order")
        )
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        in_order = in_order and not (main_only or local)
        # Before the level is looked at: ranks whose levels differ would not meet.
        with get_active_group().in_turn() if in_order else contextlib.nullcontext():
            if not self.isEnabledFor(level):
                return
            topology = get_topology()
            # Where it is not known yet which rank is a node's first, all of them log.
            another = topology.local_rank > 0 if local else main_only and topology.rank != 0
            if another:
                return
            if once:
                # With the rank: threads that are ranks share this logger.
                key = topology.rank, level, f"{msg}{args or ''}"
                if key in self._logged:
                    return
                self._logged.add(key)
            text, extras = self.process(msg, kwargs)
            self.logger.log(level, text, *args, **extras)

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[str, MutableMapping[str, Any]]:
        """Put the rank in front, and into the record: ``%(rank)d``, ``%(world_size)d``."""
        topology = get_topology()
        names = ("rank", "local_rank", "node_rank", "world_size")
        known = {name: getattr(topology, name) for name in names}
        kwargs["extra"] = known | dict(kwargs.get("extra") or {})
        if topology.world_size == 1:
            return str(msg), kwargs
        return f"[rank {topology.rank}] {msg}", kwargs


@functools.cache  # so that `once` is once, whichever module asks for the logger
def make_rank_logger(name: str) -> RankLogger:
    """Return the adapter of the logger `name`: the same for the same name."""
    return RankLogger(logging.getLogger(name))
