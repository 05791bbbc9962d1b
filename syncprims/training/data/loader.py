"""Prepared loaders: each rank its own batches, in an order that can be resumed, on its device."""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeVar, cast

import torch
from torch.utils import data
from torch.utils.data import DataLoader, IterableDataset

from syncprims import Change, ConfigurationError, broadcast, get_rank, get_world_size
from syncprims.training.private_names import NAMES
from syncprims.training.pytree import to_device
from syncprims.training.rng import WorkerSeed, draw_seed, epoch_generator

from . import sampling
from .batch_shards import (
    BatchShard,
    Collate,
    Collated,
    Draw,
    Round,
    ShardPlan,
    StreamBatches,
    begin_stream,
    deal_whole,
    dispatch,
    with_last,
)
from .sampling import EpochSetter, SeedableRandomSampler, samplers
from .workers import WorkerInit, end_with_rank

T = TypeVar("T")


class Cursor:
    """One iteration of one prepared loader."""

    def __init__(self, loader: object) -> None:
        self._loader = weakref.ref(loader)
        self.serial: int = 0  #: of its latest batch
        self.at_end = False  #: the latest batch is the last
        self.beside: tuple[Cursor, ...] = ()  #: others that alternate with it, as in ``zip``
        #: of each rank, the items of its latest batch, and those that are not padding; None if all
        #: are such
        self.items: list[tuple[int, int]] | None = None
        self.padded: int | None = None  #: items in a batch, if a later one is padding in part
        self.resharded = False  #: the rest of the epoch has to be distributed again

    @property
    def loader(self) -> object:
        """The loader; None if it has been freed, with its workers, after the iteration."""
        return self._loader()


class OpenLoaders:
    """The iterations of prepared loaders that run now, outermost first."""

    def __init__(self) -> None:
        self.serial: int = 0  #: the number of batches yielded so far
        self.open: list[Cursor] = []

    def leave(self, cursor: Cursor) -> None:
        """Record that an iteration is over, by exhaustion, ``break`` or an exception."""
        if cursor in self.open:
            self.open.remove(cursor)

    def advance(self, cursor: Cursor) -> None:
        """Record that `cursor` yields a batch, so that the loops inside of its own are over.

        If a cursor that was taken to be over goes on, it is not a loop inside of others: it runs
        beside them.
        """
        self.serial += 1
        cursor.serial = self.serial
        if cursor not in self.open:
            cursor.beside = tuple(self.open)
            self.open.append(cursor)
        elif cursor is not self.open[-1]:
            del self.open[self.open.index(cursor) + 1 :]

    @property
    def innermost(self) -> Cursor | None:
        """The iteration that the current code is in."""
        return self.open[-1] if self.open else None

    def since(self, serial: int) -> list[Cursor]:
        """Return the iterations with a batch newer than `serial`, outermost first."""
        return [cursor for cursor in self.open if cursor.serial > serial]


