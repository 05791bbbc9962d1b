"""A trace for Perfetto and chrome://tracing, in the JSON of the Trace Event Format.

It has a process for each rank, a thread in it for each group, a slice for each wait, and an arrow
from the rank that arrived last to the one that waited longest for it.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from syncprims._protocol.trace_file import ROUND

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .analysis import Analysis, GroupRounds
    from .reading import RankTrace

MOST_SLICES = 500_000  # viewers become slow beyond
MOST_ARROWS = 5_000


def write_chrome_trace(analysis: Analysis, path: Path) -> int:
    """Write the trace completely or not at all; return how many of the shortest waits it lacks.

    :raises OSError: if it cannot be written.
    """
    waits = np.concatenate([_durations(rank.rounds) for rank in analysis.run.ranks])
    left_out = max(0, len(waits) - MOST_SLICES)
    shortest = float(np.partition(waits, left_out - 1)[left_out - 1]) if left_out else -1.0
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for number, event in enumerate(_events(analysis, shortest)):
                file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    return left_out


def _durations(rounds: Any) -> Any:
    return (rounds["done"] - rounds["since"])[rounds["kind"] == ROUND].astype(float)


def _events(analysis: Analysis, shortest: float) -> Iterator[dict[str, Any]]:
    run = analysis.run
    for rank in run.ranks:
        about: dict[str, Any] = {"ph": "M", "pid": rank.rank, "tid": 0}
        name = f"rank {rank.rank} ({rank.host})"
        yield {**about, "name": "process_name", "args": {"name": name}}
        yield {**about, "name": "process_sort_index", "args": {"sort_index": rank.rank}}
        for group in sorted({int(number) for number in rank.rounds["group"]}):
            members = run.names.groups[group]
            everyone = len(members) == run.world_size
            text = "all ranks" if everyone else f"ranks {', '.join(map(str, members))}"
            yield {**about, "tid": group, "name": "thread_name", "args": {"name": text[:200]}}
        yield from _slices(analysis, rank, shortest)
    yield from _arrows(analysis)


def _slices(analysis: Analysis, rank: RankTrace, shortest: float) -> Iterator[dict[str, Any]]:
    names, start, rounds = analysis.run.names, analysis.start, rank.rounds
    chosen = rounds[(rounds["kind"] != ROUND) | (rounds["done"] - rounds["since"] > shortest)]
    for one in chosen[np.argsort(chosen["since"], kind="stable")]:
        call = names.calls[int(one["call"])]
        args: dict[str, Any] = {"where": call.site, "round": int(one["number"])}
        if one["since"] > one["posted"]:
            args["posted"] = _microseconds(float(one["posted"]) - start)
        if one["outcome"]:
            args["error"] = names.outcomes[int(one["outcome"])]
        event: dict[str, Any] = {
            "name": str(call), "cat": call.kind, "pid": rank.rank, "tid": int(one["group"]),
            "ts": _microseconds(float(one["since"]) - start), "args": args,
        }  # fmt: skip
        if one["kind"] == ROUND:
            yield {**event, "ph": "X", "dur": _microseconds(float(one["done"] - one["since"]))}
        else:
            yield {**event, "ph": "i", "s": "t", "name": f"{call}, not over"}


def _arrows(analysis: Analysis) -> Iterator[dict[str, Any]]:
    """Return arrows from the last rank to the one that waited longest, in the worst rounds."""
    found: list[tuple[float, GroupRounds, int]] = []
    for rounds in analysis.groups:
        total = rounds.waited.sum(axis=1)
        worst = np.argsort(-total, kind="stable")[:MOST_ARROWS]
        found += [(float(total[at]), rounds, int(at)) for at in worst if total[at] > 0]
    found.sort(key=lambda one: -one[0])
    for number, (_, rounds, at) in enumerate(found[:MOST_ARROWS]):
        late = int(rounds.late[at])
        if np.isnan(rounds.since[at, late]):
            continue  # it never arrived
        waiter = int(rounds.waited[at].argmax())
        call = analysis.run.names.calls[int(rounds.call[at])]
        for phase, member, times in (("s", late, rounds.since), ("f", waiter, rounds.done)):
            event: dict[str, Any] = {
                "ph": phase, "id": number, "name": f"{call} waits", "cat": "late",
                "pid": rounds.members[member], "tid": rounds.group,
                "ts": _microseconds(float(times[at, member]) - analysis.start),
            }  # fmt: skip
            yield {**event, "bp": "e"} if phase == "f" else event


def _microseconds(nanoseconds: float) -> float:
    return round(max(nanoseconds, 0.0) / 1e3, 3)
