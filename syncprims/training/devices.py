"""Where a rank computes, and how batches get there."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from syncprims import get_local_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def rank_device(*, cpu: bool = False) -> torch.device:
    """Return this rank's device: one accelerator per local rank where there are any, else the CPU.

    With fewer accelerators than ranks on the node, ranks share them in turn.
    """
    if cpu or not torch.accelerator.is_available():
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    if found is None:
        return torch.device("cpu")
    return torch.device(found.type, get_local_rank() % max(1, torch.accelerator.device_count()))


def _is_tensor(tree: Any) -> bool:
    return isinstance(tree, torch.Tensor)


def map_tensors(
    function: Callable[[Any], Any], tree: Any, is_one: Callable[[Any], bool] = _is_tensor
) -> Any:
    """Return `tree` with every tensor replaced by ``function(tensor)``; other leaves stay.

    Lists, tuples, named tuples, mappings and dataclasses keep their types. Where `is_one` says that
    something is to be replaced, it is not looked into.
    """
    if is_one(tree):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, part, is_one) for part in tree))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(function, part, is_one) for part in tree)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(function, part, is_one) for key, part in tree.items()}  # pyright: ignore[reportUnknownVariableType]
        return like(tree, mapped)  # pyright: ignore[reportUnknownArgumentType]
    if is_dataclass(tree) and not isinstance(tree, type):
        made = copy.copy(tree)
        for field in fields(tree):
            if hasattr(tree, field.name):
                part = map_tensors(function, getattr(tree, field.name), is_one)
                object.__setattr__(made, field.name, part)  # frozen ones, too
        return made
    return tree


def leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what :func:`map_tensors` sees as leaves of `tree`, each with its place in ``name``."""
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
    for place, part in parts:
        yield from leaves(part, place)


def like(tree: Any, mapped: dict[Any, Any]) -> Any:
    """Return `mapped` as the mapping type of `tree`: transformers' outputs and batches are such."""
    if type(tree) is dict:
        return mapped
    try:
        return type(tree)(mapped)
    except TypeError:
        return mapped


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """Return `batch` with its tensors on `device`, in lists, tuples, mappings and dataclasses.

    Anything else in it that has ``.to(device)`` is asked to move itself.
    """

    def move(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            return one.to(device, non_blocking=non_blocking)
        return one.to(device)

    return map_tensors(move, batch, _moves)


def _moves(tree: Any) -> bool:
    return callable(getattr(tree, "to", None)) and not isinstance(tree, type)
