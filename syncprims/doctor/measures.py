"""What the ranks find out together: round trips, bandwidth, and how far their clocks are apart."""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from syncprims._world.world import get_node_group

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncprims import World

SIZES = (64 << 10, 1 << 20, 16 << 20)  # bytes
_SMALL = {"step": 1, "loss": 0.5, "name": "doctor"}
_CLOCK_ROUNDS = 100
_TOO_SLOW = 1.0  # seconds for one size: then the next one is left out


def latency(world: World, seconds: float) -> list[dict[str, Any]]:
    """Return the round trips of small calls, in microseconds, by group; each takes `seconds`.

    The slowest member's median and 99th percentile; of nodes, the slowest node's.
    """
    groups = [("world", world.group)]
    if world.num_nodes > 1:
        groups.append(("node", get_node_group(world)))
    rows: list[dict[str, Any]] = []
    for name, group in groups:
        calls: list[tuple[str, Callable[[], object]]] = [
            ("barrier", partial(group.barrier, "doctor")),
            ("flag", partial(group.any_rank, False)),
            ("broadcast of a small object", partial(group.broadcast, _SMALL)),
            ("all_gather of small objects", partial(group.all_gather, _SMALL)),
        ]
        for call, function in calls:
            times = sorted(_timed(world, function, seconds, least=20, most=5000))
            mine = [statistics.median(times), times[int(len(times) * 0.99)]]
            all_times: list[list[float]] = world.group.all_gather(mine)
            median, p99 = (max(column) * 1e6 for column in zip(*all_times, strict=True))
            rows.append({"group": name, "call": call, "median_us": median, "p99_us": p99})
    return rows


def bandwidth(world: World, seconds: float) -> list[dict[str, Any]]:
    """Return the bandwidth of arrays in bulk, in GB/s: bytes of the array by the median time."""
    import numpy as np

    rows: list[dict[str, Any]] = []
    for size in SIZES:
        array = np.ones(size // 4, np.float32)
        out = np.empty_like(array)
        rows += _carried(world, "memory", size, array, out, seconds)
        if rows[-1]["ms"] > _TOO_SLOW * 1e3:
            break
    on_device = _on_device()
    if world.group.all_ranks(on_device is not None) and on_device is not None:
        for size in SIZES:
            rows += _carried(world, "cuda", size, *on_device(size), seconds)
    return rows


def _carried(
    world: World, where: str, size: int, array: Any, out: Any, seconds: float
) -> list[dict[str, Any]]:
    synchronize: Callable[[], object] = lambda: None  # noqa: E731
    if where == "cuda":
        synchronize = sys.modules["torch"].cuda.synchronize

    def send() -> None:
        world.group.broadcast(array, out=out)
        synchronize()

    def reduce() -> None:
        world.group.all_reduce(array, out=out)
        synchronize()

    rows: list[dict[str, Any]] = []
    for call, function in (("broadcast", send), ("all_reduce", reduce)):
        mine = statistics.median(_timed(world, function, seconds, least=3, most=200))
        took = max(world.group.all_gather(mine))
        rows.append(
            {"call": call, "where": where, "bytes": size, "ms": took * 1e3,
             "gb_per_s": size / took / 1e9}
        )  # fmt: skip
    return rows


def _on_device() -> Callable[[int], tuple[Any, Any]] | None:
    """Return what makes two tensors on this rank's CUDA device; None if it has none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    from syncprims._data.arrays import own_device

    def make(size: int) -> tuple[Any, Any]:
        from syncprims import get_local_rank

        device = own_device("cuda", get_local_rank())
        return torch.ones(size // 4, device=device), torch.empty(size // 4, device=device)

    return make


def _timed(
    world: World, call: Callable[[], object], seconds: float, *, least: int, most: int
) -> list[float]:
    """Return how long each call took, of as many as fit into `seconds`, the same on all ranks."""
    begin = time.perf_counter()
    for _ in range(3):  # the first ones open what the others use
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


def clocks(world: World) -> list[dict[str, Any]]:
    """Return how far the clock of each node's first rank is ahead of rank 0's, in seconds.

    Nobody leaves a round before everybody has come, so each round bounds the difference from both
    sides, and what all of them allow is an interval: its middle, and half of its width. (As in
    Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989, with rounds for
    his messages.)
    """
    came: list[float] = []
    left: list[float] = []
    for _ in range(_CLOCK_ROUNDS):
        came.append(time.time())
        world.group.barrier("doctor's clocks")
        left.append(time.time())
    mine = (came, left) if world.local_rank == 0 else None
    said = world.group.all_gather(mine)
    assert said[0] is not None
    return [
        {"rank": rank, **offset(said[0], theirs)}
        for rank, theirs in enumerate(said)
        if theirs is not None
    ]


def offset(
    ours: tuple[list[float], list[float]], theirs: tuple[list[float], list[float]]
) -> dict[str, float]:
    """Return how far `their` clock is ahead of `ours`, from when both came to and left rounds."""
    least = max(came - left for came, left in zip(theirs[0], ours[1], strict=True))
    most = min(left - came for left, came in zip(theirs[1], ours[0], strict=True))
    return {"ahead_s": (least + most) / 2, "uncertainty_s": max(0.0, (most - least) / 2)}
