"""What each rank knows of itself, and what all measure together.

They measure round trips, bandwidth, and the offsets of their clocks.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from syncprims import World
from syncprims._world import host
from syncprims._world.nodes import identify_kernel
from syncprims._world.world import get_meeting_place, get_node_group

#: Packages of which all ranks should have the same release.
COMPARED = ("syncprims", "torch", "numpy")
SIZES = (64 << 10, 1 << 20, 16 << 20)  # bytes
_SMALL = {"step": 1, "loss": 0.5, "name": "doctor"}
_CLOCK_ROUNDS = 100
_TOO_SLOW = 1.0  # seconds for one size: then the next one is left out


def examine(world: World, environ: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """Return all facts and measurements, the same on each rank; each measurement takes `seconds`.

    Every rank of the world has to call it.
    """
    return {
        "backend": world.backend_name,
        "world_size": world.world_size,
        "num_nodes": world.num_nodes,
        "ranks": world.group.all_gather(own_facts(world, environ)),
        "latency": latency(world, seconds),
        "bandwidth": bandwidth(world, seconds) if world.world_size > 1 else [],
        "clocks": clock_offsets(world),
    }


# -- one rank and its machine ------------------------------------------------------------------


def own_facts(world: World, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what this rank knows of itself, in values that JSON can hold."""
    meeting_place = get_meeting_place(world)
    place = Path(meeting_place) if meeting_place.startswith("/") else None
    memory = host.find_shared_memory()
    threads = environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    existing = next(path for path in (place, *place.parents) if path.exists()) if place else memory
    return {
        "rank": world.rank,
        "node": world.node_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "machine": identify_kernel(),
        "memory": f"{memory.stat().st_dev}:{memory.stat().st_ino}",
        "launcher": world.topology.launcher,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in COMPARED},
        "processors": host.count_processors(),
        "allowed": sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else None,
        "load": os.getloadavg()[0],
        "threads": (int(threads) if threads.isdecimal() else 0) or None,  # None: not set
        "gpus": host.find_visible_gpus(environ),
        "meeting_place": meeting_place,
        "file_system": host.find_file_system(place) if place else None,
        "free": host.count_free_bytes(existing),
        "shared_memory": {"path": str(memory), "free": host.count_free_bytes(memory)},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# -- round trips and bandwidth -----------------------------------------------------------------


def latency(world: World, seconds: float) -> list[dict[str, Any]]:
    """Return the round trips of small calls in microseconds, for the world and for the node.

    Each row has the median and the 99th percentile of the slowest rank.
    """
    groups = [("world", world.group)]
    if world.num_nodes > 1:
        groups.append(("node", get_node_group(world)))
    rows: list[dict[str, Any]] = []
    for name, group in groups:
        for call, function in (
            ("barrier", partial(group.barrier, "doctor")),
            ("flag", partial(group.any_rank, False)),
            ("broadcast of a small object", partial(group.broadcast, _SMALL)),
            ("all_gather of small objects", partial(group.all_gather, _SMALL)),
        ):
            times = sorted(_timed(world, function, seconds, least=20, most=5000))
            mine = [statistics.median(times), times[int(len(times) * 0.99)]]
            all_times: list[list[float]] = world.group.all_gather(mine)
            median, p99 = (max(column) * 1e6 for column in zip(*all_times, strict=True))
            rows.append({"group": name, "call": call, "median_us": median, "p99_us": p99})
    return rows


def bandwidth(world: World, seconds: float) -> list[dict[str, Any]]:
    """Return the bandwidth of large arrays in GB/s: their bytes divided by the median time."""
    import numpy as np

    rows: list[dict[str, Any]] = []
    for size in SIZES:
        array = np.ones(size // 4, np.float32)
        rows += _bulk_rows(world, "memory", array, np.empty_like(array), seconds)
        if rows[-1]["ms"] > _TOO_SLOW * 1e3:
            break
    torch = sys.modules.get("torch")
    if world.group.all_ranks(torch is not None and torch.cuda.is_available()) and torch is not None:
        from syncprims._data.arrays import own_device

        device = own_device("cuda", world.local_rank)
        for size in SIZES:
            tensor = torch.ones(size // 4, device=device)
            rows += _bulk_rows(world, "cuda", tensor, torch.empty_like(tensor), seconds)
    return rows


def _bulk_rows(
    world: World, where: str, array: Any, out: Any, seconds: float
) -> list[dict[str, Any]]:
    """Return the rows of one array, which is in the hosts' `memory` or on a `cuda` device."""
    on_device = where == "cuda"
    synchronize = sys.modules["torch"].cuda.synchronize if on_device else lambda: None

    def transfer(call: Callable[..., object]) -> None:
        call(array, out=out)
        synchronize()

    rows: list[dict[str, Any]] = []
    for call in (world.group.broadcast, world.group.all_reduce):
        times = _timed(world, partial(transfer, call), seconds, least=3, most=200)
        mine = statistics.median(times)
        took = max(world.group.all_gather(mine))
        rate = array.nbytes / took / 1e9
        figures = {"bytes": array.nbytes, "ms": took * 1e3, "gb_per_s": rate}
        rows.append({"call": call.__name__, "where": where, **figures})
    return rows


def _timed(
    world: World, call: Callable[[], object], seconds: float, *, least: int, most: int
) -> list[float]:
    """Call as often as fits into `seconds`, equally on all ranks; return the seconds of each."""
    begin = time.perf_counter()
    for _ in range(3):  # the first calls set up what later ones use
        call()
    took = (time.perf_counter() - begin) / 3
    count: int = world.group.broadcast(min(most, max(least, int(seconds / took))))
    times: list[float] = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return times


# -- clocks ------------------------------------------------------------------------------------


def clock_offsets(world: World) -> list[dict[str, Any]]:
    """Return how far the clock of each node's first rank is ahead of rank 0's, in seconds.

    No rank leaves a round before all have arrived, so each round bounds the offset from both sides.
    All bounds together leave an interval: its middle is the offset, half its width the uncertainty.
    (The idea is Cristian's, "Probabilistic clock synchronization", Distributed Computing 3, 1989,
    with rounds instead of messages.)
    """
    arrived: list[float] = []
    left: list[float] = []
    for _ in range(_CLOCK_ROUNDS):
        arrived.append(time.time())
        world.group.barrier("doctor's clocks")
        left.append(time.time())
    mine = (arrived, left) if world.local_rank == 0 else None
    times = world.group.all_gather(mine)
    assert times[0] is not None
    return [
        {"rank": rank, **clock_offset(times[0], theirs)}
        for rank, theirs in enumerate(times)
        if theirs is not None
    ]


def clock_offset(
    ours: tuple[list[float], list[float]], theirs: tuple[list[float], list[float]]
) -> dict[str, float]:
    """Return how far `their` clock is ahead of `ours`, from the times of arriving and leaving."""
    least = max(arrived - left for arrived, left in zip(theirs[0], ours[1], strict=True))
    most = min(left - arrived for left, arrived in zip(theirs[1], ours[0], strict=True))
    return {"ahead_s": (least + most) / 2, "uncertainty_s": max(0.0, (most - least) / 2)}
