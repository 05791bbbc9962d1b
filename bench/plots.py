"""Draw lines on two logarithmic scales as SVG, each with its name at its end.

No library and no font is needed. The picture has its own background, and other colours for dark
mode, so that it is readable on any page.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.sax.saxutils import escape

from bulk import sizes_of
from catalogue import OURS, named
from table import Seen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Sections = Mapping[str, Mapping[str, Any]]

TITLES = {
    "latency": "Latency by number of ranks, compared with peers",
    "arrays": "Time by array size, compared with peers",
}
WIDTH, HEIGHT = 876, 380
PANEL, TOP, BOTTOM = 270, 62, 330  #: width of a panel's scale, its upper and lower edge
LEFTS = (64, 502)  #: of both panels
LABEL_WIDTH = 48  #: least distance between the middles of the values below a panel
NAME_HEIGHT = 15  #: least distance between the names at the ends of lines
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #333a44 }
.title { font-weight: 600; font-size: 14px } .faint { fill: #68717d; font-size: 12px }
.ours { fill: #00796b; font-weight: 700 }
.ground { fill: #ffffff; stroke: #d5d9df } .grid { stroke: #e3e6ea }
path { fill: none; stroke-width: 1.75 } path.line-ours { stroke: #00897b; stroke-width: 3 }
circle.dot-ours { fill: #00897b }
@media (prefers-color-scheme: dark) {
text { fill: #d6dbe1 } .faint { fill: #98a2ae } .ours { fill: #4dd0c0 }
.ground { fill: #14181d; stroke: #333a42 } .grid { stroke: #2a3037 }
path.line-ours { stroke: #4dd0c0 } circle.dot-ours { fill: #4dd0c0 }
}
"""
#: Of the peers' lines and names; each is readable on both grounds.
COLOURS = {
    "Accelerate": "#c2691a",
    "Gloo": "#5b7fc7",
    "MPICH": "#9a6fb0",
    "Open MPI": "#b0842b",
    "pthread": "#c45a7a",
}
OTHER_COLOUR = "#8a939e"

Points = list[tuple[float, float]]


class Panel(NamedTuple):
    """A pair of scales with its lines."""

    title: str
    unit: str  #: of the vertical scale
    lines: dict[str, Points]
    across: Callable[[float], str]  #: text under a value
    below: str


def latency(sections: Sections) -> str:
    """Return the picture of barriers and small broadcasts: microseconds by ranks."""
    panels = []
    for title, operation in (
        ("barrier on one host", "barrier"),
        ("broadcast of a small dict", "small dict"),
    ):
        lines = _by_ranks(sections, "control", operation)
        below = f"ranks{_on(sections, 'control')}"
        panels.append(Panel(title, "microseconds, less is better", lines, "{:g}".format, below))
    return _drawn(TITLES["latency"], panels)


def arrays(sections: Sections) -> str:
    """Return the picture of broadcasts and all-reduces: microseconds by size."""
    panels = []
    seen = Seen.restored(sections.get("data", {}).get("data", {}))
    for title, operation in (("broadcast", "broadcast"), ("all-reduce", "all_reduce")):
        # The number of ranks with the most sizes
        ranks = max(seen.ranks(), key=lambda n: (len(sizes_of(seen, operation, n)), n), default=0)
        lines: dict[str, Points] = {}
        for size in sizes_of(seen, operation, ranks):
            for library in dict.fromkeys(name for _, name, _ in seen.names()):
                time = seen.median(ranks, library, f"{operation} {size}")
                if time:
                    lines.setdefault(library, []).append((size, time))
        at = f", {ranks} ranks" if ranks else ""
        unit = "microseconds, less is better"
        below = f"size{_on(sections, 'data')}"
        panels.append(Panel(f"{title} of an array{at}", unit, lines, named, below))
    return _drawn(TITLES["arrays"], panels)


def _on(sections: Sections, section: str) -> str:
    """Return on how many processors this was measured."""
    count = str(sections.get(section, {}).get("machine", "")).partition(" x ")[0]
    return f", on {count} processors" if count else ""


