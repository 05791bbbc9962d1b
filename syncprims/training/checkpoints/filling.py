"""Bring tensors of a checkpoint into a model's own memory, without another copy of them.

A parameter that lies in the CPU's memory just as the file has it is read into in place, by several
threads. Every other one is copied into, one after the other.
"""

# Torch is typed in part, and what comes out of JSON may be anything:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from .meter import metered
from .stored import HeldTensor, StoredTensor, TensorFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Stored: TypeAlias = StoredTensor | HeldTensor
_PLAIN = torch.Tensor, nn.Parameter  # not what is derived from them


def fill(
    model: nn.Module, state: Mapping[str, Stored], whole: Callable[[Stored, Any], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Bring a state into a model; return what ``load_state_dict`` is to be given then.

    For what is in its place that is the model's own tensor, which torch then leaves alone. The rest
    are tensors as `whole` makes them, for the model to take.

    :raises CheckpointError: if a file cannot be read.
    :raises RuntimeError: if the model cannot take a tensor.
    """
    places: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    places |= dict(model.named_buffers(remove_duplicate=False))
    targets = {name: places[name] for name in state if type(places.get(name)) in _PLAIN}
    result = {name: whole(state[name], places.get(name)) for name in state if name not in targets}
    apart = _are_apart(state, targets)
    straight = [name for name, t in targets.items() if apart and _is_alike(t, state[name])]
    with torch.no_grad(), metered("loading weights", _size(targets.values())) as meter:
        _read_into(straight, state, targets, meter)
        for name in targets.keys() - set(straight) if apart else targets:
            targets[name].copy_(state[name].tensor())
            meter(_size([targets[name]]))
    return {**result, **targets}


def _is_alike(target: torch.Tensor, stored: Stored) -> bool:
    """Tell whether a tensor lies in the CPU's memory just as it is in a file."""
    return (
        isinstance(stored, StoredTensor)
        and target.device.type == "cpu"
        and target.layout == torch.strided
        and target.dtype == stored.dtype
        and target.is_contiguous()
        and not (target.is_conj() or target.is_neg() or target.is_inference())
        and _has_memory(target)
    )


def _has_memory(tensor: torch.Tensor) -> bool:
    # Some wrappers take it away for a while.
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= end


def _are_apart(state: Mapping[str, Stored], targets: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether no two tensors share memory, but for tied ones that get the same.

    Of others the last one is what stays: these can only be loaded one after the other.
    """
    places: dict[tuple[str, int, int], Stored] = {}
    for name, target in targets.items():
        if target.numel() and target.layout == torch.strided:
            last = sum(
                (n - 1) * step for n, step in zip(target.shape, target.stride(), strict=True)
            )
            begin = target.data_ptr()
            place = str(target.device), begin, begin + (last + 1) * target.element_size()
            if places.setdefault(place, state[name]) is not state[name]:
                return False
    found = sorted(places)
    return all(one[0] != other[0] or one[2] <= other[1] for one, other in itertools.pairwise(found))


def _read_into(
    names: Sequence[str],
    state: Mapping[str, Stored],
    targets: Mapping[str, torch.Tensor],
    tell: Callable[[int], object],
) -> None:
    files: dict[TensorFile, list[tuple[str, torch.Tensor]]] = {}
    for name in names:
        stored = state[name]
        assert isinstance(stored, StoredTensor), "it is in a file"
        files.setdefault(stored.file, []).append((stored.name, targets[name]))
    # Torch does not see that these change, and a backward pass under way must.
    torch.autograd.graph.increment_version([targets[name] for name in names])
    for file, some in files.items():
        file.fill(some, tell)


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
