"""The order of the data: a function of a seed and the epoch, the same on all ranks."""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from syncprims import broadcast

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")
_END: Any = object()  # no item is this one
#: Their order takes nothing from the generators that all share, once they have one of their own.
_APART = (
    SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler,
    list, tuple, range,
)  # fmt: skip


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


def drawn(items: Iterable[T], sampler: Any, seed: int, epoch: int) -> Iterator[T]:
    """Return what `items` give, in an order of `sampler` that follows from `seed` and `epoch`.

    A sampler of the user's may draw from Python's, numpy's and torch's own generators, at once or
    with each item. While it does, those are the epoch's, and afterwards they are as they were.
    """
    return iter(items) if _is_apart(sampler) else _drawn(items, seed, epoch)


def _drawn(items: Iterable[T], seed: int, epoch: int) -> Iterator[T]:
    own = _seeded(generator_of(seed, epoch))
    iterator: Iterator[T] | None = None
    while True:
        others = _captured()
        try:
            _restore(own)
            iterator = iter(items) if iterator is None else iterator
            item = next(iterator, _END)
        finally:
            own = _captured()
            _restore(others)
        if item is _END:
            return
        yield item


def _is_apart(sampler: Any) -> bool:
    return _is_apart(sampler.sampler) if type(sampler) is BatchSampler else type(sampler) in _APART


def _seeded(generator: torch.Generator) -> tuple[Any, Any, torch.Tensor]:
    """Return states of Python's, numpy's and torch's generators that follow from `generator`."""
    seed = generator.initial_seed()
    numbers = np.random.RandomState(seed % (1 << 32)).get_state()
    return random.Random(seed).getstate(), numbers, generator.get_state()


def _captured() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _restore(states: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def is_known(sampler: Any) -> bool:
    """Tell whether the order of `sampler` follows from seed and epoch for certain."""
    if type(sampler) is BatchSampler:
        return is_known(sampler.sampler)
    return type(sampler) in (SequentialSampler, RandomSampler)
