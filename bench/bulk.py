"""Measure the array calls of syncprims and of its peers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jobs
from catalogue import DATA, OURS, named
from table import Seen, head, row

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scale import Scale


def measure(scale: Scale) -> dict[str, Any]:
    """Return the microseconds of calls on the slowest rank."""
    seen = Seen()
    for ranks, sizes in scale.data:
        names = [f"{operation} {size}" for operation in DATA for size in sizes]
        for _ in range(scale.data_runs):
            for library in DATA["broadcast"]:
                plan = {
                    "what": "data",
                    "sizes": sizes,
                    "seconds": scale.data_seconds,
                    "beside": ["barrier"] if library == OURS else [],
                }
                jobs.measure(seen, library, ranks, plan, names)
    return {**seen.stored(), "runs": scale.data_runs}


def sizes_of(seen: Seen, operation: str, ranks: int) -> list[int]:
    """Return the measured sizes in bytes."""
    names = {name for count, _, name in seen.names() if count == ranks}
    return sorted(int(name.split()[1]) for name in names if name.split()[0] == operation)


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the section of the results page."""
    seen = Seen.restored(data)
    found = [
        "",
        "## Data plane",
        "",
        "Arrays of float32, into a given buffer that was written before. MB = 2**20 bytes.",
        "The slowest rank counts. Calls shorter than 5 ms are timed in spells of 5 ms, others",
        "alone; all ranks start a spell with new values, and the result is checked. A ratio is",
        f"the peer's time divided by our time: higher is better. Medians of {data['runs']} runs.",
        *head("ours", "size", "beside", *(f"{ranks} ranks" for ranks in seen.ranks())),
    ]
    counts = seen.ranks()
    for operation, calls in DATA.items():
        for size in sorted({size for n in counts for size in sizes_of(seen, operation, n)}):
            for peer in [library for library in calls if library != OURS]:
                ratios = [seen.ratio(n, peer, f"{operation} {size}") for n in counts]
                found.append(row(calls[OURS], named(size), peer, *ratios))
    for ranks in seen.ranks():
        found += ["", f"### {ranks} ranks, microseconds per call"]
        found += head("by", "call", "median", "range", "times ours")
        for operation, calls in DATA.items():
            for size in sizes_of(seen, operation, ranks):
                texts = {library: f"{call}, {named(size)}" for library, call in calls.items()}
                found += seen.rows(ranks, f"{operation} {size}", texts)
    return found
