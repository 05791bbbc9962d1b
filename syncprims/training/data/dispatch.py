"""Dispatch: rank 0 reads batches and sends the others theirs.

For streams that yield different items each time they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch

from syncprims import on_main
from syncprims.training.pytree import as_mapping_type, is_tensor, map_tensors, named_leaves

from .batch_shards import Counted, ShardPlan


class _DealtBatches(NamedTuple):
    """One batch per rank."""

    parts: list[Any]  #: by rank; there may be fewer than ranks
    real: int | None  #: items that are not padding, if there is any padding
    is_last: bool = False  #: it is known that no other follows


def dispatch(
    begin: Callable[[], Iterator[Any]], plan: ShardPlan, *, drop_last: bool, done: int
) -> Iterator[Any]:
    """Yield this rank's batches of those that `begin` yields on rank 0. Collective each time.

    The first `done` batches are left out. Rank 0 reads them all the same: they may pad the last.

    :raises PeerFailed: on the others, if reading fails on rank 0.
    """
    reader = _Reader(plan, drop_last)

    @on_main(share=True)
    def read() -> _DealtBatches | None:
        if reader.batches is None:
            reader.batches = begin()
            for _ in range(done):
                reader.next()
        return reader.next()

    while (found := read()) is not None:
        if plan.rank < len(found.parts):
            yield Counted(found.parts[plan.rank], found.real)
        if found.is_last:
            return  # a rank that got no batch does not call again, so the others must not


class _Reader:
    """Deals the batches that rank 0 reads."""

    def __init__(self, plan: ShardPlan, drop_last: bool) -> None:
        self.batches: Iterator[Any] | None = None
        self._plan = plan
        self._drop_last = drop_last
        self._ahead: list[Any] = []  # read to see whether there are more
        self._first: list[Any] = []  # the first batches, which pad the last ones
        self._size = 0  # items of the first batch
        self._mixed = False  # a batch that is not the last has another size

    def next(self) -> _DealtBatches | None:
        """Return the next batches, one per rank; None after the last ones.

        Batches of mixed sizes are dealt as by :class:`.batch_shards.BatchShard`.
        """
        ranks, split = self._plan.ranks, self._plan.split
        held = self._take(1 if split else ranks)
        if not held:
            return None
        sizes = [_length(batch) for batch in held]
        if not self._first:
            self._first, self._size = held, sizes[0]
        *others, last = sizes
        is_odd = last != self._size or (not split and len(held) < ranks)
        is_last = is_odd and self._is_over()  # otherwise do not wait for the batch after
        self._mixed |= any(size != self._size for size in others)
        self._mixed |= last > self._size or (last < self._size and not is_last)
        if split:
            return self._split(held[0], last, is_last)
        if len(held) == ranks and (self._mixed or last == self._size):
            return _DealtBatches(held, None, is_last)
        if self._drop_last and len(held) < ranks:
            return None
        if not self._mixed:
            whole, count = _join(held), sum(sizes)
            return self._cut(whole, count, self._size, _join(self._first), is_last)
        if not self._plan.even:
            return _DealtBatches(held, None, is_last)
        more = islice(cycle(self._first), ranks - len(held))
        return _DealtBatches([*held, *more], sum(sizes), is_last)

    def _take(self, number: int) -> list[Any]:
        assert self.batches is not None
        taken = [*self._ahead, *islice(self.batches, number - len(self._ahead))]
        self._ahead = []
        return [batch.value if isinstance(batch, Counted) else batch for batch in taken]

    def _is_over(self) -> bool:
        self._ahead = self._take(1)
        return not self._ahead

    def _split(self, batch: Any, count: int, is_last: bool) -> _DealtBatches:
        size, more = (count, batch) if self._mixed else (self._size, self._first[0])
        return self._cut(batch, count, -(-size // self._plan.ranks), more, is_last)

    def _cut(self, whole: Any, count: int, part: int, more: Any, is_last: bool) -> _DealtBatches:
        """Return parts of `part` items; `more` pads the last one if parts are to be even."""
        part = max(1, part)
        full, real = part * self._plan.ranks, None
        if 0 < count < full and self._plan.even:
            real = count
            while count < full:
                added = _slice(more, 0, full - count)
                count += _length(added)
                whole = _join([whole, added])
        starts = range(0, count, part)
        parts = [_slice(whole, at, min(at + part, count)) for at in starts]
        return _DealtBatches(parts, real, is_last)


def _length(batch: Any) -> int:
    """Return the number of items in a batch: the first dimension of its first tensor.

    :raises TypeError: if it has no tensor with a dimension.
    """
    for _, leaf in named_leaves(batch):
        if is_tensor(leaf) and leaf.ndim:
            return len(leaf)
    raise TypeError("dispatch_batches cuts batches of tensors, and this one holds none")


def _slice(batch: Any, start: int, stop: int) -> Any:
    """Return some items of a batch: rows of its tensors, and of plain lists as long as those."""
    count = _length(batch)

    def cut(part: Any) -> Any:
        if is_tensor(part):
            return part[start:stop].clone() if part.ndim else part
        return part[start:stop] if len(part) == count else part

    return map_tensors(cut, batch, lambda part: is_tensor(part) or _is_plain_list(part))


def _join(batches: list[Any]) -> Any:
    """Return one batch with the items of all.

    :raises TypeError: if the batches differ in structure.
    """
    first = batches[0]
    if is_tensor(first):
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
    if not isinstance(part, list | tuple) or hasattr(part, "_fields"):  # pyright: ignore[reportUnknownArgumentType]
        return False
    return not any(isinstance(item, torch.Tensor | Mapping | list | tuple) for item in part)  # pyright: ignore[reportUnknownVariableType]
