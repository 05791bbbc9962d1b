"""Measure the file backend beside its peers: one command, every figure.

    python bench/measure.py [--write] [--quick]

Ours and the peers run in turn within each repetition, so that a slow minute slows all. `--write`
puts the figures into RESULTS.md and results.svg; `--quick` only shows that everything here works.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import chart
import death
import essentials
import jobs
import machine
import resources
import worlds
from catalogue import CONTROL, CONTROL_AIMS, DATA, DATA_AIMS, OURS
from table import Seen, head, row

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

RESULTS = Path(__file__).with_name("RESULTS.md")
PICTURE = Path(__file__).with_name("results.svg")


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    runs: int
    seconds: float  #: for every figure of the control plane
    control: tuple[int, ...]  #: ranks
    data: dict[int, tuple[int, ...]]  #: ranks -> MB
    data_runs: int
    data_seconds: float
    memory: tuple[int, int]  #: ranks, MB
    wait: tuple[int, float]  #: ranks, seconds
    kills: int  #: in each case
    worlds: tuple[int, int]  #: of tests: ours, the peers'


FULL = Scale(
    runs=3,
    seconds=0.3,
    control=(2, 4, 8),
    data={2: (1, 16, 64, 256), 4: (1, 16, 64, 256), 8: (64,)},
    data_runs=2,
    data_seconds=1.0,
    memory=(4, 256),
    wait=(8, 20.0),
    kills=100,
    worlds=(50, 3),
)
QUICK = Scale(1, 0.02, (2, 4), {2: (1, 16)}, 1, 0.05, (2, 16), (2, 1.0), 3, (5, 1))


def measure(
    seen: Seen, libraries: Iterable[str], ranks: int, names: Mapping[str, object], **plan: object
) -> None:
    """Run each library once, ours and the peers in turn."""
    for library in libraries:
        print(f"{plan['what']}, {ranks} ranks: {library}", file=sys.stderr, flush=True)
        try:
            seen.add(ranks, library, jobs.start(library, ranks, plan))
        except jobs.NoFigures as error:
            seen.lack(ranks, library, names, str(error))


def control_plane(scale: Scale, seen: Seen) -> list[str]:
    """Return the figures of the calls that carry little or nothing."""
    for ranks in scale.control:
        for _ in range(scale.runs):
            measure(seen, jobs.KINDS, ranks, CONTROL, what="control", seconds=scale.seconds)
    columns = [f"{ranks} ranks" for ranks in scale.control]
    lines = ["", "## Control plane", *head("ours", "beside", "aim", *columns)]
    for aim in CONTROL_AIMS:
        cells = [seen.verdict(ranks, aim, aim.operation) for ranks in scale.control]
        lines.append(row(CONTROL[aim.operation][OURS], aim.peer or "", aim, *cells))
    lines += [
        "",
        f"Ratios of the medians of {scale.runs} runs: with an aim of `<=` our time over the",
        "peer's, else the peer's over ours, so that more is better. MPICH's and Gloo's broadcasts",
        "let the source go on before the others have come; every call of ours returns when all",
        "came, and so can tell who is missing.",
    ]
    for ranks in scale.control:
        lines += ["", f"### {ranks} ranks, microseconds per call"]
        lines += head("by", "call", "median", "range", "times ours")
        for operation, calls in CONTROL.items():
            lines += seen.rows(ranks, operation, calls)
    return lines


def data_plane(scale: Scale, seen: Seen) -> list[str]:
    """Return the figures of the calls that carry arrays."""
    for ranks, sizes in scale.data.items():
        names = [f"{operation} {size}" for operation in DATA for size in sizes]
        plan = {"what": "data", "sizes": sizes, "seconds": scale.data_seconds}
        for _ in range(scale.data_runs):
            measure(seen, DATA["broadcast"], ranks, dict.fromkeys(names), **plan)
    columns = [f"{ranks} ranks" for ranks in scale.data]
    lines = [
        "",
        "## Data plane",
        "",
        "Arrays of float32 into a given buffer whose pages are there, MB = 2**20 bytes. Each call",
        "is timed by itself, as long as the slowest rank took, and every result is checked.",
        f"Medians and ranges are of all calls of {scale.data_runs} runs.",
        *head("ours", "MB", "beside", "aim", *columns),
    ]
    every_size = sorted({size for sizes in scale.data.values() for size in sizes})
    for aim in DATA_AIMS:
        for size in every_size:
            cells = [
                seen.verdict(ranks, aim, f"{aim.operation} {size}") if size in sizes else ""
                for ranks, sizes in scale.data.items()
            ]
            lines.append(row(DATA[aim.operation][OURS], size, aim.peer, aim, *cells))
    for ranks, sizes in scale.data.items():
        lines += ["", f"### {ranks} ranks, milliseconds per call"]
        lines += head("by", "call", "median", "range", "times ours")
        for operation, calls in DATA.items():
            for size in sizes:
                named = {library: f"{call}, {size} MB" for library, call in calls.items()}
                lines += seen.rows(ranks, f"{operation} {size}", named)
    return lines


def kill_to_report(kills: int) -> list[str]:
    """Return how soon waiting ranks are told that one of them was killed."""
    lines = ["", "## From a kill to the news, milliseconds", ""]
    lines += [f"The slowest of the waiting ranks; {kills} kills in each case."]
    lines += head("case", "median", "p99", "max")
    for case, figures in death.measure(kills).items():
        ordered = sorted(figures)
        p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
        shown = (statistics.median(ordered), p99, ordered[-1])
        lines.append(row(case, *(f"{figure:.1f}" for figure in shown)))
    return lines


def report(scale: Scale, seen: Seen) -> str:
    begin = time.monotonic()
    lines = ["# Results", "", *machine.described()]
    lines += ["", "![the medians at 4 ranks](results.svg)"]
    lines += essentials.section(scale.runs)
    lines += control_plane(scale, seen)
    lines += data_plane(scale, seen)
    lines += resources.memory(seen, *scale.memory)
    lines += resources.long_wait(seen, *scale.wait)
    lines += kill_to_report(scale.kills)
    lines += worlds.section(*scale.worlds)
    lines += ["", f"All of it took {(time.monotonic() - begin) / 60:.0f} minutes."]
    if seen.failed:
        lines += ["", "What failed:", "", *(f"- {failure}" for failure in seen.failed)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure syncprims beside its peers.")
    parser.add_argument("--write", action="store_true", help="also write RESULTS.md")
    parser.add_argument("--quick", action="store_true", help="try everything once, in a minute")
    options = parser.parse_args()
    if options.quick and options.write:
        parser.error("--quick gives no figures worth writing")
    seen = Seen()
    text = report(QUICK if options.quick else FULL, seen)
    picture = chart.draw(seen, ranks=4, size=64)
    print(text)
    if options.write:
        RESULTS.write_text(text)
        PICTURE.write_text(picture)
    sys.exit(1 if seen.failed else 0)


if __name__ == "__main__":
    main()
