"""Batch shards: which batches of a sampler or items of a stream this rank gets.

Batches are dealt in rounds of one per rank. If the last round is not full and `even` is set, it is
padded from the beginning of the data: all ranks get equally many batches, all of one size. Without
`even` nothing is repeated: some ranks may have one batch more, and a smaller last one.

A sampler may make batches of mixed sizes, such as length buckets. They keep their sizes: a last
round is padded with whole batches from the beginning, and a batch that is split for all ranks
repeats its own items where it must.

A stream that yields different items each time it is read is read by rank 0, which sends the others
their batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, cycle, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from syncprims import assert_same, on_main
from syncprims.training.pytree import as_mapping_type, batch_length, map_tensors

from .sampling import SEEDED, draw, has_type

_END: Any = object()  # never a batch


class ShardPlan(NamedTuple):
    """How batches are dealt to ranks."""

    rank: int
    ranks: int
    even: bool = True
    split: bool = False  #: each batch is cut into one part per rank
    drop_last: bool = False  #: of a stream: a last round that is not full is left out
    dispatch: bool = False  #: rank 0 reads for all


def share_of(batches: int, plan: ShardPlan) -> int:
    """Return how many of so many batches this rank gets."""
    full, rest = divmod(batches, plan.ranks)
    if plan.drop_last or not rest:
        return full
    return full + (1 if plan.even else plan.rank < rest)


class Draw:
    """One iteration of a batch shard: what is known of its batches, by number."""

    def __init__(self) -> None:
        #: items that are not padding, of a round that is not full
        self.real: dict[int, int] = {}
        self.count: int | None = None  #: of all batches, once the last one is drawn


class BatchShard:
    """This rank's batches of a batch sampler: lists of indices, or single indices.

    An iteration leaves the first `skip` batches out, in the order of `seed` and `epoch`.

    :raises ValueError: with `split`, if a batch cannot be cut into equal parts.
    """

    def __init__(self, batches: Iterable[Any], plan: ShardPlan) -> None:
        self.batches = batches  #: a sampler, or a copy of it for the current epoch
        self.batch_sampler: Any = batches  #: the sampler itself
        self.plan = plan
        self.batch_size: int | None = getattr(batches, "batch_size", None)
        self.drop_last = bool(getattr(batches, "drop_last", False))
        self.skip = self.seed = self.epoch = 0
        self.checked = False  #: the first batches are compared on all ranks
        self.seeded = True  #: the order follows from seed and epoch, else from torch's generators
        self.latest = Draw()  #: of the iteration that began last
        self.single = False  #: each rank gets one index at a time, and not a list of them
        if plan.split and self.batch_size is not None and self.batch_size % plan.ranks:
            raise ValueError(
                f"split_batches: a batch of {self.batch_size} cannot be cut into {plan.ranks} "
                f"equal parts, one per rank; make it a multiple"
            )

    @property
    def sampler(self) -> Any:
        """The sampler of single indices, if there is one."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def even_batches(self) -> bool:
        """Whether all ranks get equally many batches."""
        return self.plan.even

    @property
    def split_batches(self) -> bool:
        """Whether each batch is cut into one part per rank."""
        return self.plan.split

    def __len__(self) -> int:
        total = len(self.batch_sampler)
        if self.plan.split:
            return self._split_length(total)
        return share_of(total, self.plan._replace(drop_last=self.drop_last))

    def _split_length(self, total: int) -> int:
        if self.plan.even or self.drop_last or not total:
            return total
        items = self.sampler
        if items is None or self.batch_size is None:
            return total
        last = len(items) - (total - 1) * self.batch_size  # the items of the last batch
        return total if last > self.plan.rank * self.batch_size // self.plan.ranks else total - 1

    def __iter__(self) -> Iterator[Any]:
        self.latest = drawn = Draw()
        dealt = self._dealt(drawn.real)
        if self.seeded:
            dealt = draw(dealt, self.batches, self.seed, self.epoch)
        return islice(_counted(dealt, drawn), self.skip, None)

    def _dealt(self, real: dict[int, int]) -> Iterator[Any]:
        plan, size = self.plan._replace(drop_last=self.drop_last), self.batch_size
        rounds = deal(self._checked(), plan, _OF_INDICES, size, mixed=size is None)
        for number, (parts, count, _) in enumerate(rounds):
            if plan.rank < len(parts):
                self.single = not _is_batch(parts[plan.rank])
                if count is not None:
                    real[number] = count
                yield parts[plan.rank]

    def _checked(self) -> Iterator[Any]:
        """Yield the batches, after a check that the first ones are the same on all ranks.

        A sampler of the user's may give each rank another order. There is nothing to check if
        nothing is dealt.

        :raises RankMismatch: on all ranks, if they are not. Collective.
        """
        batches = iter(self.batches)
        if self.plan.split:
            batches = map(_batch_to_split, batches)
        if self.checked and self.plan.ranks > 1 and not has_type(self.batch_sampler, SEEDED):
            first = list(islice(batches, self.plan.ranks))
            order = [list(one) if isinstance(one, list | tuple) else one for one in first]
            assert_same(order, f"the order of {type(self.batch_sampler).__name__}")
            yield from first
        yield from batches


