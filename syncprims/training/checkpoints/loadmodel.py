"""Load a model's weights, ours or others': proved first, and only then brought in."""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import torch

from syncprims import CheckpointError

from .filling import fill
from .placing import place, without_values
from .readweights import open_weights
from .refusal import refusal
from .sharded import cut, is_sharded
from .together import log
from .weights import portable, unwrapped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from .readweights import Weights
    from .stored import HeldTensor, StoredTensor


def load_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | str | int | torch.device | None,
    dtype: torch.dtype | str | None,
    *,
    strict: bool,
    allow_links: bool,
) -> None:
    """Bring the weights of a checkpoint into the model. See ``load_checkpoint_in_model``."""
    path = os.fspath(cast("Any", checkpoint))
    if not isinstance(path, str):
        raise TypeError(f"checkpoint={checkpoint!r}: it takes a str or a path")
    with open_weights(path, follow=allow_links) as weights:
        _bring_in(unwrapped(model), weights, path, device_map, dtype, strict)
    empty = without_values(model)
    if empty:
        log().warning(
            "%s: %sthese are in no checkpoint, and still on the meta device: compute them anew",
            path, _listed("buffers without values", empty),
        )  # fmt: skip


def _bring_in(
    model: nn.Module,
    weights: Weights,
    path: str,
    device_map: Any,
    dtype: torch.dtype | str | None,
    strict: bool,
) -> None:
    own: dict[str, Any] = model.state_dict(keep_vars=True)
    state, missing, unexpected = _matched(own, weights)
    renames = _looks_itself(model)
    if (missing or unexpected) and strict and not renames:
        expected = f"the model's {len(own)} tensors"
        found = f"{_listed('missing', missing)}{_listed('not in the model', unexpected)}"
        raise refusal(path, "another model", expected, found.strip("; "))
    for name, stored in state.items():
        target = own.get(name)
        if isinstance(target, torch.Tensor) and target.shape != stored.shape:
            what = f"shape of {name!r}"
            raise refusal(path, what, f"{tuple(target.shape)}, the model's", str(stored.shape))
    if missing or unexpected:
        log().warning("%s: %s%s", path, _listed("missing", missing), _listed("unused", unexpected))
    place(model, state, device_map, dtype)
    try:
        if renames:
            own = model.state_dict(keep_vars=True)
            read = {name: _whole(stored, own.get(name)) for name, stored in state.items()}
        else:
            read = fill(model, {name: state[name] for name in own if name in state}, _whole)
        # What a part renames, or makes of what is there, only torch can tell from what is missing.
        model.load_state_dict(read, strict=strict)
    except (CheckpointError, RuntimeError) as error:
        said = str(error) if isinstance(error, CheckpointError) else f"{path}: {error}"
        number = error.errno if isinstance(error, CheckpointError) else None
        raise CheckpointError(
            f"{said} The model has been loaded in part: do not go on with it.",
            path=path, errno=number,
        ) from error  # fmt: skip


def _whole(stored: StoredTensor | HeldTensor, target: Any) -> torch.Tensor:
    """Return a tensor of a checkpoint in memory, spread over the ranks as its target is."""
    tensor = stored.tensor()
    return cut(tensor, target) if is_sharded(target) else tensor


def _matched(
    own: dict[str, Any], weights: Weights
) -> tuple[dict[str, StoredTensor | HeldTensor], list[str], list[str]]:
    """Return the weights under the model's names, the names that are missing, and those unused."""
    names = {portable(name): name for name in own}
    state = {names.get(name, name): tensor for name, tensor in weights.items()}
    unexpected = [name for name in state if name not in own]
    there = {id(own[name]): state[name] for name in state if name in own}
    missing: list[str] = []
    for name, tensor in own.items():
        if name in state or not isinstance(tensor, torch.Tensor):
            continue
        if id(tensor) in there:  # tied in the model to one that is there
            state[name] = there[id(tensor)]
        else:
            missing.append(name)
    return state, missing, unexpected


def _looks_itself(model: nn.Module) -> bool:
    """Tell whether a part of the model looks at names or values by itself when it is loaded."""
    return any(
        module._load_state_dict_pre_hooks  # pyright: ignore[reportPrivateUsage]
        or not _is_torchs(type(module)._load_from_state_dict)  # pyright: ignore[reportPrivateUsage]
        or not _is_torchs(type(module).load_state_dict)
        for module in model.modules()
    )


def _is_torchs(method: Any) -> bool:
    return str(getattr(method, "__module__", "")).startswith("torch.nn.")


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{what}: {', '.join(names[:5])}{more}; "
