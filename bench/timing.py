"""The measurement on one rank: the same steps for every library.

A job makes a `Library` and calls `run`. It reads the plan from the last argument, and rank 0 prints
the figures as one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float32]
    Figures = dict[str, list[float]]

SMALL_DICT = {"lr": 1e-3, "epoch": 3}
METRICS = {"loss": 1.0, "n": 3}
ARRAYS = {"loss": np.ones((), np.float32), "confusion": np.ones((10, 10), np.float32)}
GATHERED = np.ones(16 << 10, np.float32)
_COLUMNS = 1024  # chunk size for filling and checking arrays
_MOST_ROUNDS = 100_000
_SPELL = 5e-3  #: seconds of calls that are timed together, if single calls are shorter


@dataclass(frozen=True)
class Library:
    """The calls to measure, and what the measurement needs, on one rank."""

    rank: int
    ranks: int
    barrier: Callable[[], object]
    gather: Callable[[float], Sequence[float]]  #: gathers a number of every rank on every rank
    calls: Mapping[str, Callable[[], object]]  #: by operation; see catalogue.CONTROL
    stepped: Mapping[str, Callable[[], object]] = field(default_factory=dict)  #: within a real step
    broadcast: Callable[[Array], object] | None = None  #: copies the array of rank 0 to all ranks
    all_reduce: Callable[[Array, Array], object] | None = None  #: sums 1st array into 2nd
    in_place: bool = False  #: all_reduce works in place only

    def slowest(self, figure: float) -> float:
        """Return the largest figure of all ranks on every rank, so that all decide alike."""
        return max(self.gather(figure))


def run(library: Library) -> None:
    """Run the plan."""
    plan = json.loads(sys.argv[-1])
    steps: dict[str, Callable[..., Figures]] = {
        "control": control,
        "barrier": lambda library, seconds: {
            "barrier": [_per_call(library, library.barrier, seconds)]
        },
        "data": data,
        "memory": memory,
        "wait": wait,
    }
    figures = steps[plan.pop("what")](library, **plan)
    if library.rank == 0:
        print(json.dumps(figures), flush=True)


def control(library: Library, seconds: float) -> Figures:
    """Return the microseconds per call for every operation."""
    figures = {name: [_per_call(library, call, seconds)] for name, call in library.calls.items()}
    return figures | _in_steps(library, seconds)


def _per_call(library: Library, call: Callable[[], object], seconds: float) -> float:
    """Time a tight loop. Its length grows until it takes `seconds`; shorter loops are warm-up."""
    rounds = 10
    while True:
        library.barrier()
        begin = time.perf_counter()
        for _ in range(rounds):
            call()
        # The slowest rank counts: the source of a broadcast may be far ahead of the receivers.
        spent = library.slowest(time.perf_counter() - begin)
        if spent >= seconds or rounds == _MOST_ROUNDS:
            return spent / rounds * 1e6
        rounds = min(_MOST_ROUNDS, int(rounds * max(2.0, 1.2 * seconds / spent)))


def _in_steps(library: Library, seconds: float) -> Figures:
    """Return the median of single calls, by name. They take turns, one in each step.

    All ranks start a step at the same time. They made the previous call long ago, so no rank has to
    wait. The caches of the processor hold what ran since.
    """
    if not library.stepped:
        return {}
    period, busy, work = 5e-3, 1e-3, np.ones((96, 96), np.float32)
    library.barrier()
    start = max(library.gather(time.monotonic())) + period
    times: dict[str, list[float]] = {name: [] for name in library.stepped}
    for name in times:
        for _ in range(40):  # warm-up: Python adapts what runs often
            _repeated(library.stepped[name], 1)
    for step in range(len(times) * max(20, int(4 * seconds / period))):
        name = list(times)[step % len(times)]
        call = library.stepped[name]
        until = start + step * period
        time.sleep(max(0.0, until - busy - time.monotonic()))
        work @ work
        while time.monotonic() < until:  # busy as in training: idle processors start slowly
            work @ work
        times[name].append(_repeated(call, 1))
    return {name: [library.slowest(float(np.median(each))) * 1e6] for name, each in times.items()}


def data(library: Library, sizes: Sequence[int], seconds: float, beside: Sequence[str]) -> Figures:
    """Return the microseconds per call, by size in bytes, and of the operations `beside` them."""
    figures = {
        name: _spells(library, partial(_repeated, library.calls[name]), seconds) for name in beside
    }
    for size in sizes:
        moves = _Moves(library, size)
        for name in ("broadcast", "all_reduce"):
            figures[f"{name} {size}"] = _spells(library, partial(moves.timed, name), seconds)
    return figures


def _spells(library: Library, timed: Callable[[int], float], seconds: float) -> list[float]:
    """Return the microseconds per call of several spells. Each has as many calls as fill it."""
    timed(1)  # warm-up
    calls = 1
    while (spent := library.slowest(timed(calls))) < _SPELL and calls < _MOST_ROUNDS:
        calls = max(2 * calls, int(0.8 * calls * _SPELL / spent))
    times = [spent / calls]
    while len(times) < 3 or (len(times) < 30 and sum(times) * calls < seconds):
        times.append(library.slowest(timed(calls)) / calls)
    return [time * 1e6 for time in times]


def _repeated(call: Callable[[], object], calls: int) -> float:
    """Return the seconds of a spell of calls."""
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - begin


def memory(library: Library, size: int, operation: str) -> Figures:
    """Return the MB that three calls with `size` bytes add to each rank, by rank."""
    _Moves(library, 2**20).timed(operation, 1)  # the very first call has other costs than its array
    moves = _Moves(library, size)
    moves.fill(0)
    with contextlib.suppress(OSError):  # reset the peak
        Path("/proc/self/clear_refs").write_text("5")
    before = _status()
    library.barrier()
    for _ in range(3):
        moves.call(operation)()
    after = _status()
    grown = {
        "peak": after["VmHWM"] - before["VmRSS"],
        "private": after["RssAnon"] - before["RssAnon"],
        "shared": after["RssShmem"] - before["RssShmem"],
    }
    return {name: list(library.gather(figure)) for name, figure in grown.items()}


def _status() -> dict[str, float]:
    """Return the sizes of this process in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines)
    return {name: int(text.split()[0]) / 1024 for name, text in pairs if text.endswith("kB")}