def _counted(batches: Iterable[Any], drawn: Draw) -> Iterator[Any]:
    """Yield the batches, and count them before the last one is yielded."""
    for number, (batch, after) in enumerate(pairwise(chain(batches, [_END])), 1):
        if after is _END:
            drawn.count = number
        yield batch


def _is_batch(batch: Any) -> bool:
    """Return whether `batch` is a batch of indices, not a single index."""
    return isinstance(batch, list | tuple) or getattr(batch, "ndim", 0) > 0


def _batch_to_split(batch: Any) -> Any:
    if not _is_batch(batch):
        raise ValueError("split_batches cuts batches, and this loader has single items")
    return batch


class Counted(NamedTuple):
    """An item or a batch of a sharded stream, made where it is read: here or in a worker."""

    value: Any
    real: int | None  #: items of its round that are not padding, if the round has any padding


class CountingCollate:
    """Collates counted items to a counted batch."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, items: Any) -> Counted:
        """Return the batch of `items`; of a single item, if the loader makes no batches."""
        if isinstance(items, Counted):
            return Counted(self.collate(items.value), items.real)
        return Counted(self.collate([item.value for item in items]), items[-1].real)


class WorkerInit:
    """The initialization of a worker that reads a sharded stream.

    The user's own function, and the dataset itself, find the dataset in ``get_worker_info()``, and
    not the shard: many datasets are split among workers by changing it there.
    """

    def __init__(self, init: Callable[[int], object] | None) -> None:
        self.init = init

    def __call__(self, worker: int) -> None:
        """Put the dataset in its place, and call the user's function."""
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # its own is refused later on
        if self.init is not None:
            self.init(worker)


