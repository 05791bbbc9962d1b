"""One measured rank of syncprims."""

from __future__ import annotations

import timing

import syncprims as sp


def main() -> None:
    lagging = sp.Trigger("lagging", lag=1)
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
            },
            stepped={
                "lagging check, no late rank": lagging.check,
            },
            broadcast=broadcast,
            all_reduce=lambda value, out: sp.all_reduce(value, out=out),
        )
    )


if __name__ == "__main__":
    main()
