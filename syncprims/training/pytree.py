"""Nested structures: lists, tuples, mappings and dataclasses with tensors as their leaves."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:  # slow to import
    from torch.distributed.tensor import DTensor


def map_tensors(
    function: Callable[[Any], Any], tree: object, is_leaf: Callable[[Any], bool] = torch.is_tensor
) -> Any:
    """Return `tree` with ``function(tensor)`` in place of every tensor; other leaves are kept.

    Lists, tuples, named tuples, mappings and dataclasses keep their types. `is_leaf` chooses other
    things to replace than tensors; the function does not descend into them.
    """
    if is_leaf(tree):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, part, is_leaf) for part in tree))
    if isinstance(tree, (list, tuple)):  # the compiler of torch 2.6 knows no `|` of types
        return type(tree)(map_tensors(function, part, is_leaf) for part in tree)
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(function, part, is_leaf) for key, part in tree.items()}
        return as_mapping_type(tree, mapped)
    if is_dataclass(tree) and not isinstance(tree, type):
        made = copy.copy(tree)
        for field in fields(tree):
            if hasattr(tree, field.name):
                part = map_tensors(function, getattr(tree, field.name), is_leaf)
                object.__setattr__(made, field.name, part)  # works for frozen dataclasses, too
        return made
    return tree


def named_leaves(tree: object, name: str = "tensor") -> Iterator[tuple[str, Any]]:
    """Yield the leaves that :func:`map_tensors` sees, each with its path, as ``tensor['x'][0]``."""
    parts: list[tuple[str, Any]] = []
    if isinstance(tree, (list, tuple, Mapping)):
        items: Any = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        parts = [(f"{name}[{key!r}]", part) for key, part in items]
    elif is_dataclass(tree) and not isinstance(tree, type):
        held = (field.name for field in fields(tree) if hasattr(tree, field.name))
        parts = [(f"{name}.{field}", getattr(tree, field)) for field in held]
    else:
        yield name, tree
    for path, part in parts:
        yield from named_leaves(part, path)


def tensors_of(tree: object) -> list[torch.Tensor]:
    """Return the tensors that :func:`map_tensors` sees, in its order."""
    return [leaf for _, leaf in named_leaves(tree) if isinstance(leaf, torch.Tensor)]


def batch_length(tree: object) -> int:
    """Return the number of items in a batch: the first dimension of its first tensor.

    :raises TypeError: if it has no tensor with a dimension.
    """
    for tensor in tensors_of(tree):
        if tensor.ndim:
            return len(tensor)
    raise TypeError("expected a batch of tensors, and found no tensor with a dimension in it")


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # not imported: there are none
    return module is not None and isinstance(value, module.DTensor)


def has_only_tensors(tree: object) -> bool:
    """Return whether every leaf that :func:`map_tensors` sees is a tensor."""
    return all(isinstance(leaf, torch.Tensor) for _, leaf in named_leaves(tree))


def as_mapping_type(tree: Any, mapped: dict[Any, Any]) -> Any:
    """Return `mapped` in the mapping type of `tree`, such as an output class of transformers.

    If the type cannot be made from a dict, the dict is returned.
    """
    if type(tree) is dict:
        return mapped
    try:
        return type(tree)(mapped)
    except TypeError:
        return mapped


def to_device(batch: object, device: torch.device, *, non_blocking: bool = False) -> Any:
    """Return `batch` with its tensors on `device`, in lists, tuples, mappings and dataclasses.

    Any other object in it that has ``.to(device)`` is moved by that method.
    """

    def move(part: Any) -> Any:
        options: Any = {"non_blocking": non_blocking} if torch.is_tensor(part) else {}
        return part.to(device, **options)

    return map_tensors(move, batch, _can_move)


def _can_move(part: Any) -> bool:
    # The order is for torch.compile(), which cannot trace callable().
    if torch.is_tensor(part) or not hasattr(part, "to"):
        return torch.is_tensor(part)
    return callable(part.to) and not isinstance(part, type)
