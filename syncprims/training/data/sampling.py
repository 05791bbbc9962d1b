"""The order of the data: a function of a seed and the epoch, the same on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils import data
from torch.utils.data.distributed import DistributedSampler

from syncprims.training.rng import capture_cpu, epoch_generator, restore_cpu, seeded_cpu

T = TypeVar("T")
_END: Any = object()  # never an item


class SeedableRandomSampler(data.RandomSampler):
    """A random sampler whose order is that of torch's for the seed ``initial_seed + epoch``."""

    generator: torch.Generator | None

    def __init__(self, *args: Any, data_seed: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.initial_seed: int = torch.initial_seed() if data_seed is None else data_seed
        self.epoch: int = 0

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


def samplers(sampler: object) -> Iterator[Any]:
    """Yield `sampler`, and the samplers that it batches, the outermost first."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def with_inner(sampler: Any, inner: object) -> Any:
    """Return a copy of `sampler` with another sampler inside, if any."""
    changed = copy.copy(sampler)
    if inner is not None:
        changed.sampler = inner
    return changed


def is_sharded(sampler: object) -> bool:
    """Return whether `sampler`, or the one that it batches, shards the data by rank itself."""
    return any(isinstance(one, DistributedSampler) for one in samplers(sampler))


def copy_sampler(sampler: object) -> Any:
    """Return a sampler whose generator may be set: a copy of one of torch's own.

    A sampler of the user's is returned itself, since the user may change it between epochs.
    """
    if type(sampler).__module__ != data.Sampler.__module__:
        return sampler
    inner = getattr(sampler, "sampler", None)
    return with_inner(sampler, None if inner is None else copy_sampler(inner))


class EpochSetter:
    """Passes epochs to the samplers of one loader, and respects those that the user has set."""

    def __init__(self, sampler: object) -> None:
        self._known = {id(one): getattr(one, "epoch", None) for one in samplers(sampler)}

    def set(self, sampler: object, epoch: int) -> None:
        """Set `epoch` where no other one has been set since the last call."""
        for one in samplers(sampler):
            if callable(getattr(one, "set_epoch", None)):
                counts = isinstance(one, SeedableRandomSampler)  # and so changes its own epoch
                if counts or getattr(one, "epoch", None) == self._known.get(id(one)):
                    one.set_epoch(epoch)
                self._known[id(one)] = getattr(one, "epoch", None)


def seed_generators(sampler: object, seed: int, epoch: int) -> None:
    """Give every sampler of the chain that has a generator that of `seed` and `epoch`."""
    for one in samplers(sampler):
        if hasattr(one, "generator"):
            one.generator = epoch_generator(seed, epoch)


def draw(items: Iterable[T], sampler: object, seed: int, epoch: int) -> Iterator[T]:
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


def has_type(sampler: object, types: tuple[type, ...]) -> bool:
    """Return whether `sampler`, or the one that it batches, is of one of these very types."""
    return all(type(one) in (*types, data.BatchSampler) for one in samplers(sampler))
