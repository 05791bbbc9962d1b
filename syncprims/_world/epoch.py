"""Who the members of an epoch are, and what has changed since the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from syncprims.interface import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncprims.interface import Topology

JOINER = -1  #: in place of the number of rounds that a process has completed


class Change(NamedTuple):
    """What one :func:`reform` has changed; the same on all ranks but for `rank_before`."""

    epoch: int  #: its number; the world began with epoch 0
    members: tuple[int | None, ...]  #: by new rank: the rank before, or None for one that joined
    lost: tuple[int, ...]  #: ranks of the world before that are no members any more
    joined: tuple[int, ...]  #: new ranks of the processes that have joined
    rank_before: int | None  #: this process's own; None if it has joined
    furthest: int  #: the lowest of the new ranks that have completed the most rounds
    rounds: tuple[int, ...]  #: by new rank: how many it had completed; less than 0: it has joined


class Epoch(NamedTuple):
    """A decided membership."""

    number: int
    size_before: int  #: of the last world in which all had met
    members: Sequence[tuple[int, int | None, int]]  #: slot, rank in that world, rounds completed

    def change(self, slot: int) -> Change:
        """Return what the process of `slot` has to know."""
        before = [rank for _, rank, _ in self.members]
        rounds = [count for *_, count in self.members]
        return Change(
            self.number,
            tuple(before),
            tuple(sorted({*range(self.size_before)} - {*before})),
            tuple(rank for rank, old in enumerate(before) if old is None),
            before[self.rank(slot)],
            rounds.index(max(rounds)),
            tuple(rounds),
        )

    def rank(self, slot: int) -> int:
        """Return the new rank of the process of `slot`."""
        return self.slots.index(slot)

    def topology(self, slot: int, before: Topology) -> Topology:
        """Return the topology of the process of `slot`; its hosts are not known yet."""
        return before._replace(
            rank=self.rank(slot),
            world_size=len(self.members),
            local_rank=UNKNOWN,
            local_world_size=UNKNOWN,
            node_rank=UNKNOWN,
            num_nodes=UNKNOWN,
        )

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots of the members, by rank."""
        return tuple(slot for slot, *_ in self.members)
