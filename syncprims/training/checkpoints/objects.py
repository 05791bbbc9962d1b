"""What can be saved and loaded by name: anything that gives its state and takes it back."""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from syncprims import CheckpointError
from syncprims._protocol.validation import require

from .refusal import refusal
from .sharded import is_sharded
from .weights import portable, unwrapped

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_OURS = re.compile(r"rank-\d+")


@runtime_checkable
class Stateful(Protocol):
    """Anything that gives its state and takes it back: model, optimizer, scheduler, your own."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take it back."""


def check_objects(objects: Mapping[str, object], own: Mapping[str, object]) -> None:
    """Accept objects that can be saved and loaded, under names that files can have.

    :raises TypeError: if something has no state, or a name is no str.
    :raises ValueError: if a name is none for a file, or stands in both.
    """
    for name, thing in (*objects.items(), *own.items()):
        require(name, str, "objects are saved under names")
        if not isinstance(thing, Stateful):
            raise TypeError(
                f"{name!r} is a {type(thing).__name__}: it has no state_dict() and "
                f"load_state_dict(), which a checkpoint needs"
            )
        if not _NAME.fullmatch(name) or _OURS.fullmatch(name):
            raise ValueError(
                f"{name!r} is no name for an object: letters, digits, '_', '.' and '-', at most "
                f"100, and not 'rank-' with a number"
            )
    both = sorted(objects.keys() & own.keys())
    if both:
        raise ValueError(f"{both} are among the common objects and among the ranks' own")


def state_of(thing: Stateful) -> Any:
    """Return an object's state; of a model, that inside of its wrappers."""
    if not isinstance(thing, nn.Module):
        return thing.state_dict()
    state: Any = unwrapped(thing).state_dict()
    renamed = type(state)((portable(name), value) for name, value in state.items())
    if hasattr(state, "_metadata"):
        renamed._metadata = state._metadata
    return renamed


def give_back(thing: Stateful, state: Any) -> None:
    """Let an object take its state back."""
    if isinstance(thing, nn.Module):
        inner = unwrapped(thing)
        own: dict[str, Any] = inner.state_dict()
        names = {portable(name): name for name in own}
        renamed = type(state)((names.get(name, name), value) for name, value in state.items())
        if hasattr(state, "_metadata"):
            renamed._metadata = state._metadata
        inner.load_state_dict(renamed)
    else:
        thing.load_state_dict(state)


def check_fits(path: str, name: str, thing: Stateful, state: Any) -> None:
    """Accept a state that fits a model, so that nothing is loaded if something does not fit.

    :raises CheckpointError: if it has other tensors than the model, or of other shapes.
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
        if not isinstance(found, torch.Tensor) or found.shape != value.shape:
            what = f"object {name!r}: {key!r}"
            shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise refusal(path, what, f"the model's shape {tuple(value.shape)}", str(shape))


def targets(thing: Stateful) -> Mapping[str, Any]:
    """Return the tensors that are spread over ranks, by the names under which they are saved.

    For an optimizer: by the beginning of the names, since its own state may not be there yet.
    """
    if isinstance(thing, nn.Module):
        return {key: value for key, value in state_of(thing).items() if is_sharded(value)}
    if isinstance(thing, torch.optim.Optimizer):
        params = [p for group in thing.param_groups for p in group["params"]]
        return {f"state.{number}.": p for number, p in enumerate(params) if is_sharded(p)}
    return {}
