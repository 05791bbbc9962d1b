"""The rendezvous: ranks agree through the store on who takes part and who shares a host.

What launchers say about nodes is not enough: containers with a GPU each may share a machine and no
memory. So each rank publishes the directory in which it would meet others, by what the kernel calls
it. A directory is the same for two ranks only if both see the same memory there.

A rendezvous has epochs. Each rank adds its entry to the open epoch, and the rank that completes it
proposes the result. It holds once every process in it has confirmed it: an entry may be of one that
has ended, or that its launcher has replaced. Processes of one rank are numbered at the store. The
latest counts, and voids a proposal that names an earlier one. An epoch that is complete, or void,
is closed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from syncprims import errors
from syncprims.errors import BackendUnavailable, ConfigurationError, PeerLost, SyncTimeout
from syncprims.interface import Settings, Topology

from ..file.backend import find_early_ends, lives_here
from ..file.private_dir import PrivateDirectory, base_path
from .decisions import Store, read_key
from .store import TRY_AGAIN, StoreEndpoint, StoreGone, StoreLink, T

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.25  # seconds between two checks whether all have come
_LEAVING = 2.0  # seconds to publish that this rank leaves the epoch
_COMPLETE, _VOID = b"complete", b"void"
_BROKEN = b"broken "  # then the error of all ranks


class HostGroup(NamedTuple):
    """Ranks that share memory."""

    name: str
    ranks: list[int]  #: ascending
    devices: bool = False  #: there is one for each of them
    place: str = ""  #: of the memory that they share


class Placement:
    """All ranks of one world, by host."""

    goes_on = False  #: it has begun without this process, which may join it

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


@dataclass
class Rendezvous:
    """One rank's part in a rendezvous. Methods that take a `store` run on a link's thread."""

    met: ClassVar[set[str]] = set()  #: tokens of the worlds that this process was in

    links: Sequence[StoreLink]
    endpoint: StoreEndpoint
    top: Topology
    settings: Settings
    deadline: float
    warning: JoinWarning
    _epoch: str = ""  # prefix of the keys of the epoch that this rank is in
    #: Who is missing and why, as last known: the rank that serves the store may go first.
    _missing: dict[int, str] = field(default_factory=dict[int, str])
    _incarnation: int = 0  # which of the processes that had this rank it is, from 1
    _confirmed: bool = False  # the proposal of this epoch

    def __post_init__(self) -> None:
        self._prefix = f"world-{self.top.world_size}/rendezvous"
        self._entry = [self.top.rank, *describe_here(self.settings)]

    def run(self) -> Placement:
        """Return who takes part, once all have come and have all their links to the store.

        If the run is elastic, and goes on without the process that had this rank, return how it
        began.

        :raises SyncTimeout: naming the ranks that have not come at the deadline.
        :raises BackendUnavailable: if the store cannot be reached.
        :raises StoreGone: if the store ended meanwhile, and there is time for another attempt.
        """
        try:
            for link in self.links:
                # Now, and not when they are needed: a store may take seconds for a new connection,
                # to look up the name of the caller, and answers no other rank meanwhile.
                self._reach(link)
            while True:
                epoch = self._ask(self._enter)
                if epoch is None:
                    raise self._replaced()
                if isinstance(epoch, Placement):
                    return epoch
                self._epoch, self._confirmed = epoch, False
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
                placement = self.links[0].ask(self._void, _LEAVING)
                if placement is not None:
                    return placement
            if self._missing:
                raise self._never_came()
        raise unreachable(self.top, self.endpoint, why) from why

    def _reach(self, link: StoreLink) -> None:
        """Return once `link` has its connection to the store."""
        answer = link.submit(lambda store: None)
        while not answer.done() and self._left():
            futures.wait([answer], min(self._left(), self.warning.left))
            if not answer.done() and not self.warning.left:
                why = self.endpoint.refusal or "it does not answer"
                self.warning.log(f"the store at {self.endpoint.address}", why)
        if not answer.done():
            raise StoreGone(f"no answer for {self.settings.join_timeout:g} s")
        link.ask(lambda store: None, self._left())  # raises what the first request met

    def _left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _ask(self, work: Callable[[Any], T]) -> T:
        return self.links[0].ask(work, self._left())

    def _await_result(self) -> Placement | None:
        """Return the result of the epoch once it is closed; None if it is void."""
        pause = _FIRST_PAUSE
        while True:
            if not self._left():
                raise StoreGone("not all ranks have come")
            time.sleep(min(pause, self._left()))
            pause = min(1.2 * pause, _LONGEST_PAUSE)  # many ranks may ask
            confirmed = self._confirmed
            result = self._ask(self._look)
            if result:
                return _decode(result)
            self._look_for_early_ends()
            if self._confirmed and not confirmed:
                pause = _FIRST_PAUSE  # the others confirm it now
            if self._left() < _LEAVING or not self.warning.left:
                self._missing = self._ask(self._find_missing)
            if self._missing and not self.warning.left:
                why = [f"rank {rank} {why}" for rank, why in self._missing.items()]
                self.warning.log(f"ranks {list(self._missing)}", "; ".join(why[:8]))

    def _look_for_early_ends(self) -> None:
        """Break the epoch if a rank that it lacks is known to have ended."""
        ends = find_early_ends(self.top, self.settings)
        lost = [rank for rank in self._ask(self._find_missing) if rank in ends] if ends else []
        if lost:
            joined = self._ask(lambda store: [rank for rank in lost if self._has_come(store, rank)])
            rank = min(lost, key=lambda rank: (rank in joined, rank))  # first what is the cause
            call = self.settings.first_call or "init"
            facts = rank, ends[rank].how, rank in joined
            error: errors.SyncError = PeerLost.before_start(
                *facts, waiting=self.top.rank, call=call
            )
            for failure in errors.load(ends[rank].failure).failures.values():
                error = errors.PeerFailed.from_failure(failure, waiting=call)
            error.missing = lost
            verdict = _BROKEN + errors.dump(error)
            self._ask(lambda store: store.compare_set(f"{self._epoch}end", "", verdict))

    def _never_came(self) -> SyncTimeout:
        top, missing = self.top, list(self._missing)
        waited = self.settings.join_timeout - self._left()
        call = self.settings.first_call or "init"
        arrived = [rank for rank in range(top.world_size) if rank not in missing]
        lines = "\n".join(f"  rank {rank} {why}" for rank, why in self._missing.items())
        who = f"ranks {missing} did not come, ranks {arrived} did"
        where = f"the store at {self.endpoint.address}, run id {top.run_id!r}"
        return SyncTimeout(
            f"{call} timed out after {waited:.1f} s: {who}\n{lines}\nThis rank waits at {where}: a "
            f"rank that was started with others never meets it. See what keeps ranks {missing}. If "
            f"they are only slow, allow more: SYNCPRIMS_JOIN_TIMEOUT.",
            rank=top.rank, call=call, missing=missing, arrived=arrived, waited=waited,
        )  # fmt: skip

    def _replaced(self) -> ConfigurationError:
        rank = self.top.rank
        what = f"rank {rank} of run {self.top.run_id!r} is taken by a process that started later"
        cure = "give every process its own rank, and every run its own SYNCPRIMS_RUN_ID"
        return ConfigurationError(f"{what}: {cure}", rank=rank)

    # -- at the store ---------------------------------------------------------------------------

    def _enter(self, store: Store) -> str | Placement | None:
        """Add this rank's entry to the open epoch, and return the prefix of that epoch's keys.

        Or the world of an earlier epoch, if this process may join it in place of a lost one. None
        if another process has this rank now. An epoch is closed once all ranks are in it, and
        then belongs to their world. So a second world of the same processes opens the next.
        """
        latest = store.add(self._incarnations_of(self.top.rank), not self._incarnation)
        if self._incarnation not in (0, latest):
            return None
        self._incarnation = latest
        number = 1
        while store.check([f"{self._prefix}/{number}/end"]):
            number += 1
        goes_on = self.settings.elastic and self._find_world(store, number)
        if goes_on:
            return goes_on
        epoch = f"{self._prefix}/{number}/"
        entry = json.dumps([*self._entry, self._incarnation])
        store.append(f"{epoch}entries", f"{entry}\n")
        if store.add(f"{epoch}count", 1) >= self.top.world_size:
            entries = _entries(store, epoch)
            if len(entries) == self.top.world_size:
                incarnations = [entries[rank].incarnation for rank in sorted(entries)]
                result = json.dumps([secrets.token_hex(8), _by_host(entries), incarnations])
                store.compare_set(f"{epoch}result", "", result)
        return epoch

    def _find_world(self, store: Store, number: int) -> Placement | None:
        """Return the newest world before epoch `number`, if it goes on without this process."""
        epochs = (f"{self._prefix}/{earlier}/" for earlier in range(number - 1, 0, -1))
        newest = next((e for e in epochs if read_key(store, f"{e}end") == _COMPLETE), None)
        found = newest and _decode(read_key(store, f"{newest}result"))
        if not found or found.token in self.met or store.check([over_key(found.token)]):
            return None
        if len(found.hosts) == 1:  # it has no link to the store: the memory of that host tells
            here = found.hosts[0].place == self._entry[1]
            if not here or not lives_here(found.token, self.settings):
                return None
        found.goes_on = True
        return found

    def _incarnations_of(self, rank: int) -> str:
        return f"{self._prefix}/incarnations/{rank}"

    def _has_come(self, store: Store, rank: int) -> bool:
        """Return whether a process of `rank` has entered any epoch."""
        return bool(store.check([self._incarnations_of(rank)]))

    def _look(self, store: Store) -> bytes:
        """Return how the epoch has ended, empty if it has not; confirm its result, or void it."""
        end = read_key(store, f"{self._epoch}end")
        if end.startswith(_BROKEN):
            return end
        if end == _VOID or self._confirmed:
            return read_key(store, f"{self._epoch}result") if end == _COMPLETE else end
        result = read_key(store, f"{self._epoch}result")
        if not result:
            return b""
        *_, incarnations = json.loads(result)
        if incarnations[self.top.rank] != self._incarnation:
            # It names an earlier process of this rank. (Or a later one: then the next epoch says
            # so.) If that has confirmed it, too, it is the result of an earlier world.
            store.compare_set(f"{self._epoch}end", "", _VOID)
            return _VOID
        self._confirmed = True
        store.append(f"{self._epoch}confirmed", f"{self.top.rank} ")
        if store.add(f"{self._epoch}confirmations", 1) < self.top.world_size:
            return b""
        end = store.compare_set(f"{self._epoch}end", "", _COMPLETE)
        return result if end == _COMPLETE else _VOID

    def _find_missing(self, store: Store) -> dict[int, str]:
        entries, ranks = _entries(store, self._epoch), range(self.top.world_size)
        missing = {rank: "never joined" for rank in ranks if rank not in entries}
        if missing or not store.check([f"{self._epoch}result"]):
            return missing
        confirmed = set(map(int, read_key(store, f"{self._epoch}confirmed").split()))
        why = "ended or stopped while it joined"
        return {rank: why for rank in ranks if rank not in confirmed}

    def _void(self, store: Store) -> Placement | None:
        """Void this epoch by compare-and-set; return its result if it was complete before.

        No rank may use an epoch that another has left. The others open the next one, where this
        rank may meet them if it tries again.
        """
        end = store.compare_set(f"{self._epoch}end", "", _VOID)
        if end != _COMPLETE:
            return _decode(end)
        return _decode(read_key(store, f"{self._epoch}result"))


def _decode(result: bytes) -> Placement | None:
    if result == _VOID:
        return None
    if result.startswith(_BROKEN):
        raise errors.load(result.removeprefix(_BROKEN))
    token, hosts, _ = json.loads(result)
    return Placement(token, [HostGroup(*host) for host in hosts])


class _Arrival(NamedTuple):
    """The facts that a process reports about itself."""

    rank: int
    place: str  #: the directory where it would meet others
    host: str  #: the name of its host
    devices: int  #: that it sees
    incarnation: int


def _entries(store: Store, epoch: str) -> dict[int, _Arrival]:
    """Return the entry of each rank's latest process."""
    lines = store.get(f"{epoch}entries").splitlines()
    entries = sorted((_Arrival(*json.loads(line)) for line in lines), key=lambda e: e.incarnation)
    return {entry.rank: entry for entry in entries}


def _by_host(entries: dict[int, _Arrival]) -> list[HostGroup]:
    at: dict[str, list[int]] = {}
    for rank in sorted(entries):
        at.setdefault(entries[rank].place, []).append(rank)
    groups: list[HostGroup] = []
    for place, ranks in at.items():
        devices = min(entries[rank].devices for rank in ranks) >= len(ranks)
        groups.append(HostGroup(entries[ranks[0]].host, ranks, devices, place))
    return groups


def describe_here(settings: Settings) -> tuple[str, str, int]:
    """Return the place of this process, the name of its host, and how many devices it sees."""
    # To count the devices touches none.
    return identify_place(settings), socket.gethostname(), torch.cuda.device_count()


def over_key(token: str) -> str:
    """Return the key that exists once all processes of a run have ended: nobody joins it now."""
    return f"{token}/over"


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
    what = f"rank {top.rank} cannot reach the store at {endpoint.address}"
    cure = "Is rank 0 or torchrun's agent up there, and are MASTER_ADDR and MASTER_PORT right?"
    return BackendUnavailable(f"{what}: {endpoint.refusal or why}. {cure}")
