"""The journal of a rank that is a process: what it does, written so that it survives the rank.

A journal is a file to which one rank appends lines, and which its parent reads. So the parent knows
what a killed rank did last. It also finds deadlocks, without a timeout: a rank that waits writes
nothing, so what the journals contain at two looks in a row is true at one time.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from syncprims import errors
from syncprims._protocol.deadlock import Wait, deadlock_error, find_any_cycle
from syncprims.interface import Label

from .faults import Fault
from .probe import Observer, RecordedCall


class JournalWriter(Observer):
    """Writes the journal of one rank, and reads the verdict that the parent may leave for it."""

    def __init__(self, journal: Path, verdict: Path, faults: Sequence[Fault]) -> None:
        self._fd = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._verdict = verdict
        self._faults = faults
        self._waits: tuple[Any, ...] | None = None

    def on_call(self, rank: int, call: RecordedCall) -> None:
        """Write the call."""
        self._write("call", *_encode(call))

    def on_post(self, rank: int, call: RecordedCall, number: int) -> None:
        """Write the number of the round."""
        self._write("post", _join(call.members), number)

    def on_fault(self, rank: int, fault: Fault) -> None:
        """Write which fault it is."""
        self._write("fault", self._faults.index(fault))

    def on_wait(self, rank: int, call: RecordedCall, number: int, until: float) -> bytes | None:
        """Write where it waits, once for each wait; return the parent's verdict."""
        waits = (*_encode(call), number, until < math.inf)
        if waits != self._waits:
            self._waits = waits
            self._write("wait", *waits)
        return self._verdict.read_bytes() if self._verdict.exists() else None

    def on_wait_end(self, rank: int) -> None:
        """Write that the wait is over."""
        if self._waits is not None:
            self._waits = None
            self._write("wait end")

    def _write(self, event: str, *facts: Any) -> None:
        os.write(self._fd, json.dumps((event, *facts)).encode() + b"\n")


def _join(members: Sequence[int]) -> str:
    return ",".join(map(str, members))


def _encode(call: RecordedCall) -> tuple[str, str]:
    return _join(call.members), call.label.encode().decode("utf-8", "surrogatepass")


@functools.lru_cache(maxsize=4096)  # a loop makes the same calls many times
def _decode(members: str, label: str) -> RecordedCall:
    decoded = Label.decode(label.encode("utf-8", "surrogatepass"))
    return RecordedCall(tuple(map(int, members.split(","))), decoded)


class Journal:
    """The journal of one rank, as far as the parent has read it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.posted: dict[str, int] = {}  #: number of rounds, by members of the board
        self.calls: list[RecordedCall] = []
        self.struck: list[int] = []  #: numbers of faults
        self.waits: RecordedCall | None = None
        self.number = 0  #: of the round that it waits for
        self.has_deadline = False  #: does the wait end by itself?

    def read(self) -> bool:
        """Read what is new, and return whether there is anything."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return False
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            self._take(*json.loads(line))
        return bool(complete)

    def _take(self, event: str, *facts: Any) -> None:
        self.waits = None
        match event, facts:
            case "call", (members, label):
                self.calls.append(_decode(members, label))
            case "post", (members, number):
                self.posted[members] = number
            case "fault", (number,):
                self.struck.append(number)
            case "wait", (members, label, number, has_deadline):
                self.waits = _decode(members, label)
                self.number, self.has_deadline = number, has_deadline
            case _:
                pass


def missing_ranks(journal: Journal, journals: Mapping[int, Journal]) -> set[int]:
    """Return the ranks that have not posted to the round that the rank of `journal` waits for."""
    assert journal.waits is not None
    board = _join(journal.waits.members)
    return {
        rank
        for rank in journal.waits.members
        if rank in journals and journals[rank].posted.get(board, 0) < journal.number
    }


def deadlock_verdict(waiting: Mapping[int, Journal]) -> bytes | None:
    """Return the verdict for ranks that all wait, if some wait for each other; else None."""
    waits = {
        rank: Wait(str(call.label), str([*call.members]), missing_ranks(journal, waiting))
        for rank, journal in waiting.items()
        if (call := journal.waits) is not None
    }
    cycle = find_any_cycle(waits)
    if not cycle:
        return None
    return errors.dump(deadlock_error({rank: waits[rank] for rank in cycle}, cycle[0]))
