"""What the workers of a prepared loader draw: other numbers on each rank, the same when resumed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.rank_worlds import Kind, Ranks
from support.training_models import alone, in_pairs, new_job
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

import syncprims
from syncprims.training import prepare_data_loader, set_seed

on_file = pytest.mark.parametrize("kind", [Kind("file", 2)], ids=str, indirect=True)


def drawn() -> list[float]:
    """Return a number of each generator."""
    return [torch.rand((), dtype=torch.float64).item(), random.random(), np.random.rand()]


class Augmented(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, *drawn()], dtype=torch.float64)


class AugmentedStream(IterableDataset[torch.Tensor]):
    """Draws when an epoch begins, and with each item."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        assert worker is not None
        own = np.random.default_rng(worker.seed).random() + sum(drawn())
        items = range(worker.id, 16, worker.num_workers)
        return (torch.tensor([i, *drawn(), own], dtype=torch.float64) for i in items)


Epoch = list[list[list[float]]]


def numbers(epochs: list[Epoch]) -> set[float]:
    """Return all numbers that were drawn, and check that none came twice."""
    found = [x for epoch in epochs for batch in epoch for item in batch for x in item[1:4]]
    assert len(found) == len({*found}) > 0
    return {*found}


def read(loader: Any, epochs: int) -> list[Epoch]:
    return [[b.reshape(-1, b.shape[-1]).tolist() for b in loader] for _ in range(epochs)]


def keep_seed(_: int) -> None:
    """Do nothing, as a function that opens files."""


SOURCES: dict[str, Callable[..., Any]] = {
    "map": functools.partial(DataLoader, Augmented(), 2),
    "shuffled": functools.partial(DataLoader, Augmented(), 2, shuffle=True),
    "initialized": functools.partial(DataLoader, Augmented(), 2, worker_init_fn=keep_seed),
    "items": functools.partial(DataLoader, Augmented(), None),
    "stream": functools.partial(DataLoader, AugmentedStream(), 2),
    "own stream": functools.partial(DataLoader, AugmentedStream(), 2),
}


def prepared(source: str, *, seed: int | None = 5, workers: int = 2, **how: Any) -> Any:
    plain = SOURCES[source](num_workers=workers, **how)
    own = False if source == "own stream" else None
    return prepare_data_loader(plain, seed=seed, dispatch_batches=own)


@in_pairs
@pytest.mark.parametrize("persistent", [False, True], ids=["new", "persistent"])
def test_workers_draw_by_seed_epoch_and_rank(world: Ranks, persistent: bool) -> None:
    """Also if all ranks have seeded their generators alike."""

    def program() -> dict[str, list[Epoch]]:
        torch.manual_seed(0)
        seen = {}
        for source in SOURCES if world.kind.backend == "file" else ("shuffled",):
            loader = prepared(source, persistent_workers=persistent)
            seen[source] = read(loader, 2)
            again = prepared(source, persistent_workers=persistent)
            loader.set_epoch(1)
            again.load_state_dict(loader.state_dict())
            assert read(again, 1) == seen[source][1:], f"{source}: not resumed"
        return seen

    outcomes = world.run(program)
    for source in outcomes[0]:
        ranks = [seen[source] for seen in outcomes]
        if source == "stream":  # rank 0 has read it for all
            numbers([epoch for seen in ranks for epoch in seen])
        else:
            assert not set.intersection(*map(numbers, ranks)), source
            ours = [[[item[0] for b in epoch for item in b] for epoch in seen] for seen in ranks]
            whole = [sorted(a + b) for a, b in zip(*ours, strict=True)]
            times = 2 if source == "own stream" else 1
            assert whole == [sorted([*range(16)] * times)] * 2, source


@on_file
def test_workers_draw_the_same_from_the_middle_of_an_epoch(world: Ranks) -> None:
    """Whatever their number is: each batch has its own seed. A stream is read again."""

    def program() -> None:
        for source, workers in (("shuffled", 1), ("stream", 2), ("items", 1)):
            loader, states, whole = prepared(source), [], []
            for batch in loader:
                whole.append(batch.reshape(-1, batch.shape[-1]).tolist())
                states.append(loader.state_dict())
            again = prepared(source, workers=workers)
            again.load_state_dict(states[1])
            assert read(again, 1) == [whole[2:]], source

    world.run(program)


def seed_alike(worker: int) -> None:
    random.seed(worker)


@on_file
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_a_function_of_the_user_has_the_last_word(world: Ranks, start: str) -> None:
    def program() -> Any:
        how: Any = {"worker_init_fn": seed_alike, "multiprocessing_context": start}
        (first,) = read(prepared("map", workers=1, **how), 1)
        return [item for batch in first for item in batch]

    mine, other = world.run(program)
    wanted = random.Random(0)
    for a, b in zip(mine, other, strict=True):
        assert a[2] == b[2] == wanted.random()
        assert a[1] != b[1]
        assert a[3] != b[3]


@on_file
def test_workers_of_samplers_that_shard_differ(world: Ranks) -> None:
    def program() -> set[float]:
        place: Any = {"num_replicas": 2, "rank": syncprims.get_rank()}
        sampler: Any = DistributedSampler(Augmented(), **place)
        plain = DataLoader(Augmented(), 2, sampler=sampler, num_workers=1)
        return numbers(read(prepare_data_loader(plain, seed=1), 2))

    assert not set.intersection(*world.run(program))


@on_file
@pytest.mark.parametrize("seedable", [False, True])
def test_workers_of_accelerates_order_differ(world: Ranks, seedable: bool) -> None:
    """Its order follows from generators that all ranks may have seeded alike."""

    def program() -> list[set[float]]:
        seen = []
        for own in (None, torch.Generator().manual_seed(3)):
            set_seed(7)
            job = new_job(stateful=False, use_seedable_sampler=seedable)
            for persistent in (False, True):
                how: Any = {"generator": own, "persistent_workers": persistent, "num_workers": 1}
                loader = job.prepare(DataLoader(Augmented(), 2, shuffle=True, **how))
                epochs = read(loader, 2)
                seen.append(numbers(epochs))
                order = syncprims.all_gather([item[0] for b in epochs[1] for item in b])
                assert sorted(order[0] + order[1]) == [*range(16)]
        return seen

    for mine, other in zip(*world.run(program), strict=True):
        assert not mine & other


@alone
def test_one_rank_with_accelerates_order_is_as_plain_torch(world: Ranks) -> None:
    def program() -> None:
        set_seed(7)
        plain = read(SOURCES["shuffled"](num_workers=1), 2)
        set_seed(7)
        loader = new_job(stateful=False).prepare(SOURCES["shuffled"](num_workers=1))
        assert read(loader, 2) == plain

    world.run(program)
