"""Measure the basic costs without other ranks: the import, and a barrier in a world of one."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from catalogue import OURS
from table import Seen, head, row, short, span

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scale import Scale

BARE = "a bare interpreter"
#: `import syncprims` alone loads a public name only when it is used.
IMPORTS = {BARE: "pass", OURS: "from syncprims import barrier", "torch": "import torch",
           "Accelerate": "import accelerate"}  # fmt: skip
#: Each measurement uses a new interpreter, so that none affects the next one.
LONE_BARRIER = """
import os, timeit
for name in [name for name in os.environ if "SYNCPRIMS" in name]:
    del os.environ[name]
{prepare}
timeit.timeit(barrier, number=20_000)
print(timeit.timeit(barrier, number=200_000) / 200_000 * 1e6)
"""
BARRIERS = {
    OURS: "from syncprims import barrier",
    "Accelerate": "import accelerate; barrier = accelerate.Accelerator(cpu=True).wait_for_everyone",
}


def measure(scale: Scale) -> dict[str, Any]:
    """Return the milliseconds of each import, and the microseconds of a barrier of one rank."""
    seen = Seen()
    for library, code in IMPORTS.items():
        if library != BARE and find_spec(code.split()[1]) is None:
            seen.lack(1, library, ("import",), f"not installed: {code.split()[1]}")
    for number in range(scale.imports):  # in turn, so that a slow minute affects all
        bare = _started(IMPORTS[BARE])
        seen.add(1, BARE, {"start": [bare]})
        for library, code in IMPORTS.items():
            slow = library in ("torch", "Accelerate")
            if library == BARE or (slow and number % 3) or find_spec(code.split()[1]) is None:
                continue
            seen.add(1, library, {"import": [_started(code) - bare]})
    for _ in range(scale.runs):
        for library, prepare in BARRIERS.items():
            code = LONE_BARRIER.format(prepare=prepare)
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no word"])[-1]
                seen.lack(1, library, ("barrier",), f"not installed, or failed: {last}")
                continue
            seen.add(1, library, {"barrier": [float(done.stdout)]})
    return seen.stored()


def _started(code: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter() - begin) * 1e3


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the section of the results page."""
    seen = Seen.restored(data)
    what = {"start": "{}, ms", "import": "import of {}, on top of it, ms",
            "barrier": "barrier of {} in a world of one, us"}  # fmt: skip
    found = ["", "## Alone", *head("what", "median", "range")]
    for operation, text in what.items():
        for ranks, library, measured in seen.names():
            if measured == operation:
                times = seen.figures(ranks, library, operation)
                median = short(seen.median(ranks, library, operation) or 0.0)
                found.append(row(text.format(library), median, span(times)))
    return found
