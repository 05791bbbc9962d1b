"""Gradients and buffers, the same on all ranks: in flat buckets, through the public all-reduce.

Works on every backend. Where ``torch.distributed`` runs and the model is wrapped in DDP, that does
it instead, overlapped with the backward pass. Here nothing is overlapped on purpose: ranks that
share memory reduce with the very processors that compute the gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed, nn

from syncprims import all_reduce, broadcast, get_world_size

from .likeness import check_alike, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: What travels at once. Big enough that a round's price does not show, and no model is held twice.
BUCKET_BYTES = 16 << 20


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Leave every gradient as its mean over all ranks, the same bits on each.

    A rank without a gradient where others have one counts as zeros; where nobody has one it stays
    None. Parameters that need no gradient are left out. Collective.

    :raises RankMismatch: on all ranks, if they hold different parameters or freeze others.
    """
    if get_world_size() == 1:
        return
    needed = [p for p in parameters if p.requires_grad]
    for bucket in _buckets(needed):
        _average(bucket)


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Cut into lists of one dtype and device, in an order that all ranks share."""
    kinds: dict[tuple[torch.dtype, torch.device], list[list[nn.Parameter]]] = {}
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    for p in parameters:
        kind = p.dtype, p.device
        if p.nbytes > room.get(kind, 0):
            kinds.setdefault(kind, []).append([])
            room[kind] = BUCKET_BYTES
        kinds[kind][-1].append(p)
        room[kind] -= p.nbytes
    return [bucket for buckets in kinds.values() for bucket in buckets]


def _average(bucket: Sequence[nn.Parameter]) -> None:
    """Average one bucket, which also carries who has a gradient at all."""
    sizes = [p.numel() for p in bucket]
    held = [p.grad is not None for p in bucket]
    first = bucket[0]
    flat = torch.zeros(sum(sizes) + len(bucket), dtype=first.dtype, device=_device(first))
    *parts, present = torch.split(flat, [*sizes, len(bucket)])
    views = [part.view(p.shape) for part, p in zip(parts, bucket, strict=True)]
    mine = [(v, p.grad) for v, p in zip(views, bucket, strict=True) if p.grad is not None]
    if mine:
        torch._foreach_copy_([v for v, _ in mine], [_dense(g) for _, g in mine])  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    present.copy_(torch.tensor(held))
    all_reduce(flat, "mean", out=flat)
    somewhere = (present != 0).tolist()
    for p, view, here, there in zip(bucket, views, held, somewhere, strict=True):
        if there and not here:
            p.grad = view.to(p.device, copy=True)
        elif p.grad is not None and p.grad.is_sparse:
            p.grad = view.to(p.device).to_sparse(p.grad.sparse_dim())
    together = [(p.grad, v) for p, v, here in zip(bucket, views, held, strict=True)
                if here and p.grad is not None and not p.grad.is_sparse]  # fmt: skip
    if together:
        torch._foreach_copy_([g for g, _ in together], [v for _, v in together])  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _device(tensor: torch.Tensor) -> torch.device:
    """Return where a bucket lives: shared memory takes what is on the CPU."""
    grouped = distributed.is_available() and distributed.is_initialized()
    return tensor.device if grouped else torch.device("cpu")


def share_model(model: nn.Module, src: int = 0) -> None:
    """Leave the parameters and buffers of rank `src` in `model` on every rank. Collective.

    :raises RankMismatch: on all ranks, if the models differ in more than their values: in names,
        shapes, dtypes, or in what is frozen. Then they are as they were.
    """
    if get_world_size() > 1:
        check_alike("the model", _described(model), "Build the same model on every rank.")
    _broadcast([*(p.data for p in model.parameters()), *model.buffers()], src)


def _described(model: nn.Module) -> list[str]:
    """Return a line for each parameter and buffer, in the order in which they travel."""
    tensors = [
        *((f"parameter {name!r}", p) for name, p in model.named_parameters()),
        *((f"buffer {name!r}", buffer) for name, buffer in model.named_buffers()),
    ]
    return [
        f"{name}, {kind_of(tensor)}"
        + ", frozen" * (isinstance(tensor, nn.Parameter) and not tensor.requires_grad)
        for name, tensor in tensors
    ]


def share_buffers(model: nn.Module, src: int = 0) -> None:
    """Leave the buffers of rank `src` (running means, counts) in `model` everywhere. Collective."""
    _broadcast(list(model.buffers()), src)


def _broadcast(tensors: Sequence[torch.Tensor], src: int) -> None:
    if get_world_size() == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in same]).to(_device(same[0]))
        flat = broadcast(flat, src, out=flat)
        with torch.no_grad():
            parts = torch.split(flat, [tensor.numel() for tensor in same])
            for tensor, part in zip(same, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))
