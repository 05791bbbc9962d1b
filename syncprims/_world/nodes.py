"""Which ranks share a host, or a file system: every rank gets the same answer."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from typing import NamedTuple

from syncprims._protocol.rounds import RoundSequence
from syncprims._system.locks import identify_kernel
from syncprims.errors import ConfigurationError
from syncprims.interface import UNKNOWN, Topology


class SaidPlace(NamedTuple):
    """The facts that one rank reports about its host."""

    host: str  #: the same for all ranks of a host, and for no other rank
    local_rank: int  #: its launcher's, or unknown
    node_rank: int  #: its launcher's, or unknown


def identify_host() -> str:
    """Return what this host, and no other, is called."""
    import socket  # slow to import, and ranks of one host need no name of it

    name = socket.gethostname()  # containers of one machine have names of their own
    memory = ""
    with contextlib.suppress(OSError):  # not Linux
        found = os.stat("/dev/shm")  # noqa: PTH116 - pathlib is slow to import
        memory = f"{found.st_dev}-{found.st_ino}"
    return f"{identify_kernel() or name}-{name}-{memory}"


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


def number_file_systems(sequence: RoundSequence, path: str, nodes: list[int]) -> list[int]:
    """Return a number for each rank: the same for those to which `path` is one directory.

    The first rank of each node leaves a mark. Thus nodes also find each other if they share what
    rank 0 does not see. No mark remains, also after an exception.

    :param nodes: the node of each rank.
    :raises ConfigurationError: on a rank that cannot read the directory, and on rank 0 if it cannot
        write there. The others raise `PeerFailed`.
    """
    import socket  # both are slow to import, and few programs need this
    from pathlib import Path

    folder, rank, note = Path(path), sequence.index, sequence.note
    node = nodes[rank]
    leads = nodes.index(node) == rank
    token = sequence.meet(note._replace(payload=os.urandom(8)))[0].payload.hex()  # of this call
    marks = [folder / f".syncprims-{token}-{number}" for number in range(max(nodes) + 1)]
    to_remove = marks  # those of other nodes too: their ranks may have been killed

    def leave_mark() -> None:
        if not leads:
            return
        try:
            os.scandir(folder).close()  # raises if it cannot be read
            marks[node].touch()
        except OSError as error:
            may_not_write = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
            if rank and may_not_write and str(error.filename) == str(marks[node]):
                return  # it may still see the mark of another host
            raise ConfigurationError(
                f"main_first(at={path!r}): rank {rank} on host {socket.gethostname()!r} "
                f"cannot use this directory: {error}; pass one that exists on every host, and in "
                f"which rank 0 may write"
            ) from error

    def look() -> bytes:
        if not leads:
            return b""
        return b"%d" % next((n for n, mark in enumerate(marks) if os.path.exists(mark)), node)  # noqa: PTH110 - it raises nothing

    try:
        sequence.agree(leave_mark)
        notes = sequence.meet(note._replace(payload=sequence.attempt(look)))
        to_remove = [marks[node]] if leads else []
    finally:
        for mark in to_remove:
            with contextlib.suppress(OSError):
                mark.unlink()
    return [int(notes[nodes.index(number)].payload) for number in nodes]
