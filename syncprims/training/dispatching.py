"""Batches that rank 0 reads for all: for streams that cannot be read twice alike."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from syncprims import on_main

from .devices import like, map_tensors
from .sharding import Counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .sharding import Plan


class Round(NamedTuple):
    """What all ranks get at once."""

    parts: list[Any]  #: by rank; perhaps fewer than ranks
    real: int | None  #: items of the round that are no padding, if it has any
    is_last: bool = False  #: it is known that no other comes


def dispatched(
    begin: Callable[[], Iterator[Any]], plan: Plan, *, drop_last: bool, done: int
) -> Iterator[Any]:
    """Yield this rank's batches of those that `begin` yields on rank 0. Collective each time.

    Rank 0 reads the first `done` rounds, too, and keeps them: the last one may need the beginning.
    If reading fails, it fails on all ranks alike: the others get a ``PeerFailed``.
    """
    reader = _Reader(plan, drop_last)

    @on_main(share=True)
    def read() -> Round | None:
        if reader.batches is None:
            reader.batches = begin()
            for _ in range(done):
                reader.round()
        return reader.round()

    while (found := read()) is not None:
        if plan.rank < len(found.parts):
            yield Counted(found.parts[plan.rank], found.real)
        if found.is_last:
            return  # who got nothing must not ask alone


class _Reader:
    """Rank 0's rounds of batches."""

    def __init__(self, plan: Plan, drop_last: bool) -> None:
        self.batches: Iterator[Any] | None = None
        self._plan = plan
        self._drop_last = drop_last
        self._ahead: list[Any] = []  # read to see whether there is more
        self._first: list[Any] = []  # the first round: what an even last one goes on with
        self._size = 0  # items of the first batch
        self._mixed = False  # others that are not the last have other sizes

    def round(self) -> Round | None:
        """Return the next round; None after the last one.

        Of batches of mixed sizes it holds what :mod:`.sharding` would give the ranks.
        """
        ranks, split = self._plan.ranks, self._plan.split
        held = self._take(1 if split else ranks)
        if not held:
            return None
        sizes = [length(batch) for batch in held]
        if not self._first:
            self._first, self._size = held, sizes[0]
        *others, last = sizes
        is_odd = last != self._size or (not split and len(held) < ranks)
        is_last = is_odd and self._is_over()  # else nothing is read that may be long in coming
        self._mixed |= any(size != self._size for size in others)
        self._mixed |= last > self._size or (last < self._size and not is_last)
        if split:
            return self._split(held[0], last, is_last)
        if len(held) == ranks and (self._mixed or last == self._size):
            return Round(held, None, is_last)
        if self._drop_last and len(held) < ranks:
            return None
        if not self._mixed:
            whole, count = joined(held), sum(sizes)
            return self._cut(whole, count, self._size, joined(self._first), is_last)
        if not self._plan.even:
            return Round(held, None, is_last)
        more = islice(cycle(self._first), ranks - len(held))
        return Round([*held, *more], sum(sizes), is_last)

    def _take(self, number: int) -> list[Any]:
        assert self.batches is not None
        taken = [*self._ahead, *islice(self.batches, number - len(self._ahead))]
        self._ahead = []
        return [batch.batch if isinstance(batch, Counted) else batch for batch in taken]

    def _is_over(self) -> bool:
        self._ahead = self._take(1)
        return not self._ahead

    def _split(self, batch: Any, count: int, is_last: bool) -> Round:
        size, more = (count, batch) if self._mixed else (self._size, self._first[0])
        return self._cut(batch, count, -(-size // self._plan.ranks), more, is_last)

    def _cut(self, whole: Any, count: int, part: int, more: Any, is_last: bool) -> Round:
        """Return parts of one size; `more` is what an even round goes on with."""
        part = max(1, part)
        full, real = part * self._plan.ranks, None
        if 0 < count < full and self._plan.even:
            real = count
            while count < full:
                added = piece(more, 0, full - count)
                count += length(added)
                whole = joined([whole, added])
        starts = range(0, count, part)
        return Round([piece(whole, at, min(at + part, count)) for at in starts], real, is_last)


def length(batch: Any) -> int:
    """Return how many items a batch holds: the first dimension of its first tensor.

    :raises TypeError: if it holds no tensor with one.
    """
    found: list[int] = []
    map_tensors(lambda tensor: found.append(len(tensor)) if tensor.ndim else None, batch)
    if not found:
        raise TypeError("dispatch_batches cuts batches of tensors, and this one holds none")
    return found[0]


def piece(batch: Any, start: int, stop: int) -> Any:
    """Return some items of a batch: rows of its tensors, and of lists that are as long."""
    count = length(batch)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[start:stop].clone() if tensor.ndim else tensor

    return _with_lists(map_tensors(cut, batch), lambda part: part[start:stop], count)


def joined(batches: list[Any]) -> Any:
    """Return one batch with the items of all.

    :raises TypeError: if the batches are not alike.
    """
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(batches) if first.ndim else first
    if isinstance(first, Mapping):
        return like(first, {key: joined([batch[key] for batch in batches]) for key in first})
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(joined, map(list, zip(*batches, strict=True))))
    if isinstance(first, list | tuple):
        if not any(isinstance(part, torch.Tensor | Mapping | list | tuple) for part in first):
            return type(first)(item for batch in batches for item in batch)
        return type(first)(map(joined, map(list, zip(*batches, strict=True))))
    return first


def _with_lists(tree: Any, cut: Callable[[Any], Any], count: int) -> Any:
    """Cut the lists of plain objects in a tree that are as long as its tensors were."""
    if isinstance(tree, Mapping):
        return like(tree, {key: _with_lists(part, cut, count) for key, part in tree.items()})
    if not isinstance(tree, list | tuple) or hasattr(tree, "_fields"):
        return tree
    plain = not any(isinstance(part, torch.Tensor | Mapping | list | tuple) for part in tree)
    if plain:
        return cut(tree) if len(tree) == count else tree
    return type(tree)(_with_lists(part, cut, count) for part in tree)
