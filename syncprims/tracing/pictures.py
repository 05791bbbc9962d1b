"""A run drawn as an image by matplotlib, and written as a trace for Perfetto.

The image shows the timeline, with a row per rank: it is readable with 2 ranks and with 64.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncprims._protocol.trace_file import ROUND
from syncprims.errors import BackendUnavailable, ConfigurationError

from .analysis import Analysis, GroupRounds, seconds_text
from .reading import RankTrace

Intervals = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]

MOST_SLICES = 500_000  # viewers become slow beyond
MOST_ARROWS = 5_000

WAITS = "#f08c2e"  #: waiting
LATE = "#1f3a5f"  #: others wait for this rank
WORKS = "#e9edf1"  #: anything else

_COLUMNS = 1600  # of an image
_LANES = 3  # of labels above it
_FORMATS = ("png", "svg", "pdf", "jpg", "webp")  # that matplotlib has everywhere
_INCHES = 12.0


@dataclass
class TimelineRow:
    """One rank. `waits` and `late` are arrays: begin and end in seconds, and the call's number."""

    rank: int
    name: str
    note: str  #: how much it waited, and others for it
    waits: Intervals
    late: Intervals
    begin: float
    end: float
    failed: bool


@dataclass
class Timeline:
    """The rows of all ranks, and the calls to name above them."""

    rows: list[TimelineRow]
    length: float  #: seconds
    marks: list[tuple[float, float, str]]  #: worst first: when, all waiting in seconds, call


def timeline(analysis: Analysis) -> Timeline:
    """Return the timeline of `analysis`, in seconds from its first arrival."""
    start = analysis.start
    late: dict[int, list[Any]] = {}
    marks: list[tuple[float, float, str]] = []
    for group in analysis.groups:
        waited = group.waited.sum(axis=1)
        arrived = np.where(group.waited > 0, group.since, np.inf).min(axis=1, initial=np.inf)
        for index, member in enumerate(group.members):
            mine = (group.late == index) & np.isfinite(arrived)
            found = np.stack([arrived[mine], group.last[mine], group.call[mine]])
            late.setdefault(member, []).append(found)
        for at in np.argsort(-waited, kind="stable")[:400]:
            if waited[at] > 0:
                call = analysis.run.names.calls[int(group.call[at])]
                when = (float(arrived[at]) + float(group.last[at])) / 2 - start
                marks.append((when / 1e9, float(waited[at]) / 1e9, str(call)))
    marks.sort(key=lambda mark: -mark[1])
    marks = [mark for mark in marks if mark[1] > marks[0][1] / 20]
    several_hosts = len({one.host for one in analysis.summaries}) > 1
    rows: list[TimelineRow] = []
    for rank, one in zip(analysis.run.ranks, analysis.summaries, strict=True):
        rounds = rank.rounds[rank.rounds["done"] > 0]
        own = np.stack([rounds["since"], rounds["done"], rounds["call"]]).astype(float)
        others = np.concatenate([np.empty((3, 0)), *late.get(rank.rank, [])], axis=1)
        share = one.waiting / one.span if one.span else 0.0
        begin = float(rank.rounds["posted"].min(initial=int(analysis.stop)))
        end = max(float(rank.rounds["done"].max(initial=0)), rank.left[0] if rank.left else 0)
        rows.append(
            TimelineRow(
                rank.rank,
                f"rank {rank.rank}" + (f"  {rank.host}" if several_hosts else ""),
                f"{share:.0%} waiting, waited for {seconds_text(one.waited_for)}",
                _in_seconds(own, start),
                _in_seconds(others, start),
                (begin - start) / 1e9,
                (end - start) / 1e9,
                one.end != "well",
            )
        )
    return Timeline(rows, max((analysis.stop - start) / 1e9, 1e-9), marks)


def _in_seconds(found: NDArray[Any], start: float) -> Intervals:
    begin, end, call = found[:, np.argsort(found[0], kind="stable")]
    return (begin - start) / 1e9, (end - start) / 1e9, call.astype(int)


def _coverage(begin: NDArray[Any], end: NDArray[Any], edges: NDArray[Any]) -> NDArray[Any]:
    """Return the share of each bin that the intervals cover, from 0 to 1."""

    def elapsed(times: NDArray[Any]) -> NDArray[Any]:
        """Return the time since each of `times`, summed, at each edge."""
        ordered = np.sort(times)
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
        before = np.searchsorted(ordered, edges)
        summed: NDArray[Any] = before * edges - sums[before]
        return summed

    covered = np.diff(elapsed(begin) - elapsed(end))
    share: NDArray[Any] = np.clip(covered / np.diff(edges), 0.0, 1.0)
    return share


# -- an image ----------------------------------------------------------------------------------


