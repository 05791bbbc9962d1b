"""A run drawn as an image by matplotlib, and written as a trace for Perfetto.

The image shows the timeline, with a row per rank: it is readable with 2 ranks and with 64.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncprims.errors import BackendUnavailable, install

from .analysis import Analysis, seconds_text
from .reading import RankTrace
from .recorder import ROUND

MOST_SLICES = 500_000  # viewers become slow beyond

WAITS = "#f08c2e"  #: the rank waits
LATE = "#3a76b8"  #: others wait for this rank
WORKS = "#c3cbd4"  #: anything else
#: Of all text: with no ground below, every colour is read on a light and on a dark page.
_INK = "#7b838e"

_COLUMNS = 1600  # of an image
_INCHES = 12.0


# -- an image ----------------------------------------------------------------------------------


def draw_image(analysis: Analysis, path: Path) -> None:
    """Write the timeline to `path` as a PNG without a background.

    :raises BackendUnavailable: if matplotlib is not installed.
    :raises OSError: if the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        what = f"--png draws with matplotlib, which is not installed: {install('trace')}"
        raise BackendUnavailable(f"{what}. Or open trace.json at ui.perfetto.dev") from error
    count = len(analysis.summaries)
    row_height = min(0.34, max(0.13, 8.0 / count))
    height = row_height * count + 1.6
    figure: Any = Figure(figsize=(_INCHES, height), dpi=110)
    several_hosts = len({summary.host for summary in analysis.summaries}) > 1
    names = [
        analysis.run.names([summary.rank]) + (f"  {summary.host}" if several_hosts else "")
        for summary in analysis.summaries
    ]
    length = max((analysis.stop - analysis.start) / 1e9, 1e-9)
    left = 0.03 + 0.0065 * max(map(len, names))
    axes: Any = figure.add_axes((left, 0.75 / height, 0.785 - left, row_height * count / height))
    for at, rank in enumerate(analysis.run.ranks):
        axes.imshow([_row_pixels(analysis, rank)], aspect="auto", interpolation="nearest",
                    extent=(0, length, at + 0.47, at - 0.47))  # fmt: skip
    size = 10 if row_height > 0.2 else 7
    axes.set_yticks(range(count), names, fontsize=size)
    for at, (rank, summary) in enumerate(zip(analysis.run.ranks, analysis.summaries, strict=True)):
        straggles = summary.rank in analysis.stragglers
        style = {"color": LATE, "fontweight": "bold"} if straggles else {"color": _INK}
        text = f"{summary.waiting_share:.0%} waiting, waited for {seconds_text(summary.waited_for)}"
        axes.text(1.008, at, text, transform=axes.get_yaxis_transform(), va="center",
                  fontsize=size, **style)  # fmt: skip
        axes.get_yticklabels()[at].set(**style)
        if summary.end != "well":
            end = (rank.last_event - analysis.start) / 1e9
            axes.plot(end, at, marker="x", color="#c92a2a", markersize=6, clip_on=False)
        for mark in analysis.marks:
            if mark.rank == rank.rank:
                text = f"{mark.text} > " if mark.joins else f"   {mark.text}"
                axes.text(mark.at, at, text, ha="right" if mark.joins else "left", va="center",
                          color=_INK, fontsize=size - 2, clip_on=True)  # fmt: skip
    axes.tick_params(length=0, axis="y")
    axes.tick_params(colors=_INK, axis="x")
    axes.set_xlabel("seconds", color=_INK)
    axes.set(xlim=(0, length), ylim=(count - 0.5, -0.5))
    axes.spines[:].set_visible(False)
    figure.text(0.012, 1 - 0.25 / height, analysis.conclusion, fontsize=11, fontweight="bold",
                color=_INK, va="center", wrap=True)  # fmt: skip
    meanings = {WORKS: "works", WAITS: "waits", LATE: "the others wait for it"}
    handles = [Patch(color=colour, label=label) for colour, label in meanings.items()]
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(left, 0.0), ncols=3,
                  labelcolor=_INK, frameon=False, fontsize=9)  # fmt: skip
    # Without `format`, matplotlib adds a suffix to the name.
    figure.savefig(path, format="png", transparent=True)


