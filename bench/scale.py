"""How much is measured: enough to publish, or just enough to show that all of it works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """How often, how long, how large."""

    imports: int  #: interpreters started, of ours; the peers' are slow, and a third of it will do
    runs: int  #: of every job of the control plane
    seconds: float  #: for every figure of the control plane
    control: tuple[int, ...]  #: ranks
    hosts: tuple[int, ...]  #: ranks on two pretended hosts
    data: dict[int, tuple[float, ...]]  #: ranks -> MB
    data_runs: int
    data_seconds: float
    memory: tuple[int, int]  #: ranks, MB
    wait: tuple[int, float]  #: ranks, seconds
    kills: int  #: in each case
    worlds: tuple[int, int]  #: of tests: ours, the peers'
    turns: int  #: of the training step
    checkpoint: tuple[int, int]  #: rounds, width of the model: 64 x width x width bytes
    forecast: int  #: hosts at most
    constants: int  #: runs; 0: those that are stored


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
