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


def dispatch(begin: Callable[[], Iterator[Any]], plan: ShardPlan, done: int) -> Iterator[Any]:
    """Yield this rank's batches of those that `begin` yields on rank 0. Collective each time.

    The first `done` batches are left out. Rank 0 reads them all the same: they may pad the last.

    :raises PeerFailed: on the others, if reading fails on rank 0.
    """
    dealt = islice(_deal(begin, plan), done, None)

    @on_main(share=True)
    def read() -> _DealtBatches | None:
        return next(dealt, None)

    while (found := read()) is not None:
        if plan.rank < len(found.parts):
            yield Counted(found.parts[plan.rank], found.real)
        if found.is_last:
            return  # a rank that got no batch does not call again, so the others must not


def _deal(begin: Callable[[], Iterator[Any]], plan: ShardPlan) -> Iterator[_DealtBatches]:
    """Yield the batches that `begin` yields, one per rank.

    Batches of mixed sizes are dealt as by :class:`.batch_shards.BatchShard`.
    """
    batches = (batch.value if isinstance(batch, Counted) else batch for batch in begin())
    ranks, at_once = plan.ranks, 1 if plan.split else plan.ranks
    first: list[Any] = []  # the first batches, which pad the last ones
    ahead: list[Any] = []  # read to see whether there are more
    size = 0  # items of the first batch
    mixed = False  # a batch that is not the last has another size
    while held := [*ahead, *islice(batches, at_once - len(ahead))]:
        sizes = [_length(batch) for batch in held]
        if not first:
            first, size = held, sizes[0]
        *others, last = sizes
        is_odd = last != size or len(held) < at_once
        ahead = list(islice(batches, 1)) if is_odd else []  # otherwise do not wait for it
        is_last = is_odd and not ahead
        mixed |= any(other != size for other in others)
        mixed |= last > size or (last < size and not is_last)
        if plan.split:
            usual, more = (last, held[0]) if mixed else (size, first[0])
            yield _cut(held[0], last, -(-usual // ranks), more, plan, is_last)
        elif len(held) == ranks and (mixed or last == size):
            yield _DealtBatches(held, None, is_last)
        elif plan.drop_last and len(held) < ranks:
            return
        elif not mixed:
            yield _cut(_join(held), sum(sizes), size, _join(first), plan, is_last)
        elif not plan.even:
            yield _DealtBatches(held, None, is_last)
        else:
            padded = [*held, *islice(cycle(first), ranks - len(held))]
            yield _DealtBatches(padded, sum(sizes), is_last)


def _cut(
    whole: Any, count: int, part: int, more: Any, plan: ShardPlan, is_last: bool
) -> _DealtBatches:
    """Return parts of `part` items; `more` pads the last one if parts are to be even."""
    part = max(1, part)
    full, real = part * plan.ranks, None
    if 0 < count < full and plan.even:
        real = count
        while count < full:
            added = _slice(more, 0, full - count)
            count += _length(added)
            whole = _join([whole, added])
    parts = [_slice(whole, at, min(at + part, count)) for at in range(0, count, part)]
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
