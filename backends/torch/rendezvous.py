"""Who takes part in a run, and who shares a host: agreed through the rendezvous store.

What launchers say of nodes is not enough: containers with a GPU each may share a machine and no
memory. So each rank tells which directory it would meet others in, by what the kernel calls it; a
directory is the same for two ranks only if both see the same memory there. Whoever comes last
writes down the result, which holds for all.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from syncprims.errors import BackendUnavailable, SyncTimeout

from ..file.backend import base_of
from .store import TRY_AGAIN
from .store_link import StoreGone

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncprims.interface import Settings, Topology

    from .store import StoreSource
    from .store_link import StoreLink

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.25  # seconds between two looks whether all have come
_LAST_WORD = 2.0  # seconds to say that this rank gives up


_VOID = b"void"


class Host(NamedTuple):
    """Ranks that share memory."""

    name: str
    ranks: list[int]  #: ascending
    devices: bool = False  #: one for each of them


class Census(NamedTuple):
    """All ranks of one world."""

    token: str  #: tells this world from every other
    hosts: list[Host]  #: by lowest rank

    @property
    def host_of(self) -> dict[int, int]:
        """The host of each rank."""
        return {rank: number for number, host in enumerate(self.hosts) for rank in host.ranks}


def identity(directory_fd: int) -> str:
    """Return what this kernel, and no other, calls the open directory."""
    found = os.fstat(directory_fd)
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # no Linux
        boot = socket.gethostname()
    return f"{boot}-{found.st_dev}-{found.st_ino}"


class Register:
    """The books of the census at the store, under `prefix`. Its methods run on a link's thread."""

    def __init__(self, prefix: str, world_size: int) -> None:
        self._prefix = prefix
        self._world_size = world_size

    def give_up(self, store: Any, book: str) -> Census | None:
        """Close a book for nobody, or return its result: all came at the last moment.

        Nobody may go by a book that a rank has left. The others open the next, where it may meet
        them if it tries again.
        """
        return _read(store.compare_set(f"{book}result", "", _VOID))

    def enter(self, store: Any, rank: int, place: str, devices: int) -> str:
        """Write this rank and the devices it sees into the open book; return the book's name.

        A book is closed once all ranks are in it, and then belongs to their world. So a second
        world of the same processes opens the next.
        """
        number = 1
        while store.check([self._key(number, "result")]):
            number += 1
        entry = json.dumps([rank, place, socket.gethostname(), devices]).encode() + b"\n"
        store.append(self._key(number, "entries"), entry)
        if store.add(self._key(number, "count"), 1) >= self._world_size:
            entries = self._entries(store, number)
            if len(entries) == self._world_size:
                result = json.dumps([secrets.token_hex(8), _by_host(entries)])
                store.compare_set(self._key(number, "result"), "", result)
        return self._key(number, "")

    def look(self, store: Any, book: str) -> tuple[bool, Census | None]:
        """Tell whether a book is closed, and its result, if it has one."""
        if not store.check([f"{book}result"]):
            return False, None
        return True, _read(store.get(f"{book}result"))

    def missing(self, store: Any, book: str) -> list[int]:
        """Return the ranks that are not in a book yet."""
        number = int(book.split("/")[-2])
        entries = self._entries(store, number)
        return [rank for rank in range(self._world_size) if rank not in entries]

    def _entries(self, store: Any, number: int) -> dict[int, tuple[str, str, int]]:
        lines = store.get(self._key(number, "entries")).splitlines()
        return {rank: (place, name, devices) for rank, place, name, devices in map(_load, lines)}

    def _key(self, number: int, what: str) -> str:
        return f"{self._prefix}/census/{number}/{what}"


def _read(result: bytes) -> Census | None:
    if result == _VOID:
        return None
    token, hosts = json.loads(result)
    return Census(token, [Host(*host) for host in hosts])


def _load(line: bytes) -> tuple[int, str, str, int]:
    rank, place, name, devices = json.loads(line)
    return rank, place, name, devices


def devices() -> int:
    """Return how many CUDA devices this process sees, without touching one."""
    return torch.cuda.device_count()


