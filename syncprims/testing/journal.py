"""What a rank that is a process does, written down so that it outlives the rank.

A journal is a file that one rank appends to, a line at a time, and that its parent reads. So the
parent knows what a killed rank did last, and that all ranks wait and nobody can go on: then nobody
writes any more, and what is written says so. That is no guess and takes no timeout: a rank that
waits posts nothing, and each waits for a note that somebody else who waits has not posted.
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

from syncprims import errors
from syncprims.errors import CollectiveMismatch
from syncprims.interface import Label

from .probe import Seen, Witness

if TYPE_CHECKING:
    from pathlib import Path

    from .faults import Fault


class Scribe(Witness):
    """Writes a journal, in the rank; reads there what the parent has found out."""

    def __init__(self, journal: Path, verdict: Path, faults: list[Fault]) -> None:
        self._fd = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._verdict = verdict
        self._faults = faults
        self._waits: tuple[Any, ...] | None = None

    def came(self, rank: int, seen: Seen) -> None:
        """Write that the rank has come to a call."""
        self._write("came", *_pack(seen))

    def posted(self, rank: int, seen: Seen, number: int) -> None:
        """Write that it has posted."""
        self._write("posted", seen.members, number)

    def struck(self, rank: int, fault: Fault) -> None:
        """Write that a fault is about to strike."""
        self._write("struck", self._faults.index(fault))

    def waits(self, rank: int, seen: Seen, number: int, until: float) -> bytes | None:
        """Write that it waits, once for each wait."""
        wait = (*_pack(seen), number, until < math.inf)
        if wait != self._waits:
            self._waits = wait
            self._write("waits", *wait)
        return self._verdict.read_bytes() if self._verdict.exists() else None

    def goes_on(self, rank: int) -> None:
        """Write that it does not wait any more."""
        if self._waits is not None:
            self._waits = None
            self._write("goes on")

    def _write(self, *what: Any) -> None:
        os.write(self._fd, json.dumps(what).encode() + b"\n")


def _pack(seen: Seen) -> tuple[Any, str]:
    return seen.members, seen.label.encode().decode("utf-8", "surrogatepass")


def _unpack(members: list[int], label: str) -> Seen:
    return Seen(tuple(members), Label.decode(label.encode("utf-8", "surrogatepass")))


class Journal:
    """Reads one, in the parent."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._known: dict[tuple[Any, ...], Seen] = {}
        self.calls: list[Seen] = []
        self.struck: list[int] = []  #: numbers of faults
        self.posted: dict[tuple[int, ...], int] = {}  #: by board
        self.waits: Seen | None = None
        self.number = 0  #: of the round that it waits for
        self.bounded = False  #: it waits with a deadline

    def read(self) -> bool:
        """Read what is new; tell whether anything is."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return False
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self._take(*json.loads(line))
        return bool(whole)

    def _take(self, what: str, *facts: Any) -> None:
        if what == "came":
            self.calls.append(self._seen(*facts))
        elif what == "posted":
            self.posted[tuple(facts[0])] = facts[1]
        elif what == "struck":
            self.struck.append(facts[0])
        self.waits = None
        if what == "waits":
            members, label, self.number, self.bounded = facts
            self.waits = self._seen(members, label)

    def _seen(self, members: list[int], label: str) -> Seen:
        key = (*members, label)
        if key not in self._known:
            self._known[key] = _unpack(members, label)
        return self._known[key]


def deadlock(waiting: dict[int, Journal]) -> bytes | None:
    """Return the verdict for ranks that all wait, if they wait for each other; else None."""
    stuck: dict[int, Journal] = {}
    found = waiting
    while found != stuck:  # until only those are left whose way leads into a circle
        stuck, found = found, {r: j for r, j in found.items() if missing(j, waiting) & found.keys()}
    if not stuck:
        return None
    lines = "\n".join(
        f"  rank {rank}: {journal.waits.label} in group {list(journal.waits.members)}"
        for rank, journal in sorted(stuck.items())
        if journal.waits is not None
    )
    rank = min(stuck)
    waits = stuck[rank].waits
    assert waits is not None
    error = CollectiveMismatch(
        f"ranks wait for each other in different groups, and none can go on:\n{lines}\n"
        f"Every rank must make the calls of different groups in the same order.",
        rank=rank,
        call=str(waits.label),
    )
    return errors.dump(error)


def missing(journal: Journal, all_of: dict[int, Journal]) -> set[int]:
    """Return those ranks whose notes the round lacks that this one waits for."""
    assert journal.waits is not None
    members = journal.waits.members
    return {
        rank
        for rank in members
        if rank in all_of and all_of[rank].posted.get(members, 0) < journal.number
    }
