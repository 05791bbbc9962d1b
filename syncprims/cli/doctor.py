"""The command that measures a job from inside."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from syncprims.doctor.findings import Finding, count_of, findings, grouped, listed, processor_count

from .console import CommandParser, Style, table
from .options import seconds

HELP = """Measure a job from inside, and print what to improve.
Measure round trips and bandwidth in the real job. Show which ranks share a host and its memory, how
far clocks are apart, and which versions differ; then what is wrong, and the cure.

examples:
  syncprims run -n 4 -m syncprims doctor
  torchrun --nproc-per-node 4 -m syncprims doctor
  srun -n 8 python -m syncprims doctor
  syncprims doctor                                  one rank, alone

Start it as you start the job: by the same launcher, with the same variables. Every rank takes part
and rank 0 prints, once. exit code: 0 if it could be measured, with or without problems; else 2."""


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--json", action="store_true", help="the same for programs, as JSON")
    parser.add_argument(
        "--seconds", type=seconds, default=0.2, metavar="S",
        help="how long each measurement takes, about (default: 0.2)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Examine the job on every rank, and print the result on rank 0."""
    from syncprims import init
    from syncprims.doctor.measurements import examine

    with init() as world:
        job = examine(world, options.environ, options.seconds)
        if world.rank == 0:
            found = findings(job)
            text = "\n".join(report(job, found, Style(sys.stdout, options.environ)))
            whole = {**job, "findings": [one._asdict() for one in found]}
            print(json.dumps(whole, indent=2) if options.json else text)  # noqa: T201
    return 0


def report(job: dict[str, Any], found: Sequence[Finding], style: Style) -> list[str]:
    """Return the lines of the report: the ranks, the measurements, and the findings."""
    ranks, nodes = count_of(job["world_size"], "rank"), count_of(job["num_nodes"], "node")
    launcher = job["ranks"][0]["launcher"].replace("none", "no launcher")
    lines = [
        style("bold", f"{ranks} on {nodes}, backend {job['backend']}, started by {launcher}"),
        *table(_place_rows(job["ranks"][0])),
        "",
        style("bold", "Who shares what"),
        *table(_machine_rows(job["ranks"])),
        "",
        style("bold", "Round trips, microseconds") + " (the slowest rank's)",
    ]
    rows: list[tuple[str, ...]] = [("group", "call", "median", "99 in 100 below")]
    for row in job["latency"]:
        figures = (f"{row[key]:.{1 if row[key] >= 1 else 2}f}" for key in ("median_us", "p99_us"))
        rows.append((row["group"], row["call"], *figures))
    lines += table(rows)
    if job["bandwidth"]:
        sizes: list[tuple[str, ...]] = [("size", "through", "call", "milliseconds", "GB/s")]
        for row in job["bandwidth"]:
            figures = (f"{row[key]:.3g}" for key in ("ms", "gb_per_s"))
            sizes.append((_size(row["bytes"]), row["where"], row["call"], *figures))
        lines += ["", style("bold", "Large arrays"), *table(sizes)]
    lines += ["", style("bold", "Clocks"), *table(_clock_rows(job))]
    lines += ["", style("bold", "Findings")]
    for one in found:
        colour = "red" if one.level == "problem" else "yellow"
        lines += [f"  {style(colour, one.level)}: {one.text}", f"    cure: {one.cure}"]
    if not any(one.level == "problem" for one in found):
        lines.append("  " + style("green", "nothing is wrong"))
    return lines


def _place_rows(first: dict[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if first["meeting_place"]:
        kind = f" ({first['file_system']})" if first["file_system"] else ""
        rows.append(("meeting place", first["meeting_place"] + kind))
    if first["free"] is not None:
        rows.append(("free there", _size(first["free"])))
    versions = [f"python {first['python']}"]
    versions += [f"{name} {release or 'none'}" for name, release in first["versions"].items()]
    return [*rows, ("rank 0 has", ", ".join(versions))]


def _machine_rows(ranks: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("host", "node", "ranks", "share memory", "processors", "threads", "load")
    ]
    for those in grouped(ranks, "machine"):
        memories = [listed(one["rank"] for one in each) for each in grouped(those, "memory")]
        processors = processor_count(those)
        threads = sorted({str(facts["threads"] or "not set") for facts in those})
        rows.append(
            (
                ", ".join(dict.fromkeys(facts["host"] for facts in those)),
                listed({facts["node"] for facts in those}),
                listed(facts["rank"] for facts in those),
                " / ".join(memories) if len(those) > 1 else "-",
                f"{processors} ({processors / len(those):.3g} per rank)",
                f"{' or '.join(threads)} per rank",
                f"{those[0]['load']:.1f}",
            )
        )
    return rows


def _clock_rows(job: dict[str, Any]) -> list[tuple[str, ...]]:
    ranks = job["ranks"]
    if len({facts["machine"] for facts in ranks}) == 1:
        return [("all ranks read the clock of one machine",)]

    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        figures = f"{row['ahead_s'] * 1e3:.3f}", f"{row['uncertainty_s'] * 1e3:.3f}"
        return (ranks[row["rank"]]["host"], str(row["rank"]), *figures)

    head = "host", "rank", "ahead of rank 0, ms", "uncertainty, ms"
    return [head, *map(cells, job["clocks"][1:])]


def _size(count: int) -> str:
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << bits:
            return f"{count / (1 << bits):.3g} {unit}"
    return f"{count} bytes"
