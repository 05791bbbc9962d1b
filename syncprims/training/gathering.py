"""Tensors and objects of all ranks: gathered, reduced, padded, without the padding of loaders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import syncprims

from .devices import leaves, map_tensors
from .likeness import check_alike, kind_of

if TYPE_CHECKING:
    from .tracking import OpenLoaders


def gather(tree: Any) -> Any:
    """Return all ranks' tensors, joined along the first dimension, in rank order, on every rank.

    `tree` is a tensor, or lists, tuples and mappings of them; one without dimensions counts as one
    item. Sizes may differ in the first dimension only. Collective.

    :raises TypeError: if a leaf is no tensor.
    :raises RankMismatch: on all ranks, if structures, dtypes or other dimensions differ.
    """
    mine = _leaves(tree)
    places = [place for place, _ in leaves(tree, "tensor")]
    kinds = [(p, str(t.dtype), list(t.shape[1:])) for p, t in zip(places, mine, strict=True)]
    rows = syncprims.all_gather((kinds, [leaf.cpu() for leaf in mine]))
    if any(kinds != rows[0][0] for kinds, _ in rows):
        lines = "\n".join(f"  rank {rank}: {kinds}" for rank, (kinds, _) in enumerate(rows))
        raise syncprims.RankMismatch(
            f"gather() of tensors that differ in place, dtype, or beyond the first dimension:\n"
            f"{lines}\n"
            f"Pad them with pad_across_processes(), or gather objects."
        )
    joined = iter([torch.cat([row[i] for _, row in rows]) for i in range(len(mine))])
    return map_tensors(lambda tensor: next(joined).to(tensor.device), tree)


def _leaves(tree: Any) -> list[torch.Tensor]:
    if not only_tensors(tree):
        raise TypeError("gather() takes tensors, and lists, tuples and mappings of them only")
    return [t.reshape(1) if t.ndim == 0 else t for t in _plain_leaves(tree)]


def only_tensors(tree: Any) -> bool:
    """Tell whether every leaf is a tensor."""
    if isinstance(tree, torch.Tensor):
        return True
    if isinstance(tree, list | tuple):
        return all(map(only_tensors, tree))  # pyright: ignore[reportUnknownArgumentType]
    return hasattr(tree, "values") and all(map(only_tensors, tree.values()))


def gather_for_metrics(tree: Any, loaders: OpenLoaders, *, use_gather_object: bool = False) -> Any:
    """Return what :func:`gather` does, less the items that only fill up the last batches.

    Of the loader that is being iterated. What is no tensor is gathered as a list of all ranks'
    objects, lists joined. Collective.
    """
    if use_gather_object or not only_tensors(tree):
        rows = syncprims.all_gather(tree)
        joined: Any = [item for row in rows for item in row] if isinstance(tree, list) else rows
    else:
        joined = gather(tree)
    cursor = loaders.innermost
    if cursor is None or cursor.real is None:
        return joined
    real = cursor.real
    if isinstance(joined, list) and not only_tensors(joined):
        return joined[:real]  # pyright: ignore[reportUnknownVariableType]
    return map_tensors(lambda tensor: tensor[:real], joined)


def reduce(tree: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
    """Return the tensors' ``sum``, ``mean``, ``min``, ``max`` or ``prod`` over all ranks, scaled.

    With ``none`` the tensors are returned as they are. Collective otherwise.

    :raises ValueError: if the reduction is none of these.
    """
    if reduction == "none":
        return tree
    reduced = syncprims.all_reduce(_plain(tree), reduction)
    return reduced if scale == 1.0 else map_tensors(lambda tensor: tensor * scale, reduced)


def _plain(tree: Any) -> Any:
    return map_tensors(lambda tensor: tensor.detach(), tree)


def broadcast(tree: Any, from_process: int = 0) -> Any:
    """Fill the tensors of `tree` with those of one rank, and return it. Collective.

    A None among them stays one. Entries of mappings go by their names, in any order.

    :raises RankMismatch: on all ranks, if structures, shapes or dtypes differ; nothing is filled.
    :raises TypeError: on all ranks, if a leaf is something else.
    """
    places = sorted(leaves(tree, "tensor"), key=lambda found: found[0])
    check_alike(
        "what broadcast() fills",
        [f"{place}: {_kind(leaf)}" for place, leaf in places],
        "Pass tensors of the same shapes and dtypes everywhere, or use syncprims.broadcast().",
    )
    for place, leaf in places:
        if leaf is not None and not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"broadcast() fills tensors in place, and {place} is of type "
                f"{type(leaf).__name__}; syncprims.broadcast() returns any object"
            )
    tensors = [leaf.detach() for _, leaf in places if leaf is not None]
    sends = syncprims.get_rank() == from_process
    sent = syncprims.broadcast([t.cpu() for t in tensors] if sends else [], from_process)
    with torch.no_grad():
        for mine, theirs in zip(tensors, sent, strict=True):
            mine.copy_(theirs)
    return tree


def _kind(leaf: Any) -> str:
    return kind_of(leaf) if isinstance(leaf, torch.Tensor) else type(leaf).__name__


def _plain_leaves(tree: Any) -> list[torch.Tensor]:
    found = (leaf for _, leaf in leaves(tree, ""))
    return [leaf.detach() for leaf in found if isinstance(leaf, torch.Tensor)]


def pad_across_processes(
    tree: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
) -> Any:
    """Return the tensors, filled up with `pad_index` in `dim` to the longest of all ranks.

    One without that dimension stays as it is. Collective.
    """
    mine = [t.shape[dim] for t in _plain_leaves(tree) if -t.ndim <= dim < t.ndim]
    longest = iter([max(sizes) for sizes in zip(*syncprims.all_gather(mine), strict=True)])

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        if not -tensor.ndim <= dim < tensor.ndim:
            return tensor
        missing = next(longest) - tensor.shape[dim]
        if not missing:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = missing
        more = tensor.new_full(shape, pad_index)
        return torch.cat([more, tensor] if pad_first else [tensor, more], dim=dim)

    return map_tensors(pad, tree)
