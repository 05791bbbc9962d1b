"""One rank of a job that ends after its first barrier; the argument names the library."""

from __future__ import annotations

import sys
import time
from pathlib import Path


def main() -> None:
    library = sys.argv[1]
    if library == "syncprims":
        import syncprims

        syncprims.barrier()
    elif library == "Gloo":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.barrier()
    else:
        from mpi4py import MPI

        MPI.COMM_WORLD.Barrier()
    now = time.monotonic()  # of the system, so that the starter can compare it
    text = f'{{"at": {now}, "private": {_private_memory()}}}\n'
    sys.stdout.write(text)  # in one piece, since all ranks write to one pipe
    sys.stdout.flush()
    if library == "Gloo":
        dist.barrier()  # rank 0 serves the store, and must leave last
        dist.destroy_process_group()


def _private_memory() -> float:
    """Return the MB of this process that it shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


if __name__ == "__main__":
    main()
