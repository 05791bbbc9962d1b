"""Accelerate's hooks around a save or load of a state.

A hook gets a list of models or weights, and removes from it what it saves or loads itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from .coordination import Directory, Team, check_equal, coordinate
from .stateful import state_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Weights: TypeAlias = dict[str, Any]
SaveHook: TypeAlias = Callable[[list[nn.Module], list[Weights], str], object]
LoadHook: TypeAlias = Callable[[list[nn.Module], str], object]


class Registered:
    """A hook that is called until it is removed."""

    def __init__(self, hooks: list[Any], hook: Callable[..., object]) -> None:
        self._hooks = hooks
        self._hook = hook
        hooks.append(hook)

    def remove(self) -> None:
        """Stop calling the hook. A second call does nothing."""
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


class _SavedWeights:
    """A model's weights, as the hooks leave them."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def state_dict(self) -> Weights:
        """Return them."""
        return self._weights

    def load_state_dict(self, state_dict: Weights) -> None:
        """Raise: this object is only saved."""
        raise NotImplementedError


def offer_weights(
    directory: str,
    hooks: Sequence[SaveHook],
    models: Mapping[str, nn.Module],
    objects: dict[str, Any],
) -> None:
    """Replace the models in `objects` by the weights that the hooks leave to be saved.

    :raises CheckpointError: on all ranks, if a hook raises on one.
    """
    if not hooks:
        return
    where = Directory.of(directory)
    directory, doing = where.path, f"save_state to {where.path}"
    Team.meet(doing, where)
    originals = [state_of(model) for model in models.values()]

    def call_hooks() -> dict[int, Weights]:
        Path(directory).mkdir(parents=True, exist_ok=True)
        some, weights = list(models.values()), list(originals)
        for hook in list(hooks):
            hook(some, weights, directory)
        if len(weights) == len(originals):
            return dict(enumerate(weights))  # possibly replaced by other weights
        kept = {i: one for i, one in enumerate(originals) if any(one is each for each in weights)}
        if len(kept) < len(weights):
            raise ValueError("a hook that puts other weights into the list takes none out of it")
        return kept

    own, kept = coordinate(doing, call_hooks, list)
    for number, name in enumerate(models):
        if number in kept[0]:
            objects[name] = _SavedWeights(own[number] if number in own else originals[number])
        else:
            del objects[name]


def offer_models(
    directory: str,
    hooks: Sequence[LoadHook],
    models: Mapping[str, nn.Module],
    objects: dict[str, Any],
) -> None:
    """Remove from `objects` the models that the hooks load themselves.

    :raises CheckpointError: on all ranks, if a hook raises on one, or they leave different ones.
    """
    if not hooks:
        return
    directory = Directory.of(directory).path
    doing = f"load_state from {directory}"

    def call_hooks() -> list[str]:
        some = list(models.values())
        for hook in list(hooks):
            hook(some, directory)
        return [name for name, model in models.items() if any(model is each for each in some)]

    result = coordinate(doing, call_hooks, list)
    left = [str(names) for names in result.by_rank]
    what = "have different models that hooks left to be loaded"
    check_equal(doing, Team.meet(doing).ranks, left, what)
    for name in models.keys() - set(result.own):
        del objects[name]
