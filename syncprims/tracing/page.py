"""The timeline as one page for a browser, which needs nothing else and can be zoomed."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from .timeline import coverage, timeline

if TYPE_CHECKING:
    from pathlib import Path

    from .waits import Analysis

_MOST = 60_000  # waits that are drawn one by one, the longest; the others by the share they take
_BINS = 1000


def draw(analysis: Analysis, path: Path) -> None:
    """Write the page to `path`.

    :raises OSError: if it cannot be written.
    """
    shown = timeline(analysis)
    edges = np.linspace(0, shown.length, _BINS + 1)
    lengths = [line.waits[1] - line.waits[0] for line in shown.lines]
    lengths += [line.late[1] - line.late[0] for line in shown.lines]
    every = np.concatenate(lengths) if lengths else np.empty(0)
    shortest = float(np.sort(every)[-_MOST]) if len(every) > _MOST else 0.0
    lines: list[dict[str, Any]] = []
    for line in shown.lines:
        entry: dict[str, Any] = {
            "rank": line.rank, "name": line.name, "said": line.said, "failed": line.failed,
            "begin": line.begin, "end": line.end,
        }  # fmt: skip
        for key, (begin, end, call) in (("waits", line.waits), ("late", line.late)):
            long = end - begin >= shortest
            entry[key] = [
                [round(a, 9), round(b, 9), c]
                for a, b, c in zip(
                    begin[long].tolist(), end[long].tolist(), call[long].tolist(), strict=True
                )
            ]
            share = coverage(begin[~long], end[~long], edges)
            entry[f"{key}_under"] = "".join(str(round(float(part) * 9)) for part in share)
        lines.append(entry)
    data = {
        "verdict": analysis.verdict,
        "about": f"{analysis.run.title}.",
        "length": shown.length,
        "stragglers": analysis.stragglers,
        "calls": [[str(call), call.site] for call in analysis.run.names.calls],
        "lines": lines,
    }
    # Within a script no text may look like a tag.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    frame = files("syncprims.tracing").joinpath("page.html").read_text(encoding="utf-8")
    path.write_text(frame.replace("@DATA@", text), encoding="utf-8")
