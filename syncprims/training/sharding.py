"""Which rank gets which batch: in turn; and what fills the last ones up.

In rounds of one batch per rank. With `even`, a last round that is not full goes on at the
beginning of the data, so that all ranks have as many batches, all of one size. Without, nothing is
repeated: ranks may have a batch more than others, and a smaller last one.
"""

from __future__ import annotations

from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import IterableDataset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


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
        self.real: int | None = None  #: items of the last round that are no padding, if it has any
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
        self.real = None
        return self._split() if self.plan.split else self._deal()

    def _deal(self) -> Iterator[Any]:
        rank, ranks, even, _ = self.plan
        first: list[Any] = []  # the first round: what a last one goes on with
        size = self.batch_size
        single = False
        current: list[Any] = []
        for batch in self.batches:
            single = not isinstance(batch, list | tuple)
            size = size or (1 if single else len(batch))
            if len(first) < ranks:
                first.append(batch)
            current.append(batch)
            if len(current) == ranks and (single or len(batch) == size or self.batch_size is None):
                yield current[rank]
                current = []
        if not current or self.drop_last:
            return
        if not even or ranks == 1:
            if rank < len(current):
                yield current[rank]
            return
        self.real = len(current) if single else sum(map(len, current))
        yield self._filled(current, first, single, size or 1)[rank]

    def _filled(self, current: list[Any], first: list[Any], single: bool, size: int) -> list[Any]:
        """Return a last round, gone on with from the beginning."""
        ranks = self.plan.ranks
        if single or self.batch_size is None:  # a batch of unknown size is repeated whole
            return [*current, *islice(cycle(first), ranks - len(current))]
        more = cycle([item for batch in first for item in batch])
        rounds = [list(batch) for batch in current]
        rounds += [[] for _ in range(ranks - len(current))]
        for batch in rounds:
            batch += islice(more, size - len(batch))
        return rounds

    def _split(self) -> Iterator[Any]:
        rank, ranks, even, _ = self.plan
        first: list[Any] | None = None
        for batch in self.batches:
            if not isinstance(batch, list | tuple):
                raise ValueError("split_batches cuts batches, and this loader has single items")
            items: list[Any] = list(batch)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            first = first or items
            size = self.batch_size or -(-len(items) // ranks) * ranks
            part = size // ranks
            if len(items) < size:
                if self.drop_last:
                    return
                if even and ranks > 1:
                    self.real = len(items)
                    items += islice(cycle(first), size - len(items))
            mine = items[rank * part : (rank + 1) * part]
            if mine:
                yield mine


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
