"""Which batches of a sampler or items of a stream this rank gets.

Batches are dealt in rounds of one per rank. If the last round is not full and `even` is set, it is
padded from the beginning of the data: all ranks get equally many batches, all of one size. Without
`even` nothing is repeated: some ranks may have one batch more, and a smaller last one.

A sampler may make batches of mixed sizes, such as length buckets. They keep their sizes: a last
round is padded with whole batches from the beginning, and a batch that is split for all ranks
repeats its own items where it must.

A position in an epoch is the number of items that all ranks have taken together. What follows it
can be dealt to any number of ranks.

A stream is read by rank 0, which sends the others their batches, or by each rank for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, cycle, islice, pairwise
from typing import Any, NamedTuple, TypeVar

import torch

from syncprims import assert_same, on_main
from syncprims.training.pytree import as_mapping_type, batch_length, map_tensors, tensors_of
from syncprims.training.rng import WorkerSeed, mix

from .sampling import SEEDED, draw, has_type

T = TypeVar("T")
_END: Any = object()  # never a batch


class ShardPlan(NamedTuple):
    """The way in which batches are distributed to ranks."""

    rank: int
    ranks: int
    even: bool = True
    split: bool = False  #: each batch is cut into one part per rank
    drop_last: bool = False  #: a last round that is not full is left out
    dispatch: bool = False  #: rank 0 reads for all
    size: int | None = None  #: the batches are cut again to this size before they are dealt

    def share_of(self, batches: int, size: int | None = None, items: int | None = None) -> int:
        """Return how many of so many batches this rank gets.

        `size` is that of each batch but the last, and `items` that of all together, if known.
        """
        if items is not None and self.size is not None:
            size = self.size
            batches = items // size if self.drop_last else -(-items // size)
        if self.split:
            if self.even or not batches or size is None or items is None:
                return batches
            begin, last = self.rank * -(-size // self.ranks), items - (batches - 1) * size
            return (batches - 1) * (begin < size) + (begin < last)
        full, rest = divmod(batches, self.ranks)
        if self.drop_last or not rest:
            return full
        return full + (1 if self.even else self.rank < rest)


class Draw:
    """One iteration of a batch shard: the known facts about its batches, by number."""

    def __init__(self) -> None:
        #: how many items of a round are no padding, if there is any, and the position after it
        self.rounds: dict[int, tuple[int | None, int]] = {}
        self.count: int | None = None  #: of all batches, once the last one is drawn


class BatchShard:
    """This rank's batches of a batch sampler: lists of indices, or single indices.

    An iteration begins after the first `start` items of all ranks, and leaves `skip` rounds out, in
    the order of `seed` and `epoch`.

    :raises ValueError: with `split`, if a batch cannot be cut into equal parts.
    """

    def __init__(self, batches: Iterable[Any], plan: ShardPlan) -> None:
        self.batches = batches  #: a sampler, or a copy of it for the current epoch
        self.batch_sampler: Any = batches  #: the sampler itself
        self.plan = plan
        self.batch_size: int | None = getattr(batches, "batch_size", None)
        self.drop_last: bool = bool(getattr(batches, "drop_last", False))
        self.start = self.skip = self.seed = self.epoch = 0
        self.checked = False  #: the first batches are compared on all ranks
        self.seeded = True  #: the order follows from seed and epoch, else from torch's generators
        self.latest: Draw = Draw()  #: of the iteration that began last
        self.single: bool = False  #: each rank gets one index at a time, and not a list of them
        self.worker_rank: int | None = None  #: with it, each batch seeds the worker that reads it
        if plan.split and self.batch_size is not None and self.batch_size % plan.ranks:
            what = f"split_batches: {plan.ranks} ranks cannot share a batch of {self.batch_size}"
            raise ValueError(f"{what}; choose a multiple of {plan.ranks}")

    @property
    def sampler(self) -> Any:
        """The sampler of single indices, if there is one."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def even_batches(self) -> bool:
        """Whether all ranks get equally many batches."""
        return self.plan.even

    def __len__(self) -> int:
        return self.share_of(self.plan._replace(drop_last=self.drop_last))

    def share_of(self, plan: ShardPlan) -> int:
        """Return how many batches a rank gets in an epoch."""
        batches, size, items = len(self.batch_sampler), self.batch_size, None
        if size is not None and self.sampler is not None:
            items = batches * size if self.drop_last else len(self.sampler)
        return plan.share_of(batches, size, items)

    def __iter__(self) -> Iterator[Any]:
        drawn = Draw()
        self.latest = drawn
        dealt = self._dealt(drawn)
        if self.seeded:
            dealt = draw(dealt, self.batches, self.seed, self.epoch)
        return islice(dealt, self.skip, None)

    def _dealt(self, drawn: Draw) -> Iterator[Any]:
        plan, size = self.plan._replace(drop_last=self.drop_last), self.batch_size
        rounds = deal(
            self._checked(), plan, _OF_INDICES, size, mixed=size is None, start=self.start
        )
        mine = (each for each in rounds if plan.rank < len(each.parts))
        for number, (each, is_last) in enumerate(with_last(mine)):
            part = each.parts[plan.rank]
            self.single = not _is_batch(part)
            drawn.rounds[number] = each.real, each.end
            drawn.count = number + 1 if is_last else None
            if self.worker_rank is not None:
                part = WorkerSeed(mix(self.seed, self.epoch, self.worker_rank, each.end), part)
            yield part

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


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield the items, and whether each is the last one: so the next one is read before."""
    for item, after in pairwise(chain(items, [_END])):
        yield item, after is _END


def _is_batch(batch: object) -> bool:
    """Return whether `batch` is a batch of indices, not a single index."""
    return isinstance(batch, list | tuple) or getattr(batch, "ndim", 0) > 0


def _batch_to_split(batch: object) -> Any:
    if not _is_batch(batch):
        raise ValueError("split_batches divides batches, and this loader gives single items")
    return batch


# -- read by rank 0 for all ----------------------------------------------------------------------


def dispatch(
    begin: Callable[[], Iterator[Any]],
    plan: ShardPlan,
    size: int | None,
    *,
    single: bool = False,
    start: int = 0,
    skip: int = 0,
) -> Iterator[tuple[Any, int | None, int]]:
    """Yield this rank's batches of those that `begin` yields on rank 0. Collective each time.

    With each comes how many items of its round are no padding, if there is any, and the position
    after it. The first `start` items and `skip` rounds are left out. Rank 0 reads them all the
    same: they may pad the last round. A batch may be a `single` item.

    :raises PeerFailed: on the others, if reading fails on rank 0.
    """
    if plan.ranks == 1:
        plan = plan._replace(split=False)

    def rounds() -> Iterator[Round]:
        batches = begin()
        first = list(islice(batches, 1))
        whole = single or not any(tensor.ndim for batch in first for tensor in tensors_of(batch))
        kind = _OF_SINGLES if whole and not plan.split else _OF_TENSORS
        dealt = deal(chain(first, batches), plan, kind, size, mixed=whole, start=start)
        return islice(dealt, skip, None)

    left: Iterator[Round] | None = None

    def read() -> Round | None:
        nonlocal left
        left = rounds() if left is None else left
        return next(left, None)

    if plan.ranks > 1:
        read = on_main(share=True)(read)
    while (found := read()) is not None:
        if plan.rank < len(found.parts):
            yield found.parts[plan.rank], found.real, found.end
        if found.is_last:
            return  # a rank that got no batch does not call again, so the others must not


# -- how batches are dealt, of indices and of tensors ---------------------------------------------


class Round(NamedTuple):
    """One batch per rank."""

    parts: list[Any]  #: by rank; there may be fewer than ranks
    real: int | None  #: items that are not padding, if there is any padding
    end: int  #: the position after it
    is_last: bool = False  #: it is known that no other follows


class Kind(NamedTuple):
    """The kind of a batch: how its items are counted, cut and joined."""

    length: Callable[[Any], int]
    cut: Callable[[Any, int, int], Any]
    join: Callable[[list[Any]], Any]


def deal(
    batches: Iterator[Any], plan: ShardPlan, kind: Kind, size: int | None = None, *,
    mixed: bool = False, start: int = 0,
) -> Iterator[Round]:  # fmt: skip
    """Yield the batches after the first `start` items, one per rank.

    Each has `size` items, by default those of the first one. Batches are of `mixed` sizes once one
    that is not the last has another size.
    """
    ranks, at_once = plan.ranks, 1 if plan.split else plan.ranks
    even = plan.even and ranks > 1
    first = list(islice(batches, at_once))  # they pad the last ones
    batches = chain(first, batches)
    size = size or (kind.length(first[0]) if first else 1)
    end, recut = 0, plan.size is not None
    while end < start and (held := [*islice(batches, 1)]):
        length = kind.length(held[0])
        end += length
        if end > start:  # it was dealt in other sizes
            batches = chain([kind.cut(held[0], length - (end - start), length)], batches)
            end, recut = start, recut or not mixed
        else:
            mixed |= length != size and not recut
    if recut:
        size = plan.size or size
        batches = _recut(batches, kind, size, plan.drop_last)
    ahead: list[Any] = []  # read to see whether there are more
    while held := [*ahead, *islice(batches, at_once - len(ahead))]:
        sizes = [kind.length(batch) for batch in held]
        *others, last = sizes
        is_odd = last != size or len(held) < at_once
        ahead = list(islice(batches, 1)) if is_odd else []  # otherwise do not wait for it
        is_last = is_odd and not ahead
        mixed |= any(other != size for other in others)
        mixed |= last > size or (last < size and not is_last)
        count = sum(sizes)
        end += count
        if plan.split:
            usual, more = (last, held) if mixed else (size, first)
            parts, real = _cut(kind, held, last, -(-usual // ranks), more if even else [], ranks)
        elif len(held) == ranks and (mixed or last == size):
            parts, real = held, None
        elif plan.drop_last and len(held) < ranks:
            return
        elif not mixed:
            parts, real = _cut(kind, held, count, size, first if even else [], ranks)
        elif not even:
            parts, real = held, None
        else:
            parts, real = [*held, *islice(cycle(first), ranks - len(held))], count
        yield Round(parts, real, end, is_last)


def _recut(batches: Iterator[Any], kind: Kind, size: int, drop_last: bool) -> Iterator[Any]:
    """Yield batches of `size` items, and a smaller last one unless that is dropped."""
    held: list[Any] = []
    count = 0
    for batch in batches:
        held.append(batch)
        count += kind.length(batch)
        while count >= size:
            whole = kind.join(held)
            yield kind.cut(whole, 0, size)
            held, count = [kind.cut(whole, size, count)], count - size
    if count and not drop_last:
        yield kind.join(held)


def _cut(
    kind: Kind, batches: list[Any], count: int, part: int, more: list[Any], ranks: int
) -> tuple[list[Any], int | None]:
    """Return parts of `part` items of `count`, and `count` if the items of `more` pad the last."""
    part = max(1, part)
    full, real, whole = part * ranks, None, kind.join(batches)
    if more and 0 < count < full:
        real, padding = count, kind.join(more)
        while count < full:
            added = kind.cut(padding, 0, full - count)
            count += kind.length(added)
            whole = kind.join([whole, added])
    return [kind.cut(whole, i, min(i + part, count)) for i in range(0, count, part)], real


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


def _is_plain_list(part: object) -> bool:
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
_OF_SINGLES = Kind(lambda _: 1, _slice, _join)  # never cut, and never joined
