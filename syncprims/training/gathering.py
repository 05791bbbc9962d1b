"""Collectives over nested tensors: gather, reduce, broadcast and pad."""

from __future__ import annotations

from typing import Any, Literal

import torch

import syncprims

from .data.loader import Cursor
from .gradient_sync import broadcast_tensors, check_alike, describe
from .pytree import has_only_tensors, map_tensors, named_leaves, tensors_of

Reduction = Literal["sum", "mean", "min", "max", "prod", "none"]


def gather(tensor: object, *, name: str | None = None) -> Any:
    """Return all ranks' tensors, concatenated along the first dimension in rank order. Collective.

    `tensor` may also be lists, tuples and mappings of tensors; a tensor without dimensions counts
    as one item. Only the first dimension may differ between ranks. `name` is that of the call, and
    the same on all ranks; so it is in the functions below.

    :raises TypeError: if a leaf is not a tensor.
    :raises RankMismatch: on all ranks, if structures, dtypes or other dimensions differ.
    """
    if not has_only_tensors(tensor):
        raise TypeError("gather() takes tensors, and lists, tuples and mappings of them only")
    _refuse_nested(tensor)
    named = [(path, _as_items(leaf.detach())) for path, leaf in named_leaves(tensor)]
    kinds = [(path, str(leaf.dtype), list(leaf.shape[1:])) for path, leaf in named]
    rows = syncprims.all_gather((kinds, [leaf.cpu() for _, leaf in named]), name=name)
    filled = [row for row in rows if any(map(len, row[1]))] or rows  # an empty one adds nothing
    names = [[kind[:2] for kind in kinds] for kinds, _ in rows]
    if any(one != names[0] for one in names) or any(k != filled[0][0] for k, _ in filled):
        what = "gather() of tensors that differ in structure, dtype, or beyond the first dimension"
        advice = "Pad them with pad_across_processes(), or gather objects."
        raise _mismatch(what, [kinds for kinds, _ in rows], advice)
    joined = map(torch.cat, zip(*(leaves for _, leaves in filled), strict=True))
    return map_tensors(lambda leaf: next(joined).to(leaf.device), tensor)


def gather_for_metrics(
    tensor: Any, cursor: Cursor | None, as_objects: bool, *, name: str | None = None
) -> Any:
    """Return what :func:`gather` does, without items that only pad the last batches. Collective.

    `cursor` is the iteration of the loader whose items these are, if there is one. Objects other
    than tensors are gathered into a list of all ranks' objects; lists and tuples of them are
    concatenated. Tensors and lists have an entry for each item of the batch, or tensors have one
    number in all. Of a batch that only pads, nothing is returned.

    :raises TypeError: on several ranks, for a list or tuple of tensors and other objects: these are
        not the items.
    :raises ValueError: if a batch of the epoch is padding in part, and entries are not its items.
    """
    objects = as_objects or not has_only_tensors(tensor)
    listed = isinstance(tensor, list | tuple)
    mixed = objects and listed and not as_objects and any(map(torch.is_tensor, tensor))
    if mixed and syncprims.get_world_size() > 1:
        what = "gather_for_metrics() of a list with both tensors and other objects"
        raise TypeError(f"{what}; gather its parts one by one")
    if objects and not listed:
        tensor = [tensor]
    if cursor is not None and cursor.items is not None:
        size, real = cursor.items[syncprims.get_rank()]
        if real < size:
            tensor = _without_padding(tensor, size, real, objects=objects)
    elif cursor is not None and cursor.padded is not None:  # a later batch is padding in part
        _without_padding(tensor, cursor.padded, 1, objects=objects)
    if objects:
        return [item for row in syncprims.all_gather(tensor, name=name) for item in row]
    return gather(tensor, name=name)


