"""Data loaders: which rank gets which batch, in which order, and how they resume."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import on_every_rank
from generated.parts import FORMS, ids_of
from support.rank_environment import PATIENCE
from support.rank_worlds import Ranks
from support.training_models import (
    TRAINED,
    WAYS,
    Sized,
    Stream,
    alone,
    everywhere,
    feed,
    in_pairs,
    items,
    new_job,
    with_others,
)
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

import syncprims
from syncprims.accelerate.data_loader import prepare_data_loader as accelerate_prepare
from syncprims.testing import run_world
from syncprims.training import (
    load_state,
    prepare_data_loader,
    save_state,
    set_seed,
    skip_first_batches,
    to_device,
)
from syncprims.training.data.batch_shards import BatchShard, ShardPlan
from syncprims.training.gathering import gather


def dealt(length: int, size: int, ranks: int = 2, *, drop_last: bool = False, **how: bool) -> Any:
    """Return every rank's batches of ``range(length)``, and check what the lengths say."""
    shards = [
        BatchShard(BatchSampler(range(length), size, drop_last), ShardPlan(rank, ranks, **how))
        for rank in range(ranks)
    ]
    found = [list(shard) for shard in shards]
    assert [len(shard) for shard in shards] == [len(batches) for batches in found]
    return found


FIRST_6 = [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]]]


@pytest.mark.parametrize(
    ("length", "even", "uneven"),
    [
        (12, [[], []], [[], []]),
        (15, [[[12, 13, 14]], [[0, 1, 2]]], [[[12, 13, 14]], []]),
        (16, [[[12, 13, 14]], [[15, 0, 1]]], [[[12, 13, 14]], [[15]]]),
        (14, [[[12, 13, 0]], [[1, 2, 3]]], [[[12, 13]], []]),
    ],
)
def test_batches_are_dealt_in_turn(length: int, even: Any, uneven: Any) -> None:
    assert dealt(length, 3) == [FIRST_6[r] + even[r] for r in (0, 1)]
    assert dealt(length, 3, even=False) == [FIRST_6[r] + uneven[r] for r in (0, 1)]
    assert dealt(length, 3, drop_last=True) == FIRST_6
    assert dealt(length, 3, drop_last=True, even=False) == FIRST_6


def test_a_world_larger_than_the_data_begins_again() -> None:
    assert dealt(2, 3) == [[[0, 1, 0]], [[1, 0, 1]]]
    assert dealt(2, 3, even=False) == [[[0, 1]], []]
    assert dealt(2, 3, drop_last=True) == [[], []]
    assert dealt(2, 1, 4) == [[[0]], [[1]], [[0]], [[1]]]
    assert dealt(0, 3) == [[], []]


@pytest.mark.parametrize(
    ("length", "even", "uneven"),
    [
        (8, [[], []], [[], []]),
        (10, [[[8, 9]], [[0, 1]]], [[[8, 9]], []]),
        (9, [[[8, 0]], [[1, 2]]], [[[8]], []]),
        (11, [[[8, 9]], [[10, 0]]], [[[8, 9]], [[10]]]),
    ],
)
def test_batches_are_split(length: int, even: Any, uneven: Any) -> None:
    start = [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert dealt(length, 4, split=True) == [start[r] + even[r] for r in (0, 1)]
    assert dealt(length, 4, split=True, even=False) == [start[r] + uneven[r] for r in (0, 1)]
    assert dealt(length, 4, split=True, drop_last=True) == start
    with pytest.raises(ValueError, match="cannot share"):
        dealt(length, 3, split=True)


def test_one_rank_has_the_data_as_it_is() -> None:
    assert dealt(5, 3, 1) == [[[0, 1, 2], [3, 4]]]
    assert dealt(5, 4, 1, split=True) == [[[0, 1, 2, 3], [4]]]


@everywhere
@pytest.mark.parametrize("workers", [0, 1])
def test_whole_batches_of_streams_are_dealt(world: Ranks, workers: int) -> None:
    def program() -> list[Any]:
        def of(length: int, **how: Any) -> list[list[int]]:
            drop_last = how.pop("drop_last", False)
            plain: Any = DataLoader(
                Stream(length), batch_size=3, drop_last=drop_last, num_workers=workers
            )
            return items(list(prepare_data_loader(plain, **how)))

        return [of(14), of(14, even_batches=False), of(14, drop_last=True), of(2)]

    def wanted(rank: int) -> list[Any]:
        ranks, whole = world.ranks, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13]]
        full = (len(whole) - 1) // ranks * ranks
        padded = [*whole, *whole[: -len(whole) % ranks]]
        return [padded[rank::ranks], whole[rank::ranks], whole[rank:full:ranks], [[0, 1]]]

    assert world.run(program) == [wanted(rank) for rank in range(world.ranks)]


@everywhere
@on_every_rank
def test_an_object_for_each_item_may_be_a_tensor() -> None:
    """A list of them is cut, and not each of them."""
    accelerator = new_job()
    tensors, boxes = [], []
    for batch in accelerator.prepare(feed(range(7), batch_size=2)):
        own = [torch.arange(x, x + 4) for x in batch.tolist()]
        tensors += accelerator.gather_for_metrics(own, use_gather_object=True)
        found = [{"boxes": one} for one in own]
        boxes += accelerator.gather_for_metrics(found, use_gather_object=True)
        if accelerator.num_processes > 1:
            with pytest.raises(TypeError, match="gather its parts one by one"):
                accelerator.gather_for_metrics((batch, ["a text"]))
    wanted = [list(range(x, x + 4)) for x in range(7)]
    assert [[one.tolist() for one in tensors], [one["boxes"].tolist() for one in boxes]] == [
        wanted,
        wanted,
    ]


