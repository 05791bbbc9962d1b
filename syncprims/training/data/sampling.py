"""The order of the data: a function of a seed and the epoch, the same on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch.utils import data
from torch.utils.data.distributed import DistributedSampler

from syncprims.training.rng import capture_cpu, epoch_generator, restore_cpu, seeded_cpu

T = TypeVar("T")
_END: Any = object()  # never an item
#: Their order is certain to follow from seed and epoch.
SEEDED = (data.SequentialSampler, data.RandomSampler)
#: With a generator of their own, they draw nothing from the global generators.
_SELF_CONTAINED = (
    *SEEDED, data.SubsetRandomSampler, data.WeightedRandomSampler, list, tuple, range,
)  # fmt: skip


def is_sharded(sampler: Any) -> bool:
    """Return whether `sampler`, or the one that it batches, shards the data by rank itself."""
    while sampler is not None and not isinstance(sampler, DistributedSampler):
        sampler = getattr(sampler, "sampler", None)
    return sampler is not None


def copy_sampler(sampler: Any) -> Any:
    """Return a copy of `sampler`, so that setting its generator leaves the original unchanged."""
    mine = copy.copy(sampler)
    inner = getattr(mine, "sampler", None)
    if isinstance(inner, data.Sampler):  # a batch sampler's
        mine.sampler = copy_sampler(inner)
    return mine


def begin_epoch(sampler: Any, seed: int, epoch: int) -> None:
    """Set `seed` and `epoch` in every sampler of the chain that takes them."""
    while sampler is not None:
        if hasattr(sampler, "generator"):
            sampler.generator = epoch_generator(seed, epoch)
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)
        sampler = getattr(sampler, "sampler", None)


def draw(items: Iterable[T], sampler: Any, seed: int, epoch: int) -> Iterator[T]:
    """Return what `items` yield, in an order of `sampler` that is a function of seed and epoch.

    A sampler of the user's may draw from the global generators of Python, numpy and torch, at once
    or with each item. While it does, they follow from seed and epoch; afterwards their states are
    what they were before.
    """
    return iter(items) if has_type(sampler, _SELF_CONTAINED) else _draw_seeded(items, seed, epoch)


def _draw_seeded(items: Iterable[T], seed: int, epoch: int) -> Iterator[T]:
    own = seeded_cpu(epoch_generator(seed, epoch))
    iterator: Iterator[T] | None = None
    while True:
        others = capture_cpu()
        try:
            restore_cpu(own)
            iterator = iter(items) if iterator is None else iterator
            item = next(iterator, _END)
        finally:
            own = capture_cpu()
            restore_cpu(others)
        if item is _END:
            return
        yield item


def has_type(sampler: Any, types: tuple[type, ...]) -> bool:
    """Return whether `sampler`, or the one that it batches, is of one of these very types."""
    return type(sampler.sampler if type(sampler) is data.BatchSampler else sampler) in types