def take_census(
    links: Sequence[StoreLink],
    source: StoreSource,
    top: Topology,
    settings: Settings,
    deadline: float,
) -> Census:
    """Return who takes part, once all have come and have all their `links` to the store.

    :raises SyncTimeout: naming the ranks that have not come at the deadline.
    :raises BackendUnavailable: if there is no store to be reached.
    :raises StoreGone: if the store went meanwhile, and there is time for another attempt.
    """
    link = links[0]
    register = Register(f"world-{top.world_size}", top.world_size)
    base = base_of(settings)
    try:
        place = identity(base.fd)
    finally:
        base.close()

    def left() -> float:
        return max(0.0, deadline - time.monotonic())

    missing: list[int] = []  # as last heard of: whoever serves the store may give up first

    book = ""
    try:
        for other in links:
            # Now, and not when they are needed: a store may take seconds for a new connection,
            # asking for the name of whoever calls, and answers nobody else meanwhile.
            other.ask(lambda store: None, left())
        while True:
            book = link.ask(lambda store: register.enter(store, top.rank, place, devices()), left())
            census = _attend(link, register, book, left, missing)
            if census is not None:
                return census
            if left() < _LAST_WORD:
                # Somebody's deadline came a moment before ours: who was late for it, is for us.
                missing[:] = _missing(link, register, book, left())
                if missing:
                    raise StoreGone("not all ranks have come")
    except StoreGone as error:
        if left() > (_LAST_WORD if missing else TRY_AGAIN):
            raise
        why = error
    if book:
        with contextlib.suppress(StoreGone):
            census = link.ask(lambda store: register.give_up(store, book), _LAST_WORD)
            if census is not None:
                return census
        if missing:
            raise _never_came(top, missing, settings.join_timeout - left(), source.address)
    raise unreachable(top, source, why) from why


def unreachable(top: Topology, source: StoreSource, why: StoreGone) -> BackendUnavailable:
    """Return what tells that there is no store, or none any more."""
    return BackendUnavailable(
        f"rank {top.rank} cannot reach the store at {source.address}: {source.refusal or why}. It "
        f"is served by rank 0, or by torchrun's agent on its host: is that up, and are MASTER_ADDR "
        f"and MASTER_PORT right and open from here?"
    )


def _attend(
    link: StoreLink,
    register: Register,
    book: str,
    left: Callable[[], float],
    missing: list[int],
) -> Census | None:
    """Return the result of a book once it is closed; keep in `missing` who is not in it yet."""
    pause = _FIRST_PAUSE
    while True:
        if not left():
            raise StoreGone("not all ranks have come")
        time.sleep(min(pause, left()))
        pause = min(1.2 * pause, _LONGEST_PAUSE)  # there may be many of us
        closed, census = link.ask(lambda store: register.look(store, book), left())
        if closed:
            return census
        if left() < _LAST_WORD:
            missing[:] = _missing(link, register, book, left())


def _missing(link: StoreLink, register: Register, book: str, seconds: float) -> list[int]:
    return link.ask(lambda store: register.missing(store, book), seconds)


def _never_came(top: Topology, missing: list[int], waited: float, address: str) -> SyncTimeout:
    arrived = [rank for rank in range(top.world_size) if rank not in missing]
    lines = "\n".join(f"  rank {rank} never joined" for rank in missing)
    return SyncTimeout(
        f"init timed out after {waited:.1f} s: ranks {missing} did not come, ranks {arrived} did\n"
        f"{lines}\nThis rank waits at the store at {address}, run id {top.run_id!r}: a rank that "
        f"was started with others never meets it. See what keeps ranks {missing}. If they are only "
        f"slow, allow more: SYNCPRIMS_JOIN_TIMEOUT.",
        rank=top.rank,
        call="init",
        missing=missing,
        arrived=arrived,
        waited=waited,
    )


def _by_host(entries: dict[int, tuple[str, str, int]]) -> list[Host]:
    at: dict[str, list[int]] = {}
    for rank in sorted(entries):
        at.setdefault(entries[rank][0], []).append(rank)
    return [
        Host(entries[ranks[0]][1], ranks, min(entries[r][2] for r in ranks) >= len(ranks))
        for ranks in at.values()
    ]
