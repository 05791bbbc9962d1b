"""Which ranks share a host: every rank computes the same from the statements of all ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple

from syncprims.interface import UNKNOWN, Topology


class SaidPlace(NamedTuple):
    """The facts that one rank reports about its host."""

    host: str  #: the same for all ranks of a host, and for no other rank
    local_rank: int  #: its launcher's, or unknown
    node_rank: int  #: its launcher's, or unknown


def identify_host() -> str:
    """Return what this host, and no other, is called."""
    import socket  # slow to import, and ranks of one host need no name of it

    kernel = name = socket.gethostname()  # containers of one machine have names of their own
    memory = ""
    with contextlib.suppress(OSError):  # not Linux
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123
            kernel = file.read().strip()
        found = os.stat("/dev/shm")  # noqa: PTH116 - pathlib is slow to import
        memory = f"{found.st_dev}-{found.st_ino}"
    return f"{kernel}-{name}-{memory}"


def number_nodes(said: Sequence[SaidPlace]) -> list[tuple[int, int]]:
    """Return the node rank and the local rank of each rank.

    They are the launcher's where it means the same hosts. Otherwise nodes are numbered by their
    lowest rank, and ranks on a node in ascending order.
    """
    members: dict[str, list[int]] = {}
    for rank, topology in enumerate(said):
        members.setdefault(topology.host, []).append(rank)
    numbers = {host: {said[rank].node_rank for rank in ranks} for host, ranks in members.items()}
    keep = sorted(n for of_host in numbers.values() for n in of_host) == [*range(len(members))]
    result = [(0, 0)] * len(said)
    for index, (host, ranks) in enumerate(members.items()):
        node = min(numbers[host]) if keep else index
        local = [said[rank].local_rank for rank in ranks]
        if sorted(local) != [*range(len(ranks))]:
            local = [*range(len(ranks))]
        for rank, number in zip(ranks, local, strict=True):
            result[rank] = node, number
    return result


def place_on_nodes(topology: Topology, nodes: Sequence[tuple[int, int]]) -> Topology:
    """Return `topology` with its numbers from those of all ranks."""
    node, local = nodes[topology.rank]
    return topology._replace(
        local_rank=local,
        local_world_size=sum(other == node for other, _ in nodes),
        node_rank=node,
        num_nodes=1 + max(other for other, _ in nodes),
    )


def without_nodes(topology: Topology) -> Topology:
    """Return `topology` with its numbers about hosts unknown."""
    return topology._replace(
        local_rank=UNKNOWN, local_world_size=UNKNOWN, node_rank=UNKNOWN, num_nodes=UNKNOWN
    )
