"""One measured rank of MPICH or Open MPI, called through mpi4py."""

from __future__ import annotations

import numpy as np
import timing
from mpi4py import MPI


def main() -> None:
    world = MPI.COMM_WORLD
    rank = int(world.Get_rank())
    small = timing.SMALL_DICT if rank == 0 else None
    gathered = np.empty((int(world.Get_size()), timing.GATHERED.size), np.float32)
    timing.run(
        timing.Library(
            rank=rank,
            ranks=int(world.Get_size()),
            barrier=world.Barrier,
            gather=world.allgather,
            calls={
                "barrier": world.Barrier,
                "flag": lambda: world.allreduce(False, op=MPI.LOR),
                "all_gather": lambda: world.allgather(rank),
                "small dict": lambda: world.bcast(small),
                "number": lambda: world.allreduce(1.0),
                "gathered arrays": lambda: world.Allgather(timing.GATHERED, gathered),
            },
            broadcast=world.Bcast,
            all_reduce=world.Allreduce,
        )
    )


if __name__ == "__main__":
    main()
