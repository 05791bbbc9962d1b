"""The state that the ranks of one host share about rounds with other hosts, and about these hosts.

One rank asks the store, and all ranks of the host read the answer here. It does not matter which:
the decision about a round is the same, whichever rank writes it, and each record proves itself
whole, as in the cells. A rank that finds nothing here can still ask for itself.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterable

from ..file import memory
from ..file.abort import Aborts
from ..file.description import NO_REPORT, HostReport
from ..file.liveness import Liveness
from ..file.memory import CELLS, HEADER_SIZE, RECORD_HEAD
from .decisions import END, Store

MAGIC = b"syncprims host state 4"
OF_HOST = "-host"  #: what the name of this file adds to that of the board
_ROUND = struct.Struct("<Q")
ENTRY_SIZE = 8 * 1024
#: Bytes of a decision that fits.
MOST = ENTRY_SIZE - RECORD_HEAD - _ROUND.size
_REPORT_SIZE = 64 * 1024
#: In place of a decision that is too large: it must be read from the store.
ELSEWHERE = b"?"

BEATS = 5  #: within the time after which silence is taken for death


class HostState:
    """The shared memory of one board's `count` members on this host, one of which is `index`."""

    def __init__(self, liveness: Liveness, name: str, count: int, index: int) -> None:
        """Map it, creating it if it is not there; under the run's lock.

        :raises OSError: if there is no space for it.
        """
        self._index = index
        self._contributed_at = HEADER_SIZE + _ROUND.size * count
        self._report_at = self._contributed_at + _ROUND.size
        self._entries_at = self._report_at + _REPORT_SIZE
        intents_at = self._entries_at + CELLS * ENTRY_SIZE
        texts_at = intents_at + _ROUND.size * count
        size = texts_at + memory.TEXT_SIZE * count
        self._memory = memory.map_file(liveness.directory, f"{name}{OF_HOST}", MAGIC, count, size)
        #: Breaks the board for this host, which is cut off from the store, unless it already knows
        #: the decision about the round: so either all its ranks raise, or none does.
        places = self._memory, intents_at, texts_at, count
        self.cut = Aborts(*places, liveness.claims, f"{name}-cut", index, self._is_decided)

    # -- decisions ------------------------------------------------------------------------------

    def publish_decision(self, number: int, decision: bytes) -> bool:
        """Write the decision about a round; False if it is too large, and is read elsewhere."""
        fits = len(decision) <= MOST
        self._write(self._entry(number), number, decision if fits else ELSEWHERE)
        return fits

    def decision(self, number: int) -> bytes | None:
        """Return the decision about a round, None if it is not known here."""
        return self._read(self._entry(number), ENTRY_SIZE, number)

    def _is_decided(self, number: int) -> bool:
        """Return whether this host knows how a round ended. A member's end is not yet that."""
        return (self.decision(number) or END)[:1] != END

    def _entry(self, number: int) -> int:
        return self._entries_at + number % CELLS * ENTRY_SIZE

    # -- duties ---------------------------------------------------------------------------------

    @property
    def contributed(self) -> int:
        """The last round to which this host's notes have been contributed."""
        return int(_ROUND.unpack_from(self._memory, self._contributed_at)[0])

    @contributed.setter
    def contributed(self, number: int) -> None:
        if number > self.contributed:
            at = self._contributed_at
            self._memory[at : at + _ROUND.size] = _ROUND.pack(number)

    def set_waiting(self, number: int) -> None:
        """Publish that this member waits for the decision about a round; 0: for none."""
        at = HEADER_SIZE + _ROUND.size * self._index
        self._memory[at : at + _ROUND.size] = _ROUND.pack(number)

    def waiting_before(self, number: int) -> int:
        """Return how many members with a lower index wait for the same round."""
        return struct.unpack_from(f"<{self._index}Q", self._memory, HEADER_SIZE).count(number)

    # -- other hosts ----------------------------------------------------------------------------

    def publish_report(self, number: int, report: HostReport) -> None:
        """Write what is known about members that have not come to a round yet."""
        data = json.dumps(report).encode()
        if len(data) <= _REPORT_SIZE - RECORD_HEAD - _ROUND.size:
            self._write(self._report_at, number, data)

    def report(self, number: int) -> HostReport:
        """Return the latest report about a round."""
        data = self._read(self._report_at, _REPORT_SIZE, number)
        return HostReport(*json.loads(data)) if data else NO_REPORT

    def close(self) -> None:
        """Unmap the memory."""
        memory.unmap(self._memory)

    # -- entries --------------------------------------------------------------------------------

    def _write(self, at: int, number: int, data: bytes) -> None:
        memory.write_record(self._memory, at, _ROUND.pack(number) + data)

    def _read(self, at: int, size: int, number: int) -> bytes | None:
        data = memory.read_record(self._memory, at, size)
        return data[8:] if data is not None and data[:8] == _ROUND.pack(number) else None


def read_report(copy: bytes, count: int) -> tuple[int, HostReport]:
    """Return the latest report about other hosts in the copied state of `count` members.

    It is of the round that is also returned: 0 if there is none.
    """
    at = HEADER_SIZE + _ROUND.size * (count + 1)
    data = memory.read_record(copy, at, _REPORT_SIZE) or b""
    if len(data) <= _ROUND.size:
        return 0, NO_REPORT
    return int(_ROUND.unpack_from(data)[0]), HostReport(*json.loads(data[_ROUND.size :]))


class Heartbeat:
    """The heartbeat of this host, and what is known of the others'.

    Each host counts up its key at the store several times within the time after which its silence
    means that it is gone. All of its ranks do this, so one that is stopped or busy does not silence
    its host. Only a rank that waits for a host looks at its key, and it measures silence by
    its own clock alone. Time in which the store did not answer, or this rank did not run, proves
    nothing about other hosts, and does not count.
    """

    def __init__(self, prefix: str, host: int, limit: float) -> None:
        """Keep the counts of hosts under `prefix`; `host` is this one."""
        self.limit = limit  #: seconds of silence that mean death
        self.every = limit / BEATS  #: seconds between two beats
        self._prefix = prefix
        self._host = host
        self._seen: dict[int, tuple[int, float]] = {}  # host -> beats, and since when
        self._watched, self._ticked = 0.0, time.monotonic()  # seconds that count; the last tick

    def beat(self, store: Store) -> None:
        """Count up this host's key."""
        self._tick()
        store.add(self._key(self._host), 1)

    def look(self, store: Store, hosts: Iterable[int]) -> None:
        """Check whether these hosts have beaten since the last look."""
        for host in hosts:
            self._tick()
            beats = store.add(self._key(host), 0)
            self._tick()
            if self._seen.get(host, (-1, 0.0))[0] != beats:
                self._seen[host] = beats, self._watched

    def silence(self, host: int) -> float:
        """Return for how many seconds no beat of `host` has been seen; 0 before the first look."""
        return self._watched - self._seen.get(host, (0, self._watched))[1]

    def _tick(self) -> None:
        """Count the time since the last tick, as far as this rank and the store were at work."""
        now = time.monotonic()
        # This rank ticks at each beat at least. A longer pause was spent waiting for the store, or
        # stopped.
        self._watched += min(now - self._ticked, 2 * self.every)
        self._ticked = now

    def _key(self, host: int) -> str:
        return f"{self._prefix}/beat/{host}"
