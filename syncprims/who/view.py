"""What a process that is no rank reads of a running world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from syncprims.interface import Label, Status, WaitView


class BoardView(NamedTuple):
    """What a process outside of the run reads of a board, while its members go on."""

    members: tuple[int, ...]  #: world ranks, ascending
    statuses: Mapping[int, Status]  #: of each member
    waits: Mapping[int, WaitView]  #: of members that wait; short waits are not seen
    last_barrier: Label | None = None  #: with a name, that all have passed; if not too long ago


class WorldView(NamedTuple):
    """What a process outside of the run reads of a world, or of its part on this host."""

    run_id: str
    backend: str
    world_size: int
    boards: Sequence[BoardView]  #: that of all ranks first, once it is there
    hosts: Mapping[int, str]  #: the name of each rank's host, if there are several
    pids: Mapping[int, int]  #: of those that have joined and whose process the reader can see
    states: Mapping[int, Status]  #: of the ranks of this host
    announced: Mapping[int, bytes]  #: what the ranks of this host have announced
    problem: str = ""  #: why the rest cannot be read, if it cannot
