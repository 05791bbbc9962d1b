"""The timeline as a picture, by matplotlib: a row per rank, readable at 2 ranks and at 64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncprims.errors import BackendUnavailable, ConfigurationError

from .timeline import LATE, WAITS, WORKS, coverage, timeline

if TYPE_CHECKING:
    from pathlib import Path

    from .timeline import Timeline
    from .waits import Analysis

_BINS = 1600  # across
_LANES = 3  # of labels above
_FORMATS = ("png", "svg", "pdf", "jpg", "webp")  # of those that matplotlib knows everywhere
_INCHES = 12.0


def draw(analysis: Analysis, path: Path) -> None:
    """Write the timeline to `path`, in the format of its ending.

    Without an ending it is a PNG.

    :raises BackendUnavailable: if matplotlib is not there.
    :raises ConfigurationError: if it knows no format of that ending.
    :raises OSError: if it cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendUnavailable(
            "--png draws with matplotlib, which is not here: pip install 'syncprims[trace]', "
            "or take --html, which needs nothing"
        ) from error
    kind = path.suffix[1:].lower() or "png"
    if kind not in _FORMATS:
        raise ConfigurationError(
            f"--png {path}: there is no format {kind!r}; the ending is one of {', '.join(_FORMATS)}"
        )
    shown = timeline(analysis)
    count = len(shown.lines)
    row = min(0.34, max(0.13, 8.0 / count))
    height = row * count + 2.1
    figure: Any = Figure(figsize=(_INCHES, height), dpi=110)
    FigureCanvasAgg(figure)
    longest = max(len(line.name) for line in shown.lines)
    left = 0.03 + 0.0065 * longest
    axes: Any = figure.add_axes((left, 0.75 / height, 0.785 - left, row * count / height))
    axes.imshow(_image(shown), aspect="auto", interpolation="nearest",
                extent=(0, shown.length, count - 0.5, -0.5))  # fmt: skip
    for at in range(1, count):
        axes.axhline(at - 0.5, color="white", linewidth=1.5 if count <= 16 else 0.6)
    size = 10 if row > 0.2 else 7
    axes.set_yticks(range(count), [line.name for line in shown.lines], fontsize=size)
    for at, line in enumerate(shown.lines):
        blamed = line.rank in analysis.stragglers
        style = {"color": LATE, "fontweight": "bold"} if blamed else {"color": "#555"}
        axes.text(1.008, at, line.said, transform=axes.get_yaxis_transform(), va="center",
                  fontsize=size, **style)  # fmt: skip
        if blamed:
            axes.get_yticklabels()[at].set(**style)
        if line.failed:
            axes.plot(line.end, at, marker="x", color="#c92a2a", markersize=6, clip_on=False)
    axes.tick_params(length=0, axis="y")
    axes.set_xlabel("seconds")
    axes.spines[:].set_visible(False)
    _label(axes, shown, count, row)
    _explain(figure, analysis, height, left)
    figure.savefig(path, format=kind)  # else matplotlib takes another name where it has no ending


def _image(shown: Timeline) -> Any:
    """Return the rows as colours: mixed where many waits share a column."""
    from matplotlib.colors import to_rgb

    edges = np.linspace(0, shown.length, _BINS + 1)
    middle = (edges[:-1] + edges[1:]) / 2
    image = np.ones((len(shown.lines), _BINS, 3))
    for at, line in enumerate(shown.lines):
        image[at, (middle >= line.begin) & (middle <= line.end)] = to_rgb(WORKS)
        for colour, (begin, end, _) in ((WAITS, line.waits), (LATE, line.late)):
            share = coverage(begin, end, edges)[:, None]
            image[at] = image[at] * (1 - share) + share * np.array(to_rgb(colour))
    return image


def _label(axes: Any, shown: Timeline, count: int, row: float) -> None:
    """Name the calls with the longest waits above the rows, where there is room."""
    per_character = shown.length * 0.0078
    taken: list[list[tuple[float, float]]] = [[] for _ in range(_LANES)]
    for when, _, call in shown.marks:
        text = call if len(call) <= 40 else f"{call[:37]}..."
        half = (len(text) + 2) * per_character / 2
        middle = min(max(when, half), shown.length - half)
        for lane, spans in enumerate(taken):
            if all(middle + half < a or middle - half > b for a, b in spans):
                spans.append((middle - half, middle + half))
                up = -0.5 - (0.10 + 0.17 * lane) / row
                axes.text(middle, up, text, ha="center", va="bottom", fontsize=8, color="#333",
                          backgroundcolor="white", bbox={"pad": 0.5, "color": "white"})  # fmt: skip
                axes.plot([when, when], [up, -0.5], color="#bbb", linewidth=0.7, clip_on=False,
                          zorder=0)  # fmt: skip
                break
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_xlim(0, shown.length)


def _explain(figure: Any, analysis: Analysis, height: float, left: float) -> None:
    from matplotlib.patches import Patch

    figure.text(0.012, 1 - 0.25 / height, analysis.verdict, fontsize=11, fontweight="bold",
                va="center", wrap=True)  # fmt: skip
    figure.legend(
        handles=[
            Patch(color=WORKS, label="works"),
            Patch(color=WAITS, label="waits"),
            Patch(color=LATE, label="the others wait for it"),
        ],
        loc="lower left",
        bbox_to_anchor=(left, 0.0),
        ncols=3,
        frameon=False,
        fontsize=9,
    )
