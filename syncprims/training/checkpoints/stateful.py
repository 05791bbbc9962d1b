"""What can be saved by name: objects with a state."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from syncprims import CheckpointError
from syncprims._protocol.validation import require
from syncprims.training.preparation import unwrap_model

from .dtensor import is_dtensor
from .integrity import refusal
from .weights import portable_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_RESERVED_NAME = re.compile(r"rank-\d+")


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state that can be saved: model, optimizer, scheduler, your own."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state."""


def check_objects(objects: Mapping[str, object], own: Mapping[str, object]) -> None:
    """Raise unless the objects can be saved and loaded, under names that files can have.

    :raises TypeError: if something has no state, or a name is not a str.
    :raises ValueError: if a name cannot be a file's name, or is in both.
    """
    for name, thing in (*objects.items(), *own.items()):
        require(name, str, "objects are saved under names")
        if not isinstance(thing, Stateful):
            raise TypeError(
                f"{name!r} is a {type(thing).__name__}: it has no state_dict() and "
                f"load_state_dict(), which a checkpoint needs"
            )
        if not _NAME.fullmatch(name) or _RESERVED_NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is no name for an object: letters, digits, '_', '.' and '-', at most "
                f"100, and not 'rank-' with a number"
            )
    both = sorted(objects.keys() & own.keys())
    if both:
        raise ValueError(f"{both} are among the common objects and among the ranks' own")


def state_of(thing: Stateful) -> Any:
    """Return an object's state; of a wrapped model, that of the model inside."""
    if not isinstance(thing, nn.Module):
        return thing.state_dict()
    state: Any = unwrap_model(thing).state_dict()
    return _rename(state, portable_name)


def load_into(thing: Stateful, state: Any) -> None:
    """Load a state into an object; into a wrapped model, the model inside."""
    if isinstance(thing, nn.Module):
        inner = unwrap_model(thing)
        names = {portable_name(name): name for name in inner.state_dict()}
        inner.load_state_dict(_rename(state, lambda name: names.get(name, name)))
    else:
        thing.load_state_dict(state)


def _rename(state: Any, new_name: Callable[[str], str]) -> Any:
    renamed = type(state)((new_name(name), value) for name, value in state.items())
    if hasattr(state, "_metadata"):
        renamed._metadata = state._metadata
    return renamed


def check_fits(path: str, name: str, thing: Stateful, state: Any) -> None:
    """Raise if a state does not fit a model, before anything is loaded.

    :raises CheckpointError: if it has other tensors than the model, or of other shapes, or if the
        model has no memory for them.
    """
    if not isinstance(thing, nn.Module):
        return
    own: dict[str, Any] = state_of(thing)
    if not isinstance(state, dict):
        raise refusal(path, f"object {name!r}", "a model's state", type(state).__name__)
    if own.keys() != state.keys():
        lacking = sorted(own.keys() - state.keys())
        extra = sorted(state.keys() - own.keys(), key=repr)  # of another object, or made up
        raise CheckpointError(
            f"{path}: object {name!r} is of another model: expected {lacking[:5]}, which it lacks, "
            f"and found {extra[:5]}, which the model lacks. Load it into the model that was saved.",
            path=path,
        )
    for key, value in own.items():
        found = state[key]
        if not isinstance(value, torch.Tensor):
            continue
        if value.is_meta:
            raise CheckpointError(
                f"{path}: object {name!r}: the model's {key!r} is on the meta device: it has no "
                f"place for values. Call model.to_empty(device=...) first, or load the weights of "
                f"a saved model with load_checkpoint_in_model().",
                path=path,
            )
        if not isinstance(found, torch.Tensor) or found.shape != value.shape:
            what = f"object {name!r}: {key!r}"
            shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise refusal(path, what, f"the model's shape {tuple(value.shape)}", str(shape))


def dtensors_of(thing: Stateful) -> Mapping[str, Any]:
    """Return an object's DTensors by the names under which they are saved.

    Of an optimizer: its parameters, by prefixes of the names, since it may have no state yet.
    """
    if isinstance(thing, nn.Module):
        return {key: value for key, value in state_of(thing).items() if is_dtensor(value)}
    if isinstance(thing, torch.optim.Optimizer):
        params = [p for group in thing.param_groups for p in group["params"]]
        return {f"state.{number}.": p for number, p in enumerate(params) if is_dtensor(p)}
    return {}
