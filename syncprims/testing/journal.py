"""The journal of a rank that is a process: what it does, written so that it survives the rank.

A journal is a file to which one rank appends events, and which its parent reads. So the parent
knows what a killed rank did last. It also finds deadlocks, without a timeout: a rank that waits
writes nothing, so what the journals contain at two looks in a row is true at one time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pickle
import threading
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from syncprims._protocol.deadlock import Wait, describe_group
from syncprims._protocol.threads import threads_that_may_call

from .exception_transport import pack_exception
from .faults import Fault, Kill, Stop
from .outcomes import RankOutcome, RecordedCall
from .probe import Observer

_LOOK_EVERY = 0.005  # seconds, at least, between two looks that are written


class JournalWriter(Observer):
    """Writes the journal of one rank, and reads the verdict that the parent may leave for it."""

    def __init__(self, journal: Path, verdict: Path, faults: Sequence[Fault]) -> None:
        self._fd = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._verdict = verdict
        self._faults = faults
        self._waits: dict[int, tuple[RecordedCall, int, bool]] = {}  # by thread
        self._any: tuple[str, tuple[int, ...]] | None = None  # its wait for any of several notes
        self._looked = -math.inf
        self._written: tuple[Any, ...] = ((), False)  # the last event about waits

    def on_call(self, rank: int, call: RecordedCall) -> None:
        """Write the call."""
        self._write("call", pickle.dumps(call))

    def on_rounds(self, rank: int, members: Sequence[int], board: str, number: int) -> None:
        """Write the number of the round."""
        self._write("rounds", members, board, number)

    def on_fault(self, rank: int, fault: Fault) -> None:
        """Write which fault it is."""
        self._write("fault", self._faults.index(fault))

    def on_wait(self, rank: int, call: RecordedCall, number: int, until: float) -> bytes | None:
        """Write where it waits, once for each wait; return the parent's verdict."""
        self._waits[threading.get_ident()] = call, number, until < math.inf
        self._write_waits()
        return self._verdict.read_bytes() if self._verdict.exists() else None

    def on_wait_any(self, rank: int, call: str, members: Sequence[int]) -> bytes | None:
        """Write where it waits and, each time, that it has looked; return the parent's verdict."""
        event, now = (call, tuple(members)), time.monotonic()
        if event != self._any:
            self._any = event
            self._write("any", *event)
        if now > self._looked + _LOOK_EVERY:
            self._looked = now
            self._write("looked")
        return self._verdict.read_bytes() if self._verdict.exists() else None

    def on_wait_end(self, rank: int) -> None:
        """Write that the wait is over."""
        if self._waits.pop(threading.get_ident(), None) is not None:
            self._write_waits()
        if self._any is not None:
            self._any = None
            self._write("any", "", ())

    def _write_waits(self) -> None:
        """Write where the threads of the rank wait, and whether another may still make a call."""
        waits = dict(self._waits)
        event = tuple(waits.values()), bool(waits and threads_that_may_call() - waits.keys())
        if event != self._written:
            self._written = event
            self._write("waits", *event)

    def on_end(self, outcome: RankOutcome) -> None:
        """Write how the rank has ended, and its result; what the journal has is not repeated."""
        try:
            result = pickle.dumps(outcome.result)
        except Exception as why:
            outcome.fail(
                TypeError(
                    f"rank {outcome.rank} returns a {type(outcome.result).__name__}, which cannot "
                    f"be sent to the test: {why}. Return plain values, or use a world of threads"
                )
            )
            result = pickle.dumps(None)
        error = None if outcome.error is None else pack_exception(outcome.error)
        rest = dataclasses.replace(outcome, result=result, error=None, calls=[], struck=[])
        self._write("end", rest, error)

    def _write(self, *event: Any) -> None:
        data = pickle.dumps(event)
        while data:
            data = data[os.write(self._fd, data) :]


_load_call = functools.lru_cache(maxsize=4096)(pickle.loads)  # loops make the same calls many times


class Journal:
    """The journal of one rank, as far as the parent has read it."""

    def __init__(self, path: Path, rank: int, faults: Sequence[Fault]) -> None:
        self.outcome = RankOutcome(rank)
        #: number of rounds, by members and name of the board
        self.posted: dict[tuple[tuple[int, ...], str], int] = {}
        self._waits: Sequence[tuple[RecordedCall, int, bool]] = ()
        self._may_go_on = False  # a thread that does not wait may make a call
        self._any: tuple[str, tuple[int, ...]] = ("", ())  # its wait for any of several notes
        self._looks = 0  # how often it has looked for them since another journal changed
        path.touch()
        self._path = path
        self._offset = 0
        self._faults = faults

    def read(self) -> bool:
        """Read what is new, and return whether anything is but looks for one of several notes."""
        news = False
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while True:
                try:
                    event = pickle.load(file)
                except (EOFError, pickle.UnpicklingError):  # the rest is not written yet
                    return news
                self._offset = file.tell()
                news = news or event[0] != "looked"
                self._take(*event)

    def forget_looks(self) -> None:
        """Forget that the rank has looked: what it looks for may have come since."""
        self._looks = 0

    def _take(self, event: str, *facts: Any) -> None:
        outcome = self.outcome
        match event, facts:
            case "call", (call,):
                outcome.calls.append(_load_call(call))
            case "rounds", (members, board, number):
                self.posted[members, board] = number
            case "fault", (int(number),):
                fault = self._faults[number]
                outcome.struck.append(fault)
                if isinstance(fault, Kill | Stop):
                    outcome.end = "killed" if isinstance(fault, Kill) else "stopped"
            case "waits", (waits, may_go_on):
                self._waits, self._may_go_on = waits, may_go_on
                outcome.waits = waits[0][0] if waits else None
            case "any", (call, members):
                self._any = call, members
                outcome.waits_any = call
            case "looked", ():
                self._looks += 1
            case "end", (ended, error):
                result, raised = pickle.loads(ended.result), error and error.unpack()
                self.outcome = dataclasses.replace(
                    ended, result=result, error=raised, calls=outcome.calls, struck=outcome.struck
                )
            case _:
                pass

    @property
    def only_waits(self) -> bool:
        """Whether the rank waits, and does nothing else until a note comes or it is ended."""
        if self.outcome.end != "left":
            return False
        if self._any[0]:
            return self._looks > 1  # the second began after all other journals were read
        ends_by_itself = self._may_go_on or any(deadline for *_, deadline in self._waits)
        return bool(self._waits) and not ends_by_itself

    def waits(self, journals: Mapping[int, Journal], living: Set[int]) -> list[Wait]:
        """Return the waits of the rank's threads, each with the ranks that have not posted.

        Of the ranks that may end a wait for any of several notes, those that are `living`.
        """
        call, members = self._any
        if call:
            return [Wait(call, describe_group(members, ""), living & {*members})]
        return [
            Wait(
                str(call.label),
                call.group,
                {
                    rank
                    for rank in call.members
                    if journals[rank].posted.get((call.members, call.board), 0) < number
                },
            )
            for call, number, _ in self._waits
        ]
