"""One rank of the measurement: microseconds per call, printed by rank 0 as JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

import syncprims as sp

if TYPE_CHECKING:
    from collections.abc import Callable


def per_call(call: Callable[[], object], rounds: int) -> float:
    for _ in range(rounds // 10):
        call()
    sp.barrier()
    begin = time.perf_counter()
    for _ in range(rounds):
        call()
    return (time.perf_counter() - begin) / rounds * 1e6


def main() -> None:
    rounds = int(sys.argv[1])
    lagging = sp.Trigger(lag=1)
    figures = {
        "barrier": per_call(sp.barrier, rounds),
        "any_rank": per_call(lambda: sp.any_rank(False), rounds),
        "broadcast of a small dict": per_call(lambda: sp.broadcast({"lr": 1e-3}), rounds),
        "Trigger(lag=1).check()": per_call(lagging.check, rounds),
    }
    if sp.is_main():
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
