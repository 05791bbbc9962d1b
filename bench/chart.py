"""Draw the medians as bars on a log scale: an SVG by hand, so that no library has to be there."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from catalogue import CONTROL, DATA, OURS
from table import short

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from table import Seen

WIDTH, LEFT, RIGHT, LINE, HEAD = 720, 130, 90, 22, 34
TEXT = 'font-family="sans-serif" font-size="13" fill="#222"'


def draw(seen: Seen, ranks: int, size: int) -> str:
    """Return the picture of what is compared most, at one number of ranks."""
    panels = [
        ("barrier, microseconds", "barrier", CONTROL["barrier"]),
        ("broadcast of a small dict, microseconds", "small dict", CONTROL["small dict"]),
        (f"broadcast of {size} MB, milliseconds", f"broadcast {size}", DATA["broadcast"]),
        (f"all-reduce of {size} MB, milliseconds", f"all_reduce {size}", DATA["all_reduce"]),
    ]
    parts: list[str] = []
    top = 0
    for title, operation, libraries in panels:
        figures = {library: seen.figures(ranks, library, operation) for library in libraries}
        medians = {name: statistics.median(times) for name, times in figures.items() if times}
        if medians:
            parts += _panel(top, title, medians)
            top += HEAD + LINE * len(medians)
    note = f"At {ranks} ranks. The scales are logarithmic, one per block; shorter is faster."
    parts.append(f'<text x="12" y="{top + 24}" {TEXT} opacity="0.7">{note}</text>')
    return _svg(top + 36, parts)


def _panel(top: int, title: str, medians: Mapping[str, float]) -> list[str]:
    """Return one bar per library, longest room for the slowest."""
    start = math.floor(math.log10(min(medians.values())) - 0.3)
    decades = max(1.0, math.log10(max(medians.values())) - start)
    parts = [f'<text x="12" y="{top + 24}" {TEXT} font-weight="bold">{escape(title)}</text>']
    for number, (library, median) in enumerate(medians.items()):
        y = top + HEAD + LINE * number
        length = (math.log10(median) - start) / decades * (WIDTH - LEFT - RIGHT)
        colour = "#0b7a75" if library == OURS else "#b9b4a7"
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 13}" {TEXT} text-anchor="end">{escape(library)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{LINE - 5}" fill="{colour}"/>',
            f'<text x="{LEFT + length + 6:.1f}" y="{y + 13}" {TEXT}>{short(median)}</text>',
        ]
    return parts


def _svg(height: int, parts: Iterable[str]) -> str:
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', ground, *parts, "</svg>"]
    return "\n".join(lines) + "\n"
