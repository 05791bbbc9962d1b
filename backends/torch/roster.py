"""The processes of a run on several hosts, for `reform`: what each calls, and the decisions.

All of it is at the rendezvous store, by the number of the process. Of their own host the ranks know
who lives. Of another host they know which ranks its others have seen end, and whether its heartbeat
is missing: then its ranks count as lost. If they live, they learn from the store that the others
went on without them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from syncprims.errors import BackendUnavailable
from syncprims.interface import State

from .board import HostConnection
from .decisions import Store, read_key
from .rendezvous import HostGroup, Placement, over_key
from .store import StoreGone, T

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05  # seconds between two looks at the store
_JOINER_PAUSE = 0.25  # at most, of a process that may wait for hours


class Roster:
    """Where the processes of a run are, and what they call: a log at the store, read in its order.

    A process that joins has three steps: it takes the next number, writes where it is, and, once it
    has a number on its host, writes that. So it is known only when its end can be proven.
    Methods that take a `store` run on a link's thread.
    """

    def __init__(self, placement: Placement) -> None:
        self.hosts = list(placement.hosts)  #: a host that comes later has the next number
        self.host_of = dict(placement.host_of)  #: of each process
        #: The number of each process on its host.
        self.local = {process: n for host in self.hosts for n, process in enumerate(host.ranks)}
        self.calls: dict[int, bytes] = {}
        self.first = len(self.local)  #: the lowest number of a process that joins later
        self._key = f"{placement.token}/reform"
        self._read = 0  # lines
        self._counted = 0  # lines that the store's counter had when a heartbeat read the log

    def write(self, store: Store, process: int, said: object) -> None:
        """Write a line: a host, the number there, or a call."""
        store.append(f"{self._key}/log", f"{json.dumps([process, said])}\n")
        store.add(f"{self._key}/lines", 1)
        self.read(store)

    def read_news(self, store: Store) -> None:
        """Read the log only if the counter says that there is more: it comes after its line."""
        count = store.add(f"{self._key}/lines", 0)
        if count != self._counted:
            self.read(store)
            self._counted = count

    def read(self, store: Store) -> None:
        """Read what others have written since."""
        lines = read_key(store, f"{self._key}/log").splitlines()
        for line in lines[self._read :]:
            process, said = json.loads(line)
            if isinstance(said, list):
                host = HostGroup(*said)
                places = [known.place for known in self.hosts]
                if host.place not in places:
                    self.hosts.append(host)
                self.host_of[process] = [*places, host.place].index(host.place)
            elif isinstance(said, int):
                self.local[process] = said
            else:
                self.calls[process] = said.encode()
        self._read = len(lines)

    def arrive(self, store: Store, host: HostGroup) -> int:
        """Take the next number, on `host`, and return it."""
        process = self.first - 1 + store.add(f"{self._key}/arrivals", 1)
        self.write(store, process, host)
        return int(process)


class Processes:
    """The processes of a run, seen from one host."""

    def __init__(
        self, own: int, connection: HostConnection, roster: Roster, *, elastic: bool
    ) -> None:
        self.own = own
        self.roster = roster
        self.members = tuple(range(roster.first))
        self._open = elastic
        self.connection = connection  #: of this host, in the present epoch
        self._left: set[int] = set()
        self._admitted: set[int] = set()  # all members that this rank has known

    def key(self, what: str, name: int | str) -> str:
        """Return the key of what belongs to a process, or to a decision."""
        return f"{self.connection.placement.token}/{what}/{name}"

    @property
    def here(self) -> dict[int, int]:
        """The processes of this host, by their number there."""
        roster, own = self.roster, self.connection.host
        return {n: p for p, n in [*roster.local.items()] if roster.host_of[p] == own}

    def publish(self, call: bytes) -> None:
        """Add the call of `reform` to those at the store."""
        self._ask(lambda store: self.roster.write(store, self.own, call.decode()))
        self._ask(self.look)

    def published(self, process: int) -> bytes:
        """Return the last call of `process` that this rank has read."""
        return self.roster.calls.get(process, b"")

    def state(self, process: int) -> State:
        """Return the state of `process`: exact on this host, the last one read on others."""
        connection = self.connection
        host = self.roster.host_of[process]
        if host == connection.host:
            return connection.liveness.state(self.roster.local[process])[0]
        silent = connection.heartbeat.silence(host) >= connection.heartbeat.limit
        return "lost" if silent or process in self._left else "alive"

    def arrived(self) -> list[int]:
        """Return the processes that wait to join, as known at the last heartbeat."""
        return [process for process in self._arrived() if self.state(process) == "alive"]

    def _arrived(self) -> list[int]:
        """Return the processes that have joined, and not been members yet."""
        self._admitted.update(self.members)
        return sorted(p for p in [*self.roster.local] if p not in self._admitted)

    def decide(self, name: str, value: str = "") -> str:
        """Return the decision at the store; write it there if there is none, and a `value`."""
        key = self.key("reform", name)

        def decide(store: Store) -> bytes:
            if value:
                store.compare_set(key, "", value)
            found = read_key(store, key)
            if found:
                self.roster.read(store)  # after it: then all members of the epoch are known
            return found

        return self._ask(decide).decode()

    def wait(self, ready: Callable[[], bool], until: float) -> bool:
        """Look at the store again and again."""
        pause, longest = _FIRST_PAUSE, _LONGEST_PAUSE if self.own in self.members else _JOINER_PAUSE
        while True:
            self._ask(self.look)
            if ready():
                return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, longest)

    def look(self, store: Store) -> None:
        """Read what the others have called, and who has ended."""
        self.roster.read(store)
        self._look_at(store, {*self.members, *self._arrived()})

    def look_for_arrivals(self, store: Store) -> None:
        """Read which processes wait to join, and live."""
        if self._open:
            self.roster.read_news(store)
            self._look_at(store, self._arrived())

    def leave(self, store: Store) -> None:
        """Publish that this process ends; the last one publishes that the run has ended."""
        store.set(self.key("left", self.own), "")
        others = [p for p in [*self.roster.local] if self.state(p) == "alive"]
        if self._open and store.check([self.key("left", p) for p in (self.own, *others)]):
            store.set(over_key(self.connection.placement.token), "")

    def _look_at(self, store: Store, processes: Iterable[int]) -> None:
        hosts = {process: self.roster.host_of[process] for process in processes}
        elsewhere = {p: host for p, host in hosts.items() if host != self.connection.host}
        self._left |= {p for p in elsewhere if store.check([self.key("left", p)])}
        self.connection.heartbeat.look(store, {*elsewhere.values()})

    def _ask(self, work: Callable[[Any], T]) -> T:
        """Return what ``work(store)`` returns."""
        try:
            return self.connection.requests.ask(work, self.connection.heartbeat.limit)
        except StoreGone as error:
            what = f"reform() cannot ask the store at {self.connection.endpoint.address}: {error}"
            raise BackendUnavailable(f"{what}. Restart the run from a checkpoint") from error
