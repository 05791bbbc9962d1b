"""Loaders: each rank its own batches, in an order that can be resumed, put on its device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from syncprims import assert_same, get_rank, get_world_size

from . import order
from .devices import to_device
from .dispatching import dispatched
from .sharding import BatchShard, Counted, CountingCollate, Plan, StatefulStreamShard, StreamShard
from .tracking import Cursor, OpenLoaders

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_END: Any = object()  # no batch is this one


class PreparedLoader(DataLoader[T]):
    """A loader of this rank's batches.

    Each iteration is an epoch of its own. It looks one batch ahead, so that the last one is known
    as such. Everything else (`dataset`, `batch_size`, `num_workers`) is that of :attr:`loader`.
    """

    def __init__(
        self,
        loader: DataLoader[T],
        plan: Plan,
        *,
        device: torch.device | None,
        seed: int,
        loaders: OpenLoaders,
        non_blocking: bool = False,
        dispatch: bool = False,
        drop_last: bool = False,
    ) -> None:
        # Not DataLoader.__init__: there is one already.
        self.loader = loader
        self.device = device
        self._plan = plan
        self._progress = _Progress(seed)
        self._skip = 0  # of every iteration: a view of :func:`skip_first_batches`
        self._loaders = loaders
        self._non_blocking = non_blocking
        self._dispatch = dispatch  # rank 0 reads for all
        self._drop_last = drop_last

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet: a copy in the making
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        count = len(self.loader)
        if self._dispatch and not self._plan.split:
            count, rest = divmod(count, self._plan.ranks)
            whole = self._plan.even or self._plan.rank < rest
            count += bool(rest) and whole and not self._drop_last
        return max(0, count - self._skip)

    @property
    def total_batch_size(self) -> int | None:
        """Items of all ranks' batches of one step together, where known."""
        shard = self._shard
        size = shard.batch_size if shard is not None else self.loader.batch_size
        if size is None:
            return None
        return size if shard is not None and self._plan.split else size * self._plan.ranks

    @property
    def total_dataset_length(self) -> int:
        """The items of the whole dataset, those of other ranks included."""
        dataset: Any = self.loader.dataset
        whole: Any = dataset.dataset if isinstance(dataset, StreamShard) else dataset
        return len(whole)

    @property
    def even_batches(self) -> bool:
        """Whether all ranks get equally many batches; a change counts from the next iteration."""
        return self._plan.even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._plan = self._plan._replace(even=even)
        dealer: Any = self._shard or self.loader.dataset
        if isinstance(dealer, BatchShard | StreamShard):
            dealer.plan = dealer.plan._replace(even=even)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of `epoch`."""
        self._progress.epoch, self._progress.batch, self._progress.resume = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return where in the order this is: seed, epoch, and batches handed out of it."""
        progress = self._progress
        state: dict[str, Any] = {
            "seed": progress.seed,
            "epoch": progress.epoch,
            "batch": progress.batch,
            "world_size": self._plan.ranks,
        }
        if progress.stream is not None:
            state["stream"] = progress.stream
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on where `state` was taken, with the very next batch.

        If it was taken in the body of an epoch's last batch, none is left, and what comes after the
        epoch is what goes on. A loop that begins with ``state_dict()["epoch"]`` is always right.

        :raises ValueError: in the middle of an epoch, if the world had another size.
        """
        if state["batch"] and state["world_size"] != self._plan.ranks:
            raise ValueError(
                f"the order was saved in the middle of an epoch on {state['world_size']} ranks, "
                f"and there are {self._plan.ranks}: a rank's next batch is another one; resume "
                f"with as many ranks, or from the end of an epoch"
            )
        progress = self._progress
        progress.seed, progress.epoch = state["seed"], state["epoch"]
        progress.batch = progress.resume = state["batch"]
        progress.stream = state.get("stream")

    @property
    def _shard(self) -> BatchShard | None:
        for sampler in (self.loader.batch_sampler, self.loader.sampler):
            if isinstance(sampler, _Skipping):
                return sampler.shard
        return None

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]
        return self._iterate()

    def _iterate(self) -> Iterator[T]:
        progress = self._progress
        epoch, done = progress.epoch, max(self._skip, progress.resume)
        progress.batch, progress.resume = done, 0
        cursor = Cursor(self)
        self._loaders.enter(cursor)
        try:
            batches = self._dispatched(epoch, done) if self._dispatch else self._begin(epoch, done)
            placed = self.device is not None and _can_be_elsewhere(self.device)
            shard = self._shard
            streamed = isinstance(self.loader.dataset, IterableDataset)
            stateful = streamed and not self._dispatch and hasattr(self.loader, "state_dict")
            after = next(batches, _END)
            while (batch := after) is not _END:
                # torchdata's state of a stream, before the batch ahead is read
                stream = self.loader.state_dict() if stateful else None  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]
                after = next(batches, _END)
                progress.batch, progress.stream = progress.batch + 1, stream
                cursor.at_end = after is _END
                cursor.real = None if shard is None else shard.real.get(progress.batch - 1)
                if isinstance(batch, Counted):
                    batch, cursor.real = batch
                self._loaders.advance(cursor)
                yield self._place(batch) if placed else batch
        finally:
            self._loaders.leave(cursor)
            if progress.epoch == epoch and not progress.resume:
                progress.epoch, progress.batch, progress.stream = epoch + 1, 0, None

    def _begin(self, epoch: int, done: int) -> Iterator[Any]:
        """Return the batches of `epoch` after the first `done`, nothing read that is not used."""
        progress, loader = self._progress, self.loader
        loader.generator = order.generator_of(progress.seed, epoch)  # leave torch's own alone
        dataset: Any = loader.dataset
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(epoch)
        sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        if isinstance(sampler, _Skipping):
            sampler.skip, sampler.seed, sampler.epoch = done, progress.seed, epoch
            order.begin_epoch(sampler.shard.batches, progress.seed, epoch)
            _check_order(sampler.shard, progress.seed, epoch)
            return iter(loader)
        if isinstance(dataset, IterableDataset) and progress.stream is not None and done:
            loader.load_state_dict(progress.stream)  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            return iter(loader)
        order.begin_epoch(sampler, progress.seed, epoch)
        return islice(iter(loader), done, None)

    def _dispatched(self, epoch: int, done: int) -> Iterator[Any]:
        """Return this rank's batches of those that rank 0 reads."""
        return dispatched(
            lambda: self._begin(epoch, 0), self._plan, drop_last=self._drop_last, done=done
        )

    def _place(self, batch: Any) -> Any:
        assert self.device is not None
        return to_device(batch, self.device, non_blocking=self._non_blocking)


