"""Batch samplers of mixed sizes (length buckets): no item is lost or repeated.

The only exception is padding at the end of a round, which `gather_for_metrics` removes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import on_every_rank
from support.rank_worlds import Kind, Ranks
from support.training_models import WAYS, new_job
from torch.utils.data import DataLoader, Sampler

import syncprims
from syncprims.accelerate import Accelerator
from syncprims.training import skip_first_batches

SIZE = 6  # to be cut for one, two and three ranks
MIXED = [
    [6, 2, 6, 6, 3, 6, 6],
    [6, 6, 6, 4, 6, 6, 6, 1],
    [1, 6, 6, 6, 6],
    [6, 6, 8, 6, 5],  # one is larger than said
    [5, 5, 4, 4, 1, 9],
    [6, 2],
    [6, 6, 6, 3],
    [6],
    [4],
]

on_few = pytest.mark.parametrize(
    "kind", [Kind("single", 1), Kind("file", 2), Kind("file", 3)], ids=str, indirect=True
)


ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


class Buckets(Sampler[Any]):
    """Batches of these sizes, in another order in each epoch, of other items."""

    def __init__(self, sizes: list[int], *, drop_last: bool, as_array: bool = False) -> None:
        self.sizes = sizes
        self.drop_last = drop_last
        self.epoch = 0
        self._as_array = as_array

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Any]:
        chance = random.Random(self.epoch)
        sizes = chance.sample(self.sizes, len(self.sizes)) if self.epoch else self.sizes
        items = chance.sample(range(sum(sizes)), sum(sizes))
        for start, end in pairwise(accumulate(sizes, initial=0)):
            yield np.array(items[start:end]) if self._as_array else items[start:end]


class Sized(Buckets):
    """They say how large they are at most, or so."""

    batch_size = SIZE


def feed(buckets: Buckets) -> Any:
    count = sum(buckets.sizes)
    return DataLoader(torch.arange(count), batch_sampler=buckets)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def metrics(job: Accelerator, loader: Any) -> list[tuple[list[int], list[int]]]:
    """Return this rank's batches, and what is gathered of each."""
    return [(batch.tolist(), job.gather_for_metrics(batch).tolist()) for batch in loader]


class Case(NamedTuple):
    kind: type[Buckets]
    sizes: list[int]
    drop_last: bool

    def loader(self, job: Accelerator, **how: bool) -> Any:
        return job.prepare(feed(self.kind(self.sizes, drop_last=self.drop_last, **how)))

    def starves(self, ranks: int) -> bool:
        """Return whether a batch may be cut into fewer parts than there are ranks."""
        return any(-(-size // -(-size // ranks)) < ranks for size in self.sizes)


CASES = [
    Case(kind, sizes, drop_last)
    for kind in (Sized, Buckets)
    for sizes in MIXED
    for drop_last in (False, True)
]


def gathered(seen: list[tuple[list[int], list[int]]]) -> list[int]:
    return [item for _, together in seen for item in together]


@on_few
@ways
def test_batches_of_mixed_sizes_come_whole(world: Ranks, way: Any) -> None:
    def program() -> list[Any]:
        job = new_job(**way)
        found: list[Any] = []
        for number, case in enumerate(CASES):  # a batch may be an array of indices
            loader = case.loader(job, as_array=number % 3 == 0)
            loader.set_epoch(1)
            length = len(loader)
            found.append(metrics(job, loader))
            assert length == len(found[-1]), case
        return found

    outcomes = world.run(program)
    for case, ranks in zip(CASES, zip(*outcomes, strict=True), strict=True):
        assert len({len(seen) for seen in ranks}) == 1, case
        wanted = gathered(ranks[0])
        assert all(gathered(seen) == wanted for seen in ranks), case
        assert {item for seen in ranks for batch, _ in seen for item in batch} == {*wanted}, case
        if way or not case.drop_last:
            assert sorted(wanted) == list(range(sum(case.sizes))), case
        else:
            assert len(wanted) == len({*wanted}), case
            assert len(ranks[0]) == len(case.sizes) // world.ranks, case


@on_few
@ways
@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
def test_an_order_of_buckets_goes_on_in_the_middle(world: Ranks, way: Any, even: bool) -> None:
    def program() -> int:
        job = new_job(**way, even_batches=even)

        def seen(loader: Any) -> list[Any]:
            return metrics(job, loader) if even else [batch.tolist() for batch in loader]

        tried = 0
        for case in CASES[::4]:
            first, again = case.loader(job), case.loader(job)
            first.set_epoch(1)
            states = [first.state_dict() for _ in first]
            half = syncprims.all_reduce(len(states), "min") // 2
            if not half or (not even and len(way) == 2 and case.starves(world.ranks)):
                continue
            first.set_epoch(1)
            wanted = seen(first)
            again.load_state_dict(states[half - 1])
            assert seen(again) == wanted[half:], case
            first.set_epoch(1)
            assert seen(skip_first_batches(first, half)) == wanted[half:], case
            tried += 1
        return tried

    assert min(world.run(program)) > 1


@on_few
def test_buckets_are_never_mixed(world: Ranks) -> None:
    """So that items of one length each can be stacked."""
    buckets = Sized(MIXED[0], drop_last=False)
    length_of = {item: number for number, batch in enumerate(buckets) for item in batch}
    data: Any = [torch.full((1 + length_of[i],), i) for i in range(len(length_of))]
    cases = list(product(WAYS.values(), [True, False]))

    def read(way: Any, even: bool) -> list[int]:
        job = new_job(even_batches=even, **way)
        loader = job.prepare(DataLoader(data, batch_sampler=buckets))
        return [item for batch in loader for item in batch[:, 0].tolist()]

    outcomes = world.run(lambda: [read(*case) for case in cases])
    for case, parts in zip(cases, zip(*outcomes, strict=True), strict=True):
        seen = [item for part in parts for item in part]
        assert {*seen} == {*range(len(data))}, case
        assert case[1] or len(seen) == len(data), case


@on_few
@on_every_rank
def test_batches_that_do_not_come_out_even_are_sent_with_drop_last() -> None:
    job = new_job(split_batches=True, dispatch_batches=True)
    data: Any = DataLoader(torch.arange(11), batch_size=5, drop_last=True)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert gathered(metrics(job, job.prepare(data))) == [*range(10)]