class PreparedLoader(DataLoader[T]):
    """A loader of this rank's batches.

    Each iteration is an epoch of its own. The sampler shows which batch is the last one; where rank
    0 reads for all, it reads one batch ahead to know it.
    Everything else (`dataset`, `batch_size`, `num_workers`) is that of :attr:`loader`.
    """

    def __init__(
        self,
        loader: DataLoader[T],
        plan: ShardPlan,
        device: torch.device | None,
        seed: int | None,
        loaders: OpenLoaders,
        *,
        non_blocking: bool = False,
        generator: torch.Generator | None = None,
        skip_finished: bool = False,
    ) -> None:
        # Not DataLoader.__init__: the wrapped loader has everything already.
        self.loader = loader
        self.device = device
        self._plan = plan
        self._progress = _Progress(seed, loaders)
        self._skip = 0  # of every iteration: a view of :func:`skip_first_batches`
        self._non_blocking = non_blocking
        self._generator = generator  # of torch's own order, which all ranks take from rank 0
        self._skip_finished = skip_finished
        shard: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._shard: BatchShard | None = shard if isinstance(shard, BatchShard) else None
        self._worker_generator = loader.generator  # draws torch's own seeds of workers
        # Each rank's sampler, or stream, has a share of the data only.
        self._shards_itself = self._shard is None and not plan.dispatch
        if self._shard is not None:
            self._shards_itself = sampling.is_sharded(shard.batch_sampler)
            self._epochs = EpochSetter(shard.batch_sampler)
            shard.seeded, shard.checked = seed is not None, True

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet: the object is being copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        loader, plan, shard = self.loader, self._plan, self._shard
        if shard is None and self._shards_itself:
            count = len(loader)
        elif shard is None:
            count = plan.share_of(len(loader), loader.batch_size or 1, self.total_dataset_length)
        else:
            count = shard.share_of(plan) if plan.dispatch else len(shard)
        return max(0, count - self._skip)

    @property
    def _size(self) -> int | None:
        """The items in a batch before it is dealt, if they are as many in each."""
        shard = self._shard
        return self._plan.size or (self.loader if shard is None else shard).batch_size

    @property
    def collate_fn(self) -> Any:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        """The function that makes a batch of items."""
        collate = self.loader.collate_fn
        return collate.collate if isinstance(collate, Collate) else collate

    @property
    def worker_init_fn(self) -> Any:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        """The function that the program calls in each new worker, if there is one."""
        init = self.loader.worker_init_fn
        return init.init if isinstance(init, WorkerInit) else init

    @property
    def total_dataset_length(self) -> int:
        """The number of items of the whole dataset, for all ranks."""
        return len(cast("Sized", self.loader.dataset))

    @property
    def even_batches(self) -> bool:
        """Whether all ranks get equally many batches; a change acts from the next iteration on."""
        return self._plan.even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._change_plan(even=even)

    def _change_plan(self, **changes: Any) -> None:
        self._plan = self._plan._replace(**changes)
        if self._shard is not None and not self._shards_itself:
            self._shard.plan = self._plan
        elif self._shard is None:  # workers that persist collate for the plan before
            NAMES.set(self.loader, "DataLoader._iterator", None)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`."""
        self._progress.move(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the order: seed, epoch, and items that all ranks have taken.

        :raises RuntimeError: if the order does not follow from a seed.
        """
        progress = self._progress
        state = {"seed": self._known_seed(), "epoch": progress.epoch, "samples": progress.samples}
        return state | self._read_by | ({"at_end": True} if progress.at_end else {})

    @property
    def _read_by(self) -> dict[str, Any]:
        """What decides in which order several workers read a stream: they take turns."""
        workers = self.loader.num_workers
        turns = self._shard is None and workers > 1
        return {"workers": workers, "batch_size": self._size} if turns else {}

    def _known_seed(self) -> int:
        if self._progress.seed is None:
            what = "this loader has the order of torch's own generators, which no state holds"
            how = "order='seeded' (Accelerator: use_stateful_dataloader=True)"
            raise RuntimeError(f"{what}; prepare it with {how}")
        return self._progress.seed

    def _own_shares(self) -> str:
        return "a DistributedSampler" if self._shard is not None else "a stream of each rank's own"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue in the next iteration where `state` was taken, with the very next batch.

        There may be more or fewer ranks than then: they share the rest of the epoch. If the
        state was taken in the body of an epoch's last batch, the next iteration is empty, and the
        loop goes on with what follows an epoch. A loop over epochs that begins at
        ``state_dict()["epoch"]`` is right in every case.

        :raises ValueError: if a sampler that shards by itself cannot begin there.
        """
        self._check_state(state)
        samples, progress = state["samples"], self._progress
        progress.seed = state["seed"]
        progress.move(state["epoch"], samples)
        progress.at_end = state.get("at_end", False)
        if self._skip_finished and progress.at_end:
            self.set_epoch(progress.epoch + 1)

    def _check_state(self, state: dict[str, Any]) -> None:
        _, _, samples = (operator.index(state[name]) for name in ("seed", "epoch", "samples"))
        if self._shards_itself and samples % get_world_size():
            what = f"{self._own_shares()} of {get_world_size()} ranks cannot begin at {samples}"
            raise ValueError(f"{what}; let the loader shard the data")
        now = self._read_by
        before = {name: state[name] for name in ("workers", "batch_size") if name in state}
        if samples and now != before:
            what = f"{now or 'one worker'} cannot begin at {samples} items, where"
            raise ValueError(f"a stream: {what} {before or 'one worker'} ended; keep the number")

    def reshard(self, change: Change, *, keep: Literal["local", "global"] = "local") -> None:
        """Distribute the rest of the epoch to the ranks of the world after a change. Collective.

        `change` is what :func:`syncprims.reform` has returned. All ranks take the position of the
        rank that is furthest. The batch that the body of a loop has not finished is dealt again. A
        loop that runs goes on with its new batches, and so does the next one after a loop that was
        left in the middle. `keep` says which size of a batch stays: that of each rank, or that of
        all ranks together.

        :raises RuntimeError: if the order does not follow from a seed.
        :raises ValueError: if the batches cannot be cut to the new size, or the sampler shards by
            itself.
        """
        progress, old = self._progress, self._plan
        position = progress.unfinished or (progress.epoch, progress.resume)
        own = self._known_seed(), *position, old.ranks, self._size, old.size
        seed, epoch, samples, before, size, cut = broadcast(own, change.furthest, name="reshard")
        rank, ranks = get_rank(), get_world_size()
        if self._shards_itself:
            what = f"{self._own_shares()} divides the data for the {before} ranks before"
            cure = "prepare a loader without it: such a loader divides the data itself"
            raise ValueError(f"reshard(): {what}; {cure}")
        if before != ranks and (keep == "global") != old.split:
            whole = (size or 0) * (ranks if old.split else before)
            cut, rest = divmod(whole, before if old.split else ranks)
            if rest or not cut:
                what = f"batches of {size or 'mixed sizes'} cannot be cut for {ranks} ranks"
                raise ValueError(f"reshard(keep={keep!r}): {what}; keep the other size")
        self._change_plan(rank=rank, ranks=ranks, size=cut)
        running = progress.current
        progress.seed = seed
        progress.move(epoch, samples)
        if running is not None:
            running.resharded, progress.current = True, running

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]
        return _Iteration(self, self._progress, self._deal)

    def _deal(self, cursor: Cursor, epoch: int, start: int) -> Iterator[tuple[Any, int]]:
        """Yield this rank's batches after `start` items, on its device, and the positions after."""
        device, options = self.device, {"non_blocking": self._non_blocking}
        if device is not None and device.type == "cpu" and not torch.accelerator.is_available():
            device = None  # batches cannot be anywhere else
        is_sent = self._plan.dispatch or self._shard is None
        deal, skip = self._sent if is_sent else self._read, 0 if start else self._skip
        for batch, end in deal(cursor, epoch, start, skip):
            yield batch if device is None else to_device(batch, device, **options), end

    def _read(self, cursor: Cursor, epoch: int, start: int, skip: int) -> Iterator[tuple[Any, int]]:
        """Yield the batches that this rank reads itself, and the positions after them.

        Each one is read after the body of the loop has run for the one before: reading may draw
        from the generators that the body draws from, and a state is saved in the body.
        """
        shard: Any = self._shard
        each = self._plan.ranks if self._shards_itself else 1  # ranks for which the sampler counts
        drawn: Any = None
        for number, batch in enumerate(self._begin(epoch, start // each, skip), skip):
            drawn = drawn or shard.latest  # only now: a loader's own __iter__ may be a generator
            found = self._drawn_round(drawn, number)
            cursor.items, cursor.at_end, cursor.padded = found.items, found.is_last, drawn.padded
            yield batch, found.end * each
        if drawn is not None and not cursor.at_end:
            raise self._refuse_iteration("fewer batches than its sampler")

    def _drawn_round(self, drawn: Draw, number: int) -> Round:
        """Return the facts about the batch of this number."""
        if number not in drawn.rounds:
            raise self._refuse_iteration("a batch that its sampler has not given")
        return drawn.rounds.pop(number)

    def _refuse_iteration(self, what: str) -> ConfigurationError:
        name = f"{type(self.loader).__name__}.__iter__()"
        how = "It may change the batches of DataLoader.__iter__(), but not their number or order"
        other = "a plain DataLoader with persistent_workers=True keeps its workers between epochs"
        return ConfigurationError(
            f"{name} gave {what}, so no rank knows its position in the data. {how}; {other}"
        )

    def _sent(self, cursor: Cursor, epoch: int, start: int, skip: int) -> Iterator[tuple[Any, int]]:
        """Yield the batches that rank 0 reads and sends, and the positions after them.

        A stream of each rank's own is read in the same way, and not sent.
        """
        plan, each = self._plan, 1
        if self._shards_itself:
            each, plan = plan.ranks, ShardPlan(0, 1, drop_last=plan.drop_last)
        sent = dispatch(lambda: self._rounds(plan, epoch, start // each, skip), plan)
        for (batch, found), cursor.at_end in with_last(sent):
            cursor.items = found.items
            yield batch, found.end * each

    def _rounds(self, plan: ShardPlan, epoch: int, start: int, skip: int) -> Iterator[Round]:
        """Yield the batches of all ranks, as this one reads them."""
        if self._shard is None:
            size = None if self.loader.batch_size is None else self._size
            batches = self._begin(epoch, start)
            read = (
                one if isinstance(one, Collated) else Collated([one], [size or 1])
                for one in batches
            )
            yield from islice(deal_whole(begin_stream(read, plan, start), plan), skip, None)
            return
        number = skip * plan.ranks
        batches = self._begin(epoch, start, number)
        for batch in batches:
            found = self._drawn_round(self._shard.latest, number)
            number += len(found.parts)
            parts = [batch, *islice(batches, len(found.parts) - 1)]
            if len(parts) < len(found.parts):
                raise self._refuse_iteration("fewer batches than its sampler")
            yield found._replace(parts=parts)
            if found.is_last:
                return

    def _begin(self, epoch: int, start: int = 0, skip: int = 0) -> Iterator[Any]:
        """Return the batches of `epoch`; those that are left out are not read if possible."""
        seed, loader, shard = self._progress.seed, self.loader, self._shard
        if isinstance(loader.collate_fn, Collate):
            self._begin_stream(loader.collate_fn, start)
        if seed is None and self._generator is not None:
            self._generator.set_state(broadcast(self._generator.get_state()))
        self._seed_workers(seed, epoch)
        dataset: Any = loader.dataset
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(epoch)
        if shard is not None:
            shard.start, shard.skip, shard.epoch = start, skip, epoch
            self._epochs.set(shard.batch_sampler, epoch)
            if seed is not None:
                shard.seed, shard.batches = seed, sampling.copy_sampler(shard.batch_sampler)
                sampling.seed_generators(shard.batches, seed, epoch)
                by_batch = self.worker_init_fn is None and _iterates_as_torch(loader)
                shard.worker_rank = self._plan.rank if by_batch and loader.num_workers else None
        iterator = iter(loader)
        if loader.num_workers:
            end_with_rank(iterator)
        return iterator

    def _begin_stream(self, collate: Collate, start: int) -> None:
        """Say how many items each batch takes, and into how many parts it is cut."""
        plan, batches, size = self._plan, self.loader.batch_sampler, self._size or 1
        collate.parts = plan.ranks if plan.split else 1
        if isinstance(batches, StreamBatches):
            # Several workers take turns, so all batches have to be those of before.
            batches.size, batches.start = size, start if self.loader.num_workers < 2 else 0

    def _seed_workers(self, seed: int | None, epoch: int) -> None:
        """Give workers numbers of their own on each rank: torch seeds them from the generator."""
        loader, rank = self.loader, self._plan.rank
        running = NAMES.of(loader, "DataLoader._iterator", None)  # of workers that persist
        if seed is not None:
            loader.generator = epoch_generator(seed, epoch, rank)  # torch's own stays as it is
            if running is not None:  # torch sends them this attribute when an epoch begins
                shared = WorkerSeed(draw_seed(loader.generator))
                NAMES.set(running, "_BaseDataLoaderIter._shared_seed", shared)
        elif rank and loader.num_workers and running is None:
            loader.generator = epoch_generator(draw_seed(self._worker_generator), 0, rank)


def _iterates_as_torch(loader: DataLoader[Any]) -> bool:
    """Return whether its indices go to its workers as torch sends them."""
    own = type(loader)
    makes = NAMES.of(own, "DataLoader._get_iterator") is NAMES["DataLoader._get_iterator"]
    return makes and own.__iter__ is DataLoader.__iter__


#: ``deal(cursor, epoch, start)`` yields batches, and the positions after them.
_Deal = Callable[[Cursor, int, int], Iterator[tuple[Any, int]]]


class _Iteration(Iterator[Any]):
    """One epoch of a prepared loader.

    It survives an exception, a lost peer for example: the next call asks again for the batch that
    did not come. After a reshard it goes on with the new batches of this rank.
    """

    def __init__(self, loader: PreparedLoader[Any], progress: _Progress, deal: _Deal) -> None:
        self._loader, self._progress, self._deal = loader, progress, deal
        self._cursor: Cursor | None = None  # before the first batch
        self._dealt: Iterator[tuple[Any, int]] | None = None  # to be begun at the position
        self._over = False
        self._epoch = self._position = 0  # the position after the latest batch
        if progress.resume:
            # It ends its epoch even if it is left without a batch: a loader beside it in a `zip`
            # may have had its last one.
            self._begin()

    def _begin(self) -> Cursor:
        progress = self._progress
        progress.current = self._cursor = cursor = Cursor(self._loader)
        progress.loaders.open.append(cursor)
        self._epoch, self._position = progress.epoch, progress.begin()
        return cursor

    def __next__(self) -> Any:
        progress = self._progress
        cursor = self._begin() if self._cursor is None else self._cursor
        if cursor.resharded and not self._over:
            self._dealt = None
            if progress.current is not cursor or progress.epoch != self._epoch:
                self._end(finished=True)
            else:
                cursor.resharded, self._position = False, progress.begin()
        if self._over:
            raise StopIteration
        if progress.current is cursor:
            progress.unfinished = self._epoch, self._position
        try:
            if self._dealt is None:
                self._dealt = self._deal(cursor, self._epoch, self._position)
            batch, end = next(self._dealt, _NO_BATCH)
        except BaseException:
            self._dealt = None
            if progress.seed is None:  # torch's own order cannot be begun again in the middle
                self._end(finished=False)
            raise
        if end < 0:
            self._end(finished=True)
            raise StopIteration
        self._position = end
        if progress.current is cursor:
            progress.samples, progress.at_end = end, cursor.at_end
        progress.loaders.advance(cursor)
        return batch

    def _end(self, *, finished: bool) -> None:
        """End the epoch, which is finished, or was left by ``break`` or an exception."""
        cursor, progress = self._cursor, self._progress
        self._over, self._dealt = True, None
        if cursor is None:
            return
        progress.loaders.leave(cursor)
        # Where the order is torch's own, an epoch that was left has not been one, as there.
        ended = finished or progress.seed is not None
        if ended and progress.current is cursor and not cursor.resharded:
            left = None if finished else progress.unfinished
            progress.move(self._epoch + 1, 0)
            progress.unfinished = left

    def __del__(self) -> None:
        if not self._over:
            self._end(finished=False)


_NO_BATCH: Any = None, -1


@dataclass
class _Progress:
    """The position in the order, which a loader shares with its views without first batches."""

    seed: int | None  #: None: the order is that of torch's own generators
    loaders: OpenLoaders
    epoch: int = 0
    samples: int = 0  #: taken by all ranks together in this epoch
    at_end: bool = False  #: the latest batch is the epoch's last
    resume: int = 0  #: samples that the next iteration leaves out
    #: epoch and samples before the batch that a loop is working on, or was when it was left
    unfinished: tuple[int, int] | None = None
    current: Cursor | None = None  #: the iteration whose end ends the epoch

    def move(self, epoch: int, samples: int) -> None:
        """Set where the next iteration begins. The end of a running one then changes nothing."""
        self.epoch, self.samples, self.resume, self.at_end = epoch, samples, samples, False
        self.unfinished = self.current = None

    def begin(self) -> int:
        """Return the samples that an iteration leaves out, when it begins."""
        self.samples, self.resume, self.at_end = self.resume, 0, False
        return self.samples


def prepare_data_loader(
    loader: DataLoader[T],
    *,
    device: torch.device | None = None,
    even_batches: bool = True,
    split_batches: bool = False,
    seed: int | None = None,
    loaders: OpenLoaders | None = None,
    non_blocking: bool = False,
    dispatch_batches: bool | None = None,
    order: str = "seeded",
    skip_finished: bool = False,
) -> PreparedLoader[T]:
    """Return a loader of this rank's batches of `loader`, on `device`. Collective.

    Rank *r* of *n* gets batches *r*, *r + n*, ... With `even_batches` all ranks get equally many,
    of one size, the last ones padded from the beginning of the data; without, nothing is repeated.
    With `split_batches` each batch is cut into one part per rank instead: the batch size is that of
    all ranks together. Shuffling follows from `seed` and the epoch, the same on all ranks; without
    a seed, rank 0's generator gives one. A sampler that shards by itself is used as it is. With
    `dispatch_batches` rank 0 reads and sends the others their batches. None means True for a
    stream. With False each rank reads a stream of its own, whole: they may end apart.

    :raises ConfigurationError: in an epoch, if the loader's own ``__iter__`` gives other batches
        than those of its sampler.
    :raises ValueError: if batches cannot be cut as asked; if rank 0 is to read from a sampler that
        shards by itself; if workers yield batches in any order (``in_order=False``).
    :raises RankMismatch: in an epoch, if a sampler of your own gives the ranks different orders.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    dispatched = _is_stream(loader) if dispatch_batches is None else dispatch_batches
    _check(loader, split_batches, dispatched=dispatched)
    rank, ranks, drop_last = get_rank(), get_world_size(), loader.drop_last
    plan = ShardPlan(rank, ranks, even_batches, split_batches, drop_last, dispatched)
    if order != "torch" and seed is None:
        seed = _common_seed(loader)
    mine = _rebuild(loader, plan, seed if order == "seedable" else None)
    return PreparedLoader(
        mine,
        plan,
        device,
        seed if order == "seeded" else None,
        loaders or OpenLoaders(),
        non_blocking=non_blocking,
        generator=_common_generator(mine) if order == "torch" and not dispatched else None,
        skip_finished=skip_finished,
    )


def _is_stream(loader: object) -> bool:
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def _check(loader: object, split: bool, *, dispatched: bool) -> None:
    """Raise an error if no rank could know its batches of `loader`, or they cannot be split."""
    if not isinstance(loader, DataLoader):
        what = f"prepare_data_loader() takes a torch DataLoader, and no {type(loader).__name__}"
        raise TypeError(f"{what}; prepare a loader before you skip batches of it")
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        what = f"with in_order=False and {loader.num_workers} workers no rank knows its position"
        raise ValueError(f"{what}; leave in_order out")
    sharded = any(map(sampling.is_sharded, (loader.batch_sampler, loader.sampler)))
    if dispatched and sharded and get_world_size() > 1:
        what = "dispatch_batches: rank 0 reads for all, and a DistributedSampler has only its share"
        raise ValueError(f"{what}; remove the sampler, or dispatch_batches")
    if split and not dispatched and _is_stream(loader):
        what = "split_batches: a stream of each rank's own (dispatch_batches=False) has no batches"
        raise ValueError(f"{what} of all ranks; leave one of the two out")
    plain = loader.batch_size is not None and _iterates_as_torch(loader)
    if split and _is_stream(loader) and not plain and get_world_size() > 1:
        what = f"split_batches: what {type(loader).__name__} makes of a stream cannot be cut"
        raise ValueError(f"{what}; use a plain DataLoader with a batch_size, or no split_batches")


def _common_seed(loader: DataLoader[Any]) -> int:
    """Return the seed of rank 0's generator. Collective."""
    own = loader.generator or getattr(loader.sampler, "generator", None)
    source: Any = own if isinstance(own, torch.Generator) else torch
    return broadcast(int(source.initial_seed()), name="seed")


def _common_generator(loader: DataLoader[Any]) -> torch.Generator | None:
    """Return the generator that a sampler of torch's draws from, the same one on all ranks.

    A sampler without one gets one, from a seed that torch's generator draws.
    """
    shard: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if get_world_size() == 1 or not isinstance(shard, BatchShard):
        return None
    for one in samplers(shard.batch_sampler):
        if hasattr(one, "generator"):
            if one.generator is None:
                one.generator = torch.Generator().manual_seed(draw_seed(None))
            return one.generator  # type: ignore[no-any-return]
    return None


def _rebuild(loader: DataLoader[T], plan: ShardPlan, seed: int | None = None) -> DataLoader[T]:
    """Return a loader with the options of `loader` that reads this rank's batches.

    With `seed` a random sampler gets torch's order for that seed.
    """
    mine = copy.copy(loader)  # of the same class, whose constructor may take other arguments
    own = vars(mine)  # torch refuses to set these attributes
    NAMES.set(mine, "DataLoader._iterator", None)  # workers that persist stay those of `loader`
    if loader.num_workers:
        own["worker_init_fn"] = WorkerInit(loader.worker_init_fn)
    if _is_stream(loader):
        if loader.batch_size is not None and _iterates_as_torch(loader):
            batches = StreamBatches(loader.batch_sampler)
            own |= {"collate_fn": Collate(loader.collate_fn), "batch_sampler": batches}
        return mine
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler: Any = getattr(loader, name)
    sampler = sampler if seed is None else _make_seedable(sampler, seed)
    if sampling.is_sharded(sampler):
        plan = ShardPlan(0, 1, plan.even)
    own[name] = shard = BatchShard(sampler, plan)
    if getattr(mine, name) is not shard:
        what = (
            f"{type(loader).__name__}.{name} is a property, and a loader is sharded by setting it"
        )
        raise ConfigurationError(f"{what}; prepare a plain DataLoader with that sampler")
    return mine


def _make_seedable(sampler: object, seed: int) -> Any:
    """Return `sampler` with torch's random sampler replaced by one of this seed."""
    if type(sampler) is data.RandomSampler:
        # None, as in torch: it follows the length of the data.
        whole = sampler.num_samples == len(sampler.data_source)
        count = None if whole else sampler.num_samples
        return SeedableRandomSampler(
            sampler.data_source, sampler.replacement, count, torch.Generator(), data_seed=seed
        )
    inner = getattr(sampler, "sampler", None)
    seedable = inner if inner is None else _make_seedable(inner, seed)
    return sampler if seedable is inner else sampling.with_inner(sampler, seedable)


class _Skipped:
    """A loader without its first batches."""

    def __init__(self, loader: DataLoader[Any], count: int) -> None:
        self._loader = loader
        self._count = count

    def __len__(self) -> int:
        return max(0, len(self._loader) - self._count)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._loader), self._count, None)


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """Return a view of `loader` without the first `num_batches` of each iteration.

    A prepared loader and its views share their epochs. Batches of map-style data are then not even
    read. To share what is left among ranks, prepare the loader first.

    :raises ValueError: if `num_batches` is negative.
    """
    if num_batches < 0:
        raise ValueError(f"num_batches={num_batches}: it must be 0 or more")
    if not isinstance(loader, PreparedLoader):
        return _Skipped(loader, num_batches)
    view = copy.copy(loader)
    view._skip += num_batches  # pyright: ignore[reportPrivateUsage]
    return view