class Tables(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(tables())


def tables() -> list[torch.Tensor]:
    return [torch.arange(i, i + 5) for i in (0, 10, 20)]


@everywhere
@on_every_rank
def test_metrics_of_items_without_batches_are_gathered_whole() -> None:
    """An item may have many rows: rows and items are not the same."""
    job = new_job()
    seen: list[Any] = []
    for data in (tables(), Tables()):
        rows, means, texts = [], [], []
        for table in job.prepare(DataLoader(data, batch_size=None)):  # type: ignore[arg-type]
            rows += job.gather_for_metrics({"x": [table]})["x"][0].tolist()
            means += job.gather_for_metrics(table.float().mean()).tolist()
            texts += job.gather_for_metrics([str(int(row)) for row in table])
        seen += [rows, means, texts]
    whole = [row for table in tables() for row in table.tolist()]
    wanted = [whole, [2.0, 12.0, 22.0], [str(row) for row in whole]]
    assert seen == wanted * 2


@everywhere
@pytest.mark.parametrize("seed", [None, 7])
def test_a_shuffle_is_one_order_and_another_each_epoch(world: Ranks, seed: int | None) -> None:
    def program() -> list[Any]:
        torch.manual_seed(syncprims.get_rank())  # rank 0's counts
        plain = feed(range(16), batch_size=2, shuffle=True)
        loader = prepare_data_loader(plain, seed=seed)
        before = torch.get_rng_state()
        epochs = [items(list(loader)) for _ in range(3)]
        assert torch.equal(before, torch.get_rng_state()), "the order has numbers of its own"
        loader.set_epoch(1)
        assert items(list(loader)) == epochs[1]
        return epochs

    results = world.run(program)
    for epoch in range(3):
        seen = [x for rank in results for batch in rank[epoch] for x in batch]
        assert sorted(seen) == list(range(16))
        assert seen != sorted(seen)
    assert results[0][0] != results[0][1]


@everywhere
@pytest.mark.parametrize(("seed", "workers"), [(None, 0), (7, 2)])
def test_the_order_goes_on_in_a_new_process(world: Ranks, seed: int | None, workers: int) -> None:
    """From any batch: after an epoch's last one, the loop goes on with what follows an epoch."""

    def loop(loader: Any, states: list[Any]) -> list[Any]:
        seen: list[Any] = []
        for epoch in range(loader.state_dict()["epoch"], 3):
            for batch in loader:
                seen.append(batch.tolist())
                states.append((len(seen), loader.state_dict()))
            seen.append(f"end of epoch {epoch}")
            states.append((len(seen), loader.state_dict()))
        return seen

    def loader() -> Any:
        plain = feed(range(12), batch_size=2, shuffle=True, num_workers=workers)
        return prepare_data_loader(plain, seed=seed)

    def begin() -> Any:
        states: list[Any] = []
        return loop(loader(), states), states

    begun = world.run(begin)

    def resumed() -> None:
        torch.manual_seed(99)  # of no interest
        whole, states = begun[syncprims.get_rank()]
        for done, state in states[:: 4 if workers else 1]:
            again = loader()
            again.load_state_dict(state)
            assert whole[:done] + loop(again, []) == whole, state

    world.run(resumed)


class AtOnce(Sampler[int]):
    """Draws an epoch's order when it begins."""

    def __init__(self, draw: Callable[[int], list[int]]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[int]:
        return iter(self._draw(24))

    def __len__(self) -> int:
        return 24


class OneByOne(AtOnce):
    """Draws an epoch's order while the training draws, too."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(24))
        while left:
            yield left.pop(self._draw(len(left))[0])


DRAWS: dict[str, Callable[[int], list[int]]] = {
    "python": lambda count: random.sample(range(count), count),
    "numpy": lambda count: np.random.permutation(count).tolist(),
    "torch": lambda count: torch.randperm(count).tolist(),
}


@pytest.mark.parametrize("kind", TRAINED[:2], ids=str, indirect=True)
@pytest.mark.parametrize("kind_of_sampler", [AtOnce, OneByOne])
@pytest.mark.parametrize("draw", DRAWS)
def test_an_order_of_generators(world: Ranks, draw: str, kind_of_sampler: type[AtOnce]) -> None:
    def loader() -> Any:
        return prepare_data_loader(
            feed(range(24), batch_size=2, sampler=kind_of_sampler(DRAWS[draw])), seed=3
        )

    def program() -> list[int]:
        training = DRAWS[draw]
        torch.manual_seed(syncprims.get_rank())  # nor need ranks draw alike
        first, seen, states = loader(), [], []
        for _ in range(2):
            for batch in first:
                seen.append(batch.tolist())
                states.append(first.state_dict())
                training(9)
        half = len(seen) // 2
        assert seen[:half] != seen[half:]
        for at in (2, half + 1):
            again = loader()
            again.load_state_dict(states[at])
            end = half if at < half else len(seen)
            assert [batch.tolist() for batch in again] == seen[at + 1 : end]
        return [x for batch in seen[:half] for x in batch]

    seen = [x for rank in world.run(program) for x in rank]
    assert sorted(seen) == list(range(24))


class Augmented(Dataset[float]):
    """Draws from generators that the training uses, too."""

    def __init__(self, draw: Callable[[int], list[int]]) -> None:
        self._draw = draw

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> float:
        return 1000.0 * index + self._draw(1000)[0]


@alone
@pytest.mark.parametrize("draw", DRAWS)
def test_what_reading_draws_is_as_in_a_plain_loop(world: Ranks, draw: str, tmp_path: Path) -> None:
    def train(batches: Any, save_at: int = 0) -> list[Any]:
        seen: list[Any] = []
        for batch in batches:
            seen.append([batch.tolist(), DRAWS[draw](1000)])  # as dropout does
            if len(seen) == save_at:
                save_state(tmp_path, {}, rank_objects={"loader": batches})
        return seen

    def program() -> None:
        set_seed(5)
        source = feed(Augmented(DRAWS[draw]), batch_size=2)
        generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
        plain = train(source) + train(source)
        for save_at in range(1, 5):
            random.setstate(generators[0])
            np.random.set_state(generators[1])
            torch.set_rng_state(generators[2])
            loader = prepare_data_loader(source, seed=1)
            if draw != "torch":  # there a plain loader draws a seed for each epoch
                assert train(loader, save_at) + train(loader) == plain
            else:
                plain = train(loader, save_at) + train(loader)
            load_state(tmp_path, {}, rank_objects={"loader": loader})
            assert train(loader) + train(loader) == plain[save_at:]

    world.run(program)


@alone
@pytest.mark.parametrize("workers", [0, 1])
@on_every_rank
def test_a_place_set_in_the_loop_is_where_the_next_one_begins(workers: int) -> None:
    loader = prepare_data_loader(feed(range(4), batch_size=1, num_workers=workers), seed=1)
    list(loader)
    begin = loader.state_dict()
    order = items(list(loader))
    for stop, loads in itertools.product((True, False), repeat=2):
        loader.set_epoch(1)
        for _ in loader:
            if loads:
                loader.load_state_dict(begin)
            else:
                loader.set_epoch(1)
            if stop:
                break
        assert loader.state_dict() == begin
    assert items(list(loader)) == order


@alone
@on_every_rank
def test_loaders_side_by_side_go_on_after_a_last_batch() -> None:
    """Also the longer one, which is left in the middle."""
    made = [
        [prepare_data_loader(feed(range(n), batch_size=1, shuffle=True), seed=n) for n in (3, 5)]
        for _ in range(2)
    ]
    seen: list[list[Any]] = [[], []]
    states: list[Any] = []
    for _ in range(2):
        for pair in zip(*made[0], strict=False):
            seen[0].append([one.item() for one in pair])
            states.append([loader.state_dict() for loader in made[0]])
    for loader, state in zip(made[1], states[2], strict=True):
        loader.load_state_dict(state)
    for _ in range(2):
        for pair in zip(*made[1], strict=False):
            seen[1].append([one.item() for one in pair])
    assert seen[1] == seen[0][3:]


class WithArguments(DataLoader[int]):
    """A loader with a constructor of its own."""

    def __init__(self, count: int) -> None:
        super().__init__(range(count), batch_size=2)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


class DerivedFromIt(WithArguments):
    pass


class Moved(DataLoader[int]):
    """Changes each batch, in a constructor and an iteration of its own."""

    def __init__(self, count: int, **options: Any) -> None:
        super().__init__(range(count), batch_size=2, **options)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
        self.by = 100

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch + self.by


class Ahead(Moved):
    """Reads a batch ahead, as loaders do that copy to a GPU meanwhile."""

    def __iter__(self) -> Any:
        batches = super().__iter__()
        held = next(batches)
        for batch in batches:
            yield held
            held = batch
        yield held


class AfterAll(Moved):
    """Changes what torch's iterator gives, and not the iteration."""

    def __iter__(self) -> Any:
        return DataLoader.__iter__(self)

    def _get_iterator(self) -> Any:
        return (batch + self.by for batch in super()._get_iterator())


@in_pairs
def test_an_iteration_of_a_class_is_kept(world: Ranks) -> None:
    def program() -> None:
        rank = syncprims.get_rank()
        for kind, workers in ((Moved, 0), (Ahead, 0), (AfterAll, 0), (Ahead, 1)):
            plain = kind(18, num_workers=workers, persistent_workers=bool(workers))
            plain.by = 200
            list(plain)
            loader: Any = prepare_data_loader(plain)
            states, seen = [], []
            for batch in loader:
                seen.append(batch.tolist())
                states.append(loader.state_dict())
            wanted = [[200 + x, 201 + x] for x in range(2 * rank, 18, 4)]
            assert seen == (wanted if rank == 0 else [*wanted, [200, 201]])
            assert [state["samples"] for state in states] == [4, 8, 12, 16, 18]
            assert [state.get("at_end", False) for state in states] == [False] * 4 + [True]
            loader.load_state_dict(states[1])
            assert items(list(loader)) == seen[2:]
            assert len(items(list(plain))) == 9, "the user's loader is left alone"

    world.run(program)


class Repeating:
    """Begins the sampler again and again."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


class Endless(Moved):
    """Keeps one iteration, so that its workers live between epochs."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))
        self.held: Any = DataLoader.__iter__(self)

    def __len__(self) -> int:
        sampler: Any = self.batch_sampler
        return len(sampler.sampler)

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.held)


class Halves(Moved):
    def __iter__(self) -> Any:
        return (half for batch in super().__iter__() for half in batch)


class Few(Moved):
    def __iter__(self) -> Any:
        return itertools.islice(super().__iter__(), 1)


class FromOther(Moved):
    def __iter__(self) -> Any:
        return iter(DataLoader(self.dataset, batch_size=2))


class Computed(DataLoader[int]):
    @property
    def batch_sampler(self) -> Any:
        return BatchSampler(range(4), 2, False)

    @batch_sampler.setter
    def batch_sampler(self, _: Any) -> None:
        pass


@in_pairs
def test_an_iteration_that_goes_its_own_way_is_refused(world: Ranks) -> None:
    def program() -> None:
        with pytest.raises(
            syncprims.ConfigurationError, match=r"Computed\.batch_sampler is a prop"
        ):
            prepare_data_loader(Computed(range(4)))  # type: ignore[arg-type]
        for kind in (Endless, Halves, Few, FromOther):
            with pytest.raises(syncprims.ConfigurationError, match=rf"{kind.__name__}\.__iter__"):
                list(prepare_data_loader(kind(16)))

    world.run(program)


class OwnStream(IterableDataset[int]):
    """A part of the data on each rank, one longer than on the rank before."""

    def __iter__(self) -> Iterator[int]:
        begin, worker = 100 * syncprims.get_rank(), get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(begin + first, begin + 5 + syncprims.get_rank(), step))


