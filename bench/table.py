"""Figures, their comparison, and their rendering as Markdown."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from catalogue import OURS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from catalogue import Aim


class Seen:
    """All figures of a section, and the reasons for missing ones. Lower is always better."""

    def __init__(self) -> None:
        self._figures: dict[tuple[int, str, str], list[float]] = {}
        self._lacking: dict[tuple[int, str, str], str] = {}
        self.failed: list[str] = []

    def add(self, ranks: int, library: str, figures: Mapping[str, Sequence[float]]) -> None:
        """Add the figures of one run."""
        for operation, times in figures.items():
            self._figures.setdefault((ranks, library, operation), []).extend(times)

    def lack(self, ranks: int, library: str, operations: Iterable[str], reason: str) -> None:
        """Record why a run has no figures."""
        for operation in operations:
            self._lacking[ranks, library, operation] = reason
        if "not installed" not in reason:
            self.failed.append(f"{library} at {ranks} ranks: {reason}")

    def stored(self) -> dict[str, Any]:
        """Return the data to store: the least, the median and the most of every figure."""

        def nested(flat: Mapping[tuple[int, str, str], object]) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for (ranks, library, operation), what in flat.items():
                found.setdefault(str(ranks), {}).setdefault(library, {})[operation] = what
            return found

        return {
            "figures": nested({key: _three(times) for key, times in self._figures.items()}),
            "lacking": nested(self._lacking),
            "failed": self.failed,
        }

    @classmethod
    def restored(cls, stored: Mapping[str, Any]) -> Seen:
        """Restore from `stored`. The median of three numbers is the one in the middle."""
        seen = cls()
        seen._figures.update(_flat(stored.get("figures", {})))
        seen._lacking.update(_flat(stored.get("lacking", {})))
        seen.failed += stored.get("failed", [])
        return seen

    def figures(self, ranks: int, library: str, operation: str) -> list[float]:
        """Return all figures of one operation; empty if it could not be measured."""
        return self._figures.get((ranks, library, operation), [])

    def median(self, ranks: int, library: str, operation: str) -> float | None:
        """Return the median of the figures; None if there are none."""
        times = self.figures(ranks, library, operation)
        return statistics.median(times) if times else None

    def why_not(self, ranks: int, library: str, operation: str) -> str:
        """Return why a figure is missing."""
        return self._lacking.get((ranks, library, operation), "not measured")

    def names(self) -> list[tuple[int, str, str]]:
        """Return the ranks, library and operation of every figure, in order of measurement."""
        return list(self._figures)

    def ranks(self) -> list[int]:
        """Return every number of ranks, smallest first."""
        return sorted({ranks for ranks, _, _ in (*self._figures, *self._lacking)})

    def verdict(self, ranks: int, aim: Aim, operation: str, ours: str) -> tuple[str, bool | None]:
        """Return the value that the aim limits and whether it is reached, or why it is unknown."""
        mine = self.median(ranks, ours, operation)
        if mine is None:
            return self.why_not(ranks, ours, operation), None
        peers = None
        if aim.peer is not None:
            peers = self.median(ranks, aim.peer, aim.operation or operation)
            if peers is None:
                return f"{aim.peer}: {self.why_not(ranks, aim.peer, operation)}", None
        return short(aim.measured(mine, peers)), aim.reached(mine, peers)

    def ratio(self, ranks: int, library: str, operation: str) -> str:
        """Return the median of a library divided by ours; `-` if there is nothing to compare."""
        ours, theirs = (self.median(ranks, name, operation) for name in (OURS, library))
        return short(theirs / ours) if ours and theirs else "-"

    def rows(self, ranks: int, operation: str, calls: Mapping[str, str]) -> list[str]:
        """Return a line per library: median, range, and the ratio to ours."""
        ours = self.median(ranks, OURS, operation)
        lines: list[str] = []
        for library, call in calls.items():
            times = self.figures(ranks, library, operation)
            if not times:
                cells = [self.why_not(ranks, library, operation), "", ""]
            else:
                median = statistics.median(times)
                cells = [short(median), span(times), ""]
                if ours:
                    cells[2] = short(median / ours)
            lines.append(row(library, call, *cells))
        return lines


def _three(times: Sequence[float]) -> list[float]:
    """Return the least, the median and the most, rounded for reading."""
    three = (min(times), statistics.median(times), max(times))
    return [float(f"{figure:.4g}") for figure in three]


def _flat(nested: Mapping[str, Any]) -> dict[tuple[int, str, str], Any]:
    return {
        (int(ranks), library, operation): what
        for ranks, libraries in nested.items()
        for library, operations in libraries.items()
        for operation, what in operations.items()
    }


def short(figure: float) -> str:
    """Return a figure with three significant digits at most."""
    return f"{figure:.{2 if abs(figure) < 10 else 1 if abs(figure) < 100 else 0}f}"


def span(times: Sequence[float]) -> str:
    """Return the range of figures."""
    return f"{short(min(times))} - {short(max(times))}"


def row(*cells: object) -> str:
    """Return one row of a table."""
    return f"| {' | '.join(str(cell).strip() for cell in cells)} |"


def head(*cells: str) -> list[str]:
    """Return the two head lines of a table."""
    return ["", row(*cells), "|" + "---|" * len(cells)]
