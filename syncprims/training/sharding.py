"""Which rank gets which batch: in turn; and what fills the last ones up.

In rounds of one batch per rank. With `even`, a last round that is not full goes on at the
beginning of the data, so that all ranks have as many batches, all of one size. Without, nothing is
repeated: ranks may have a batch more than others, and a smaller last one.

A sampler may make batches of mixed sizes, as of length buckets. They stay as they are: what a last
round lacks is whole batches from the beginning, and one that is cut for all ranks repeats its own
items, if need be.
"""

from __future__ import annotations

from itertools import chain, cycle, islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import IterableDataset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


_END: Any = object()  # no batch is this one


class Plan(NamedTuple):
    """How batches are dealt out."""

    rank: int
    ranks: int
    even: bool = True
    split: bool = False  #: each batch is cut into one part per rank


class BatchShard:
    """This rank's batches of a batch sampler: lists of indices, or single ones.

    :raises ValueError: with `split`, if a batch cannot be cut into equal parts.
    """

    def __init__(self, batches: Iterable[Any], plan: Plan) -> None:
        self.batches = batches
        self.plan = plan
        self.batch_size: int | None = getattr(batches, "batch_size", None)
        self.drop_last = bool(getattr(batches, "drop_last", False))
        #: by the number of a batch of this rank, its round's items that are no padding, if some are
        self.real: dict[int, int] = {}
        if plan.split and self.batch_size is not None and self.batch_size % plan.ranks:
            raise ValueError(
                f"split_batches: a batch of {self.batch_size} cannot be cut into {plan.ranks} "
                f"equal parts, one per rank; make it a multiple"
            )

    def __len__(self) -> int:
        total = len(self.batches)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
        if self.plan.split:
            return self._split_length(total)
        full, rest = divmod(total, self.plan.ranks)
        if self.drop_last or not rest:
            return full
        return full + (1 if self.plan.even else self.plan.rank < rest)

    def _split_length(self, total: int) -> int:
        if self.plan.even or self.drop_last or not total:
            return total
        items = getattr(self.batches, "sampler", None)
        if items is None or self.batch_size is None:
            return total
        last = len(items) - (total - 1) * self.batch_size  # the items of the last batch
        return total if last > self.plan.rank * self.batch_size // self.plan.ranks else total - 1

    def __iter__(self) -> Iterator[Any]:
        self.real = {}
        return self._split(self.real) if self.plan.split else self._deal(self.real)

    def _deal(self, real: dict[int, int]) -> Iterator[Any]:
        rank, ranks, even, _ = self.plan
        first: list[Any] = []  # the first round: what a last one goes on with
        size = self.batch_size  # of all but the last; None where they differ, or nobody says
        rounds = 0
        current: list[Any] = []
        for batch, is_last in _told_apart(self.batches):
            if not is_last and _count(batch) != size:
                size = None
            if len(first) < ranks:
                first.append(batch)
            current.append(batch)
            if len(current) == ranks and not is_last:
                yield current[rank]
                current = []
                rounds += 1
        if self.drop_last and len(current) < ranks:
            return
        if current and even and ranks > 1:
            count = sum(map(_count, current))
            current = self._filled(current, first, size)
            if count < sum(map(_count, current)):
                real[rounds] = count
        if rank < len(current):
            yield current[rank]

    def _filled(self, current: list[Any], first: list[Any], size: int | None) -> list[Any]:
        """Return a last round, gone on with from the beginning: what is new comes last in it."""
        missing = self.plan.ranks - len(current)
        if size is None or not _is_batch(current[-1]):  # batches are repeated whole
            return [*current, *islice(cycle(first), missing)]
        more = cycle([item for batch in first for item in batch])
        *full, last = current
        return [
            *full,
            [*last, *islice(more, max(0, size - len(last)))],
            *(list(islice(more, size)) for _ in range(missing)),
        ]

    def _split(self, real: dict[int, int]) -> Iterator[Any]:
        rank, ranks, even, _ = self.plan
        first: list[Any] = []
        size = self.batch_size
        parts = 0
        for batch, is_last in _told_apart(self.batches):
            if not _is_batch(batch):
                raise ValueError("split_batches cuts batches, and this loader has single items")
            items = list(batch)
            first = first or items
            if not is_last and len(items) != size:
                size = None
            part = max(-(-len(items) // ranks), (size or 0) // ranks)
            missing = part * ranks - len(items)
            if even and ranks > 1 and missing:
                real[parts] = len(items)
                items += islice(cycle([*(first if size else items)]), missing)
            if mine := items[rank * part : (rank + 1) * part]:
                yield mine
                parts += 1


def _told_apart(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield each batch, and whether it is the last."""
    for batch, after in pairwise(chain(batches, [_END])):
        yield batch, after is _END


def _is_batch(batch: Any) -> bool:
    """Tell a batch of indices from a single one."""
    return isinstance(batch, list | tuple) or getattr(batch, "ndim", 0) > 0


def _count(batch: Any) -> int:
    return len(batch) if _is_batch(batch) else 1


class Marked(NamedTuple):
    """An item of a sharded stream."""

    item: Any
    real: int | None  #: items of its round that are no padding, if it has any


class Counted(NamedTuple):
    """A batch, made where the items are read, maybe in a worker process."""

    batch: Any
    real: int | None


class CountingCollate:
    """Collates the items of marked ones, and hands on what the marks say."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, marked: Any) -> Counted:
        """Return the items' batch."""
        if isinstance(marked, Marked):  # a loader without batches
            return Counted(self.collate(marked.item), marked.real)
        return Counted(self.collate([one.item for one in marked]), marked[-1].real)


class StreamShard(IterableDataset[Any]):
    """This rank's items of an iterable dataset, dealt out like batches of `size`.

    Every rank reads the whole stream. Workers each read what the dataset gives to a worker, so that
    a stream that is read by several has to share itself among them, as anywhere with torch.
    """

    def __init__(self, dataset: Iterable[Any], plan: Plan, size: int, drop_last: bool) -> None:
        self.dataset = dataset
        self.plan = plan
        self.size = size  #: of this rank's batches
        self.drop_last = drop_last

    def __len__(self) -> int:
        """Return how many items this rank gets, where the dataset knows how many there are."""
        rank, ranks, even, _ = self.plan
        rounds, rest = divmod(len(self.dataset), self.size * ranks)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
        if self.drop_last or not rest:
            more = 0
        elif even and ranks > 1:
            more = self.size
        else:
            more = min(self.size, max(0, rest - rank * self.size))
        return rounds * self.size + more

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset, if it asks for it."""
        tell = getattr(self.dataset, "set_epoch", None)
        if callable(tell):
            tell(epoch)

    def __iter__(self) -> Iterator[Marked]:
        size, ranks = self.size, self.plan.ranks
        mine = slice(self.plan.rank * size, (self.plan.rank + 1) * size)
        first: list[Any] = []
        stream = iter(self.dataset)
        while round_ := list(islice(stream, size * ranks)):
            first = first or round_
            real = None
            if len(round_) < size * ranks:
                if self.drop_last:
                    return
                if self.plan.even and ranks > 1:
                    real = len(round_)
                    round_ += islice(cycle(list(first)), size * ranks - len(round_))
            for item in round_[mine]:
                yield Marked(item, real)


class StatefulStreamShard(StreamShard):
    """A shard of a dataset that can tell and take up its place, at the end of a batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's state."""
        state: dict[str, Any] = self.dataset.state_dict()  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
        return state  # pyright: ignore[reportUnknownVariableType]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the dataset go on at a place."""
        self.dataset.load_state_dict(state)  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
