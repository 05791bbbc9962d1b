"""Measure how soon waiting ranks of Gloo raise after a kill; the last argument counts the kills.

As in `death.py`: three ranks, the slower of the two survivors, one monotonic clock.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist

RANKS, VICTIM = 3, 1


def work(rank: int, store: str, writer: int) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    dist.barrier()
    os.write(writer, b"0\n")
    if rank == VICTIM:
        time.sleep(60)
    try:
        dist.barrier()
    except RuntimeError as error:
        os.write(writer, b"%d\n" % time.monotonic_ns())
        print(rank, error, file=sys.stderr)


def forked(rank: int, store: str, writer: int) -> int:
    """Fork from a process that has imported torch, which takes seconds, but has no threads yet."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work(rank, store, writer)
    finally:
        os._exit(0)


def killed() -> float:
    """Return the milliseconds from a kill to the last exception."""
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory() as folder, open(reader) as said:  # noqa: PTH123
        pids = [forked(rank, str(Path(folder) / "store"), writer) for rank in range(RANKS)]
        os.close(writer)
        for _ in pids:
            said.readline()  # all of them are about to wait
        time.sleep(0.05)
        begin = time.monotonic_ns()
        os.kill(pids[VICTIM], signal.SIGKILL)
        news = [int(said.readline()) for _ in range(RANKS - 1)]
        for pid in pids:
            os.waitpid(pid, 0)
    return (max(news) - begin) / 1e6


def main() -> None:
    print(json.dumps({"quiet": [killed() for _ in range(int(sys.argv[-1]))]}))


if __name__ == "__main__":
    main()
