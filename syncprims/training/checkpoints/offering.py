"""Models and their weights, offered to the user's hooks before a state is saved or loaded.

As Accelerate's hooks have it: a hook takes out of a list what it saves, or loads, by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from .directory import Directory
from .objects import state_of
from .together import Team, check_alike, together

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Weights: TypeAlias = dict[str, Any]
SaveHook: TypeAlias = Callable[[list[nn.Module], list[Weights], str], object]
LoadHook: TypeAlias = Callable[[list[nn.Module], str], object]


class _AsLeft:
    """A model's weights as the hooks have left them."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def state_dict(self) -> Weights:
        """Return them."""
        return self._weights

    def load_state_dict(self, state_dict: Weights) -> None:
        """Raise: it is made to be saved."""
        raise NotImplementedError


def offer_weights(
    directory: str,
    hooks: Sequence[SaveHook],
    models: Mapping[str, nn.Module],
    objects: dict[str, Any],
) -> None:
    """Let `objects` hold of the models what the hooks leave to be saved.

    :raises CheckpointError: on all ranks, if a hook raises on one.
    """
    if not hooks:
        return
    where = Directory.of(directory)
    directory, doing = where.path, f"save_state to {where.path}"
    Team.met(doing, where)
    offered = [state_of(model) for model in models.values()]

    def offer() -> dict[int, Weights]:
        Path(directory).mkdir(parents=True, exist_ok=True)
        some, weights = list(models.values()), list(offered)
        for hook in list(hooks):
            hook(some, weights, directory)
        if len(weights) == len(offered):
            return dict(enumerate(weights))  # perhaps others in their places
        left = {i: one for i, one in enumerate(offered) if any(one is each for each in weights)}
        if len(left) < len(weights):
            raise ValueError("a hook that puts other weights into the list takes none out of it")
        return left

    told = together(doing, offer, list)
    own = told.own
    for number, name in enumerate(models):
        if number in told.by_rank[0]:
            objects[name] = _AsLeft(own[number] if number in own else offered[number])
        else:
            del objects[name]


def offer_models(
    directory: str,
    hooks: Sequence[LoadHook],
    models: Mapping[str, nn.Module],
    objects: dict[str, Any],
) -> None:
    """Let `objects` hold those of the models that the hooks leave to be loaded.

    :raises CheckpointError: on all ranks, if a hook raises on one, or they leave different ones.
    """
    if not hooks:
        return
    directory = Directory.of(directory).path
    doing = f"load_state from {directory}"

    def offer() -> list[str]:
        some = list(models.values())
        for hook in list(hooks):
            hook(some, directory)
        return [name for name, model in models.items() if any(model is each for each in some)]

    told = together(doing, offer, list)
    ranks = Team.met(doing).ranks
    check_alike(doing, ranks, "models that hooks left to be loaded", list(map(str, told.by_rank)))
    for name in models.keys() - set(told.own):
        del objects[name]
