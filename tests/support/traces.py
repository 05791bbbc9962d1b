"""Traces for the tests: read from a run, or written with given times."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from support.rank_environment import run_python
from syncprims._world.registry import load_backend
from syncprims.errors import format_ranks
from syncprims.interface import Label, Settings, Topology
from syncprims.tracing import recorder as recording
from syncprims.tracing.reading import TraceRun, find_runs, read_run
from syncprims.tracing.recorder import Recorder

SECOND = 10**9


class Entry(NamedTuple):
    """One round of one rank, as text."""

    call: str
    number: int
    outcome: str


def command(*args: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``syncprims trace`` into pipes."""
    return run_python("-m", "syncprims", "trace", *args, **variables)


def only_run(directory: Path) -> TraceRun:
    """Return the one run that is in `directory`, which nothing is wrong with."""
    (folder,) = find_runs(directory)
    run = read_run(folder)
    assert run.complaints == []
    return run


def entries(run: TraceRun, rank: int) -> list[Entry]:
    """Return the rounds of a rank in the order in which they were over."""
    (trace,) = [trace for trace in run.ranks if trace.rank == rank]
    rounds = sorted(trace.rounds.tolist(), key=lambda one: (one[2] or 1 << 62, one[3]))
    found = [dict(zip(trace.rounds.dtype.names or (), one, strict=True)) for one in rounds]
    return [
        Entry(run.calls[one["call"]].call, one["number"], run.outcomes[one["outcome"]])
        for one in found
    ]


def recorder_of(rank: int, ranks: int, directory: Path, limit: int) -> Recorder:
    """Return what records, in `directory`, a rank of a world that does not run."""
    backend = load_backend("single")(Topology(), Settings())
    backend.topology = Topology(rank, ranks, rank, ranks, run_id="planted")
    backend.process, backend.members = rank, tuple(range(ranks))
    return Recorder(str(directory), limit, backend)


class Planted:
    """A run whose ranks arrive at times that the test gives."""

    def __init__(
        self, directory: Path, patch: pytest.MonkeyPatch, ranks: int, *, ahead: Sequence[int] = ()
    ) -> None:
        """Make a run; the clock of each rank is `ahead` of the test's, and equal ones are one."""
        self.directory = directory
        self.ranks = ranks
        self._patch = patch
        self._labels: dict[tuple[str, str | None, str], Label] = {}
        self._recorders: dict[int, Recorder] = {}
        self._ahead: dict[int, int] = {}
        for rank in range(ranks):
            clock = ahead[rank] if ahead else 0
            self._add(rank, f"clock {clock}" if ahead else "same", clock)

    def _add(self, rank: int, clock: str, ahead: int) -> None:
        self._patch.setattr(recording, "_clock", lambda host: clock)
        recorder = recorder_of(rank, self.ranks, self.directory, 1 << 20)
        self._recorders[rank] = recorder
        recorder.open("planted")
        self._ahead[rank] = ahead

    def round(
        self,
        number: int,
        arrivals: Sequence[int | None],
        *,
        kind: str = "barrier",
        name: str | None = None,
        site: str = "train.py:7",
        board: str = "",
        costs: int = 1000,
        drift: float = 0.0,
    ) -> None:
        """Add a round: ranks arrive at these ns and leave with the last one; None never arrives."""
        label = self._labels.setdefault((kind, name, site), Label(kind, name, site=site))
        last = max(a for a in arrivals if a is not None)
        for rank, arrival in enumerate(arrivals):
            if arrival is None:
                continue
            ahead = self._ahead[rank]
            shift = ahead + int(drift * arrival) if ahead else 0
            came, gone = arrival + shift, last + costs * (1 + rank) + shift
            group = f"0-{self.ranks - 1} {board}".rstrip()
            outcome = "PeerLost" if None in arrivals else ""
            self._recorders[rank].record(group, label, came, came, gone, number, outcome=outcome)

    def waits(
        self, number: int, arrivals: Sequence[int | None], until: int, *, name: str, site: str
    ) -> None:
        """Add a round that never ends: those that arrived wait for the others until then."""
        label = Label("barrier", name, site=site)
        late = format_ranks(rank for rank, arrival in enumerate(arrivals) if arrival is None)
        for rank, arrival in enumerate(arrivals):
            if arrival is not None:
                self._recorders[rank].record(
                    f"0-{self.ranks - 1}", label, arrival, arrival, until, number,
                    outcome=late, kind=recording.WAITING,
                )  # fmt: skip

    def leave(self, now: int, *, ranks: Sequence[int] | None = None) -> None:
        """End ranks (all by default) regularly; the others count as killed."""
        for rank, recorder in self._recorders.items():
            if ranks is None or rank in ranks:
                recorder.close(None, now + self._ahead[rank])
            else:
                recorder.abandon()
