"""Figures become Markdown: what was measured, and how it compares."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from catalogue import OURS, Aim

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class Seen:
    """All figures so far, and why some are not there."""

    def __init__(self) -> None:
        self._figures: dict[tuple[int, str, str], list[float]] = {}
        self._lacking: dict[tuple[int, str, str], str] = {}
        self.failed: list[str] = []

    def add(self, ranks: int, library: str, figures: Mapping[str, Sequence[float]]) -> None:
        """Note one more run."""
        for operation, times in figures.items():
            self._figures.setdefault((ranks, library, operation), []).extend(times)

    def lack(self, ranks: int, library: str, operations: Iterable[str], reason: str) -> None:
        """Note that a run gave no figures, and why."""
        for operation in operations:
            self._lacking[ranks, library, operation] = reason
        if "not installed" not in reason:
            self.failed.append(f"{library} at {ranks} ranks: {reason}")

    def figures(self, ranks: int, library: str, operation: str) -> list[float]:
        """Return all figures of one operation, none if it could not be measured."""
        return self._figures.get((ranks, library, operation), [])

    def why_not(self, ranks: int, library: str, operation: str) -> str:
        """Return why there is no figure."""
        return self._lacking.get((ranks, library, operation), "not measured")

    def verdict(self, ranks: int, aim: Aim, operation: str) -> str:
        """Return the cell that compares ours with the peer's, or says why it cannot."""
        ours = self.figures(ranks, OURS, operation)
        if not ours:
            return self.why_not(ranks, OURS, operation)
        if aim.peer is None:
            return aim.verdict(statistics.median(ours), 1.0)
        peers = self.figures(ranks, aim.peer, operation)
        if not peers:
            return self.why_not(ranks, aim.peer, operation)
        return aim.verdict(statistics.median(ours), statistics.median(peers))

    def rows(self, ranks: int, operation: str, calls: Mapping[str, str]) -> list[str]:
        """Return a line per library: median, range, and how many times ours that is."""
        ours = self.figures(ranks, OURS, operation)
        lines: list[str] = []
        for library, call in calls.items():
            times = self.figures(ranks, library, operation)
            if not times:
                cells = [self.why_not(ranks, library, operation), "", ""]
            else:
                median = statistics.median(times)
                cells = [short(median), f"{short(min(times))} - {short(max(times))}", ""]
                if ours:
                    cells[2] = short(median / statistics.median(ours))
            lines.append(row(library, call, *cells))
        return lines


def short(figure: float) -> str:
    """Return a figure with as many decimals as tell something."""
    return f"{figure:.{2 if figure < 10 else 1 if figure < 100 else 0}f}"


def row(*cells: object) -> str:
    """Return one line of a table."""
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def head(*cells: str) -> list[str]:
    """Return the first two lines of a table."""
    return ["", row(*cells), "|" + "---|" * len(cells)]


def spreads(title: str, unit: str, figures: Mapping[str, Sequence[float]]) -> list[str]:
    """Return a section of medians and ranges that are compared with nobody's."""
    lines = ["", f"## {title}", *head("case", f"median, {unit}", "range")]
    for name, times in figures.items():
        span = f"{short(min(times))} - {short(max(times))}"
        lines.append(row(name, short(statistics.median(times)), span))
    return lines
