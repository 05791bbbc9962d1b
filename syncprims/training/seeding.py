"""Random numbers, seeded alike on all ranks."""

from __future__ import annotations

import random

import torch

from syncprims import get_rank


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, numpy's and torch's generators, on all ranks alike.

    With `device_specific` each rank adds its number. With `deterministic` torch uses only
    algorithms that give the same bits each time.
    """
    import numpy

    seed += get_rank() if device_specific else 0
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
