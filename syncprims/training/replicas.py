"""Tensors of training that are to be the same on all ranks, compared by digests.

What is different by design is left out: tensors that are no plain memory, such as the shards of
FSDP2 and DTensor, what is in a model of FSDP1, what DDP ignores by request, and optimizers that
torch has made for several ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncprims import RankMismatch
from syncprims._data.digests import Digests, digest_tensors

_SHOWN = 5


def digest_model(model: nn.Module) -> Digests:
    """Return the digest of each parameter of a model."""
    return digest_tensors(_named(model, "parameter"))


def digest_buffers(model: nn.Module) -> Digests:
    """Return the digest of each buffer of a model, unless its DDP makes them equal by itself."""
    if isinstance(model, DistributedDataParallel) and model.broadcast_buffers:
        return {}
    return digest_tensors(_named(model, "buffer"))


def digest_optimizer(optimizer: Any, models: Sequence[Any]) -> Digests:
    """Return the digest of each tensor that an optimizer keeps for a parameter of these models."""
    if type(optimizer).__module__.startswith("torch.distributed"):
        return {}
    names = {
        p: f"{name} of model {number}" if len(models) > 1 else name
        for number, model in enumerate(models)
        for name, p in _named(model, "parameter")
    }
    return digest_tensors(
        (f"{key} of {names[p]}", value)
        for p, kept in optimizer.state.items()
        if p in names
        for key, value in kept.items()
    )


def _named(model: nn.Module, kind: str) -> Iterator[tuple[str, Any]]:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in inner.modules()):
        return
    ignored = getattr(model, "parameters_to_ignore", ())
    tensors = inner.named_parameters() if kind == "parameter" else inner.named_buffers()
    yield from ((f"{kind} {name!r}", tensor) for name, tensor in tensors if name not in ignored)


def difference(digests: Mapping[int, Digests], when: str) -> RankMismatch | None:
    """Return the error of ranks whose digests differ; None if they do not.

    It is about the lowest rank that is not with the most.
    """
    found: dict[str, list[str]] = {}  # by which ranks agree: the tensors
    first: list[list[int]] = []  # the ranks that agree about the first tensor, the most first
    for name in dict.fromkeys(name for of_rank in digests.values() for name in of_rank):
        alike: dict[int | None, list[int]] = {}
        for rank, of_rank in digests.items():
            alike.setdefault(of_rank.get(name), []).append(rank)
        if len(alike) > 1:
            groups = sorted(alike.values(), key=lambda ranks: (-len(ranks), ranks))
            first = first or groups
            shown = "no two ranks agree"
            if len(groups[0]) > 1:
                shown = ", ".join(
                    f"ranks {ranks} agree" if len(ranks) > 1 else f"rank {ranks[0]} differs"
                    for ranks in groups
                )
            found.setdefault(shown, []).append(name)
    if not found:
        return None
    text = "\n".join(
        f"  {', '.join(names[:_SHOWN])}"
        + (f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else "")
        + f": {shown}"
        for shown, names in found.items()
    )
    return RankMismatch(
        f"replicas differ between ranks {when}, first here:\n{text}\n"
        f"Only gradients are averaged. Look for other initial values, a no_sync(), a step or a "
        f"frozen parameter that not all ranks have, a forward pass past DDP, or buffers that no "
        f"one makes equal.",
        rank=min(first[1]),
    )
