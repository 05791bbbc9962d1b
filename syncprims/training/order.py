"""The order of the data: a function of a seed and the epoch, the same on all ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from syncprims import broadcast


def common_seed(seed: int | None, generator: torch.Generator | None = None) -> int:
    """Return `seed`, or else one from rank 0's generator (torch's own by default). Collective."""
    if seed is not None:
        return seed
    own = generator.initial_seed() if generator is not None else int(torch.initial_seed())
    return broadcast(own)


def generator_of(seed: int, epoch: int) -> torch.Generator:
    """Return the generator of an epoch's order."""
    made = torch.Generator()
    # Apart by far: seed 1 in epoch 0 is not seed 0 in epoch 1.
    made.manual_seed((seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9) % (1 << 63))
    return made


def is_sharded(sampler: Any) -> bool:
    """Tell whether `sampler`, or the one it batches, gives each rank a part of its own already."""
    while sampler is not None and not isinstance(sampler, DistributedSampler):
        sampler = getattr(sampler, "sampler", None)
    return sampler is not None


def own_sampler(sampler: Any) -> Any:
    """Return a copy of `sampler` whose generator can be set without touching the user's."""
    mine = copy.copy(sampler)
    inner = getattr(mine, "sampler", None)
    if isinstance(inner, Sampler):  # a batch sampler's
        mine.sampler = own_sampler(inner)
    return mine


def begin_epoch(sampler: Any, seed: int, epoch: int) -> None:
    """Let the samplers that shuffle do so by `seed` and `epoch`."""
    while sampler is not None:
        if hasattr(sampler, "generator"):
            sampler.generator = generator_of(seed, epoch)
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)
        sampler = getattr(sampler, "sampler", None)


def is_known(sampler: Any) -> bool:
    """Tell whether the order of `sampler` follows from seed and epoch for certain."""
    if type(sampler) is BatchSampler:
        return is_known(sampler.sampler)
    return type(sampler) in (SequentialSampler, RandomSampler)
