"""The journal of a rank that is a process: what it does, written so that it survives the rank.

A journal is a file to which one rank appends events, and which its parent reads. So the parent
knows what a killed rank did last.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pickle
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .exception_transport import pack_exception
from .faults import Fault, Kill, Stop
from .outcomes import RankOutcome, RecordedCall
from .probe import Observer


class JournalWriter(Observer):
    """Writes the journal of one rank."""

    def __init__(self, journal: Path, faults: Sequence[Fault]) -> None:
        self._fd = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._faults = faults
        self._waits: dict[int, RecordedCall | str] = {}  # by thread

    def on_call(self, rank: int, call: RecordedCall) -> None:
        """Write the call."""
        self._write("call", pickle.dumps(call))

    def on_fault(self, rank: int, fault: Fault) -> None:
        """Write which fault it is."""
        self._write("fault", self._faults.index(fault))

    def on_wait(self, call: RecordedCall | str, deadline: float) -> None:
        """Write where the rank waits, and whether nothing but a note ends that."""
        thread = threading.get_ident()
        if call:
            self._waits[thread] = call
        elif self._waits.pop(thread, None) is None:
            return
        waits = [*self._waits.copy().values()]
        self._write("waits", waits, bool(waits) and deadline == math.inf)

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
        self.waits_for_notes = False  #: nothing but a note ends the wait that the rank is in
        path.touch()
        self._path = path
        self._offset = 0
        self._faults = faults

    def read(self) -> bool:
        """Read what is new, and return whether anything is."""
        news = False
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while True:
                try:
                    event = pickle.load(file)
                except (EOFError, pickle.UnpicklingError):  # the rest is not written yet
                    return news
                self._offset = file.tell()
                news = True
                self._take(*event)

    def _take(self, event: str, *facts: Any) -> None:
        outcome = self.outcome
        match event, facts:
            case "call", (call,):
                outcome.calls.append(_load_call(call))
            case "fault", (int(number),):
                fault = self._faults[number]
                outcome.struck.append(fault)
                if isinstance(fault, Kill | Stop):
                    outcome.end = "killed" if isinstance(fault, Kill) else "stopped"
            case "waits", (waits, only_notes):
                self.waits_for_notes = only_notes
                last = waits[-1] if waits else None
                outcome.waits = last if isinstance(last, RecordedCall) else None
                outcome.waits_any = last if isinstance(last, str) else ""
            case "end", (ended, error):
                result, raised = pickle.loads(ended.result), error and error.unpack()
                self.outcome = dataclasses.replace(
                    ended, result=result, error=raised, calls=outcome.calls, struck=outcome.struck
                )
            case _:
                pass
