"""Measure the array calls of syncprims and of its peers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jobs
from catalogue import DATA, OURS
from table import Seen, head, row

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scale import Scale


def measure(scale: Scale) -> dict[str, Any]:
    """Return the milliseconds of single calls on the slowest rank."""
    seen = Seen()
    for ranks, sizes in scale.data.items():
        names = [f"{operation} {size:g}" for operation in DATA for size in sizes]
        plan: dict[str, object] = {"what": "data", "sizes": sizes, "seconds": scale.data_seconds}
        for _ in range(scale.data_runs):
            for library in DATA["broadcast"]:
                jobs.measure(seen, library, ranks, plan, names)
    return {**seen.stored(), "runs": scale.data_runs}


def sizes_of(seen: Seen, operation: str, ranks: int) -> list[float]:
    """Return the measured sizes in MB."""
    names = {name for count, _, name in seen.names() if count == ranks}
    return sorted(float(name.split()[1]) for name in names if name.split()[0] == operation)


def named(size: float) -> str:
    """Return a size as text, with its unit."""
    return f"{size:g} MB" if size >= 1 else f"{size * 1024:g} KB"


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the section of the results page."""
    seen = Seen.restored(data)
    found = [
        "",
        "## Data plane",
        "",
        "Arrays of float32, into a given buffer that was written before. MB = 2**20 bytes.",
        "Each call is timed alone, by its slowest rank, and every result is checked.",
        f"Medians and ranges cover all calls of {data['runs']} runs. A ratio is the peer's time",
        "divided by our time: higher is better.",
        *head("ours", "size", "beside", *(f"{ranks} ranks" for ranks in seen.ranks())),
    ]
    counts = seen.ranks()
    for operation, calls in DATA.items():
        for size in sorted({size for n in counts for size in sizes_of(seen, operation, n)}):
            for peer in [library for library in calls if library != OURS]:
                ratios = [seen.ratio(n, peer, f"{operation} {size:g}") for n in counts]
                found.append(row(calls[OURS], named(size), peer, *ratios))
    for ranks in seen.ranks():
        found += ["", f"### {ranks} ranks, milliseconds per call"]
        found += head("by", "call", "median", "range", "times ours")
        for operation, calls in DATA.items():
            for size in sizes_of(seen, operation, ranks):
                texts = {library: f"{call}, {named(size)}" for library, call in calls.items()}
                found += seen.rows(ranks, f"{operation} {size:g}", texts)
    return found
