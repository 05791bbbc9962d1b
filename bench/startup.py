"""Measure the start of a job: seconds up to the first barrier of all ranks, and memory per rank.

python bench/measure.py --only startup
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import jobs
from table import Seen, head, row, short, span

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scale import Scale

TIME, MEMORY = "time to the first barrier", "memory per rank"
MOST_WITH_TORCH = 16  #: ranks; each takes seconds of a processor and hundreds of MB


def measure(scale: Scale) -> dict[str, Any]:
    """Return the seconds from the command to the last rank's first barrier, and MB of each rank."""
    seen = Seen()
    for ranks in scale.startup:
        for number in range(scale.runs + 1):
            for library, kind in jobs.FIRST_BARRIER.items():
                if library == "Gloo" and ranks > MOST_WITH_TORCH:
                    continue
                print(f"start of {ranks} ranks: {library}", file=sys.stderr, flush=True)
                begin = time.monotonic()
                try:
                    found = [json.loads(line) for line in jobs.run(kind, ranks, library)]
                except jobs.NoFigures as error:
                    seen.lack(ranks, library, (TIME, MEMORY), str(error))
                    continue
                if number:  # the first start reads the files from the disk
                    seen.add(ranks, library, {TIME: [max(each["at"] for each in found) - begin]})
                    seen.add(ranks, library, {MEMORY: [each["private"] for each in found]})
    return {**seen.stored(), "runs": scale.runs}


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the section of the results page."""
    seen = Seen.restored(data)
    found = [
        "",
        "## Start of a job",
        "",
        "Seconds from the command (`syncprims run`, `mpiexec`, `mpirun`, `torchrun`) to the first",
        "barrier of the last rank, and the private memory of a rank after it. Ranks are Python",
        f"programs that import only the library. {data['runs']} runs; files are in the cache.",
        *head("ranks", "by", "seconds", "range", "MB per rank", "range"),
    ]
    for ranks in seen.ranks():
        for library in jobs.FIRST_BARRIER:
            cells: list[str] = []
            for operation in (TIME, MEMORY):
                figures = seen.figures(ranks, library, operation)
                if figures:
                    cells += [short(statistics.median(figures)), span(figures)]
                else:
                    cells += [seen.why_not(ranks, library, operation), ""]
            found.append(row(ranks, library, *cells))
    return found