def _can_be_elsewhere(device: torch.device) -> bool:
    """Tell whether a batch may lie on another device than this one."""
    return device.type != "cpu" or torch.accelerator.is_available()


class _Progress:
    """Where in the order a loader, and its views that skip, are."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.epoch = 0
        self.batch = 0  # handed out of this epoch
        self.resume = 0  # batches that the next iteration leaves out
        self.stream: dict[str, Any] | None = None  # torchdata's own state, for streams


class _Skipping:
    """A shard without its first batches: they are not even read."""

    def __init__(self, shard: BatchShard) -> None:
        self.shard = shard
        self.skip = self.seed = self.epoch = 0
        self.batch_size = shard.batch_size
        self.drop_last = shard.drop_last

    def __len__(self) -> int:
        return len(self.shard)

    def __iter__(self) -> Iterator[Any]:
        shard = self.shard
        dealt = order.drawn(shard, shard.batches, self.seed, self.epoch)
        return islice(dealt, self.skip, None)


def _check_order(shard: BatchShard, seed: int, epoch: int) -> None:
    """Refuse an order of the user's own that ranks do not share, before it does harm.

    Where nothing is dealt out (a sampler shards by itself, one rank reads for all) they may differ.
    """
    batches: Any = shard.batches
    if shard.plan.ranks == 1 or order.is_known(batches) or _consumes(batches):
        return
    some = islice(order.drawn(batches, batches, seed, epoch), 2)
    first = [list(b) if isinstance(b, list | tuple) else b for b in some]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    assert_same(first, f"the order of {type(batches).__name__}")


def _consumes(batches: Any) -> bool:
    """Tell whether looking at the first batches would take them away."""
    return isinstance(batches, Iterator)


def prepare_data_loader(
    loader: DataLoader[T],
    *,
    device: torch.device | None = None,
    even_batches: bool = True,
    split_batches: bool = False,
    seed: int | None = None,
    loaders: OpenLoaders | None = None,
    non_blocking: bool = False,
    dispatch_batches: bool = False,
) -> PreparedLoader[T]:
    """Return a loader of this rank's share of `loader`'s batches, on `device`. Collective.

    Rank *r* of *n* gets batches *r*, *r + n*, ... With `even_batches` all ranks get as many, of one
    size, the last ones filled up from the beginning of the data; without, nothing is repeated. With
    `split_batches` each batch is cut into one part per rank instead, so that the batch size is that
    of all ranks together. Shuffles follow from `seed` and the epoch, on all ranks alike; without a
    seed, rank 0's generator gives one. A sampler that shards already is left to do so. With
    `dispatch_batches` rank 0 reads, and sends the others theirs: for streams that no two readers
    see alike.

    :raises ValueError: if batches cannot be cut as asked, a sampler that shards is to be dealt out
        by rank 0, or workers hand batches out as they come (``in_order=False``).
    :raises RankMismatch: in an epoch, if a sampler of your own gives the ranks different orders.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        raise ValueError(
            f"in_order=False lets {loader.num_workers} workers hand out batches in any order, "
            f"in which no rank could resume its place or tell the padding; leave in_order out"
        )
    plan = Plan(get_rank(), get_world_size(), even_batches, split_batches)
    seed = order.common_seed(seed, loader.generator or _generator(loader))
    dispatch = dispatch_batches and plan.ranks > 1
    if dispatch and any(map(order.is_sharded, (loader.batch_sampler, loader.sampler))):
        raise ValueError(
            "dispatch_batches lets rank 0 read for all, and a DistributedSampler gives it a share "
            "of the data only; drop the sampler, or dispatch_batches"
        )
    return PreparedLoader(
        _rebuilt(loader, Plan(0, 1, even_batches) if dispatch else plan),
        plan,
        device=device,
        seed=seed,
        loaders=loaders or OpenLoaders(),
        non_blocking=non_blocking,
        dispatch=dispatch,
        drop_last=loader.drop_last,
    )


