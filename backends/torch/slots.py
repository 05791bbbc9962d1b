"""The processes of a run on several hosts, for `reform`: what each calls, and the decisions.

All of it is at the rendezvous store, by the slot of the process: its rank when the run began, or
the next free number if it joined later. Of their own host the ranks know who lives. Of another host
they know which ranks its others have seen end, and whether its heartbeat is missing: then its ranks
count as lost. If they live, they learn from the store that the others went on without them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from syncprims.errors import BackendUnavailable
from syncprims.interface import Slots, State, Topology

from .board import HostConnection
from .decisions import read_key
from .rendezvous import HostGroup, Placement, over_key
from .store import StoreGone, T

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05  # seconds between two looks at the store
_JOINER_PAUSE = 0.25  # at most, of a process that may wait for hours


class Roster:
    """Where the processes of a run are, and what they call: a log at the store, read in its order.

    A process that joins has three steps: it takes the next slot, writes where it is, and, once it
    has a liveness slot on its host, writes that. So it is known only when its end can be proven.
    Methods that take a `store` run on a link's thread.
    """

    def __init__(self, placement: Placement) -> None:
        self.hosts = list(placement.hosts)  #: a host that comes later has the next number
        self.host_of = dict(placement.host_of)  #: of each slot
        #: The liveness slot of each slot, on its host.
        self.local = {slot: n for host in self.hosts for n, slot in enumerate(host.ranks)}
        self.calls: dict[int, bytes] = {}
        self.first = len(self.local)  #: the lowest slot of a process that joins later
        self._key = f"{placement.token}/reform"
        self._read = 0  # lines
        self._counted = 0  # lines that the store's counter had when a heartbeat read the log

    def write(self, store: Any, slot: int, said: object) -> None:
        """Write a line: a host, a liveness slot, or a call."""
        store.append(f"{self._key}/log", f"{json.dumps([slot, said])}\n")
        store.add(f"{self._key}/lines", 1)
        self.read(store)

    def read_news(self, store: Any) -> None:
        """Read the log only if the counter says that there is more: it comes after its line."""
        count = store.add(f"{self._key}/lines", 0)
        if count != self._counted:
            self.read(store)
            self._counted = count

    def read(self, store: Any) -> None:
        """Read what others have written since."""
        lines = read_key(store, f"{self._key}/log").splitlines()
        for line in lines[self._read :]:
            slot, said = json.loads(line)
            if isinstance(said, list):
                host = HostGroup(*said)
                places = [known.place for known in self.hosts]
                if host.place not in places:
                    self.hosts.append(host)
                self.host_of[slot] = [*places, host.place].index(host.place)
            elif isinstance(said, int):
                self.local[slot] = said
            else:
                self.calls[slot] = said.encode()
        self._read = len(lines)

    def arrive(self, store: Any, host: HostGroup) -> int:
        """Take the next slot, on `host`, and return it."""
        slot = self.first - 1 + store.add(f"{self._key}/arrivals", 1)
        self.write(store, slot, host)
        return int(slot)


class HostSlots(Slots):
    """The processes of a run, seen from one host."""

    def __init__(
        self,
        own: int,
        connection: HostConnection,
        roster: Roster,
        begin_epoch: Callable[[int, Topology], None],
        *,
        elastic: bool,
    ) -> None:
        self.own = own
        self.roster = roster
        self.members = tuple(range(roster.first))
        self.most = roster.first
        self.open = elastic
        self._connection = connection
        self._begin_epoch = begin_epoch
        self._left: set[int] = set()
        self._admitted: set[int] = set()  # slots of all members that this rank has known

    def key(self, what: str, slot: int | str) -> str:
        """Return the key of what belongs to a slot."""
        return f"{self._connection.placement.token}/{what}/{slot}"

    @property
    def here(self) -> dict[int, int]:
        """The slots of this host, by liveness slot."""
        roster, own = self.roster, self._connection.host
        return {n: slot for slot, n in [*roster.local.items()] if roster.host_of[slot] == own}

    def publish_call(self, call: bytes) -> None:
        """Add the call to those at the store."""
        self._ask(lambda store: self.roster.write(store, self.own, call.decode()))
        self._ask(self.look)

    def call_of(self, slot: int) -> bytes:
        """Return the last call of `slot` that this rank has read."""
        return self.roster.calls.get(slot, b"")

    def state(self, slot: int) -> State:
        """Return the state of `slot`: exact on this host, the last one read on others."""
        connection = self._connection
        host = self.roster.host_of[slot]
        if host == connection.host:
            return connection.liveness.state(self.roster.local[slot])[0]
        silent = connection.heartbeat.silence(host) >= connection.heartbeat.limit
        return "lost" if silent or slot in self._left else "alive"

    def waiting(self) -> list[int]:
        """Return the slots whose processes wait to join, as known at the last heartbeat."""
        return [slot for slot in self._arrived() if self.state(slot) == "alive"]

    def _arrived(self) -> list[int]:
        """Return the slots of the processes that have joined, and not been members yet."""
        self._admitted.update(self.members)
        return sorted(slot for slot in [*self.roster.local] if slot not in self._admitted)

    def decided(self, name: str) -> str | None:
        """Return the decision at the store."""
        return self._ask(lambda store: self._read(store, name)).decode() or None

    def decide(self, name: str, word: str) -> str:
        """Write the decision at the store; the first one stays."""

        def decide(store: Any) -> bytes:
            store.compare_set(self.key("reform", name), "", word)
            return self._read(store, name)

        return self._ask(decide).decode()

    def _read(self, store: Any, name: str) -> bytes:
        word = read_key(store, self.key("reform", name))
        if word:
            self.roster.read(store)  # after it: then all members of the epoch are known
        return word

    def wait(
        self, ready: Callable[[], bool], timeout: float, missing: Callable[[], Sequence[int]]
    ) -> None:
        """Look at the store again and again."""
        deadline = self.now() + timeout
        pause, longest = _FIRST_PAUSE, _LONGEST_PAUSE if missing() else _JOINER_PAUSE
        while True:
            self._ask(self.look)
            if ready() or (left := deadline - self.now()) <= 0:
                return
            time.sleep(min(pause, left))
            pause = min(2 * pause, longest)

    def enter(self, epoch: int, topology: Topology) -> None:
        """Close all boards."""
        self.epoch = epoch
        self._begin_epoch(epoch, topology)

    def now(self) -> float:
        """Return the time of the boards."""
        return time.monotonic()

    def look(self, store: Any) -> None:
        """Read what the others have called, and who has ended."""
        self.roster.read(store)
        self._look_at(store, {*self.members, *self._arrived()})

    def look_for_arrivals(self, store: Any) -> None:
        """Read which processes wait to join, and live."""
        if self.open:
            self.roster.read_news(store)
            self._look_at(store, self._arrived())

    def leave(self, store: Any) -> None:
        """Publish that this process ends; the last one publishes that the run has ended."""
        store.set(self.key("left", self.own), "")
        others = [slot for slot in [*self.roster.local] if self.state(slot) == "alive"]
        if self.open and store.check([self.key("left", slot) for slot in (self.own, *others)]):
            store.set(over_key(self._connection.placement.token), "")

    def _look_at(self, store: Any, slots: Iterable[int]) -> None:
        hosts = {slot: self.roster.host_of[slot] for slot in slots}
        elsewhere = {s: host for s, host in hosts.items() if host != self._connection.host}
        self._left |= {slot for slot in elsewhere if store.check([self.key("left", slot)])}
        self._connection.heartbeat.look(store, {*elsewhere.values()})

    def _ask(self, work: Callable[[Any], T]) -> T:
        """Return what ``work(store)`` returns."""
        try:
            return self._connection.requests.ask(work, self._connection.heartbeat.limit)
        except StoreGone as error:
            what = f"reform() cannot ask the store at {self._connection.endpoint.address}: {error}"
            raise BackendUnavailable(f"{what}. Restart the run from a checkpoint") from error
