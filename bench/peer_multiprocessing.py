"""Measure `multiprocessing.Barrier` of Python; the first argument is the number of ranks."""

from __future__ import annotations

import multiprocessing as mp
import sys
from typing import Any

import timing


def rank_main(rank: int, ranks: int, barrier: Any, figures: Any) -> None:
    def gather(figure: float) -> list[float]:
        figures[rank] = figure
        barrier.wait()
        everyones = list(figures)
        barrier.wait()  # before a rank writes the next value
        return everyones

    timing.run(timing.Library(rank, ranks, barrier.wait, gather, {"barrier": barrier.wait}))


def main() -> None:
    ranks = int(sys.argv[1])
    context = mp.get_context("spawn")
    barrier, figures = context.Barrier(ranks), context.RawArray("d", ranks)
    processes = [
        context.Process(target=rank_main, args=(rank, ranks, barrier, figures))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