def draw_image(analysis: Analysis, path: Path) -> None:
    """Write the timeline to `path`, in the format of its suffix; without one, as a PNG.

    :raises BackendUnavailable: if matplotlib is not installed.
    :raises ConfigurationError: if there is no format with that suffix.
    :raises OSError: if it cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise BackendUnavailable(
            "--png draws with matplotlib, which is not installed: pip install 'syncprims[trace]', "
            "or open trace.json at ui.perfetto.dev"
        ) from error
    kind = path.suffix[1:].lower() or "png"
    if kind not in _FORMATS:
        raise ConfigurationError(
            f"--png {path}: there is no format {kind!r}; the ending is one of {', '.join(_FORMATS)}"
        )
    shown = timeline(analysis)
    count = len(shown.rows)
    row_height = min(0.34, max(0.13, 8.0 / count))
    height = row_height * count + 2.1
    figure: Any = Figure(figsize=(_INCHES, height), dpi=110)
    FigureCanvasAgg(figure)
    longest = max(len(row.name) for row in shown.rows)
    left = 0.03 + 0.0065 * longest
    axes: Any = figure.add_axes((left, 0.75 / height, 0.785 - left, row_height * count / height))
    axes.imshow(_pixels(shown), aspect="auto", interpolation="nearest",
                extent=(0, shown.length, count - 0.5, -0.5))  # fmt: skip
    for at in range(1, count):
        axes.axhline(at - 0.5, color="white", linewidth=1.5 if count <= 16 else 0.6)
    size = 10 if row_height > 0.2 else 7
    axes.set_yticks(range(count), [row.name for row in shown.rows], fontsize=size)
    for at, row in enumerate(shown.rows):
        straggles = row.rank in analysis.stragglers
        style = {"color": LATE, "fontweight": "bold"} if straggles else {"color": "#555"}
        axes.text(1.008, at, row.note, transform=axes.get_yaxis_transform(), va="center",
                  fontsize=size, **style)  # fmt: skip
        if straggles:
            axes.get_yticklabels()[at].set(**style)
        if row.failed:
            axes.plot(row.end, at, marker="x", color="#c92a2a", markersize=6, clip_on=False)
    axes.tick_params(length=0, axis="y")
    axes.set_xlabel("seconds")
    axes.spines[:].set_visible(False)
    _add_labels(axes, shown, row_height)
    figure.text(0.012, 1 - 0.25 / height, analysis.conclusion, fontsize=11, fontweight="bold",
                va="center", wrap=True)  # fmt: skip
    meanings = {WORKS: "works", WAITS: "waits", LATE: "the others wait for it"}
    handles = [Patch(color=colour, label=label) for colour, label in meanings.items()]
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(left, 0.0), ncols=3,
                  frameon=False, fontsize=9)  # fmt: skip
    figure.savefig(path, format=kind)  # without `format`, matplotlib adds a suffix to the name


def _pixels(shown: Timeline) -> Any:
    """Return the rows as colours, mixed where many waits share a column."""
    from matplotlib.colors import to_rgb

    edges = np.linspace(0, shown.length, _COLUMNS + 1)
    middle = (edges[:-1] + edges[1:]) / 2
    image = np.ones((len(shown.rows), _COLUMNS, 3))
    for at, row in enumerate(shown.rows):
        image[at, (middle >= row.begin) & (middle <= row.end)] = to_rgb(WORKS)
        for colour, (begin, end, _) in ((WAITS, row.waits), (LATE, row.late)):
            share = _coverage(begin, end, edges)[:, None]
            image[at] = image[at] * (1 - share) + share * np.array(to_rgb(colour))
    return image


def _add_labels(axes: Any, shown: Timeline, row_height: float) -> None:
    """Name the calls with the longest waits above the rows, where there is space."""
    per_character = shown.length * 0.0078
    taken: list[list[tuple[float, float]]] = [[] for _ in range(_LANES)]
    for when, _, call in shown.marks:
        text = call if len(call) <= 40 else f"{call[:37]}..."
        half = (len(text) + 2) * per_character / 2
        middle = min(max(when, half), shown.length - half)
        for lane, spans in enumerate(taken):
            if all(middle + half < a or middle - half > b for a, b in spans):
                spans.append((middle - half, middle + half))
                up = -0.5 - (0.10 + 0.17 * lane) / row_height
                axes.text(middle, up, text, ha="center", va="bottom", fontsize=8, color="#333",
                          backgroundcolor="white", bbox={"pad": 0.5, "color": "white"})  # fmt: skip
                axes.plot([when, when], [up, -0.5], color="#bbb", linewidth=0.7, clip_on=False,
                          zorder=0)  # fmt: skip
                break
    axes.set_ylim(len(shown.rows) - 0.5, -0.5)
    axes.set_xlim(0, shown.length)


# -- a trace for Perfetto ----------------------------------------------------------------------


def write_chrome_trace(analysis: Analysis, path: Path) -> int:
    """Write a trace to `path`, completely or not at all, in the JSON of the Trace Event Format.

    It has a process for each rank, a thread in it for each group, a slice for each wait, and an
    arrow from the rank that arrived last to the one that waited longest for it. Returns how many of
    the shortest waits are left out.

    :raises OSError: if it cannot be written.
    """
    rounds = np.concatenate([rank.rounds for rank in analysis.run.ranks])
    waits = (rounds["done"] - rounds["since"])[rounds["done"] > 0].astype(float)
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
    chosen = rounds[(rounds["done"] == 0) | (rounds["done"] - rounds["since"] > shortest)]
    for one in chosen[np.argsort(chosen["since"], kind="stable")]:
        call = names.calls[int(one["call"])]
        args: dict[str, Any] = {"where": call.site, "round": int(one["number"])}
        if one["since"] > one["posted"]:
            args["posted"] = _microseconds(float(one["posted"]) - start)
        if one["outcome"]:
            what = "error" if one["kind"] == ROUND else "waits for ranks"
            args[what] = names.outcomes[int(one["outcome"])]
        event: dict[str, Any] = {
            "name": str(call), "cat": call.kind, "pid": rank.rank, "tid": int(one["group"]),
            "ts": _microseconds(float(one["since"]) - start), "args": args,
        }  # fmt: skip
        if one["kind"] != ROUND:
            event["name"] = f"{call}, not over"
        if one["done"]:
            yield {**event, "ph": "X", "dur": _microseconds(float(one["done"] - one["since"]))}
        else:
            yield {**event, "ph": "i", "s": "t"}


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
