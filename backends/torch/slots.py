"""The processes of a run on several hosts, for `reform`: what each calls, and the decisions.

All of it is at the rendezvous store, by the slot of the process: its rank when the run began. Of
their own host the ranks know who lives. Of another host they know which ranks its others have seen
end, and whether its heartbeat is missing: then its ranks count as lost. If they live, they learn
from the store that the others went on without them.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from syncprims.errors import BackendUnavailable
from syncprims.interface import Slots

from .decisions import read_key
from .store import StoreGone

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncprims.interface import State, Topology

    from .board import HostConnection
    from .store import T

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05  # seconds between two looks at the store


class HostSlots(Slots):
    """The processes of a run, seen from one host. No process joins later."""

    def __init__(
        self, rank: int, connection: HostConnection, begin_epoch: Callable[[int, Topology], None]
    ) -> None:
        self.own = rank
        self.host_of = dict(connection.placement.host_of)  #: of each slot
        self.here = list(connection.ranks)  #: the slots of this host, by liveness slot
        self.members = tuple(sorted(self.host_of))
        self.most = len(self.members)
        self._connection = connection
        self._begin_epoch = begin_epoch
        self._calls: dict[int, bytes] = {}
        self._left: set[int] = set()

    def key(self, what: str, slot: int | str) -> str:
        """Return the key of what belongs to a slot."""
        return f"{self._connection.placement.token}/{what}/{slot}"

    def publish_call(self, call: bytes) -> None:
        """Add the call to those at the store."""
        line = json.dumps([self.own, call.decode()])
        self._ask(lambda store: store.append(self.key("reform", "calls"), f"{line}\n"))
        self._ask(self._look)

    def call_of(self, slot: int) -> bytes:
        """Return the last call of `slot` that this rank has read."""
        return self._calls.get(slot, b"")

    def state(self, slot: int) -> State:
        """Return the state of `slot`: exact on this host, the last one read on others."""
        connection = self._connection
        host = self.host_of[slot]
        if host == connection.host:
            return connection.liveness.state(self.here.index(slot))[0]
        silent = connection.heartbeat.silence(host) >= connection.heartbeat.limit
        return "lost" if silent or slot in self._left else "alive"

    def waiting(self) -> list[int]:
        """Return nobody: a host of the run knows only the processes that it began with."""
        return []

    def decided(self, name: str) -> str | None:
        """Return the decision at the store."""
        return self._ask(lambda store: read_key(store, self.key("reform", name))).decode() or None

    def decide(self, name: str, word: str) -> str:
        """Write the decision at the store; the first one stays."""
        key = self.key("reform", name)
        return self._ask(lambda store: bytes(store.compare_set(key, "", word))).decode()

    def wait(self, ready: Callable[[], bool], timeout: float, waits_for: Sequence[int]) -> None:
        """Look at the store again and again."""
        deadline = self.now() + timeout
        pause = _FIRST_PAUSE
        while not ready() and (left := deadline - self.now()) > 0:
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
            self._ask(self._look)

    def enter(self, epoch: int, topology: Topology) -> None:
        """Close all boards."""
        self.epoch = epoch
        self._begin_epoch(epoch, topology)

    def now(self) -> float:
        """Return the time of the boards."""
        return time.monotonic()

    def _look(self, store: Any) -> None:
        """Read what the others have called, and who has ended."""
        for line in read_key(store, self.key("reform", "calls")).splitlines():
            slot, call = json.loads(line)
            self._calls[slot] = call.encode()
        elsewhere = {s: h for s, h in self.host_of.items() if h != self._connection.host}
        self._left |= {slot for slot in elsewhere if store.check([self.key("left", slot)])}
        self._connection.heartbeat.look(store, {*elsewhere.values()})

    def _ask(self, work: Callable[[Any], T]) -> T:
        """Return what ``work(store)`` returns."""
        try:
            return self._connection.requests.ask(work, self._connection.heartbeat.limit)
        except StoreGone as error:
            raise BackendUnavailable(
                f"reform() does not reach the store at {self._connection.endpoint.address} "
                f"({error}), and without it no two hosts agree on a new world: restart the run "
                f"from a checkpoint"
            ) from error