@in_pairs
def test_each_rank_may_read_a_stream_of_its_own(world: Ranks) -> None:
    def program() -> None:
        rank = syncprims.get_rank()
        mine = [*range(100 * rank, 100 * rank + 5 + rank)]
        plain = feed(OwnStream(), batch_size=2)
        working = feed(OwnStream(), batch_size=2, num_workers=2)
        loaders = [
            *(prepare_data_loader(one, dispatch_batches=False) for one in (plain, working)),
            new_job(dispatch_batches=False).prepare(plain),
        ]
        for loader in loaders:
            batches, states = [], []
            for batch in loader:
                batches.append(batch.tolist())
                states.append(loader.state_dict())
            assert sorted(x for batch in batches for x in batch) == mine
            assert states[0]["samples"] == 2 * world.ranks
            ends = [state.get("at_end", False) for state in states]
            assert ends == [False] * (len(batches) - 1) + [True]
            loader.load_state_dict(states[0])
            assert items(list(loader)) == batches[1:]
            assert items(list(skip_first_batches(loader, 1))) == batches[1:]
            with pytest.raises(ValueError, match="a stream of each rank's own divides"):
                loader.reshard(change_to((0, 1), 0))
            with pytest.raises(ValueError, match="cannot begin at 3"):
                loader.load_state_dict({**states[0], "samples": 3})
        with pytest.raises(ValueError, match="leave one of the two out"):
            prepare_data_loader(plain, dispatch_batches=False, split_batches=True)
        dealt = [accelerate_prepare(plain), accelerate_prepare(plain, put_on_device=True)]
        common = items(list(new_job().prepare(plain)))
        assert [items(list(loader)) for loader in dealt] == [common, common]

    world.run(program)


