"""How much to measure: enough to publish, or just enough to test that everything works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """The numbers of repetitions, durations and sizes."""

    imports: int  #: interpreters started for ours; a third as many for the slow peers
    runs: int  #: repetitions of every job of the control plane
    seconds: float  #: per figure of the control plane
    control: tuple[int, ...]  #: ranks
    hosts: tuple[int, ...]  #: ranks on two pretended hosts
    data: dict[int, tuple[float, ...]]  #: ranks -> MB
    data_runs: int
    data_seconds: float
    memory: tuple[int, int]  #: ranks, MB
    wait: tuple[int, float]  #: ranks, seconds
    kills: int  #: per case
    worlds: tuple[int, int]  #: number of tests: ours, peers
    turns: int  #: turns of the training step
    checkpoint: tuple[int, int]  #: rounds, width of the model: 64 x width x width bytes
    forecast: int  #: most hosts
    constants: int  #: runs; 0: use the stored constants


FULL = Scale(
    imports=15,
    runs=3,
    seconds=0.3,
    control=(2, 4, 8),
    hosts=(2, 4),
    data={2: (1 / 16, 1, 16, 64, 256), 4: (1 / 16, 1, 16, 64, 256), 8: (64,)},
    data_runs=2,
    data_seconds=1.0,
    memory=(4, 256),
    wait=(8, 20.0),
    kills=100,
    worlds=(50, 3),
    turns=400,
    checkpoint=(3, 4096),
    forecast=10_000,
    constants=3,
)
QUICK = Scale(
    imports=3,
    runs=1,
    seconds=0.02,
    control=(2,),
    hosts=(2,),
    data={2: (1 / 16, 64)},
    data_runs=1,
    data_seconds=0.05,
    memory=(2, 16),
    wait=(2, 1.0),
    kills=3,
    worlds=(5, 1),
    turns=20,
    checkpoint=(1, 256),
    forecast=64,
    constants=0,
)
