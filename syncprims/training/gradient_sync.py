"""Gradients, parameters and buffers made equal on all ranks, in flat buckets by all-reduce.

Works on every backend. Averaging does not overlap with the backward pass on purpose: on CPUs the
processors that compute the gradients also reduce them. On devices models are in DDP, which averages
during the backward pass; what its reducer has not averaged is averaged here afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Generator, Iterable, Sequence
from itertools import zip_longest
from typing import Any
from weakref import WeakSet
from zlib import crc32

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parameter import is_lazy

from syncprims import RankMismatch, all_gather, all_reduce, broadcast, get_world_size
from syncprims._world.runtime import get_extras

from .pytree import is_dtensor

#: Bytes that travel at once: enough to hide the price of a round, and no model is held twice.
BUCKET_BYTES = 16 << 20


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace every gradient by its mean over all ranks: the same bits on each. Collective.

    A rank without a gradient counts as zeros if another rank has one; if no rank has one it stays
    None. So it is with a frozen parameter, too. A gradient keeps its dtype. It stays sparse, with
    the rows of all ranks, if it is sparse wherever there is one. DTensors are left to torch.

    :raises RankMismatch: on all ranks, if they have different parameters, or freeze others.
    """
    every = list(parameters)
    average_all(every)
    for averager in averagers():
        averager.note_average(every)


def averagers() -> WeakSet[Any]:
    """Return the averagers of this world that note which gradients others have averaged."""
    found: WeakSet[Any] = get_extras().setdefault("training.averagers", WeakSet())
    return found


def average_all(parameters: Iterable[nn.Parameter]) -> None:
    """Average as :func:`average_gradients`, and notify no averager."""
    every = [p for p in parameters if not is_dtensor(p)]
    if get_world_size() == 1 or not every:
        return
    learning = [p for p in every if p.requires_grad]
    held = [i for i, p in enumerate(every) if p.grad is not None and not p.requires_grad]
    signs = _signs_of(every, held)
    try:
        alike = all(_average(bucket, signs) for bucket in _buckets(learning))
    except RankMismatch:  # of all ranks: they freeze parameters of other sizes
        _check_frozen(every)
        raise
    if not alike or not learning:
        _check_frozen(every)
        held = sorted({i for mine in all_gather(held, name="frozen gradients") for i in mine})
        signs = _signs_of(every, held)
        all(_average(bucket, signs) for bucket in _buckets(learning))
    for bucket in _buckets([every[i] for i in held]):
        _average(bucket, signs)


def _check_frozen(every: Sequence[nn.Parameter]) -> None:
    lines = [f"parameter {i}, {describe(p)}" for i, p in enumerate(every)]
    check_alike("the model", lines, "Freeze the same parameters on every rank.")


def _signs_of(parameters: Sequence[nn.Parameter], held: Sequence[int]) -> list[float]:
    """Return numbers of 1 and -1 that say which of the parameters are frozen, and `held` so.

    The mean over ranks that differ has another number between them.
    """
    digest = crc32(bytes([p.requires_grad for p in parameters]) + str(held).encode())
    return [1.0 if digest >> bit & 1 else -1.0 for bit in range(32)]


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return lists of parameters of one dtype and device, in the same order on all ranks."""
    buckets: dict[tuple[torch.dtype, torch.device], list[list[nn.Parameter]]] = {}
    free: dict[tuple[torch.dtype, torch.device], int] = {}
    for p in parameters:
        kind = _gradient_dtype(p), p.device
        if p.nbytes > free.get(kind, 0):
            buckets.setdefault(kind, []).append([])
            free[kind] = BUCKET_BYTES
        buckets[kind][-1].append(p)
        free[kind] -= p.nbytes
    return [bucket for same_kind in buckets.values() for bucket in same_kind]


def _gradient_dtype(p: nn.Parameter) -> torch.dtype:
    """Return the dtype of its gradient, or of the one that it would have."""
    if p.grad is not None:
        return p.grad.dtype
    return getattr(p, "grad_dtype", None) or p.dtype


def _average(bucket: Sequence[nn.Parameter], signs: Sequence[float]) -> bool:
    """Average one bucket; return False on all ranks, and change nothing, if their signs differ.

    It also carries, per parameter, whether this rank has a gradient: other ranks may have none. Two
    ranks may freeze different parameters of one shape: only the signs show that.
    """
    sizes = [p.numel() for p in bucket]
    grads = [p.grad for p in bucket]
    some_sparse = any(g is not None and g.is_sparse for g in grads)
    flags = [*(float(g is not None) for g in grads), float(some_sparse), *signs]
    first = bucket[0]
    device = _transport_device(first)
    flat = torch.zeros(sum(sizes) + len(flags), dtype=_gradient_dtype(first), device=device)
    *parts, flagged = torch.split(flat, [*sizes, len(flags)])
    views = [part.view(p.shape) for part, p in zip(parts, bucket, strict=True)]
    mine = [(v, g) for v, g in zip(views, grads, strict=True) if g is not None]
    if mine:
        dense = [g.to_dense() if g.is_sparse else g for _, g in mine]
        torch._foreach_copy_([v for v, _ in mine], dense)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    flagged.copy_(torch.tensor(flags, device=flat.device))
    all_reduce(flat, "mean", out=flat, name="gradients")
    means: list[float] = flagged.tolist()
    # Where ranks differ, the mean is at least 2 / n away from each rank's sign. Devices may round.
    both = zip(means[len(bucket) + 1 :], signs, strict=True)
    if max(abs(mean - sign) for mean, sign in both) * get_world_size() > 1:
        return False
    rows = _sparse_rows(grads) if means[len(bucket)] else {}
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i, (p, g, view) in enumerate(zip(bucket, grads, views, strict=True)):
        if not means[i]:
            continue  # no rank has one
        if i in rows:
            indices = rows[i].to(p.device)
            values = view.to(p.device)[tuple(indices)]
            p.grad = torch.sparse_coo_tensor(
                indices, values, p.shape, is_coalesced=True, check_invariants=False
            )
        elif g is None or g.is_sparse:
            new = torch.empty_like(p.detach(), dtype=flat.dtype)  # laid out as torch does
            p.grad = new.copy_(view)
        else:
            pairs.append((g, view))
    if pairs:
        torch._foreach_copy_([g for g, _ in pairs], [v for _, v in pairs])  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    return True


def _sparse_rows(grads: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
    """Return the indices of all ranks' rows, of gradients that are dense on none. Collective."""
    mine = {
        i: g.coalesce().indices().cpu() if g.is_sparse else None
        for i, g in enumerate(grads)
        if g is not None
    }
    of_ranks = all_gather(mine, name="sparse gradients")
    found: dict[int, torch.Tensor] = {}
    for i in {i for one in of_ranks for i in one}:
        indices = [one[i] for one in of_ranks if i in one]
        if None not in indices:
            found[i] = torch.unique(torch.cat([*filter(torch.is_tensor, indices)], 1), dim=1)
    return found


