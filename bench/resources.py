"""Measure other resources: memory for large arrays, and processor time in a long wait."""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jobs
from catalogue import DATA, MB, OURS
from table import Seen, head, row, span

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from scale import Scale

MEMORY = ("peak", "private", "shared", "directory")


class Watched:
    """A directory, in memory if possible, and the peak size of its files."""

    def __init__(self) -> None:
        self.peak = 0.0  #: MB
        self._over = threading.Event()

    def __enter__(self) -> Watched:
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self._folder = tempfile.TemporaryDirectory(dir=memory, ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._folder.cleanup()

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            size = 0
            for path in self.path.rglob("*"):
                with suppress(OSError):  # removed in the meantime
                    size += path.stat().st_blocks * 512
            self.peak = max(self.peak, size / 2**20)


def measure(scale: Scale) -> dict[str, Any]:
    """Return the extra memory of large arrays, and the processor share of waiting ranks."""
    seen = Seen()
    ranks, size = scale.memory
    if Path("/proc/self/status").exists():
        for operation, calls in DATA.items():
            for library in calls:
                _memory(seen, library, ranks, {"size": size * MB, "operation": operation})
    waiters, seconds = scale.wait
    plan: dict[str, object] = {"what": "wait", "seconds": seconds}
    for library in DATA["broadcast"]:
        jobs.measure(seen, library, waiters, plan, ("wait",))
    return {**seen.stored(), "memory": scale.memory, "wait": scale.wait}


def _memory(seen: Seen, library: str, ranks: int, plan: dict[str, object]) -> None:
    operation = plan["operation"]
    print(f"memory of {operation}, {ranks} ranks: {library}", file=sys.stderr, flush=True)
    names = {name: f"{operation}: {name}" for name in MEMORY}
    with Watched() as watched:
        try:
            figures = jobs.start(library, ranks, {"what": "memory", **plan}, watched.path)
        except jobs.NoFigures as error:
            seen.lack(ranks, library, names.values(), str(error))
            return
    if library == OURS:
        figures["directory"] = [watched.peak]
    seen.add(ranks, library, {names[name]: each for name, each in figures.items()})


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return both sections of the results page."""
    return [*_memory_lines(data), *_wait_lines(data)]


def _memory_lines(data: Mapping[str, Any]) -> list[str]:
    seen, (ranks, size) = Seen.restored(data), data["memory"]
    found = [
        "",
        f"## Memory of {size} MB at {ranks} ranks",
        "",
        "MB in addition to the buffers of the caller, over three calls: the least and",
        "the most of all ranks. Peak: all pages that a rank maps. A shared page counts for every",
        "rank. After: what remains. Directory: the peak size of the files in the run's directory,",
        "counted once for all ranks. This measurement needs /proc of Linux.",
        *head("by", "call", "peak", "private after", "shared after", "directory"),
    ]
    for operation, calls in DATA.items():
        for library, call in calls.items():
            cells = [seen.figures(ranks, library, f"{operation}: {name}") for name in MEMORY]
            if not any(cells):
                found.append(row(library, call, seen.why_not(ranks, library, f"{operation}: peak")))
                continue
            found.append(row(library, call, *(_range(cell) for cell in cells)))
    return found


def _wait_lines(data: Mapping[str, Any]) -> list[str]:
    seen, (ranks, seconds) = Seen.restored(data), data["wait"]
    found = [
        "",
        f"## Waiting {seconds:.0f} s in a barrier at {ranks} ranks",
        *head("by", "share of a processor that a waiting rank takes, percent: median", "range"),
    ]
    for library in DATA["broadcast"]:
        shares = seen.figures(ranks, library, "wait")
        if shares:
            found.append(row(library, f"{statistics.median(shares):.2f}", span(shares)))
        else:
            found.append(row(library, seen.why_not(ranks, library, "wait"), ""))
    return found


def _range(figures: Sequence[float]) -> str:
    least, most = (round(end(figures)) + 0 for end in (min, max)) if figures else ("", "")
    return f"{least}" if least == most else f"{least} - {most}"
