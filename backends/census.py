"""Who takes part in a run, and who shares a host: agreed through the rendezvous store.

What launchers say of nodes is not enough: containers with a GPU each may share a machine and no
memory. So each rank tells which directory it would meet others in, by what the kernel calls it; a
directory is the same for two ranks only if both see the same memory there. Whoever comes last
writes down the result, which holds for all.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from pathlib import Path
from typing import Any, NamedTuple


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

    def enter(self, store: Any, rank: int, place: str, devices: int) -> str:
        """Write this rank and the devices it sees into the open book; return the book's name.

        A book is closed once all ranks are in it, and then belongs to their world. So a second
        world of the same processes opens the next, and a rank that tries again, because the others
        did not come in time, finds the one it is in already.
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

    def read(self, store: Any, book: str) -> Census:
        """Return the result of a book, once it is closed."""
        token, hosts = json.loads(store.get(f"{book}result"))
        return Census(token, [Host(*host) for host in hosts])

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


def _load(line: bytes) -> tuple[int, str, str, int]:
    rank, place, name, devices = json.loads(line)
    return rank, place, name, devices


def _by_host(entries: dict[int, tuple[str, str, int]]) -> list[Host]:
    at: dict[str, list[int]] = {}
    for rank in sorted(entries):
        at.setdefault(entries[rank][0], []).append(rank)
    return [
        Host(entries[ranks[0]][1], ranks, min(entries[r][2] for r in ranks) >= len(ranks))
        for ranks in at.values()
    ]