def _as_items(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.ndim else tensor.reshape(1)


def _without_padding(tree: Any, size: int, real: int, *, objects: bool) -> Any:
    """Return the entries of the first `real` items of the `size` of a batch."""
    if real == 0:
        return [] if objects else map_tensors(lambda one: _as_items(one).narrow_copy(0, 0, 0), tree)

    def cut(entries: Any) -> Any:
        if torch.is_tensor(entries) and entries.numel() == 1:
            return entries
        if len(entries) != size:
            what = f"gather_for_metrics() of {len(entries)} entries, and the batch has {size} items"
            why = "a batch of this epoch is padding in part, which could not be removed"
            cure = "pass an entry for each item, or prepare with even_batches=False"
            raise ValueError(f"{what}: {why}; {cure}")
        return entries.narrow_copy(0, 0, real) if torch.is_tensor(entries) else entries[:real]

    return cut(tree) if objects else map_tensors(cut, tree)


def reduce(
    tensor: object, reduction: Reduction = "sum", scale: float = 1.0, *, name: str | None = None
) -> Any:
    """Return the tensors' ``sum``, ``mean``, ``min``, ``max`` or ``prod`` over all ranks, scaled.

    Collective, except with ``none``, which returns the tensors unchanged.

    :raises ValueError: if the reduction is none of these.
    """
    if reduction == "none":
        return tensor
    detached = map_tensors(lambda one: one.detach(), tensor)
    reduced = syncprims.all_reduce(detached, reduction, name=name)
    return reduced if scale == 1.0 else map_tensors(lambda one: one * scale, reduced)


def broadcast(tensor: object, from_process: int = 0, *, name: str | None = None) -> Any:
    """Fill the tensors of `tensor` with those of one rank, and return `tensor`. Collective.

    A leaf may also be None on all ranks. The order of a mapping's keys does not matter.

    :raises RankMismatch: on all ranks, if structures, shapes or dtypes differ; nothing is filled.
    :raises TypeError: on all ranks, if a leaf is something else.
    """
    leaves = sorted(named_leaves(tensor), key=lambda found: found[0])
    leaves = [(p, one.detach() if torch.is_tensor(one) else one) for p, one in leaves]
    parts = [
        f"{path}: {describe(leaf) if isinstance(leaf, torch.Tensor) else type(leaf).__name__}"
        for path, leaf in leaves
    ]
    advice = "Pass tensors of the same shapes and dtypes everywhere, or use syncprims.broadcast()."
    check_alike("what broadcast() fills", parts, advice)
    for path, leaf in leaves:
        if leaf is not None and not isinstance(leaf, torch.Tensor):
            what = f"broadcast() fills tensors, and {path} is of type {type(leaf).__name__}"
            raise TypeError(f"{what}; syncprims.broadcast() returns any object")
    tensors = [leaf for _, leaf in leaves if leaf is not None]
    broadcast_tensors(tensors, from_process, name)
    return tensor


def pad_across_processes(
    tensor: object,
    dim: int = 0,
    pad_index: float = 0,
    pad_first: bool = False,
    *,
    name: str | None = None,
) -> Any:
    """Return the tensors, padded with `pad_index` in `dim` to the longest of all ranks. Collective.

    A tensor without that dimension is returned unchanged.

    :raises RankMismatch: on all ranks, if they have tensors in other places, or of another number
        of dimensions.
    """
    _refuse_nested(tensor)
    named = [(path, leaf) for path, leaf in named_leaves(tensor) if isinstance(leaf, torch.Tensor)]
    mine = [
        (path, one.ndim, one.shape[dim] if -one.ndim <= dim < one.ndim else -1)
        for path, one in named
    ]
    rows = syncprims.all_gather(mine, name=name)
    kinds = [[(path, ndim) for path, ndim, _ in row] for row in rows]
    if any(one != kinds[0] for one in kinds):
        what = "pad_across_processes() of tensors in different places or of different dimensions"
        shown = [[f"{path} of {ndim} dimensions" for path, ndim in row] for row in kinds]
        raise _mismatch(what, shown, "Pass the same structure on every rank.")
    longest = iter(
        [max(lengths) for lengths in zip(*([n for *_, n in row] for row in rows), strict=True)]
    )

    def pad(one: torch.Tensor) -> torch.Tensor:
        wanted = next(longest)
        if wanted < 0:
            return one
        shape = list(one.shape)
        shape[dim] = wanted - one.shape[dim]
        if not shape[dim]:
            return one
        more = one.new_full(shape, pad_index)
        return torch.cat([more, one] if pad_first else [one, more], dim=dim)

    return map_tensors(pad, tensor)


def _mismatch(what: str, rows: list[Any], advice: str) -> syncprims.RankMismatch:
    lines = "\n".join(f"  rank {rank}: {row}" for rank, row in enumerate(rows))
    return syncprims.RankMismatch(f"{what}:\n{lines}\n{advice}")


def _refuse_nested(tree: object) -> None:
    if any(tensor.is_nested for tensor in tensors_of(tree)):
        raise TypeError("nested tensors cannot be joined; convert them by to_padded_tensor()")
