"""Collectives over nested tensors, and helpers for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import syncprims
from syncprims import RankMismatch as DistributedOperationException
from syncprims.training import gathering as _gathering
from syncprims.training import rank_device
from syncprims.training.gathering import CannotPadNestedTensorWarning
from syncprims.training.gathering import broadcast as broadcast
from syncprims.training.gathering import pad_across_processes as pad_across_processes
from syncprims.training.pytree import map_tensors, named_leaves
from syncprims.training.pytree import to_device as _to_device

__all__ = [
    "CannotPadNestedTensorWarning",
    "DistributedOperationException",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "gather",
    "gather_object",
    "honor_type",
    "is_namedtuple",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
]


def gather(tensor: Any) -> Any:
    """Return all ranks' tensors, concatenated. On one rank, `tensor` itself. Collective."""
    return tensor if syncprims.get_world_size() == 1 else _gathering.gather(tensor)


def gather_object(object: Any) -> Any:
    """Return the items of all ranks' lists in one list. On one rank, `object` itself. Collective.

    :raises TypeError: on all ranks, if a rank's object is not iterable.
    """
    if syncprims.get_world_size() == 1:
        return object
    return [item for part in syncprims.all_gather(object) for item in part]


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Fill the list with that of one rank, and return it. Collective."""
    if syncprims.get_world_size() > 1:
        object_list[:] = syncprims.broadcast(list(object_list), from_process)
    return object_list


def copy_tensor_to_devices(tensor: Any = None) -> Any:
    """Return rank 0's tensor on this rank's device. Collective."""
    return _to_device(syncprims.broadcast(tensor), rank_device())


def reduce(tensor: Any, reduction: _gathering.Reduction = "mean", scale: float = 1.0) -> Any:
    """Return the tensors' ``mean``, ``sum``, ``max`` or the like over all ranks. Collective."""
    return _gathering.reduce(tensor, reduction, scale)


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None
) -> Any:
    """Return `tensor` with its tensors on `device`, except under the keys in `skip_keys`."""
    skipped = [skip_keys] if isinstance(skip_keys, str) else skip_keys or []
    if isinstance(tensor, Mapping) and skipped:
        moved = {
            key: part if key in skipped else send_to_device(part, device, non_blocking, skipped)
            for key, part in tensor.items()
        }
        return type(tensor)(moved)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
    return _to_device(tensor, torch.device(device), non_blocking=non_blocking)


def is_torch_tensor(tensor: Any) -> bool:
    """Return whether it is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_namedtuple(data: Any) -> bool:
    """Return whether it is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Any) -> Any:
    """Return the items of `generator` in the type of `obj`."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def recursively_apply(
    func: Any, data: Any, *args: Any, test_type: Any = is_torch_tensor,
    error_on_other_type: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """Return `data` with ``func(leaf)`` in place of every leaf that passes `test_type`.

    :raises TypeError: for other leaves, with `error_on_other_type`.
    """
    if error_on_other_type:
        for path, leaf in named_leaves(data):
            if not test_type(leaf):
                raise TypeError(f"{path} is a {type(leaf).__name__}, which is not taken here")
    return map_tensors(lambda leaf: func(leaf, *args, **kwargs), data, test_type)


def find_batch_size(data: Any) -> int | None:
    """Return the first dimension of the first tensor.

    :raises TypeError: if there is no tensor with a dimension.
    """
    for _, leaf in named_leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return leaf.shape[0]
    raise TypeError("there is no tensor with a dimension in it")


def slice_tensors(
    data: Any, tensor_slice: Any, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return `data` with every tensor cut by `tensor_slice`."""
    del process_index, num_processes
    return map_tensors(lambda one: one[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Return one structure with the tensors of all, concatenated.

    :raises TypeError: if the leaves are no tensors.
    """
    first = data[0]
    if isinstance(first, Mapping):
        return type(first)({k: concatenate([d[k] for d in data], dim) for k in first})  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
    if isinstance(first, list | tuple):
        return honor_type(first, (concatenate(list(part), dim) for part in zip(*data, strict=True)))
    if not isinstance(first, torch.Tensor):
        raise TypeError(f"concatenate() takes tensors, and found a {type(first).__name__}")
    return torch.cat(data, dim=dim)


def convert_to_fp32(tensor: Any) -> Any:
    """Return `tensor` with half precision converted to float32."""
    halves = (torch.float16, torch.bfloat16)
    return map_tensors(lambda one: one.float() if one.dtype in halves else one, tensor)


def listify(data: Any) -> Any:
    """Return `data` with tensors as lists of numbers."""

    def listed(one: torch.Tensor) -> Any:
        one = one.detach().cpu()
        return (one.float() if one.dtype == torch.bfloat16 else one).tolist()

    return map_tensors(listed, data)