def _row_pixels(analysis: Analysis, rank: RankTrace) -> NDArray[Any]:
    """Return the row of a rank as colours, mixed where many waits share a column."""
    from matplotlib.colors import to_rgba

    start, length = analysis.start, max(analysis.stop - analysis.start, 1.0)
    edges = np.linspace(0, length, _COLUMNS + 1)  # ns
    pixels = np.zeros((_COLUMNS, 4))
    begin = rank.rounds["posted"].min(initial=int(analysis.stop)) - start
    pixels[(edges[1:] > begin) & (edges[:-1] < rank.last_event - start)] = to_rgba(WORKS)
    rounds = rank.rounds[rank.rounds["done"] > 0]
    waits = rounds["since"].astype(float), rounds["done"].astype(float)
    for colour, (since, until) in ((WAITS, waits), (LATE, _late_intervals(analysis, rank.rank))):
        share = _coverage(since - start, until - start, edges)[:, None]
        pixels = pixels * (1 - share) + share * np.array(to_rgba(colour))
    return pixels


def _late_intervals(analysis: Analysis, rank: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return from when to when other ranks waited for this one: begins and ends in ns."""
    begins, ends = [np.empty(0)], [np.empty(0)]
    for group in analysis.groups:
        chosen = group.late == rank
        since = np.where(group.waited[chosen] > 0, group.since[chosen], np.inf)
        begins.append(since.min(axis=1, initial=np.inf))
        ends.append(group.last[chosen])
    return np.concatenate(begins), np.concatenate(ends)


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


# -- a trace for Perfetto ----------------------------------------------------------------------


def write_chrome_trace(analysis: Analysis, path: Path) -> int:
    """Write a trace to `path`, completely or not at all, in the JSON of the Trace Event Format.

    It has a process for each rank, a thread in it for each group, and a slice for each wait, which
    says for which rank. Returns how many of the shortest waits are left out.

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
        name = f"{run.names([rank.rank])} ({rank.host})"
        yield {**about, "name": "process_name", "args": {"name": name}}
        yield {**about, "name": "process_sort_index", "args": {"sort_index": rank.rank}}
        for group in sorted({int(number) for number in rank.rounds["group"]}):
            members, board, epoch = run.groups[group]
            text = "all ranks" if len(members) == len(run.epochs[epoch]) else run.names(members)
            text += f" {board!r}" if board else ""
            if len(run.epochs) > 1 and rank.rank in run.epochs[epoch]:
                text = f"epoch {epoch}, as rank {run.epochs[epoch].index(rank.rank)}: {text}"
            yield {**about, "tid": group, "name": "thread_name", "args": {"name": text[:200]}}
        for mark in analysis.marks:
            if mark.rank == rank.rank:
                ts, tid = _microseconds(mark.at * 1e9), int(rank.rounds["group"][-1])
                yield {**about, "name": mark.text, "ph": "i", "s": "p", "tid": tid, "ts": ts}
        yield from _slices(analysis, rank, shortest)


def _slices(analysis: Analysis, rank: RankTrace, shortest: float) -> Iterator[dict[str, Any]]:
    run, start, rounds = analysis.run, analysis.start, rank.rounds
    groups = {group.group: group for group in analysis.groups}
    chosen = rounds[(rounds["done"] == 0) | (rounds["done"] - rounds["since"] > shortest)]
    for entry in chosen[np.argsort(chosen["since"], kind="stable")]:
        call = run.calls[int(entry["call"])]
        args: dict[str, Any] = {"where": call.site, "round": int(entry["number"])}
        if entry["since"] > entry["posted"]:
            args["posted"] = _microseconds(float(entry["posted"]) - start)
        late = -1
        if group := groups.get(int(entry["group"])):
            late = int(group.late[np.searchsorted(group.number, entry["number"])])
        if late not in (-1, rank.rank):
            args["last to come"] = run.names([late])
        if entry["outcome"]:
            what = "error" if entry["kind"] == ROUND else f"waits for {run.noun}"
            args[what] = run.outcomes[int(entry["outcome"])]
        event: dict[str, Any] = {
            "name": call.call, "cat": call.kind, "pid": rank.rank, "tid": int(entry["group"]),
            "ts": _microseconds(float(entry["since"]) - start), "args": args,
        }  # fmt: skip
        if entry["kind"] != ROUND:
            event["name"] = f"{call.call}, not over"
        if entry["done"]:
            yield {**event, "ph": "X", "dur": _microseconds(float(entry["done"] - entry["since"]))}
        else:
            yield {**event, "ph": "i", "s": "t"}


def _microseconds(nanoseconds: float) -> float:
    return round(max(nanoseconds, 0.0) / 1e3, 3)