class StreamShard(IterableDataset[Any]):
    """This rank's items of an iterable dataset, dealt like batches of `size`.

    Every rank reads the whole stream. A worker process reads what the dataset yields in a worker,
    so a stream with several workers must split itself among them, as always in torch.
    """

    def __init__(self, dataset: Any, plan: ShardPlan, size: int) -> None:
        self.dataset = dataset
        self.plan = plan
        self.size = size  #: of this rank's batches
        if hasattr(dataset, "state_dict"):  # its position, which is exact at the end of a batch
            self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def __len__(self) -> int:
        """Return how many items this rank gets, in whole batches, if the dataset has a length."""
        whole, rest = divmod(len(self.dataset), self.size)
        return self.size * share_of(whole + (rest > 0 and not self.plan.drop_last), self.plan)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the dataset, if it takes it."""
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Counted]:
        rank, stream = self.plan.rank, iter(self.dataset)
        batches = iter(lambda: list(islice(stream, self.size)), [])
        if self.plan.drop_last:
            batches = filter(lambda batch: len(batch) == self.size, batches)
        for parts, real, _ in deal(
            batches, self.plan._replace(split=False), _OF_INDICES, self.size
        ):
            for item in parts[rank] if rank < len(parts) else ():
                yield Counted(item, real)


# -- read by rank 0 for all ----------------------------------------------------------------------


def dispatch(begin: Callable[[], Iterator[Any]], plan: ShardPlan, done: int) -> Iterator[Any]:
    """Yield this rank's batches of those that `begin` yields on rank 0. Collective each time.

    The first `done` batches are left out. Rank 0 reads them all the same: they may pad the last.

    :raises PeerFailed: on the others, if reading fails on rank 0.
    """

    def batches() -> Iterator[Any]:
        for batch in begin():
            yield batch.value if isinstance(batch, Counted) else batch

    dealt = islice(deal(batches(), plan, _OF_TENSORS), done, None)

    @on_main(share=True)
    def read() -> Round | None:
        return next(dealt, None)

    while (found := read()) is not None:
        if plan.rank < len(found.parts):
            yield Counted(found.parts[plan.rank], found.real)
        if found.is_last:
            return  # a rank that got no batch does not call again, so the others must not


# -- how batches are dealt, of indices and of tensors ---------------------------------------------


class Round(NamedTuple):
    """One batch per rank."""

    parts: list[Any]  #: by rank; there may be fewer than ranks
    real: int | None  #: items that are not padding, if there is any padding
    is_last: bool = False  #: it is known that no other follows


class Kind(NamedTuple):
    """What a batch is: how its items are counted, cut and joined."""

    length: Callable[[Any], int]
    cut: Callable[[Any, int, int], Any]
    join: Callable[[list[Any]], Any]


def deal(
    batches: Iterator[Any], plan: ShardPlan, kind: Kind, size: int | None = None, *,
    mixed: bool = False,
) -> Iterator[Round]:  # fmt: skip
    """Yield the batches, one per rank. Each has `size` items, by default those of the first one.

    Batches are of `mixed` sizes once one that is not the last has another size.
    """
    ranks, at_once = plan.ranks, 1 if plan.split else plan.ranks
    even = plan.even and ranks > 1
    first: list[Any] = []  # the first batches, which pad the last ones
    ahead: list[Any] = []  # read to see whether there are more
    while held := [*ahead, *islice(batches, at_once - len(ahead))]:
        sizes = [kind.length(batch) for batch in held]
        first = first or held
        size = size or sizes[0]
        *others, last = sizes
        is_odd = last != size or len(held) < at_once
        ahead = list(islice(batches, 1)) if is_odd else []  # otherwise do not wait for it
        is_last = is_odd and not ahead
        mixed |= any(other != size for other in others)
        mixed |= last > size or (last < size and not is_last)
        if plan.split:
            usual, more = (last, held) if mixed else (size, first)
            yield _cut(kind, held, last, -(-usual // ranks), more if even else [], ranks, is_last)
        elif len(held) == ranks and (mixed or last == size):
            yield Round(held, None, is_last)
        elif plan.drop_last and len(held) < ranks:
            return
        elif not mixed:
            yield _cut(kind, held, sum(sizes), size, first if even else [], ranks, is_last)
        elif not even:
            yield Round(held, None, is_last)
        else:
            padded = [*held, *islice(cycle(first), ranks - len(held))]
            yield Round(padded, sum(sizes), is_last)


def _cut(
    kind: Kind,
    batches: list[Any],
    count: int,
    part: int,
    more: list[Any],
    ranks: int,
    is_last: bool,
) -> Round:
    """Return parts of `part` items of `count`; the items of `more` pad the last parts."""
    part = max(1, part)
    full, real, whole = part * ranks, None, kind.join(batches)
    if more and 0 < count < full:
        real, padding = count, kind.join(more)
        while count < full:
            added = kind.cut(padding, 0, full - count)
            count += kind.length(added)
            whole = kind.join([whole, added])
    return Round(
        [kind.cut(whole, i, min(i + part, count)) for i in range(0, count, part)], real, is_last
    )


def _slice(batch: Any, start: int, stop: int) -> Any:
    """Return some items of a batch: rows of its tensors, and of plain lists as long as those."""
    count = batch_length(batch)

    def cut(part: Any) -> Any:
        if torch.is_tensor(part):
            return part[start:stop].clone() if part.ndim else part
        return part[start:stop] if len(part) == count else part

    return map_tensors(cut, batch, lambda part: torch.is_tensor(part) or _is_plain_list(part))


def _join(batches: list[Any]) -> Any:
    """Return one batch with the items of all.

    :raises TypeError: if the batches differ in structure.
    """
    first = batches[0]
    if torch.is_tensor(first):
        return torch.cat(batches) if first.ndim else first
    if isinstance(first, Mapping):
        return as_mapping_type(first, {key: _join([b[key] for b in batches]) for key in first})
    if _is_plain_list(first):
        return type(first)(item for batch in batches for item in batch)
    if isinstance(first, list | tuple):
        parts = [_join(list(part)) for part in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return first


def _is_plain_list(part: Any) -> bool:
    """Return whether `part` is a list or tuple of objects that are no tensors or containers."""
    if not isinstance(part, list | tuple) or hasattr(part, "_fields"):
        return False
    return not any(isinstance(item, torch.Tensor | Mapping | list | tuple) for item in part)


_OF_INDICES = Kind(
    lambda batch: len(batch) if _is_batch(batch) else 1,
    lambda batch, start, stop: list(batch[start:stop]),
    lambda batches: [index for batch in batches for index in batch],
)
_OF_TENSORS = Kind(batch_length, _slice, _join)