def has_process_group() -> bool:
    """Return whether ``torch.distributed`` has a default group."""
    return distributed.is_available() and distributed.is_initialized()


def _transport_device(tensor: torch.Tensor) -> torch.device:
    """Return the device of a flat buffer: shared memory takes tensors on the CPU only."""
    return tensor.device if has_process_group() else torch.device("cpu")


def broadcast_model(model: nn.Module, src: int = 0) -> None:
    """Copy the parameters and buffers of rank `src` into `model` on every rank. Collective.

    :raises RankMismatch: on all ranks, if the models differ in more than their values: in names,
        shapes, dtypes, or in what is frozen. Then they are unchanged.
    """
    if get_world_size() > 1:
        check_alike("the model", _described(model), "Build the same model on every rank.")
    broadcast_tensors([*(p.data for p in model.parameters()), *model.buffers()], src)


def _described(model: nn.Module) -> list[str]:
    """Return a line for each parameter and buffer, in the order in which they are sent."""
    parameters = [f"parameter {name!r}, {describe(p)}" for name, p in model.named_parameters()]
    return parameters + [f"buffer {name!r}, {describe(b)}" for name, b in model.named_buffers()]


def broadcast_buffers(model: nn.Module, src: int = 0) -> None:
    """Copy the buffers of rank `src` (running means, counts) to every rank. Collective."""
    broadcast_tensors(list(model.buffers()), src)


def broadcast_tensors(
    tensors: Sequence[torch.Tensor], src: int, name: str | None = "model"
) -> None:
    """Fill tensors, alike on all ranks, with those of rank `src`. Collective."""
    if get_world_size() == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in same])
        flat = flat.to(_transport_device(same[0]))
        flat = broadcast(flat, src, out=flat, name=name)
        with torch.no_grad():
            parts = torch.split(flat, [tensor.numel() for tensor in same])
            for tensor, part in zip(same, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def check_alike(what: str, mine: Sequence[str], advice: str) -> None:
    """Check that `mine`, one line for each part, is the same on all ranks. Collective.

    :raises RankMismatch: on all ranks, if it is not; the message shows the first line that differs.
    """
    # The lines are long and mostly equal, so they are sent only if their digests differ.
    digests = all_gather(hashlib.sha256("\n".join(mine).encode()).digest(), name=what)
    if len(set(digests)) == 1:
        return
    columns = zip_longest(*all_gather(list(mine), name=what), fillvalue="nothing more")
    first = next(parts for parts in columns if len(set(parts)) > 1)
    lines = "\n".join(f"  rank {rank}: {part}" for rank, part in enumerate(first))
    raise RankMismatch(f"{what} differs between ranks, first here:\n{lines}\n{advice}")


def describe(tensor: torch.Tensor) -> str:
    """Return shape and dtype of `tensor`, and whether it is a frozen parameter.

    These must be equal on all ranks to copy its values.
    """
    shape = "of no shape yet" if is_lazy(tensor) else tuple(tensor.shape)
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{shape}, {str(tensor.dtype).removeprefix('torch.')}" + ", frozen" * frozen


class WrappedModel(DDP):
    """DDP with the attributes of the model inside: ``model.encode(x)`` works on every backend."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not there yet, or no longer
                raise
            return getattr(self.module, name)


def averages_gradients_itself(model: nn.Module) -> bool:
    """Return whether `model` averages its gradients over the ranks, as in DDP and FSDP."""
    return isinstance(model, DDP) or hasattr(model, "set_requires_gradient_sync")


@contextlib.contextmanager
def gradient_sync(model: Any, enabled: bool) -> Generator[None]:
    """Say whether a backward pass of the wrapper averages gradients, whatever was said before."""
    with contextlib.ExitStack() as stack:
        if isinstance(model, DDP):
            before = model.require_backward_grad_sync
            model.require_backward_grad_sync = enabled
            stack.callback(setattr, model, "require_backward_grad_sync", before)
            if enabled:
                model.reducer.prepare_for_backward([])  # as at the end of its forward pass
        elif hasattr(model, "set_requires_gradient_sync"):  # FSDP
            model.set_requires_gradient_sync(enabled)
            stack.callback(model.set_requires_gradient_sync, True)
        yield
