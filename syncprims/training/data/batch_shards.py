"""Which batches of a sampler or items of a stream this rank gets.

Batches are dealt in rounds of one per rank. If the last round is not full and `even` is set, it is
padded from the beginning of the data: all ranks get equally many batches, all of one size. Without
`even` nothing is repeated: some ranks may have one batch more, and a smaller last one.

A sampler may make batches of mixed sizes, such as length buckets. They keep their sizes: a last
round is padded with whole batches from the beginning, and a batch that is split for all ranks
repeats its own items where it must.

A position in an epoch is the number of items that all ranks have taken together. What follows it
can be dealt to any number of ranks.

A stream is read by rank 0, which sends the others their batches, or by each rank for itself. What
is read is never cut or joined: that is done before, with indices, or with items in the workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, chain, cycle, islice, pairwise, repeat
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import BatchSampler

from syncprims import assert_same, on_main
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
            last = min(items, batches * size) - (batches - 1) * size
            part, end = (-(-n // self.ranks) for n in (size, last if self.dispatch else size))
            return (batches - 1) * (self.rank * part < size) + (self.rank * end < last)
        full, rest = divmod(batches, self.ranks)
        if self.drop_last or not rest:
            return full
        return full + (1 if self.even else self.rank < rest)


class Draw:
    """One iteration of a batch shard: the known facts about its batches, by number."""

    def __init__(self) -> None:
        self.rounds: dict[int, Round] = {}  #: without their parts
        #: items in a batch, if the last round will have batches that are padding in part
        self.padded: int | None = None


class BatchShard:
    """This rank's batches of a batch sampler: lists of indices, or single indices.

    An iteration begins after the first `start` items of all ranks, and leaves `skip` rounds out, in
    the order of `seed` and `epoch`. Where rank 0 reads for all, these are the batches of all ranks,
    round by round. Other attributes are those of the sampler.

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
        self.worker_rank: int | None = None  #: with it, each batch seeds the worker that reads it
        odd = self.batch_size is not None and self.batch_size % plan.ranks
        if plan.split and odd and not plan.dispatch:
            what = f"split_batches: {plan.ranks} ranks cannot share a batch of {self.batch_size}"
            raise ValueError(f"{what}; choose a multiple of {plan.ranks}")

    def __getattr__(self, name: str) -> Any:
        if name in ("batch_sampler", "sampler"):  # not set yet, or there is none
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

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
        plan, number = self.plan, 0
        if not plan.dispatch:
            plan = plan._replace(drop_last=self.drop_last)
        drawn.padded = self._find_padded()
        begun = _begin(self._checked(), plan, self.batch_size, self.start)
        rounds = deal_whole(begun, plan) if plan.dispatch else deal(begun, plan)
        mine = (each for each in rounds if plan.dispatch or plan.rank < len(each.parts))
        for each, is_last in with_last(mine):
            parts = each.parts if plan.dispatch else [each.parts[plan.rank]]
            drawn.rounds[number] = each._replace(parts=[None] * len(parts), is_last=is_last)
            for rank, part in enumerate(parts, self.worker_rank or 0):
                number += 1
                if self.worker_rank is not None:
                    part = WorkerSeed(mix(self.seed, self.epoch, rank, each.end), part)
                yield part

    def _find_padded(self) -> int | None:
        """Return the items in a batch if one will be padding in part, as far as is known."""
        plan, size = self.plan, self.plan.size or self.batch_size
        if plan.ranks == 1 or not plan.even or plan.dispatch or self.drop_last or not size:
            return None
        if type(self.batch_sampler) is not BatchSampler:
            return None  # its batches may be of mixed sizes, which keep them
        size = size // plan.ranks if plan.split else size
        with contextlib.suppress(TypeError):  # its length is not known
            return size if len(self.sampler) % size else None
        return None

    def _checked(self) -> Iterator[Any]:
        """Yield the batches, after a check that the first ones are the same on all ranks.

        A sampler of the user's may give each rank another order. There is nothing to check if
        nothing is dealt.

        :raises RankMismatch: on all ranks, if they are not. Collective.
        """
        batches = iter(self.batches)
        if self.plan.split:
            batches = map(_batch_to_split, batches)
        plan = self.plan
        here = self.checked and plan.ranks > 1 and not plan.dispatch
        if here and not has_type(self.batch_sampler, SEEDED):
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


