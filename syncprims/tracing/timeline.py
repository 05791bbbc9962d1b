"""What a timeline shows, before it is drawn in one way or another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from syncprims._protocol.trace_file import ROUND

from .waits import seconds_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .waits import Analysis

WAITS = "#f08c2e"  #: waiting
LATE = "#1f3a5f"  #: others wait for this rank
WORKS = "#e9edf1"  #: anything else


@dataclass
class Line:
    """One rank."""

    rank: int
    name: str
    said: str  #: beside it: how much it waited, and was waited for
    waits: tuple[NDArray[Any], NDArray[Any], NDArray[Any]]  #: begin, end in s, and the call
    late: tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
    begin: float
    end: float
    failed: bool


@dataclass
class Timeline:
    """A line for each rank, and what to write above them."""

    lines: list[Line]
    length: float  #: seconds
    marks: list[tuple[float, float, str]]  #: worst first: seconds, of all waiting, and the call


def timeline(analysis: Analysis) -> Timeline:
    """Return what is to be drawn of `analysis`, in seconds from its first arrival."""
    start = analysis.start
    late: dict[int, list[Any]] = {}
    marks: list[tuple[float, float, str]] = []
    for meetings in analysis.groups:
        held = meetings.held.sum(axis=1)
        arrived = np.where(meetings.held > 0, meetings.since, np.inf).min(axis=1, initial=np.inf)
        for index, member in enumerate(meetings.members):
            mine = (meetings.late == index) & np.isfinite(arrived)
            late.setdefault(member, []).append(
                np.stack([arrived[mine], meetings.last[mine], meetings.call[mine]])
            )
        for at in np.argsort(-held, kind="stable")[:400]:
            if held[at] > 0:
                call = analysis.run.names.calls[int(meetings.call[at])]
                when = (float(arrived[at]) + float(meetings.last[at])) / 2 - start
                marks.append((when / 1e9, float(held[at]) / 1e9, str(call)))
    marks.sort(key=lambda mark: -mark[1])
    marks = [mark for mark in marks if mark[1] > marks[0][1] / 20]
    hosts = {one.host for one in analysis.summaries}
    lines: list[Line] = []
    for rank, one in zip(analysis.run.ranks, analysis.summaries, strict=True):
        rounds = rank.rounds[rank.rounds["kind"] == ROUND]
        own = np.stack([rounds["since"], rounds["done"], rounds["call"]]).astype(float)
        others = np.concatenate([np.empty((3, 0)), *late.get(rank.rank, [])], axis=1)
        share = one.waiting / one.span if one.span else 0.0
        begin = float(rank.rounds["posted"].min(initial=int(analysis.stop)))
        end = max(float(rank.rounds["done"].max(initial=0)), rank.left[0] if rank.left else 0)
        lines.append(
            Line(
                rank.rank,
                f"rank {rank.rank}" + (f"  {rank.host}" if len(hosts) > 1 else ""),
                f"{share:.0%} waiting, waited for {seconds_text(one.waited_for)}",
                _seconds(own, start),
                _seconds(others, start),
                (begin - start) / 1e9,
                (end - start) / 1e9,
                one.end != "well",
            )
        )
    return Timeline(lines, max((analysis.stop - start) / 1e9, 1e-9), marks)


def _seconds(found: NDArray[Any], start: float) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    found = found[:, np.argsort(found[0], kind="stable")]
    return (found[0] - start) / 1e9, (found[1] - start) / 1e9, found[2].astype(int)


def coverage(begin: NDArray[Any], end: NDArray[Any], edges: NDArray[Any]) -> NDArray[Any]:
    """Return the share of each bin that the intervals cover, from 0 to 1."""

    def passed(times: NDArray[Any]) -> NDArray[Any]:
        """Return how much time has passed since `times`, summed, at each edge."""
        ordered = np.sort(times)
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
        before = np.searchsorted(ordered, edges)
        summed: NDArray[Any] = before * edges - sums[before]
        return summed

    covered = np.diff(passed(begin) - passed(end))
    share: NDArray[Any] = np.clip(covered / np.diff(edges), 0.0, 1.0)
    return share
