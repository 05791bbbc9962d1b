"""The order of the data: a function of a seed and the epoch, the same on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils import data
from torch.utils.data.distributed import DistributedSampler

from syncprims.training.rng import capture_cpu, epoch_generator, restore_cpu, seeded_cpu

T = TypeVar("T")
_END: Any = object()  # never an item


class SeedableRandomSampler(data.RandomSampler):
    """A random sampler whose order is that of torch's for the seed ``initial_seed + epoch``."""

    def __init__(self, *args: Any, data_seed: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = self.generator or torch.Generator()
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.epoch += 1


#: Their order is certain to follow from seed and epoch.
SEEDED = (data.SequentialSampler, data.RandomSampler, SeedableRandomSampler)
#: With a generator of their own, they draw nothing from the global generators.
_SELF_CONTAINED = (
    *SEEDED, data.SubsetRandomSampler, data.WeightedRandomSampler, list, tuple, range,
)  # fmt: skip


class Skipped:
    """A sampler, a stream or a loader without its first items."""

    def __init__(self, whole: Any, count: int) -> None:
        self.whole = whole
        self._count = count

    def __getattr__(self, name: str) -> Any:
        if name == "whole":  # not set yet: the object is being copied
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __len__(self) -> int:
        return max(0, len(self.whole) - self._count)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.whole), self._count, None)


class SkippedItems(Skipped, data.IterableDataset[Any]):
    """A stream without its first items."""


def samplers(sampler: Any) -> Iterator[Any]:
    """Yield `sampler`, and the samplers that it batches, the outermost first."""
    while sampler is not None:
        if not isinstance(sampler, Skipped):
            yield sampler
        sampler = inner_sampler(sampler)


def inner_sampler(sampler: Any) -> Any:
    """Return the sampler inside of another one, or None."""
    return getattr(sampler, "whole" if isinstance(sampler, Skipped) else "sampler", None)


def with_inner(sampler: Any, inner: Any) -> Any:
    """Return a copy of `sampler` with another sampler inside."""
    changed = copy.copy(sampler)
    setattr(changed, "whole" if isinstance(sampler, Skipped) else "sampler", inner)
    return changed


def is_sharded(sampler: Any) -> bool:
    """Return whether `sampler`, or the one that it batches, shards the data by rank itself."""
    return any(isinstance(one, DistributedSampler) for one in samplers(sampler))


def copy_sampler(sampler: Any) -> Any:
    """Return a sampler whose generator may be set: a copy of one of torch's own.

    A sampler of the user's is returned itself, since the user may change it between epochs.
    """
    is_torchs = type(sampler).__module__ == data.Sampler.__module__
    if not is_torchs and not isinstance(sampler, Skipped):
        return sampler
    inner = inner_sampler(sampler)
    return copy.copy(sampler) if inner is None else with_inner(sampler, copy_sampler(inner))


class EpochSetter:
    """Passes epochs to the samplers of one loader, and respects those that the user has set."""

    def __init__(self, sampler: Any) -> None:
        self._known = {id(one): getattr(one, "epoch", None) for one in samplers(sampler)}

    def set(self, sampler: Any, epoch: int) -> None:
        """Set `epoch` where no other one has been set since the last call."""
        for one in samplers(sampler):
            if callable(getattr(one, "set_epoch", None)):
                counts = isinstance(one, SeedableRandomSampler)  # and so changes its own epoch
                if counts or getattr(one, "epoch", None) == self._known.get(id(one)):
                    one.set_epoch(epoch)
                self._known[id(one)] = getattr(one, "epoch", None)


def seed_generators(sampler: Any, seed: int, epoch: int) -> None:
    """Give every sampler of the chain that has a generator that of `seed` and `epoch`."""
    for one in samplers(sampler):
        if hasattr(one, "generator"):
            one.generator = epoch_generator(seed, epoch)


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
    return all(type(one) in (*types, data.BatchSampler) for one in samplers(sampler))
