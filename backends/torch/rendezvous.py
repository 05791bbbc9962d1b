"""The rendezvous: ranks agree through the store on who takes part and who shares a host.

What launchers say about nodes is not enough: containers with a GPU each may share a machine and no
memory. So each rank publishes the directory in which it would meet others, by what the kernel calls
it. A directory is the same for two ranks only if both see the same memory there.

A rendezvous has epochs. Each rank adds its entry to the open epoch, and the rank that completes it
writes the result. Then each rank confirms that it has read this, and the last one begins the world.
So an entry of a rank that was killed while it joined begins no world: the process that takes its
place finds an epoch that is complete and has not begun, and voids it. An epoch that has begun, or
is void, is over, and the next one is open.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import time
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from syncprims.errors import BackendUnavailable, SyncTimeout

from ..file.backend import base_path
from ..file.private_dir import PrivateDirectory
from .store import TRY_AGAIN, StoreGone, read_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncprims.interface import Settings, Topology

    from .store import StoreEndpoint, StoreLink, T

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.25  # seconds between two checks whether all have come
_LEAVING = 2.0  # seconds to publish that this rank leaves the epoch
_VOID, _BEGUN = b"void", b"begun"


class HostGroup(NamedTuple):
    """Ranks that share memory."""

    name: str
    ranks: list[int]  #: ascending
    devices: bool = False  #: there is one for each of them


class Placement:
    """All ranks of one world, by host."""

    def __init__(self, token: str, hosts: list[HostGroup]) -> None:
        self.token = token  #: unique to this world
        self.hosts = hosts  #: by lowest rank
        #: of each rank
        self.host_of = {rank: number for number, host in enumerate(hosts) for rank in host.ranks}


class JoinWarning:
    """Logs what a rank waits for that joins, at first after so many seconds, then less often."""

    def __init__(self, after: float) -> None:
        self._begin = time.monotonic()
        self._every = after
        self._at = self._begin + after

    @property
    def left(self) -> float:
        """Seconds until the next warning."""
        return max(0.0, self._at - time.monotonic())

    def log(self, missing: str, detail: object) -> None:
        """Log a warning, and begin to wait for the next one."""
        waited = time.monotonic() - self._begin
        text = "still waiting for %s at init for %.0f s; %s"
        logging.getLogger("syncprims").warning(text, missing, waited, detail)
        self._every *= 2
        self._at = time.monotonic() + self._every


class Rendezvous:
    """One rank's part in a rendezvous. Methods that take a `store` run on a link's thread."""

    def __init__(
        self,
        links: Sequence[StoreLink],
        endpoint: StoreEndpoint,
        topology: Topology,
        settings: Settings,
        deadline: float,
        warning: JoinWarning,
    ) -> None:
        self._links = links
        self._endpoint = endpoint
        self._top = topology
        self._join_timeout = settings.join_timeout
        self._deadline = deadline
        self._warning = warning
        self._prefix = f"world-{topology.world_size}/rendezvous"
        self._epoch = ""  # prefix of the keys of the epoch that this rank is in
        self._complete = False  # the epoch, when the missing ranks were last looked for
        self._missing: list[int] = []  # as last known: the rank that serves the store may go first
        place = identify_place(settings)
        # To count the devices that this process sees touches none.
        entry = [topology.rank, place, socket.gethostname(), torch.cuda.device_count()]
        self._entry = json.dumps(entry).encode() + b"\n"

    def run(self) -> Placement:
        """Return who takes part, once all have come and have all their links to the store.

        :raises SyncTimeout: naming the ranks that have not come at the deadline.
        :raises BackendUnavailable: if the store cannot be reached.
        :raises StoreGone: if the store ended meanwhile, and there is time for another attempt.
        """
        try:
            for link in self._links:
                # Now, and not when they are needed: a store may take seconds for a new connection,
                # to look up the name of the caller, and answers no other rank meanwhile.
                self._reach(link)
            while True:
                self._epoch = self._ask(self._enter)
                placement = self._await_result()
                if placement is not None:
                    return placement
                if self._left() < _LEAVING:
                    # Another rank's deadline came a moment before this one's. The ranks that were
                    # late for it are late for this one.
                    self._missing = self._ask(self._find_missing)
                    if self._missing:
                        raise StoreGone("not all ranks have come")
        except StoreGone as error:
            if self._left() > (_LEAVING if self._missing else TRY_AGAIN):
                raise
            why = error
        if self._epoch:
            with contextlib.suppress(StoreGone):
                placement = self._links[0].ask(self._void, _LEAVING)
                if placement is not None:
                    return placement
            if self._missing:
                raise self._never_came()
        raise unreachable(self._top, self._endpoint, why) from why

    def _reach(self, link: StoreLink) -> None:
        """Return once `link` has its connection to the store."""
        answer = link.submit(lambda store: None)
        while not answer.done() and self._left():
            futures.wait([answer], min(self._left(), self._warning.left))
            if not answer.done() and not self._warning.left:
                why = self._endpoint.refusal or "it does not answer"
                self._warning.log(f"the store at {self._endpoint.address}", why)
        if not answer.done():
            raise StoreGone(f"no answer for {self._join_timeout:g} s")
        link.ask(lambda store: None, self._left())  # raises what the first request met

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _ask(self, work: Callable[[Any], T]) -> T:
        return self._links[0].ask(work, self._left())

    def _await_result(self) -> Placement | None:
        """Return the result of the epoch once the world has begun; None if the epoch is void."""
        pause, result = _FIRST_PAUSE, b""
        while True:
            if not self._left():
                raise StoreGone("not all ranks have come")
            time.sleep(min(pause, self._left()))
            pause = min(1.2 * pause, _LONGEST_PAUSE)  # many ranks may ask
            if not result:
                result = self._ask(self._confirm)
            elif outcome := self._ask(lambda store: read_key(store, f"{self._epoch}outcome")):
                return _decode(result) if outcome == _BEGUN else None
            if result == _VOID:
                return None
            if self._left() < _LEAVING or not self._warning.left:
                self._missing = self._ask(self._find_missing)
            if self._missing and not self._warning.left:
                never = "; ".join(f"rank {rank} never joined" for rank in self._missing[:8])
                self._warning.log(f"ranks {self._missing}", never)

    def _never_came(self) -> SyncTimeout:
        top, missing, waited = self._top, self._missing, self._join_timeout - self._left()
        arrived = [rank for rank in range(top.world_size) if rank not in missing]
        how = "ended while it joined" if self._complete else "never joined"
        lines = "\n".join(f"  rank {rank} {how}" for rank in missing)
        return SyncTimeout(
            f"init timed out after {waited:.1f} s: ranks {missing} did not come, ranks {arrived} "
            f"did\n{lines}\nThis rank waits at the store at {self._endpoint.address}, run id "
            f"{top.run_id!r}: a rank that was started with others never meets it. See what keeps "
            f"ranks {missing}. If they are only slow, allow more: SYNCPRIMS_JOIN_TIMEOUT.",
            rank=top.rank,
            call="init",
            missing=missing,
            arrived=arrived,
            waited=waited,
        )

    # -- at the store ---------------------------------------------------------------------------

    def _enter(self, store: Any) -> str:
        """Add this rank's entry to the open epoch, and return the prefix of that epoch's keys.

        A second world of the same processes opens the next epoch. If this rank comes to one that
        is complete, a process before it was killed while it joined as this rank.
        """
        number = 1
        while store.check([f"{self._prefix}/{number}/result"]):
            store.compare_set(f"{self._prefix}/{number}/outcome", "", _VOID)
            number += 1
        epoch = f"{self._prefix}/{number}/"
        store.append(f"{epoch}entries", self._entry)
        if store.add(f"{epoch}count", 1) >= self._top.world_size:
            entries = _entries(store, epoch)
            if len(entries) == self._top.world_size:
                result = json.dumps([secrets.token_hex(8), _by_host(entries)])
                store.compare_set(f"{epoch}result", "", result)
        return epoch

    def _confirm(self, store: Any) -> bytes:
        """Confirm the result of this epoch if it is there, and return it; the last one begins."""
        result = read_key(store, f"{self._epoch}result")
        if result not in (b"", _VOID):
            store.append(f"{self._epoch}confirmed", f"{self._top.rank}\n")
            if store.add(f"{self._epoch}confirmations", 1) == self._top.world_size:
                store.compare_set(f"{self._epoch}outcome", "", _BEGUN)
        return result

    def _find_missing(self, store: Any) -> list[int]:
        self._complete = bool(read_key(store, f"{self._epoch}result"))
        if self._complete:
            came = {int(rank) for rank in read_key(store, f"{self._epoch}confirmed").split()}
        else:
            came = set(_entries(store, self._epoch))
        return [rank for rank in range(self._top.world_size) if rank not in came]

    def _void(self, store: Any) -> Placement | None:
        """Void this epoch by compare-and-set; return its result if the world has begun.

        No rank may use an epoch that another has left. The others open the next one, where this
        rank may meet them if it tries again.
        """
        result = bytes(store.compare_set(f"{self._epoch}result", "", _VOID))
        outcome = bytes(store.compare_set(f"{self._epoch}outcome", "", _VOID))
        return _decode(result) if outcome == _BEGUN else None


def _decode(result: bytes) -> Placement:
    token, hosts = json.loads(result)
    return Placement(token, [HostGroup(*host) for host in hosts])


def _entries(store: Any, epoch: str) -> dict[int, tuple[str, str, int]]:
    """Return the directory, the host's name and the number of devices of each rank."""
    entries = map(json.loads, store.get(f"{epoch}entries").splitlines())
    return {rank: (place, name, devices) for rank, place, name, devices in entries}


def _by_host(entries: dict[int, tuple[str, str, int]]) -> list[HostGroup]:
    at: dict[str, list[int]] = {}
    for rank in sorted(entries):
        at.setdefault(entries[rank][0], []).append(rank)
    return [
        HostGroup(entries[ranks[0]][1], ranks, min(entries[r][2] for r in ranks) >= len(ranks))
        for ranks in at.values()
    ]


def identify_place(settings: Settings) -> str:
    """Return what this kernel, and no other, calls the directory where ranks of a host meet."""
    with contextlib.closing(PrivateDirectory.open(base_path(settings))) as base:
        found = os.fstat(base.fd)
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        boot = socket.gethostname()
    return f"{boot}-{found.st_dev}-{found.st_ino}"


def unreachable(top: Topology, endpoint: StoreEndpoint, why: StoreGone) -> BackendUnavailable:
    """Return the error that there is no store, or none any more."""
    return BackendUnavailable(
        f"rank {top.rank} cannot reach the store at {endpoint.address}: {endpoint.refusal or why}. "
        f"It is served by rank 0, or by torchrun's agent on its host: is that up, and are "
        f"MASTER_ADDR and MASTER_PORT right and open from here?"
    )
