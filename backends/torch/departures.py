"""Who has left a run, so that the rank that serves its store can be the last."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .heartbeat import Heartbeat
    from .store_link import StoreLink

_HURRY = 2.0  # seconds that a rank which fails stays for the others


class Departures:
    """The ranks that have left, as the store under `prefix` knows them."""

    def __init__(self, prefix: str, host_of: Mapping[int, int]) -> None:
        self._prefix = prefix
        self._host_of = host_of

    def note(self, store: Any, rank: int) -> None:
        """Write down that a rank has left, or is dead."""
        store.set(self._key(rank), "")

    def await_all(
        self,
        link: StoreLink,
        heartbeat: Heartbeat,
        *,
        but: int,
        hurry: bool,
        warn_after: float,
    ) -> None:
        """Return when every rank `but` one has left, or is on a host that is gone.

        :raises StoreGone: if there is no store any more.
        """
        here = self._host_of[but]
        left = [rank for rank in self._host_of if rank != but]
        begin = warned = time.monotonic()

        def look(store: Any) -> list[int]:
            still = [rank for rank in left if not store.check([self._key(rank)])]
            heartbeat.look(store, {self._host_of[rank] for rank in still} - {here})
            return still

        while True:
            left = [
                rank
                for rank in link.ask(look, heartbeat.limit)
                if self._host_of[rank] == here
                or heartbeat.silence(self._host_of[rank]) < heartbeat.limit
            ]
            now = time.monotonic()
            if not left or (hurry and now - begin > _HURRY):
                return
            if now - warned > warn_after:
                warned = now
                logging.getLogger("syncprims").warning(
                    f"rank {but} has finished, and stays on to serve the store of ranks {left[:8]}"
                )
            time.sleep(min(0.2, 0.005 + (now - begin) / 10))

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/left/{rank}"
