"""Nested structures: lists, tuples, mappings and dataclasses with tensors as their leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def is_tensor(tree: Any) -> bool:
    """Return whether `tree` is a single tensor."""
    return isinstance(tree, torch.Tensor)


def map_tensors(
    function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] = is_tensor
) -> Any:
    """Return `tree` with ``function(tensor)`` in place of every tensor; other leaves are kept.

    Lists, tuples, named tuples, mappings and dataclasses keep their types. `is_leaf` chooses other
    things to replace than tensors; the function does not descend into them.
    """
    if is_leaf(tree):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, part, is_leaf) for part in tree))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(function, part, is_leaf) for part in tree)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(function, part, is_leaf) for key, part in tree.items()}  # pyright: ignore[reportUnknownVariableType]
        return as_mapping_type(tree, mapped)  # pyright: ignore[reportUnknownArgumentType]
    if is_dataclass(tree) and not isinstance(tree, type):
        made = copy.copy(tree)
        for field in fields(tree):
            if hasattr(tree, field.name):
                part = map_tensors(function, getattr(tree, field.name), is_leaf)
                object.__setattr__(made, field.name, part)  # works for frozen dataclasses, too
        return made
    return tree


def named_leaves(tree: Any, name: str = "tensor") -> Iterator[tuple[str, Any]]:
    """Yield the leaves that :func:`map_tensors` sees, each with its path, as ``tensor['x'][0]``."""
    parts: list[tuple[str, Any]] = []
    if isinstance(tree, list | tuple):
        parts = [(f"{name}[{i}]", part) for i, part in enumerate(tree)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    elif isinstance(tree, Mapping):
        parts = [(f"{name}[{key!r}]", part) for key, part in tree.items()]  # pyright: ignore[reportUnknownVariableType]
    elif is_dataclass(tree) and not isinstance(tree, type):
        held = (field.name for field in fields(tree) if hasattr(tree, field.name))
        parts = [(f"{name}.{field}", getattr(tree, field)) for field in held]
    else:
        yield name, tree
    for path, part in parts:
        yield from named_leaves(part, path)


def has_only_tensors(tree: Any) -> bool:
    """Return whether every leaf of lists, tuples and mappings is a tensor."""
    if isinstance(tree, list | tuple):
        return all(map(has_only_tensors, tree))  # pyright: ignore[reportUnknownArgumentType]
    if is_tensor(tree) or not hasattr(tree, "values"):
        return is_tensor(tree)
    return all(map(has_only_tensors, tree.values()))


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
