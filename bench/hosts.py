"""Pretended hosts: ranks of one machine that share no directory, so they meet only at a store.

    python bench/hosts.py HOSTS RANKS SCRIPT ARGUMENT ...

This process serves the store, as the agent of torchrun does. Ranks reach it over the loopback.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).parent


def variables(
    rank: int, hosts: int, ranks: int, port: int, base: str, run_id: str
) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank, and the directory of its host."""
    host, local = divmod(rank, ranks // hosts)
    directory = Path(base) / f"host-{host}"
    directory.mkdir(mode=0o700, exist_ok=True)
    place = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": ranks // hosts,
        "GROUP_RANK": host,
        "GROUP_WORLD_SIZE": hosts,
    }
    return {
        **{name: str(number) for name, number in place.items()},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "SYNCPRIMS_BACKEND": "torch",
        "SYNCPRIMS_DIR": str(directory),
        "OMP_NUM_THREADS": "1",
    }


def start(hosts: int, ranks: int, command: Sequence[str], port: int, base: str) -> list[Any]:
    """Start `command` on all ranks. Only ranks of one host share a directory."""
    run_id = uuid.uuid4().hex
    return [
        subprocess.Popen(
            command, env={**os.environ, **variables(rank, hosts, ranks, port, base, run_id)}
        )
        for rank in range(ranks)
    ]


def main() -> None:
    import torch.distributed

    dist: Any = torch.distributed
    hosts, ranks = map(int, sys.argv[1:3])
    if hosts < 1 or ranks % hosts:
        sys.exit(f"{ranks} ranks cannot be divided among {hosts} hosts")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as base:
        processes = start(hosts, ranks, [sys.executable, *sys.argv[3:]], store.port, base)
        sys.exit(max(abs(process.wait()) for process in processes))


if __name__ == "__main__":
    main()