# -- read by rank 0 for all, or by each rank for itself --------------------------------------------


class Collated(list[Any]):
    """A batch, in as many parts as ranks share it."""

    def __init__(self, parts: Iterable[Any], sizes: Iterable[int]) -> None:
        super().__init__(parts)
        self.sizes: list[int] = [*sizes]  #: the items of each part


def _cut(batch: Any, part: int) -> list[Any]:
    return [batch[i : i + part] for i in range(0, len(batch), max(1, part))]


class Collate:
    """Collates the items of a stream in parts: no tensor has to be cut afterwards."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate
        self.parts = 1  #: of each batch

    def __call__(self, items: list[Any]) -> Collated:
        """Return the batch of these items."""
        parts = _cut(items, -(-len(items) // self.parts))
        return Collated(map(self.collate, parts), map(len, parts))


class StreamBatches:
    """Batches of a stream, of `size` items: a loader takes as many as there are in a list.

    A batch ends after `start` items, where another size may have left the stream. Other attributes
    are those of the `sampler` of the plain loader.
    """

    size: int = 1
    start: int = 0

    def __init__(self, sampler: Any) -> None:
        self._plain = sampler

    def __getattr__(self, name: str) -> Any:
        if name == "_plain":  # not set yet
            raise AttributeError(name)
        return getattr(self._plain, name)

    def __iter__(self) -> Iterator[list[None]]:
        before, rest = divmod(self.start, self.size)
        sizes = chain(repeat(self.size, before), [rest] * bool(rest), repeat(self.size))
        return ([None] * size for size in sizes)


def dispatch(begin: Callable[[], Iterator[Round]], plan: ShardPlan) -> Iterator[tuple[Any, Round]]:
    """Yield this rank's batches of the rounds that `begin` yields on rank 0. Collective each time.

    With each comes its round.

    :raises PeerFailed: on the others, if reading fails on rank 0.
    """
    left: Iterator[Round] | None = None

    def read() -> Round | None:
        nonlocal left
        left = begin() if left is None else left
        return next(left, None)

    if plan.ranks > 1:
        read = on_main(share=True)(read)
    while (found := read()) is not None:
        if plan.rank < len(found.parts):
            yield found.parts[plan.rank], found
        if found.is_last:
            return  # a rank that got no batch does not call again, so the others must not


# -- how batches are dealt -------------------------------------------------------------------------


class Round(NamedTuple):
    """One batch per rank."""

    parts: list[Any]  #: by rank; there may be fewer than ranks
    #: of each rank, the items of its batch, and those that are not padding; None if all are such
    items: list[tuple[int, int]] | None
    end: int  #: the position after it
    is_last: bool = False  #: it is known that no other follows


class Begun(NamedTuple):
    """Batches that are to be dealt."""

    first: list[Any]  #: of the epoch: they pad its last round
    batches: Iterator[Any]
    end: int  #: the position before them
    size: int | None  #: of each but the last; None: they are of mixed sizes


def deal_whole(begun: Begun, plan: ShardPlan) -> Iterator[Round]:
    """Yield batches, or the parts of split ones, one per rank; whole ones pad the last round."""
    first, batches, end, _ = begun
    at_once = 1 if plan.split else plan.ranks
    padding = [*chain.from_iterable(zip(batch, batch.sizes, strict=True) for batch in first)]
    rounds: Iterator[tuple[list[Any], bool]] = (
        (held, len(held) < at_once) for held in iter(lambda: [*islice(batches, at_once)], [])
    )
    if plan.split and not plan.even:  # a rank without a part of the last one does not ask again
        rounds = with_last(held for held, _ in rounds)
    for held, is_last in rounds:
        if plan.drop_last and len(held) < at_once:
            return
        dealt = [*chain.from_iterable(zip(batch, batch.sizes, strict=True) for batch in held)]
        end += sum(size for _, size in dealt)
        items = [(size, size) for _, size in dealt]
        if plan.even and len(dealt) < plan.ranks:
            more = [*islice(cycle(padding), plan.ranks - len(dealt))]
            dealt, items = [*dealt, *more], [*items, *((size, 0) for _, size in more)]
        is_padded = any(size != real for size, real in items)
        yield Round([p for p, _ in dealt], items if is_padded else None, end, is_last)


def deal(begun: Begun, plan: ShardPlan) -> Iterator[Round]:
    """Yield batches of indices, one per rank, all of one size.

    They are of mixed sizes once one that is not the last has another size: then they keep them.
    """
    first, batches, end, known = begun
    ranks, at_once = plan.ranks, 1 if plan.split else plan.ranks
    even, mixed = plan.even and ranks > 1, known is None
    size = known or (_length(first[0]) if first else 1)
    ahead: list[Any] = []  # read to see whether there are more
    while held := [*ahead, *islice(batches, at_once - len(ahead))]:
        sizes = [_length(batch) for batch in held]
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
            parts = _share(held, -(-usual // ranks), more if even else [], ranks)
        elif len(held) == ranks and (mixed or last == size):
            parts = held
        elif plan.drop_last and len(held) < ranks:
            return
        elif not mixed:
            parts = _share(held, size, first if even else [], ranks)
        else:
            parts = [*held, *islice(cycle(first), (ranks - len(held)) * even)]
        yield Round(parts, _items(parts, count), end, is_last)


def _length(batch: Any) -> int:
    return len(batch) if _is_batch(batch) else 1


def _items(parts: list[Any], count: int) -> list[tuple[int, int]] | None:
    """Return the items of each part, and how many of them are among the first `count`."""
    sizes = [_length(part) for part in parts]
    ends = accumulate(sizes)
    items = [
        (size, min(max(count - (end - size), 0), size))
        for size, end in zip(sizes, ends, strict=True)
    ]
    return items if count < sum(sizes) else None


def _join(batches: Iterable[Any]) -> list[Any]:
    return [index for batch in batches for index in batch]


def _share(batches: list[Any], part: int, more: list[Any], ranks: int) -> list[Any]:
    """Return parts of `part` indices; those of `more` pad the last ones."""
    whole = _join(batches)
    missing = max(1, part) * ranks - len(whole)
    if more and whole and missing > 0:
        whole += islice(cycle(_join(more)), missing)
    return _cut(whole, part)


def _begin(batches: Iterator[Any], plan: ShardPlan, size: int | None, start: int) -> Begun:
    """Return the batches of indices after the first `start` of them, of the size that is asked."""
    first = [*islice(batches, 1 if plan.split else plan.ranks)]
    batches, end, known = chain(first, batches), 0, size
    size = size or (_length(first[0]) if first else 1)
    recut = plan.size is not None
    while end < start and (held := [*islice(batches, 1)]):
        length = _length(held[0])
        end += length
        if end > start:  # it was dealt in other sizes
            batches = chain([list(held[0][length - (end - start) :])], batches)
            end, recut = start, recut or known is not None
        elif length != size and not recut:
            known = None
    if recut:
        known = plan.size or size
        batches = _recut(batches, known, plan.drop_last)
    if not plan.dispatch:
        return Begun(first, batches, end, known)

    def whole(batch: Any) -> Collated:
        if not _is_batch(batch):
            return Collated([batch], [1])
        parts = _cut(batch, -(-len(batch) // plan.ranks)) if plan.split else [batch]
        return Collated(parts, map(len, parts))

    return Begun([*map(whole, first)], map(whole, batches), end, known)


def begin_stream(batches: Iterator[Collated], plan: ShardPlan, start: int) -> Begun:
    """Return the batches of a stream after the first `start` items, which are read again.

    :raises ValueError: if `start` is inside of a batch.
    """
    first, end = [*islice(batches, 1 if plan.split else plan.ranks)], 0
    batches = chain(first, batches)
    while end < start and (held := [*islice(batches, 1)]):
        end += sum(held[0].sizes)
    if end > start:
        what = f"a stream that several workers read cannot go on after {start} items"
        raise ValueError(f"{what}: a batch ends after {end}; keep its size, or use one worker")
    return Begun(first, batches, end, None)


def _recut(batches: Iterator[Any], size: int, drop_last: bool) -> Iterator[Any]:
    """Yield batches of `size` indices, and a smaller last one unless that is dropped."""
    indices = (index for batch in batches for index in batch)
    while batch := [*islice(indices, size)]:
        if len(batch) == size or not drop_last:
            yield batch
