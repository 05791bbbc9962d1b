"""How much to measure: enough to publish, or just enough to test that everything works."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from catalogue import KB, MB

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Scale:
    """The numbers of repetitions, durations and sizes."""

    imports: int  #: interpreters started for ours; a third as many for the slow peers
    runs: int  #: repetitions of every job of the control plane
    seconds: float  #: per figure of the control plane
    control: tuple[int, ...]  #: ranks
    waiting: tuple[int, ...]  #: ranks
    waiting_runs: tuple[int, int]  #: of the bare loops, and of whole libraries
    watched: tuple[int, int]  #: ranks, turns
    hosts: tuple[int, ...]  #: ranks on two pretended hosts
    data: Sequence[tuple[int, Sequence[int]]]  #: ranks, sizes in bytes
    data_runs: int
    data_seconds: float
    memory: tuple[int, int]  #: ranks, MB
    wait: tuple[int, float]  #: ranks, seconds
    startup: tuple[int, ...]  #: ranks
    kills: int  #: per case
    worlds: tuple[int, int]  #: number of tests: ours, peers
    c10d: tuple[int, ...]  #: ranks of torch.distributed
    turns: int  #: turns of the training step
    checkpoint: tuple[int, int]  #: rounds, width of the model: 64 x width x width bytes

    def of(self, ranks: Sequence[int] | None, sizes: Sequence[int] | None) -> Scale:
        """Return this scale with other ranks of the control and data plane, and other sizes."""
        data = tuple((count, sizes or self.data[0][1]) for count in ranks or (self.data[0][0],))
        return replace(self, control=tuple(ranks or self.control), data=data)


_SIZES = (
    4, KB, 4 * KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 64 * MB,
)  # fmt: skip

FULL = Scale(
    imports=15,
    runs=3,
    seconds=0.3,
    control=(2, 4, 8),
    waiting=(2, 4, 8, 16),
    waiting_runs=(3, 10),
    watched=(4, 9),
    hosts=(2, 4),
    data=((2, (*_SIZES, 256 * MB)), (4, (*_SIZES, 256 * MB)), (8, _SIZES)),
    data_runs=2,
    data_seconds=1.0,
    memory=(4, 256),
    wait=(8, 20.0),
    startup=(4, 16, 64),
    kills=100,
    worlds=(50, 3),
    c10d=(2, 4),
    turns=400,
    checkpoint=(3, 4096),
)
QUICK = Scale(
    imports=3,
    runs=1,
    seconds=0.02,
    control=(2,),
    waiting=(2,),
    waiting_runs=(1, 1),
    watched=(2, 1),
    hosts=(2,),
    data=((2, (4, 64 * KB, 64 * MB)),),
    data_runs=1,
    data_seconds=0.05,
    memory=(2, 16),
    wait=(2, 1.0),
    startup=(2,),
    kills=3,
    worlds=(5, 1),
    c10d=(2,),
    turns=20,
    checkpoint=(1, 256),
)