def wait(library: Library, seconds: float) -> Figures:
    """Return the processor share, in percent, of ranks that wait for rank 0."""
    library.barrier()
    if library.rank == 0:
        time.sleep(seconds)
    begin, before = time.perf_counter(), time.process_time()
    library.barrier()
    spent = time.process_time() - before
    shares = library.gather(100 * spent / (time.perf_counter() - begin))
    return {"wait": list(shares[1:])}


class _Moves:
    """Arrays of one size, and the calls that transfer them. Every result is checked."""

    def __init__(self, library: Library, size: int) -> None:
        columns = min(_COLUMNS, size // 4)
        shape = (size // 4 // columns, columns)
        self._library = library
        self._value: Array = np.ones(shape, np.float32)  # written, so that all pages exist
        self._out: Array = self._value if library.in_place else np.ones(shape, np.float32)
        self._rows: Array = (np.arange(shape[0]) % 251).astype(np.float32)[:, None]
        self._columns: Array = np.arange(columns, dtype=np.float32)[None, :]
        self._count = 0

    def timed(self, name: str, calls: int) -> float:
        """Return the seconds of a spell of calls on this rank. All ranks start together."""
        self._count += 1
        self.fill(self._count)
        call = self.call(name)
        self._library.barrier()
        spent = _repeated(call, calls)
        if calls == 1 or name == "broadcast" or not self._library.in_place:
            self._check(name, self._count)  # repeated in place, it sums the sums
        return spent

    def fill(self, count: int) -> None:
        """Write the values of this rank, and an impossible result into the target."""
        if self._out is not self._value:
            self._out.fill(-1.0)
        np.add(self._rows, self._columns + (self._library.rank + count), out=self._value)

    def call(self, name: str) -> Callable[[], object]:
        """Return the call to time."""
        library = self._library
        if name == "broadcast":
            assert library.broadcast is not None
            return partial(library.broadcast, self._value)
        assert library.all_reduce is not None
        return partial(library.all_reduce, self._value, self._out)

    def _check(self, name: str, count: int) -> None:
        """Raise if an element is wrong. Sums of small integers are exact in any order."""
        ranks = self._library.ranks
        if name == "broadcast":
            result, factor, shift = self._value, 1, count
        else:
            result, factor, shift = self._out, ranks, ranks * count + ranks * (ranks - 1) // 2
        line: Any = factor * self._columns + shift
        for top in range(0, len(result), 1024):  # in chunks, to use little memory
            part = slice(top, top + 1024)
            if not np.array_equal(result[part], factor * self._rows[part] + line):
                raise AssertionError(f"{name}: wrong values at rank {self._library.rank}")