@alone
@on_every_rank
def test_a_sampler_leaves_the_generators_that_all_share_as_they_were() -> None:
    for draw in DRAWS.values():
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(5)
        wanted = [draw(9) for _ in range(3)]
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(5)
        loader = prepare_data_loader(feed(range(24), batch_size=12, sampler=OneByOne(draw)))
        found = [draw(9), *(draw(9) for _ in loader)]
        assert found == wanted


@everywhere
def test_first_batches_are_skipped_without_being_read(world: Ranks) -> None:
    def program() -> Any:
        class Read(torch.utils.data.Dataset[int]):
            def __init__(self) -> None:
                self.read: list[int] = []

            def __len__(self) -> int:
                return 24

            def __getitem__(self, index: int) -> int:
                self.read.append(index)
                return index

        data = Read()
        loader = prepare_data_loader(feed(data, batch_size=2, shuffle=True), seed=3)
        whole = items(list(loader))
        loader.set_epoch(0)
        data.read.clear()
        rest = skip_first_batches(loader, 2)
        assert len(rest) == len(whole) - 2
        found = items(list(rest))
        assert len(data.read) == 2 * len(found)
        assert found == whole[2:]
        assert items(list(skip_first_batches([torch.ones(1)] * 3, 2))) == [[1.0]]
        assert items(list(loader)) != whole, "the view took the epoch"
        with pytest.raises(ValueError, match="num_batches=-1"):
            skip_first_batches(loader, -1)

    assert world.run(program) == [None] * world.ranks


