"""What the ranks take beside time: memory for large arrays, and the processor in a long wait."""

from __future__ import annotations

import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import jobs
from catalogue import DATA, OURS
from table import head, row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from table import Seen


class Watched:
    """A directory, in memory where there is some, and the most that was ever in it."""

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
                with suppress(OSError):  # gone meanwhile
                    size += path.stat().st_blocks * 512
            self.peak = max(self.peak, size / 2**20)


def memory(seen: Seen, ranks: int, size: int) -> list[str]:
    """Return what large arrays take beside the buffers that the caller gives."""
    lines = ["", f"## Memory of {size} MB at {ranks} ranks"]
    if not Path("/proc/self/status").exists():
        return [*lines, "", "Not measured: it takes Linux's /proc."]
    lines += [
        "",
        "MB on top of the caller's buffers, over three calls. Peak: of all pages that a rank maps;",
        "shared ones count at every rank that maps them. After: what stays. Directory: the most",
        "that the files of the ranks' meeting place took, once for all ranks.",
        *head("by", "call", "peak, by rank", "private after", "shared after", "directory"),
    ]
    for operation, calls in DATA.items():
        for library, call in calls.items():
            print(f"memory, {operation}: {library}", file=sys.stderr, flush=True)
            plan: dict[str, object] = {"what": "memory", "size": size, "operation": operation}
            with Watched() as watched:
                try:
                    figures = jobs.start(library, ranks, plan, watched.path)
                except jobs.NoFigures as error:
                    seen.lack(ranks, library, (f"memory of {operation}",), str(error))
                    lines.append(row(library, call, error, "", "", ""))
                    continue
            cells = [_joined(figures[name]) for name in ("peak", "private", "shared")]
            place = f"{watched.peak:.0f}" if library == OURS else ""
            lines.append(row(library, call, *cells, place))
    return lines


def long_wait(seen: Seen, ranks: int, seconds: float) -> list[str]:
    """Return what ranks take from the processors while they wait for one that is late."""
    lines = [
        "",
        f"## Waiting {seconds:.0f} s in a barrier at {ranks} ranks",
        *head("by", "share of a processor that each waiting rank takes, percent"),
    ]
    plan: dict[str, object] = {"what": "wait", "seconds": seconds}
    for library in DATA["broadcast"]:
        print(f"wait, {ranks} ranks: {library}", file=sys.stderr, flush=True)
        try:
            cell = _joined(jobs.start(library, ranks, plan)["wait"], 2)
        except jobs.NoFigures as error:
            seen.lack(ranks, library, ("wait",), str(error))
            cell = str(error)
        lines.append(row(library, cell))
    return lines


def _joined(figures: Sequence[float], digits: int = 0) -> str:
    return ", ".join(f"{round(figure, digits) + 0.0:.{digits}f}" for figure in figures)
