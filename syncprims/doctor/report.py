"""What a person reads of a doctor's visit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .verdicts import by_machine, listed, processors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .verdicts import Verdict

    Style = Callable[[str, str], str]
    Table = Callable[[Sequence[Sequence[str]]], list[str]]


def report(found: dict[str, Any], said: Sequence[Verdict], style: Style, table: Table) -> list[str]:
    """Return the lines of the report: who is where, what was measured, and what it means."""
    ranks, first = found["ranks"], found["ranks"][0]
    lines = [
        style(
            "bold",
            f"{found['world_size']} rank{'s' * (found['world_size'] > 1)} on {found['num_nodes']} "
            f"node{'s' * (found['num_nodes'] > 1)}, backend {found['backend']}, started by "
            f"{first['launcher'].replace('none', 'no launcher')}",
        ),
        *table(_places(first)),
        "",
        style("bold", "Who shares what"),
        *table(_hosts(ranks)),
        "",
        style("bold", "Round trips, microseconds") + " (the slowest rank's)",
        *table(_latency(found["latency"])),
    ]
    if found["bandwidth"]:
        lines += ["", style("bold", "Arrays in bulk"), *table(_bandwidth(found["bandwidth"]))]
    lines += ["", style("bold", "Clocks"), *table(_clocks(found))]
    lines += ["", style("bold", "Verdict")]
    for one in said:
        colour = "red" if one.level == "problem" else "yellow"
        lines += [f"  {style(colour, one.level)}: {one.text}", f"    cure: {one.cure}"]
    if not any(one.level == "problem" for one in said):
        lines.append("  " + style("green", "nothing is wrong"))
    return lines


def _places(first: dict[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if first["meeting_place"]:
        kind = f" ({first['file_system']})" if first["file_system"] else ""
        rows.append(("meeting place", first["meeting_place"] + kind))
    if first["room"] is not None:
        rows.append(("room there", _size(first["room"])))
    versions = [f"python {first['python']}"]
    versions += [f"{name} {release or 'none'}" for name, release in first["versions"].items()]
    return [*rows, ("rank 0 has", ", ".join(versions))]


def _hosts(ranks: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("host", "node", "ranks", "share memory", "processors", "threads", "load")
    ]
    for those in by_machine(ranks).values():
        memories: dict[str, list[int]] = {}
        for facts in those:
            memories.setdefault(facts["memory"], []).append(facts["rank"])
        shared = " / ".join(listed(numbers) for numbers in memories.values())
        rows.append(
            (
                ", ".join(dict.fromkeys(facts["host"] for facts in those)),
                listed(sorted({facts["node"] for facts in those})),
                listed([facts["rank"] for facts in those]),
                shared if len(those) > 1 else "-",
                f"{processors_of(those)} ({processors_of(those) / len(those):.3g} per rank)",
                _threads(those),
                f"{those[0]['load']:.1f}",
            )
        )
    return rows


def _threads(those: list[dict[str, Any]]) -> str:
    said = sorted({str(facts["threads"] or "not set") for facts in those})
    return f"{' or '.join(said)} per rank"


def _latency(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        ("group", "call", "median", "99 in 100 below"),
        *((row["group"], row["call"], _us(row["median_us"]), _us(row["p99_us"])) for row in rows),
    ]


def _bandwidth(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        figures = f"{row['ms']:.3g}", f"{row['gb_per_s']:.3g}"
        return (_size(row["bytes"]), row["where"], row["call"], *figures)

    return [("size", "through", "call", "milliseconds", "GB/s"), *map(cells, rows)]


def _clocks(found: dict[str, Any]) -> list[tuple[str, ...]]:
    ranks = found["ranks"]
    if len(by_machine(ranks)) == 1:
        return [("all ranks read the clock of one machine",)]

    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        figures = f"{row['ahead_s'] * 1e3:.3f}", f"{row['uncertainty_s'] * 1e3:.3f}"
        host: str = ranks[row["rank"]]["host"]
        return (host, str(row["rank"]), *figures)

    head = "host", "rank", "ahead of rank 0, ms", "give or take, ms"
    return [head, *map(cells, found["clocks"][1:])]


def _us(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _size(count: int) -> str:
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << bits:
            return f"{count / (1 << bits):.3g} {unit}"
    return f"{count} bytes"