def _generator(loader: DataLoader[Any]) -> torch.Generator | None:
    sampler: Any = loader.sampler
    found = getattr(sampler, "generator", None)
    return found if isinstance(found, torch.Generator) else None


def _rebuilt(loader: DataLoader[T], plan: Plan) -> DataLoader[T]:
    """Return a loader like `loader` that reads this rank's share."""
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in _KEPT
        if hasattr(loader, name) and not (name in _WITH_WORKERS and not loader.num_workers)
    }
    kind: Callable[..., DataLoader[T]] = type(loader)
    if "__init__" in vars(kind) and kind is not DataLoader and not hasattr(loader, "state_dict"):
        kind = DataLoader  # a subclass with a constructor of its own cannot be made again
    if isinstance(loader.dataset, IterableDataset):
        size = loader.batch_size or 1
        if plan.split and size % plan.ranks:
            raise ValueError(f"split_batches: {size} items cannot be cut for {plan.ranks} ranks")
        size = size // plan.ranks if plan.split else size
        stateful = hasattr(loader.dataset, "state_dict")
        shard_kind = StatefulStreamShard if stateful else StreamShard
        stream = shard_kind(loader.dataset, plan, size, loader.drop_last)
        options["collate_fn"] = CountingCollate(loader.collate_fn)
        options["batch_size"] = None if loader.batch_size is None else size
        return kind(stream, **options)
    if loader.batch_sampler is None:
        sampler = order.own_sampler(loader.sampler)
        if order.is_sharded(sampler):
            return kind(loader.dataset, batch_size=None, sampler=sampler, **options)
        shard = BatchShard(sampler, plan)
        return kind(loader.dataset, batch_size=None, sampler=_Skipping(shard), **options)
    batches = order.own_sampler(loader.batch_sampler)
    shard = BatchShard(batches, Plan(0, 1, plan.even) if order.is_sharded(batches) else plan)
    return kind(loader.dataset, batch_sampler=_Skipping(shard), **options)


_WITH_WORKERS = ("prefetch_factor", "persistent_workers", "timeout")
_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """Return a view of `loader` without the first `num_batches` of each iteration.

    Of map-style data they are not read. A prepared loader and its views share their epochs.

    :raises ValueError: if `num_batches` is negative.
    """
    if num_batches < 0:
        raise ValueError(f"num_batches={num_batches}: it is a count")
    if isinstance(loader, PreparedLoader):
        view = copy.copy(loader)  # pyright: ignore[reportUnknownVariableType]
        view._skip += num_batches  # pyright: ignore[reportPrivateUsage]
        return view  # pyright: ignore[reportUnknownVariableType]
    return _Rest(loader, num_batches)


class _Rest:
    """Any iterable without its first batches."""

    def __init__(self, loader: Any, count: int) -> None:
        self.loader = loader
        self._count = count

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self._count)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.loader), self._count, None)
