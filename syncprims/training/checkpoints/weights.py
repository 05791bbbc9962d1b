"""A model's tensors under the names that other programs know: unwrapped, and ties found."""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from .tensorfile import META, check_storable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch import nn

_COMPILED = "_orig_mod."
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", re.IGNORECASE)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of data-parallel and compiling wrappers."""
    from torch import nn

    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(
            model, (nn.parallel.DistributedDataParallel, nn.DataParallel)
        ):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def portable(name: str) -> str:
    """Return a parameter's name as it is without compiled parts."""
    return name.replace(_COMPILED, "")


def tensors_of(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return a model's tensors by name, each once, and the other names of tied ones.

    :raises TypeError: if something in its state is no tensor that a file can hold.
    """
    import torch

    inner = unwrapped(model)
    declared = getattr(inner, "_tied_weights_keys", None) or ()
    kept: dict[str, torch.Tensor] = {}
    others: dict[str, str] = {}
    seen: dict[Any, str] = {}
    state: dict[str, Any] = inner.state_dict()
    # The names that a model calls the copies are named last, so that the other one is kept.
    for name in sorted(state, key=lambda name: _declared(name, declared)):
        tensor = state[name]
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{name!r} in the model's state is a {type(tensor).__name__}: a weights file "
                f"holds tensors only; save_state saves the rest, too"
            )
        key = portable(name)
        if key == META:
            raise TypeError(f"a tensor of the model is called {META!r}, as is a file's own part")
        same = identity(tensor)
        if same in seen:
            others[key] = seen[same]
            continue
        if same is not None:
            seen[same] = key
        check_storable(key, tensor)
        kept[key] = tensor
    order = [portable(name) for name in state]
    return {name: kept[name] for name in order if name in kept}, others


def _declared(name: str, patterns: Iterable[str]) -> bool:
    return any(name == pattern or re.search(pattern, name) for pattern in patterns)


def identity(tensor: torch.Tensor) -> Any:
    """Return what equals for two tensors that are one, and None where that cannot be."""
    if tensor.numel() == 0 or tensor.is_meta:
        return None
    local = getattr(tensor, "_local_tensor", tensor)
    place = local.data_ptr(), tuple(local.stride()), tuple(tensor.shape)
    return (
        (*place, tensor.dtype, tensor.device, local.is_conj(), local.is_neg())
        if local.numel()
        else None
    )


def shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Return the names in groups of at most `most` bytes, in order; a larger tensor is alone."""
    groups: list[list[str]] = [[]]
    room = most
    for name, size in sizes.items():
        if size > room and groups[-1]:
            groups.append([])
            room = most
        groups[-1].append(name)
        room -= size
    return groups


def parse_size(size: int | str) -> int:
    """Return a number of bytes, given as that or as ``"5GB"``, ``"500MB"``, ``"2GiB"``.

    :raises ValueError: if it is neither, or not positive.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        if match is not None:
            base = 1024 if match[3] else 1000
            size = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    if not isinstance(size, int) or size <= 0:
        raise ValueError(f"max_shard_size={size!r}: it takes a number of bytes, or as '5GB'")
    return size
