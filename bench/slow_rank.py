"""Train the digits of ``examples/`` with one slow rank, for the trace in ``docs/trace.md``.

Run it twice, because the first run prepares the data:

    SYNCPRIMS_TRACE=trace OMP_NUM_THREADS=1 syncprims run -n 4 bench/slow_rank.py
    syncprims trace trace --png docs/trace.png
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import syncprims as sp

EXAMPLES = Path(__file__).parent.parent / "examples"
SLOW, SECONDS = 2, 0.02  # the rank, and the factor by which its gradients take longer


def main() -> None:
    sys.path.insert(0, str(EXAMPLES))
    digits: Any = importlib.import_module("digits")
    gradients = digits.gradients

    def slowly(weights: object, batch: object) -> object:
        if sp.get_rank() == SLOW:
            time.sleep(SECONDS)
        return gradients(weights, batch)

    digits.gradients = slowly
    digits.train(EXAMPLES / ".cache" / "digits.npz", epochs=3)


if __name__ == "__main__":
    main()
