"""Measure the calls that carry arrays, beside the peers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jobs
from catalogue import DATA, OURS
from table import Seen, head, row

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scale import Scale


def measure(scale: Scale) -> dict[str, Any]:
    """Return the milliseconds of single calls, of the rank that took longest."""
    seen = Seen()
    for ranks, sizes in scale.data.items():
        names = [f"{operation} {size:g}" for operation in DATA for size in sizes]
        plan: dict[str, object] = {"what": "data", "sizes": sizes, "seconds": scale.data_seconds}
        for _ in range(scale.data_runs):
            for library in DATA["broadcast"]:
                jobs.measure(seen, library, ranks, plan, names)
    return {**seen.stored(), "runs": scale.data_runs}


def sizes_of(seen: Seen, operation: str, ranks: int) -> list[float]:
    """Return the sizes, in MB, that were measured."""
    names = {name for count, _, name in seen.names() if count == ranks}
    return sorted(float(name.split()[1]) for name in names if name.split()[0] == operation)


def named(size: float) -> str:
    """Return a size as people write it."""
    return f"{size:g} MB" if size >= 1 else f"{size * 1024:g} KB"


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the figures as a section of the results."""
    seen = Seen.restored(data)
    found = [
        "",
        "## Data plane",
        "",
        "Arrays of float32 into a given buffer whose pages are there, MB = 2**20 bytes. Each call",
        "is timed by itself, as long as the slowest rank took, and every result is checked.",
        f"Medians and ranges are of all calls of {data['runs']} runs. Ratios are the peer's time",
        "over ours: more is better.",
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
