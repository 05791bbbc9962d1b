"""Gradients, parameters and buffers made equal on all ranks, in flat buckets by all-reduce.

Works on every backend. Averaging does not overlap with the backward pass on purpose: on CPUs the
processors that compute the gradients also reduce them. On devices models are in DDP, which averages
during the backward pass; what its reducer has not averaged is averaged here afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import zip_longest
from typing import Any
from zlib import crc32

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parameter import is_lazy

from syncprims import RankMismatch, all_gather, all_reduce, broadcast, get_world_size

#: Bytes that travel at once: enough to hide the price of a round, and no model is held twice.
BUCKET_BYTES = 16 << 20


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace every gradient by its mean over all ranks: the same bits on each. Collective.

    A rank without a gradient counts as zeros if another rank has one; if no rank has one it stays
    None. Parameters that need no gradient are left out.

    :raises RankMismatch: on all ranks, if they have different parameters, or freeze others.
    """
    if get_world_size() == 1:
        return
    every = list(parameters)
    signs = _signs_of(every)
    for bucket in _buckets([p for p in every if p.requires_grad]):
        if not _average(bucket, signs):
            lines = [f"parameter {i}, {describe(p)}" for i, p in enumerate(every)]
            check_alike("the model", lines, "Freeze the same parameters on every rank.")


def _signs_of(parameters: Sequence[nn.Parameter]) -> list[float]:
    """Return numbers of 1 and -1 that say which of the parameters are frozen.

    The mean over ranks that freeze others has another number between them.
    """
    digest = crc32(bytes([p.requires_grad for p in parameters]))
    return [1.0 if digest >> bit & 1 else -1.0 for bit in range(32)]


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return lists of parameters of one dtype and device, in the same order on all ranks."""
    buckets: dict[tuple[torch.dtype, torch.device], list[list[nn.Parameter]]] = {}
    free: dict[tuple[torch.dtype, torch.device], int] = {}
    for p in parameters:
        kind = p.dtype, p.device
        if p.nbytes > free.get(kind, 0):
            buckets.setdefault(kind, []).append([])
            free[kind] = BUCKET_BYTES
        buckets[kind][-1].append(p)
        free[kind] -= p.nbytes
    return [bucket for same_kind in buckets.values() for bucket in same_kind]


def _average(bucket: Sequence[nn.Parameter], signs: Sequence[float]) -> bool:
    """Average one bucket; return False on all ranks, and change nothing, if their signs differ.

    It also carries, per parameter, whether this rank has a gradient: other ranks may have none. Two
    ranks may freeze different parameters of one shape: only the signs show that.
    """
    sizes = [p.numel() for p in bucket]
    held = [p.grad is not None for p in bucket]
    flags = [*map(float, held), *signs]
    first = bucket[0]
    flat = torch.zeros(sum(sizes) + len(flags), dtype=first.dtype, device=_transport_device(first))
    *parts, flagged = torch.split(flat, [*sizes, len(flags)])
    views = [part.view(p.shape) for part, p in zip(parts, bucket, strict=True)]
    mine = [(v, p.grad) for v, p in zip(views, bucket, strict=True) if p.grad is not None]
    if mine:
        dense = [g.to_dense() if g.is_sparse else g for _, g in mine]
        torch._foreach_copy_([v for v, _ in mine], dense)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    flagged.copy_(torch.tensor(flags, device=flat.device))
    all_reduce(flat, "mean", out=flat, name="gradients")
    means: list[float] = flagged.tolist()
    # Where ranks differ, the mean is at least 2 / n away from each rank's sign. Devices may round.
    both = zip(means[len(bucket) :], signs, strict=True)
    if max(abs(mean - sign) for mean, sign in both) * get_world_size() > 1:
        return False
    somewhere = [mean != 0 for mean in means[: len(bucket)]]
    for p, view, here, there in zip(bucket, views, held, somewhere, strict=True):
        if there and not here:
            p.grad = torch.empty_like(p.detach()).copy_(view)  # laid out as torch does
        elif p.grad is not None and p.grad.is_sparse:
            p.grad = view.to(p.device).to_sparse(p.grad.sparse_dim())
    pairs = [(p.grad, v) for p, v, here in zip(bucket, views, held, strict=True)
             if here and p.grad is not None and not p.grad.is_sparse]  # fmt: skip
    if pairs:
        torch._foreach_copy_([g for g, _ in pairs], [v for _, v in pairs])  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    return True


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


# -- backward passes that a script runs itself: they average gradients, too, as in DDP ------------

_engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportPrivateUsage]


class BackwardWatch:
    """Calls ``average(models)`` at the end of each backward pass that reaches watched models.

    A pass that the library runs pauses it.
    """

    def __init__(self, average: Callable[[list[nn.Module]], None]) -> None:
        self.paused = False
        self._average = average
        self._models: list[nn.Module] = []
        self._handles: list[Any] = []
        self._pass = -1  # the number that torch has given to the current pass
        self._reached: set[int] = set()  # places of the models that it has reached
        self._known: dict[nn.Module, set[torch.Tensor]] = {}  # parameters that DDP was made with
        self._prepared: set[nn.Module] = set()  # DDP expects a backward pass of these

    def add(self, model: nn.Module) -> None:
        """Watch `model`, also those of its parameters that are frozen now."""
        if model in self._models:
            return
        place = len(self._models)
        self._models.append(model)
        if isinstance(model, DDP):
            self._known[model] = {p for p in model.parameters() if p.requires_grad}
            self._handles.append(model.register_forward_hook(self._note_forward))

        def note(_: torch.Tensor) -> None:
            if not self.paused:
                self._note(place)

        for p in model.parameters():
            if p.is_floating_point() or p.is_complex():
                needed = p.requires_grad
                p.requires_grad_(True)  # torch takes hooks for such parameters only
                self._handles.append(p.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]
                p.requires_grad_(needed)

    def clear(self) -> None:
        """Watch nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._models.clear()
        self._known.clear()

    def misses(self, model: nn.Module) -> bool:
        """Return whether `model` has gradients that its DDP has not averaged in the last pass.

        So it is with parameters that DDP was not made with, since they were frozen or not there
        yet, and if DDP has not seen the forward pass.
        """
        known = self._known[model] if model in self._prepared else set[torch.Tensor]()
        self._prepared.discard(model)
        held = (p for p in model.parameters() if p.grad is not None and p.requires_grad)
        return not known.issuperset(held)

    def _note_forward(self, model: nn.Module, *_: object) -> None:
        if torch.is_grad_enabled() and model.require_backward_grad_sync:
            self._prepared.add(model)

    def _note(self, place: int) -> None:
        # A failed pass never ended: the number of the pass shows that, and an empty set would not.
        number = torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]
        if number != self._pass:
            self._pass, self._reached = number, set()
            _engine.queue_callback(self._end)
        self._reached.add(place)

    def _end(self) -> None:
        reached, self._pass = sorted(self._reached), -1
        models = [self._models[place] for place in reached if place < len(self._models)]
        _engine.queue_callback(lambda: self._average(models))  # after DDP has written its means