@in_pairs
def test_an_order_that_ranks_do_not_share_is_told(world: Ranks) -> None:
    class Mine(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([syncprims.get_rank(), 2, 3])

        def __len__(self) -> int:
            return 3

    def program() -> None:
        loader = prepare_data_loader(feed(range(4), sampler=Mine()))
        list(loader)

    for outcome in world.outcomes(program):
        assert isinstance(outcome, syncprims.RankMismatch)
        assert "order" in str(outcome)


@in_pairs
@pytest.mark.parametrize("batch_size", [2, None])
def test_a_sampler_that_shards_is_left_to_do_so(world: Ranks, batch_size: int | None) -> None:
    def sampler() -> DistributedSampler[int]:
        place = {"num_replicas": syncprims.get_world_size(), "rank": syncprims.get_rank()}
        return DistributedSampler(range(12), seed=3, **place)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    def program() -> list[int]:
        data = feed(range(12), batch_size=batch_size, sampler=sampler())
        loader = new_job().prepare(data)
        seen: list[int] = []
        for epoch in range(2):
            plain = sampler()
            plain.set_epoch(epoch)
            batches = list(loader)
            assert len(loader) == len(batches)
            assert torch.hstack([torch.as_tensor(b) for b in batches]).tolist() == list(plain)
            seen += list(plain)
        loader.set_epoch(0)
        rest = torch.hstack([torch.as_tensor(b) for b in skip_first_batches(loader, 1)])
        assert rest.tolist() == list(sampler())[batch_size or 1 :]
        dealt = feed(range(12), batch_size=batch_size, sampler=sampler())
        with pytest.raises(ValueError, match="has only its share"):
            prepare_data_loader(dealt, dispatch_batches=True)
        return seen

    first, second = world.run(program)
    assert sorted(first[:6] + second[:6]) == sorted(first[6:] + second[6:]) == list(range(12))
    assert first[:6] != first[6:]


def loader_of(way: str, length: int = 97, seed: int | None = 5, **options: Any) -> Any:
    """Return a loader of batches of 2 on each of 4 ranks."""
    how, size = WAYS.get(way, {}), 8 if "split" in way else 2
    if way == "stream":
        plain: Any = DataLoader(Stream(length), batch_size=size)
    elif way == "buckets":
        sizes = [size + i % 3 for i in range(length)]
        ends = list(itertools.accumulate(sizes))
        batches: Any = [list(range(e - n, e)) for n, e in zip(sizes, ends, strict=True)]
        plain = feed(range(ends[-1]), batch_sampler=batches)
    else:
        plain = feed(range(length), batch_size=size, shuffle=True)
    return prepare_data_loader(plain, seed=seed, **how, even_batches=False, **options)


ANY = [*WAYS, "stream", "buckets"]


@pytest.mark.parametrize("way", ANY)
def test_the_rest_of_an_epoch_is_shared_by_any_number_of_ranks(way: str, tmp_path: Path) -> None:
    """Each sample comes once, and what a world has taken is what came before."""

    def part(ranks: int) -> list[list[int]]:
        def program() -> list[int]:
            loader, seen = loader_of(way), list[int]()
            if ranks != 4:
                load_state(tmp_path, {"loader": loader}, any_world_size=True)
            for count, batch in enumerate(loader, 1):
                seen += batch.tolist()
                if ranks != 8 and count == 2:
                    save_state(tmp_path, {"loader": loader})
                    break
            return seen

        return run_world(program, ranks)

    seen = [x for ranks in (4, 2, 8) for own in part(ranks) for x in own]
    total = 97 if way != "buckets" else sum(2 + i % 3 for i in range(97))
    assert sorted(seen) == list(range(total))


def test_worlds_of_any_sizes_share_an_epoch_without_a_sample_twice() -> None:
    for seed in range(500):
        dice = random.Random(seed)
        data, taken = range(dice.randint(0, 60)), list[int]()
        for rounds in (*(dice.randint(0, 4) for _ in range(3)), None):
            ranks, split = dice.randint(1, 5), dice.random() < 0.3
            whole = ranks if split else 1
            size, cut = (dice.choice((1, 2, 3, 5)) * whole for _ in range(2))
            plan = ShardPlan(0, ranks, even=False, split=split, size=dice.choice((None, cut)))
            start = len(taken)
            for rank in range(ranks):
                shard = BatchShard(BatchSampler(data, size, False), plan._replace(rank=rank))
                shard.start = start
                taken += [x for batch in itertools.islice(shard, rounds) for x in batch]
            assert sorted(taken) == list(range(len(taken))), seed
        assert len(taken) == len(data), seed


def change_to(members: tuple[int | None, ...], furthest: int) -> syncprims.Change:
    """Return what `reform` would return on this rank."""
    before = members[syncprims.get_rank()]
    return syncprims.Change(1, members, (), (), before, furthest, (0,) * len(members))


def resharded(way: str, before: int, after: int, keep: Any, *, leave: bool) -> list[list[int]]:
    """Return what each new rank takes after some rounds in a world of another size.

    The old world ends in the body of a batch, which its ranks have not all reached.
    """
    loaders: dict[int, Any] = {}
    seen: list[int] = []

    def begin() -> None:
        rank = syncprims.get_rank()
        loaders[rank] = loader = loader_of(way)
        batches = iter(loader)
        for _ in range(3):
            seen.extend(next(batches).tolist())
        next(batches)  # its step is not finished
        if leave:
            del batches
        else:
            loaders[rank] = loader, batches

    run_world(begin, before)

    def go_on() -> list[int]:
        rank = syncprims.get_rank()
        members = tuple(r if r < before else None for r in range(after))
        change = change_to(members, min(1, after - 1))
        loader: Any = loaders[rank] if rank < before else loader_of(way, seed=7)
        loader, batches = loader if isinstance(loader, tuple) else (loader, None)
        loader.reshard(change, keep=keep)
        batches = iter(loader) if batches is None else batches
        own = [batch.tolist() for batch in batches]
        assert loader.state_dict()["epoch"] == 1
        sizes = {len(batch) for batch in own[:-1]}
        local = 2 if keep == "local" else 2 * before // after
        assert way == "buckets" or sizes == {local}
        return [x for batch in own for x in batch]

    return [seen, *run_world(go_on, after)]


@pytest.mark.parametrize("leave", [True, False], ids=["left", "in the loop"])
@pytest.mark.parametrize("way", ANY)
def test_a_loader_deals_the_rest_of_its_epoch_to_those_that_are_left(way: str, leave: bool) -> None:
    for after, keep in ((8, "local"), (2, "global"), (1, "global")):
        if way == "buckets" and keep == "global":
            with pytest.raises(ValueError, match="mixed sizes cannot be cut for 2 ranks"):
                resharded(way, 4, 2, keep, leave=leave)
            continue
        parts = resharded(way, 4, after, keep, leave=leave)
        total = 97 if way != "buckets" else sum(2 + i % 3 for i in range(97))
        assert sorted(x for part in parts for x in part) == list(range(total)), (after, keep)


def test_the_furthest_rank_says_where_the_rest_begins() -> None:
    loaders: dict[int, Any] = {}

    def begin() -> None:
        rank = syncprims.get_rank()
        loaders[rank] = loader_of("dealt", 16)
        batches = iter(loaders[rank])
        for _ in range(1 + rank):
            next(batches)

    def go_on(epoch: int) -> list[int]:
        loader = loaders[syncprims.get_rank()]
        loader.reshard(change_to((0, 1), 1))
        assert loader.state_dict()["epoch"] == epoch
        return [x for batch in loader for x in batch.tolist()]

    run_world(begin, 2)
    rest = run_world(lambda: go_on(0), 2)
    assert sorted(map(len, rest)) == [6, 6], "one round of both is finished"
    whole = run_world(lambda: go_on(1), 2)
    assert sorted(x for own in whole for x in own) == list(range(16)), "nothing was left"


def test_what_a_loader_cannot_deal_again_is_refused() -> None:
    def program() -> None:
        change = change_to((0, 1, 2), 0)
        with pytest.raises(RuntimeError, match="use_stateful_dataloader"):
            prepare_data_loader(feed(range(8), shuffle=True), order="torch").reshard(change)
        place = {"num_replicas": 3, "rank": syncprims.get_rank()}
        sampler: Any = DistributedSampler(range(12), seed=3, **place)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        loader = prepare_data_loader(feed(range(12), sampler=sampler))
        with pytest.raises(ValueError, match="a DistributedSampler divides the data"):
            loader.reshard(change)
        with pytest.raises(ValueError, match="cannot begin at 4"):
            loader.load_state_dict({**loader.state_dict(), "samples": 4})
        loader.load_state_dict({**loader.state_dict(), "samples": 6})
        assert len([*loader]) == 2

    run_world(program, 3)


@alone
@on_every_rank
def test_a_prepared_loader_is_a_loader() -> None:
    sampler = RandomSampler(range(6))
    plain = feed(range(6), batch_size=2, sampler=sampler)
    loader = prepare_data_loader(plain)
    assert isinstance(loader, DataLoader)
    assert loader.dataset is plain.dataset
    assert len(loader) == 3
    assert prepare_data_loader(loader) is loader
    assert sampler.generator is None, "the user's sampler is left alone"
    for order in ("torch", "seedable"):
        with pytest.raises(RuntimeError, match="use_stateful_dataloader"):
            prepare_data_loader(plain, order=order).state_dict()
    single: Any = feed(range(3), batch_size=None, sampler=SequentialSampler(range(3)))
    assert list(prepare_data_loader(single)) == [0, 1, 2]
    for kind in (WithArguments, DerivedFromIt):
        assert items(list(prepare_data_loader(kind(4)))) == [[0, 1], [2, 3]]


@with_others
def test_a_stream_that_knows_its_length_tells_it(world: Ranks) -> None:
    def program() -> list[tuple[int, int]]:
        seen = []
        for even, drop in ((True, False), (False, False), (True, True)):
            loader = DataLoader(Sized(11), batch_size=2, drop_last=drop)
            mine = prepare_data_loader(loader, even_batches=even)
            seen.append((len(mine), len([*mine])))
        return seen

    outcomes = world.run(program)
    assert all(known == found for mine in outcomes for known, found in mine)
    assert {mine[0][0] for mine in outcomes} == {-(-11 // (2 * world.ranks))}


class Spread(IterableDataset[int]):
    """A stream that its workers share."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        assert worker is not None
        return iter(range(worker.id, 20, worker.num_workers))


@in_pairs
def test_metrics_of_workers_that_end_apart_have_no_padding(world: Ranks) -> None:
    def program() -> list[int]:
        job, seen = new_job(), list[int]()
        for batch in job.prepare(DataLoader(Spread(), batch_size=2, num_workers=2)):
            seen += job.gather_for_metrics(batch).tolist()
        return seen

    assert [sorted(seen) for seen in world.run(program)] == [list(range(20))] * world.ranks


@in_pairs
def test_what_cannot_be_dealt_is_refused(world: Ranks) -> None:
    def program() -> int:
        with pytest.raises(TypeError, match="prepare a loader before you skip"):
            prepare_data_loader(skip_first_batches(feed([1, 2]), 1))
        with pytest.raises(ValueError, match="in_order=False and 2 workers"):
            prepare_data_loader(DataLoader(Stream(4), num_workers=2, in_order=False))
        one: Any = DataLoader(Stream(4), num_workers=1, in_order=False)
        return len(list(prepare_data_loader(one)))

    assert world.run(program) == [2, 2]


class Failing(Stream):
    """A stream, or data, of which two items cannot be read at first."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.fails = {0, 6}

    def __getitem__(self, index: int) -> int:
        if index in self.fails:
            self.fails.remove(index)
            raise OSError(f"item {index}")
        return index

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(self.length))


class FailingData(Dataset[int]):
    def __init__(self) -> None:
        self._stream = Failing(16)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        return self._stream[index]


@in_pairs
def test_a_batch_that_could_not_be_read_is_asked_again(world: Ranks) -> None:
    def program() -> list[Any]:
        found = []
        for data, how in ((FailingData(), False), (FailingData(), True), (Failing(16), None)):
            loader: Any = prepare_data_loader(feed(data, batch_size=2), dispatch_batches=how)
            batches, seen, errors = iter(loader), list[list[int]](), 0
            while True:
                try:
                    batch = next(batches, None)
                except (OSError, syncprims.PeerFailed):
                    errors += 1
                    continue
                if batch is None:
                    break
                seen.append(batch.tolist())
            assert loader.state_dict()["epoch"] == 1
            found.append((seen, errors))
        return found

    for rank, found in enumerate(world.run(program)):
        wanted = [[x, x + 1] for x in range(2 * rank, 16, 4)]
        assert found == [(wanted, 1), (wanted, 2), (wanted, 2)]


@dataclasses.dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    word: str


class Graph:
    """What knows by itself how to move."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    def to(self, device: torch.device) -> Graph:
        return Graph(device.type)


class Edge(NamedTuple):
    start: torch.Tensor
    to: torch.Tensor


def test_batches_are_moved_wherever_their_tensors_are() -> None:
    edge, words = Edge(torch.ones(1), torch.ones(1)), pack_sequence([torch.ones(2), torch.ones(1)])
    batch: Any = [Graph(), (Graph(),), {"words": words}, edge, Graph, Pair(torch.ones(1), "a")]
    first, (second,), named, edge, kind, pair = to_device(batch, torch.device("meta"))
    moved = [first, second, named["words"].data, *edge, pair.x]
    assert [one.device.type for one in moved] == ["meta"] * 6
    assert named["words"].batch_sizes.device.type == "cpu"
    assert (type(edge), kind, type(pair), pair.word) == (Edge, Graph, Pair, "a")


@everywhere
def test_a_sampler_may_change_between_epochs(world: Ranks) -> None:
    class Mine(torch.utils.data.Sampler[int]):
        def __init__(self) -> None:
            self.length, self.epoch = 8, 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return self.length

        def __iter__(self) -> Iterator[int]:
            return iter(range(100 * self.epoch, 100 * self.epoch + self.length))

    def program() -> list[Any]:
        sampler = Mine()
        weighted = torch.utils.data.WeightedRandomSampler([1.0] + [0.0] * 7, 8)
        loader = prepare_data_loader(feed(range(1000), batch_size=1, sampler=sampler))
        other = prepare_data_loader(feed(range(1000), batch_size=1, sampler=weighted))
        found = [items(list(loader)), items(list(loader)), items(list(other))]
        sampler.length = 4
        assert len(loader) == 4 // world.ranks
        sampler.set_epoch(7)
        weighted.weights = torch.tensor([0.0] * 7 + [1.0])
        found += [items(list(loader)), items(list(other))]
        assert weighted.generator is None
        return found

    for rank, found in enumerate(world.run(program)):
        mine = list(range(rank, 8, world.ranks))
        assert found[0] == [[i] for i in mine]
        assert found[1] == [[100 + i] for i in mine]
        assert found[3] == [[700 + i] for i in range(rank, 4, world.ranks)]
        assert (found[2][0], found[4][0]) == ([0], [7])


@in_pairs
@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize("left", [False, True])
def test_a_loader_is_freed_with_its_job(world: Ranks, stateful: bool, left: bool) -> None:
    """Without the garbage collector: the workers of a loader end when it is freed."""

    def train() -> weakref.ref[Any]:
        job = new_job(stateful=stateful)
        model = torch.nn.Linear(1, 1)
        parts = (torch.optim.SGD(model.parameters(), 0.1), feed(torch.ones(8, 1), batch_size=1))
        model, optimizer, loader = job.prepare(model, *parts)
        for batch in loader:
            with job.accumulate(model):
                job.backward(model(batch).mean())
                optimizer.step()
            assert job.gradient_state.active_dataloader is loader
            if left:
                break
        assert job.gradient_state.active_dataloader is None
        return weakref.ref(loader)

    def program() -> bool:
        train()  # what torch imports late keeps the variables of its callers
        gc.collect()
        gc.disable()
        try:
            return train()() is None
        finally:
            gc.enable()

    assert all(world.run(program))


# -- batches of many forms -------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", [*WAYS, "stream", "split stream"])
def test_each_result_comes_once(way: str, form: str) -> None:
    """Whatever a batch is made of; and what is not of an item is in each batch as it was."""

    def program() -> list[int]:
        how = WAYS.get(way, {"split_batches": "split" in way})
        data: Any = Stream(31) if way.endswith("stream") else range(31)
        size = 12 if "split" in way else 3
        job, made = new_job(**how), FORMS[form]
        loader = job.prepare(DataLoader(data, batch_size=size, collate_fn=made.collate))
        found, seen = list[int](), set[int]()
        for batch in loader:
            seen.update(made.ids(batch))
            found += ids_of(job.gather_for_metrics(made.results(batch), made.objects))
        assert loader.collate_fn is made.collate
        assert seen or job.num_processes == 4
        return sorted(found)

    for ranks in (1, 2, 3, 4):
        if FORMS[form].whole and way in ("dealt", "split") and ranks > 1:
            with pytest.raises(ValueError, match=r"is padding in part.*an entry for each item"):
                run_world(program, ranks)
        else:
            assert run_world(program, ranks) == [list(range(31))] * ranks


def test_a_value_of_a_whole_batch_is_gathered_where_some_item_is_real() -> None:
    def program() -> list[list[float]]:
        job = new_job()
        loader = job.prepare(feed(torch.arange(9.0), batch_size=2))
        return [job.gather_for_metrics(batch.mean()).tolist() for batch in loader]

    assert run_world(program, 3) == [[[0.5, 2.5, 4.5], [6.5, 4.0]]] * 3


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stream_goes_on_in_batches_of_another_size(workers: int) -> None:
    """What several workers have read cannot be cut again."""

    def program() -> list[int]:
        def loader(size: int) -> Any:
            data: Any = Spread() if workers > 1 else Stream(20)
            return prepare_data_loader(
                DataLoader(data, batch_size=size, num_workers=workers), even_batches=False
            )

        first, again = loader(3), loader(4)
        batches = iter(first)
        seen = [x for _ in range(2) for x in next(batches).tolist()]
        if workers > 1:
            with pytest.raises(ValueError, match=r"'batch_size': 4.*'batch_size': 3"):
                again.load_state_dict(first.state_dict())
            return []
        again.load_state_dict(first.state_dict())
        return seen + [x for batch in again for x in batch.tolist()]

    seen = [x for own in run_world(program, 2, kind="processes") for x in own]
    assert sorted(seen) == list(range(20)) * (workers == 1)


class OwnBatches(DataLoader[Any]):
    """A loader that makes its own batches, and whose length is that of its sampler's own."""

    def __len__(self) -> int:
        batches: Any = self.batch_sampler
        return len(batches.of_its_own)

    def __iter__(self) -> Any:
        return map(torch.neg, super().__iter__())


def test_what_a_loader_makes_itself_is_not_cut() -> None:
    def program() -> None:
        stream: Any = OwnBatches(Stream(4), batch_size=2)
        with pytest.raises(ValueError, match="what OwnBatches makes of a stream cannot be cut"):
            prepare_data_loader(stream, split_batches=True)
        sampler: Any = BatchSampler(range(4), 1, False)
        sampler.of_its_own = [None] * 4
        loader = prepare_data_loader(OwnBatches(range(4), batch_sampler=sampler))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        assert [int(batch) for batch in loader] == [
            -syncprims.get_rank(),
            -2 - syncprims.get_rank(),
        ]
        assert len(loader) == 2

    run_world(program, 2)


SIGNALLED = """
import multiprocessing, os, signal
from torch.utils.data import DataLoader
from syncprims.training import prepare_data_loader
if __name__ == "__main__":
    for persistent in False, True:
        how = {"persistent_workers": persistent, "multiprocessing_context": START}
        loader = prepare_data_loader(DataLoader(range(16), 2, num_workers=2, **how))
        batches = iter(loader)
        seen = [next(batches), next(batches)]  # of each worker
        workers = multiprocessing.active_children()
        for signum in signal.SIGTERM, signal.SIGINT, signal.SIGUSR1:
            for worker in workers:
                os.kill(worker.pid, signum)
        assert len([*seen, *batches]) == 8
    left = [iter(loader), iter(prepare_data_loader(DataLoader(range(16), 2, num_workers=1)))]
    print(next(left[0]).tolist(), next(left[1]).tolist())
"""


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_signals_to_all_processes_leave_a_rank_its_workers(start: str, tmp_path: Path) -> None:
    """They end with the rank, also if it ends in the middle of an epoch."""
    script = tmp_path / "script.py"
    script.write_text(SIGNALLED.replace("START", repr(start)))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1] [0, 1]\n", "")


def test_a_rank_without_a_part_of_the_last_split_batch_asks_no_more() -> None:
    def program() -> list[int]:
        data: Any = DataLoader(Stream(11), batch_size=3)
        loader = prepare_data_loader(data, split_batches=True, even_batches=False)
        sizes = []
        for number, batch in enumerate(loader):
            sizes.append(len(batch))
            if number < 3:
                syncprims.barrier()
        batches: Any = loader.batch_sampler
        assert batches.batch_size == 3
        return sizes

    assert run_world(program, 3, kind="threads") == [[1] * 4, [1] * 4, [1] * 3]


class Buckets:
    """Batches of mixed sizes, of a sampler that says another size."""

    batch_size, sampler = 4, SequentialSampler(range(11))

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 10])

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("form", ["mixed sizes", "time first"])
def test_results_of_batches_that_only_pad_are_left_out(form: str) -> None:
    def program() -> list[int]:
        job, found = new_job(), []
        numbers: Any = torch.arange(11)
        data: Any = DataLoader(numbers, batch_sampler=Buckets())
        if form == "time first":
            twice: Any = lambda items: torch.tensor(items).repeat(2, 1)  # noqa: E731
            data = DataLoader(Stream(10), batch_size=4, collate_fn=twice)
        for batch in job.prepare(data):
            rows = job.gather_for_metrics(batch)
            found += rows.reshape(-1).tolist()
        return sorted(set(found))

    count = 11 if form == "mixed sizes" else 10
    assert run_world(program, 2, kind="threads") == [[*range(count)]] * 2


def test_what_is_gathered_is_alike_also_where_a_rank_has_no_items() -> None:
    def program(empty: Any) -> Any:
        return gather(torch.ones(2, 3) if syncprims.get_rank() else empty)

    for empty in torch.ones(0, 3), torch.ones(0, 5):
        seen = run_world(functools.partial(program, empty), 2, kind="threads")
        assert [tuple(rows.shape) for rows in seen] == [(2, 3)] * 2
    for other in [torch.ones(0, 3)], torch.ones(0, 3, dtype=torch.int64):
        with pytest.raises(syncprims.RankMismatch, match=r"rank 1: .*float32"):
            run_world(functools.partial(program, other), 2, kind="threads")