def _by_ranks(sections: Sections, section: str, operation: str) -> dict[str, Points]:
    seen = Seen.restored(sections.get(section, {}).get("data", {}))
    lines: dict[str, Points] = {}
    for ranks, library, measured in seen.names():
        median = seen.median(ranks, library, operation)
        if measured == operation and median:
            lines.setdefault(library, []).append((float(ranks), median))
    return lines


def _drawn(title: str, panels: Sequence[Panel]) -> str:
    parts = [
        part for left, panel in zip(LEFTS, panels, strict=True) for part in _panel(left, panel)
    ]
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _panel(left: int, panel: Panel) -> list[str]:
    parts = [
        _text(left, 28, panel.title, "title"),
        _text(left, 46, panel.unit, "faint"),
    ]
    values = [point for points in panel.lines.values() for point in points]
    if not values:
        return [*parts, _text(left, TOP + 40, "not measured yet", "faint")]
    across = _Scale(sorted({x for x, _ in values}), left, left + PANEL)
    low, high = (end(y for _, y in values) for end in (min, max))
    upwards = _Scale([low / 1.3, high * 1.3], BOTTOM, TOP)
    for y in _ticks(low / 1.3, high * 1.3):
        at = upwards.place(y)
        line = f'<line class="grid" x1="{left}" x2="{left + PANEL}" y1="{at:.1f}" y2="{at:.1f}"/>'
        parts += [line, _text(left - 8, at + 4, f"{y:g}", "faint", "end")]
    right = -math.inf
    for x in across.values:
        at = across.place(x)
        if at >= right:  # there is no room for the name of every value
            parts.append(_text(at, BOTTOM + 20, panel.across(x), "faint", "middle"))
            right = at + LABEL_WIDTH
    parts.append(_text(left + PANEL / 2, BOTTOM + 40, panel.below, "faint", "middle"))
    ends: dict[str, float] = {}
    # Ours last, so that it is drawn on top.
    for name in sorted(panel.lines, key=lambda name: name == OURS):
        points = [(across.place(x), upwards.place(y)) for x, y in sorted(panel.lines[name])]
        ours, colour = name == OURS, COLOURS.get(name, OTHER_COLOUR)
        line = 'class="line-ours"' if ours else f'stroke="{colour}"'
        dot = 'class="dot-ours"' if ours else f'fill="{colour}"'
        path = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path {line} d="M{path}"/>')
        parts += [f'<circle {dot} cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points]
        ends[name] = points[-1][1]
    for name, y in _apart(ends).items():
        place = left + PANEL + 9, y + 4
        if name == OURS:
            parts.append(_text(*place, name, "ours"))
        else:
            parts.append(_text(*place, name, colour=COLOURS.get(name, OTHER_COLOUR)))
    return parts


class _Scale:
    """A logarithmic scale of the picture."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        self.values = values
        self._low, self._high = math.log(values[0]), math.log(values[-1])
        self._begin, self._end = begin, end

    def place(self, value: float) -> float:
        share = (math.log(value) - self._low) / ((self._high - self._low) or 1.0)
        return self._begin + share * (self._end - self._begin)


def _ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten in range; if there are few, also 2 and 5 times these."""
    for steps in ((1,), (1, 3), (1, 2, 5)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [step * 10.0**power for power in powers for step in steps]
        within = [tick for tick in found if low <= tick <= high]
        if len(within) >= 3:
            break
    return within


def _apart(ends: Mapping[str, float]) -> dict[str, float]:
    """Return the heights of names: near the ends of their lines, in order, without overlap."""
    placed: list[tuple[str, float]] = []
    for name, y in sorted(ends.items(), key=lambda item: item[1]):
        placed.append((name, max(y, placed[-1][1] + NAME_HEIGHT) if placed else y))
    over = placed[-1][1] - max(BOTTOM, max(ends.values()))
    found: dict[str, float] = {}
    below = math.inf
    for name, y in reversed(placed):  # names below the lower edge move up again
        below = min(y, below - NAME_HEIGHT, placed[-1][1] - max(0.0, over))
        found[name] = below
    return found


def _text(
    x: float, y: float, text: str, kind: str = "", anchor: str = "start", colour: str = ""
) -> str:
    style = f' class="{kind}"' if kind else f' style="fill: {colour}"' if colour else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {place}{style}>{escape(text)}</text>"
