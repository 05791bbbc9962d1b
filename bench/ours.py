"""One measured rank of syncprims."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import timing

import syncprims as sp

if TYPE_CHECKING:
    from collections.abc import Callable


def store_and_look(rank: int, ranks: int) -> Callable[[], bool]:
    """Return the least that a call between ranks does: it stores a word and looks at all words."""
    memory, words = mmap.mmap(-1, mmap.PAGESIZE), slice(0, 16 * ranks)
    own, number = slice(16 * rank, 16 * rank + 16), 0

    def call() -> bool:
        nonlocal number
        number += 1
        word = number.to_bytes(16, "little")
        memory[own] = word
        return memory[words] == word * ranks

    return call


def main() -> None:
    tight, stepped = sp.Trigger("tight", lag=1), sp.Trigger("stepped", lag=1)
    rank = sp.get_rank()

    def broadcast(array: timing.Array) -> None:
        sp.broadcast(array if rank == 0 else None, out=array)

    timing.run(
        timing.Library(
            rank=rank,
            ranks=sp.get_world_size(),
            barrier=sp.barrier,
            gather=sp.all_gather,
            calls={
                "barrier": sp.barrier,
                "named barrier": lambda: sp.barrier("epoch end"),
                "flag": lambda: sp.any_rank(False),
                "all_gather": lambda: sp.all_gather(rank),
                "small dict": lambda: sp.broadcast(timing.SMALL_DICT),
                "number": lambda: sp.all_reduce(1.0),
                "metrics": lambda: sp.all_reduce(timing.METRICS, "mean"),
                "small arrays": lambda: sp.all_reduce(timing.ARRAYS),
                "gathered arrays": lambda: sp.all_gather(timing.GATHERED),
                "lagging check": tight.check,
            },
            stepped={
                "lagging check, no late rank": stepped.check,
                "store and look": store_and_look(rank, sp.get_world_size()),
            },
            broadcast=broadcast,
            all_reduce=lambda value, out: sp.all_reduce(value, out=out),
        )
    )


if __name__ == "__main__":
    main()
