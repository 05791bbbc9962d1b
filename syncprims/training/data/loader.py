"""Prepared loaders: each rank its own batches, in an order that can be resumed, on its device."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils import data
from torch.utils.data import DataLoader, IterableDataset

from syncprims import broadcast, get_rank, get_world_size
from syncprims.training.pytree import to_device
from syncprims.training.rng import epoch_generator

from .batch_shards import (
    BatchShard,
    Counted,
    CountingCollate,
    ShardPlan,
    StreamShard,
    WorkerInit,
    dispatch,
    share_of,
)
from .sampling import (
    EpochSetter,
    SeedableRandomSampler,
    Skipped,
    SkippedItems,
    copy_sampler,
    inner_sampler,
    is_sharded,
    samplers,
    seed_generators,
    with_inner,
)

T = TypeVar("T")
_END: Any = object()  # never a batch


class Cursor:
    """One iteration of one prepared loader."""

    def __init__(self, loader: object) -> None:
        self._loader = weakref.ref(loader)
        self.serial = 0  #: of its latest batch
        self.at_end = False  #: the latest batch is the last
        self.beside: tuple[Cursor, ...] = ()  #: others that alternate with it, as in ``zip``
        self.real: int | None = None  #: items of all ranks' latest batches that are not padding
        self.single = False  #: each of these is one item, whatever that holds

    @property
    def loader(self) -> object:
        """The loader; None if it has been freed, with its workers, after the iteration."""
        return self._loader()


class OpenLoaders:
    """The iterations of prepared loaders that run now, outermost first."""

    def __init__(self) -> None:
        self.serial = 0  #: the number of batches yielded so far
        self._open: list[Cursor] = []

    def enter(self, cursor: Cursor) -> None:
        """Record that an iteration begins."""
        self._open.append(cursor)

    def leave(self, cursor: Cursor) -> None:
        """Record that an iteration is over, by exhaustion, ``break`` or an exception."""
        if cursor in self._open:
            self._open.remove(cursor)

    def advance(self, cursor: Cursor) -> None:
        """Record that `cursor` yields a batch, so that the loops inside of its own are over.

        If a cursor that was taken to be over goes on, it is not a loop inside of others: it runs
        beside them.
        """
        self.serial = cursor.serial = self.serial + 1
        if cursor not in self._open:
            cursor.beside = tuple(self._open)
            self._open.append(cursor)
        elif cursor is not self._open[-1]:
            del self._open[self._open.index(cursor) + 1 :]

    @property
    def innermost(self) -> Cursor | None:
        """The iteration that the current code is in."""
        return self._open[-1] if self._open else None

    def since(self, serial: int) -> list[Cursor]:
        """Return the iterations with a batch newer than `serial`, outermost first."""
        return [cursor for cursor in self._open if cursor.serial > serial]

    def is_open(self, cursor: Cursor | None) -> bool:
        """Return whether `cursor` is still being iterated."""
        return cursor in self._open


class PreparedLoader(DataLoader[T]):
    """A loader of this rank's batches.

    Each iteration is an epoch of its own. The sampler shows which batch is the last one; a stream
    is read one batch ahead to know it.
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
        self._progress = _Progress(seed)
        self._skip = 0  # of every iteration: a view of :func:`skip_first_batches`
        self._loaders = loaders
        self._non_blocking = non_blocking
        self._generator = generator  # of torch's own order, which all ranks take from rank 0
        self._skip_finished = skip_finished
        inner: tuple[Any, ...] = (loader.batch_sampler, loader.sampler)
        self._shard = next((one for one in inner if isinstance(one, BatchShard)), None)
        given: Any = inner[1] if inner[0] is None else inner[0]
        given = given if self._shard is None else self._shard.batch_sampler
        self._epochs = EpochSetter(given)
        if self._shard is not None:
            self._shard.seeded, self._shard.checked = seed is not None, True

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet: the object is being copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        count = len(self.loader)
        plan = self._plan
        if plan.dispatch and not plan.split:
            count = share_of(count, plan)
        return max(0, count - self._skip)

    @property
    def total_batch_size(self) -> int | None:
        """The items in one batch of each rank together, if known."""
        shard = self._shard
        size = shard.batch_size if shard is not None else self.loader.batch_size
        if size is None:
            return None
        return size if shard is not None and self._plan.split else size * self._plan.ranks

    @property
    def total_dataset_length(self) -> int:
        """The number of items of the whole dataset, for all ranks."""
        dataset: Any = self.loader.dataset
        return len(dataset.dataset if isinstance(dataset, StreamShard) else dataset)

    @property
    def even_batches(self) -> bool:
        """Whether all ranks get equally many batches; a change acts from the next iteration on."""
        return self._plan.even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._plan = self._plan._replace(even=even)
        shard: Any = self.loader.dataset if self._shard is None else self._shard
        if isinstance(shard, BatchShard | StreamShard):
            shard.plan = shard.plan._replace(even=even)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`."""
        self._progress.move(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the order: seed, epoch, and the epoch's batches yielded so far.

        :raises RuntimeError: if the order does not follow from a seed.
        """
        progress = self._progress
        if progress.seed is None:
            raise RuntimeError(
                "this loader has the order of torch's own generators, which no state of it holds; "
                "prepare it with use_stateful_dataloader=True, and its order can be resumed"
            )
        state = {"seed": progress.seed, "epoch": progress.epoch, "batch": progress.batch}
        stream = {} if progress.stream is None else {"stream": progress.stream}
        last = {"at_end": True} if progress.at_end else {}
        return {**state, "world_size": self._plan.ranks, **stream, **last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue in the next iteration where `state` was taken, with the very next batch.

        If it was taken in the body of an epoch's last batch, the next iteration is empty, and the
        loop goes on with what follows an epoch. A loop over epochs that begins at
        ``state_dict()["epoch"]`` is right in every case.

        :raises ValueError: in the middle of an epoch, if the world had another size.
        """
        if state["batch"] and state["world_size"] != self._plan.ranks:
            raise ValueError(
                f"the order was saved in the middle of an epoch on {state['world_size']} ranks, "
                f"and there are {self._plan.ranks}: a rank's next batch is another one; resume "
                f"with as many ranks, or from the end of an epoch"
            )
        progress = self._progress
        progress.seed = state["seed"]
        progress.move(state["epoch"], state["batch"])
        progress.stream, progress.at_end = state.get("stream"), state.get("at_end", False)
        if self._skip_finished and state.get("at_end"):
            self.set_epoch(progress.epoch + 1)

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]
        batches = self._iterate()
        if self._progress.resume:
            # It ends its epoch even if it is left without a batch: a loader beside it in a `zip`
            # may have had its last one.
            next(batches)
        return batches

    def _iterate(self) -> Iterator[Any]:
        """Yield the batches of an epoch; first None, if the epoch is resumed."""
        progress = self._progress
        epoch, done = progress.epoch, max(self._skip, progress.resume)
        resumed = progress.resume > 0
        progress.batch, progress.resume, progress.at_end = done, 0, False
        progress.current = cursor = Cursor(self)
        finished = False
        self._loaders.enter(cursor)
        try:
            if resumed:
                yield None
            dispatched = self._plan.dispatch
            if dispatched:
                batches = dispatch(lambda: self._begin(epoch, 0), self._plan, done)
            else:
                batches = self._begin(epoch, done)
            device = self.device
            if device is not None and device.type == "cpu" and not torch.accelerator.is_available():
                device = None  # batches cannot be anywhere else
            shard = self._shard
            drawn = None if shard is None or dispatched else shard.latest
            streamed = isinstance(self.loader.dataset, IterableDataset)
            stateful = streamed and not dispatched and hasattr(self.loader, "state_dict")
            after = next(batches, _END)
            while (batch := after) is not _END:
                # torchdata's state of a stream, before the batch ahead is read
                stream = self.loader.state_dict() if stateful else None  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]
                if drawn is None:
                    after = next(batches, _END)
                    cursor.at_end = after is _END
                else:
                    # The next batch is read after the body of this one: reading may draw from the
                    # generators that the body draws from, and a state is saved in the body.
                    cursor.at_end = done + 1 == drawn.count
                    cursor.real = drawn.real.get(done)
                done += 1
                if progress.current is cursor:
                    progress.batch, progress.stream = done, stream
                    progress.at_end = cursor.at_end
                unbatched = self.loader.batch_sampler is None and not dispatched
                cursor.single = unbatched if shard is None else shard.single and not dispatched
                if isinstance(batch, Counted):
                    batch, cursor.real = batch
                self._loaders.advance(cursor)
                if device is not None:
                    batch = to_device(batch, device, non_blocking=self._non_blocking)
                yield batch
                if drawn is not None:
                    after = next(batches, _END)
            finished = True
        finally:
            self._loaders.leave(cursor)
            # Where the order is torch's own, an epoch that was left has not been one, as there.
            ended = finished or progress.seed is not None
            if ended and progress.current is cursor:
                progress.move(epoch + 1, 0)

    def _begin(self, epoch: int, done: int) -> Iterator[Any]:
        """Return the batches of `epoch` after the first `done`, which are not read if possible."""
        progress, loader = self._progress, self.loader
        seed = progress.seed
        if seed is not None:
            loader.generator = epoch_generator(seed, epoch)  # torch's own stays as it is
        elif self._generator is not None:
            self._generator.set_state(broadcast(self._generator.get_state()))
        dataset: Any = loader.dataset
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(epoch)
        sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        if isinstance(sampler, BatchShard):
            sampler.skip, sampler.epoch = done, epoch
            self._epochs.set(sampler.batch_sampler, epoch)
            if seed is not None:
                sampler.seed, sampler.batches = seed, copy_sampler(sampler.batch_sampler)
                seed_generators(sampler.batches, seed, epoch)
            return iter(loader)
        if isinstance(dataset, IterableDataset) and progress.stream is not None and done:
            loader.load_state_dict(progress.stream)  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]
            return iter(loader)
        self._epochs.set(sampler, epoch)
        if seed is not None:
            seed_generators(sampler, seed, epoch)
        return islice(iter(loader), done, None)


@dataclass
class _Progress:
    """The position in the order, which a loader shares with its views without first batches."""

    seed: int | None  #: None: the order is that of torch's own generators
    epoch: int = 0
    batch: int = 0  #: yielded in this epoch
    at_end: bool = False  #: the latest batch is the epoch's last
    resume: int = 0  #: batches that the next iteration leaves out
    stream: dict[str, Any] | None = None  #: for streams, the state of torchdata's loader
    current: Cursor | None = None  #: the iteration whose end ends the epoch

    def move(self, epoch: int, batch: int) -> None:
        """Set where the next iteration begins. The end of a running one then changes nothing."""
        self.epoch, self.batch, self.resume, self.current = epoch, batch, batch, None
        self.at_end, self.stream = False, None


def prepare_data_loader(
    loader: DataLoader[T],
    *,
    device: torch.device | None = None,
    even_batches: bool = True,
    split_batches: bool = False,
    seed: int | None = None,
    loaders: OpenLoaders | None = None,
    non_blocking: bool = False,
    dispatch_batches: bool | None = False,
    order: str = "seeded",
    skip_finished: bool = False,
) -> PreparedLoader[T]:
    """Return a loader of this rank's batches of `loader`, on `device`. Collective.

    Rank *r* of *n* gets batches *r*, *r + n*, ... With `even_batches` all ranks get equally many,
    of one size, the last ones padded from the beginning of the data; without, nothing is repeated.
    With `split_batches` each batch is cut into one part per rank instead: the batch size is that of
    all ranks together. Shuffling follows from `seed` and the epoch, the same on all ranks; without
    a seed, rank 0's generator gives one. A sampler that shards by itself is used as it is. With
    `dispatch_batches` rank 0 reads and sends the others their batches: for streams that yield
    different items each time they are read. None is True for streams, and False for other data.

    :raises ValueError: if batches cannot be cut as asked; if rank 0 is to read from a sampler that
        shards by itself; if workers yield batches in any order (``in_order=False``).
    :raises RankMismatch: in an epoch, if a sampler of your own gives the ranks different orders.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    ranks = get_world_size()
    if dispatch_batches is None:
        dispatch_batches = isinstance(getattr(loader, "dataset", None), IterableDataset)
    _check(loader, dispatched=dispatch_batches and ranks > 1)
    plan = ShardPlan(
        get_rank(), ranks, even_batches, split_batches, loader.drop_last,
        dispatch=dispatch_batches and ranks > 1,
    )  # fmt: skip
    generator = None
    if order == "torch":
        mine = _rebuild(loader, plan)
        generator = None if plan.dispatch else _common_generator(mine)
        seed = None
    else:
        if seed is None:
            own = loader.generator or getattr(loader.sampler, "generator", None)
            source: Any = own if isinstance(own, torch.Generator) else torch
            seed = broadcast(int(source.initial_seed()), name="seed")
        mine = _rebuild(loader, plan, seed if order == "seedable" else None)
    return PreparedLoader(
        mine,
        plan,
        device,
        None if order == "seedable" else seed,
        loaders or OpenLoaders(),
        non_blocking=non_blocking,
        generator=generator,
        skip_finished=skip_finished,
    )


def _check(loader: Any, *, dispatched: bool) -> None:
    """Raise an error if no rank could know its batches of `loader`."""
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"prepare_data_loader() takes a torch DataLoader, and this is a {type(loader).__name__}"
        )
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        raise ValueError(
            f"in_order=False lets {loader.num_workers} workers hand out batches in any order, "
            f"in which no rank could resume its position or know the padding; leave in_order out"
        )
    if dispatched and any(map(is_sharded, (loader.batch_sampler, loader.sampler))):
        raise ValueError(
            "dispatch_batches lets rank 0 read for all, and a DistributedSampler gives it a share "
            "of the data only; drop the sampler, or dispatch_batches"
        )


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
                drawn = int(torch.empty((), dtype=torch.int64).random_().item())
                one.generator = torch.Generator().manual_seed(drawn)
            return one.generator  # type: ignore[no-any-return]
    return None


def _options(loader: DataLoader[T]) -> tuple[Callable[..., DataLoader[T]], dict[str, Any]]:
    """Return the class and the options for a loader like `loader` with other data."""
    names = _KEPT + (_KEPT_WITH_WORKERS if loader.num_workers else ())
    options: dict[str, Any] = {n: getattr(loader, n) for n in names if hasattr(loader, n)}
    kind: Callable[..., DataLoader[T]] = type(loader)
    if type(loader).__init__ is not DataLoader.__init__ and not hasattr(loader, "state_dict"):
        kind = DataLoader  # a subclass may have a constructor with other arguments
    return kind, options


def _rebuild(loader: DataLoader[T], plan: ShardPlan, seed: int | None = None) -> DataLoader[T]:
    """Return a loader with the options of `loader` that reads this rank's batches.

    With `seed` a random sampler gets torch's order for that seed.
    """
    undealt = ShardPlan(0, 1, plan.even, drop_last=plan.drop_last)
    plan = undealt if plan.dispatch else plan
    kind, options = _options(loader)
    if isinstance(loader.dataset, IterableDataset):
        size = loader.batch_size or 1
        if plan.split and size % plan.ranks:
            raise ValueError(f"split_batches: {size} items cannot be cut for {plan.ranks} ranks")
        size = size // plan.ranks if plan.split else size
        options["collate_fn"] = CountingCollate(loader.collate_fn)
        options["worker_init_fn"] = WorkerInit(loader.worker_init_fn)
        options["batch_size"] = None if loader.batch_size is None else size
        return kind(StreamShard(loader.dataset, plan, size), **options)
    batched = loader.batch_sampler is not None
    sampler: Any = loader.batch_sampler if batched else loader.sampler
    if seed is not None:
        sampler = _make_seedable(sampler, seed)
    sharded = is_sharded(sampler)
    if batched:
        shard = BatchShard(sampler, undealt if sharded else plan)
        return kind(loader.dataset, batch_sampler=shard, **options)
    sampler = sampler if sharded else BatchShard(sampler, plan)
    return kind(loader.dataset, batch_size=None, sampler=sampler, **options)


def _make_seedable(sampler: Any, seed: int) -> Any:
    """Return `sampler` with torch's random sampler replaced by one of this seed."""
    if type(sampler) is data.RandomSampler:
        count = None if sampler._num_samples is None else sampler.num_samples  # pyright: ignore[reportPrivateUsage]
        return SeedableRandomSampler(
            sampler.data_source, sampler.replacement, count, torch.Generator(), data_seed=seed
        )
    inner = inner_sampler(sampler)
    seedable = inner if inner is None else _make_seedable(inner, seed)
    return sampler if seedable is inner else with_inner(sampler, seedable)


_KEPT = (
    "generator",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "worker_init_fn",
    "multiprocessing_context",
    "pin_memory_device",
)
_KEPT_WITH_WORKERS = ("prefetch_factor", "persistent_workers", "timeout")


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """Return a view of `loader` without the first `num_batches` of each iteration.

    Batches of map-style data are not even read. A prepared loader and its views share their epochs.
    The view of a DataLoader can be prepared: its ranks share what is left. If a stream is read by
    workers, prepare the loader first.

    :raises ValueError: if `num_batches` is negative.
    """
    if num_batches < 0:
        raise ValueError(f"num_batches={num_batches}: it is a count")
    if isinstance(loader, PreparedLoader):
        view = copy.copy(loader)
        view._skip += num_batches  # pyright: ignore[reportPrivateUsage]
        return view
    if not isinstance(loader, DataLoader):
        return Skipped(loader, num_batches)
    kind, options = _options(loader)
    if isinstance(loader.dataset, IterableDataset):
        if loader.num_workers:
            return Skipped(loader, num_batches)  # each worker has a stream of its own
        items = SkippedItems(loader.dataset, num_batches * (loader.batch_size or 1))
        drop_last = {} if loader.batch_size is None else {"drop_last": loader.drop_last}
        return kind(items, batch_size=loader.batch_size, **drop_last, **options)
    if loader.batch_sampler is None:
        sampler = Skipped(loader.sampler, num_batches)
        return kind(loader.dataset, batch_size=None, sampler=sampler, **options)
    rest = Skipped(loader.batch_sampler, num_batches)
    return kind(loader.dataset, batch_sampler=rest, **options)
