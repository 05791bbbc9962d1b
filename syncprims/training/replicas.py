"""Replicas compared between ranks: models and the state of their optimizers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from syncprims import all_gather, get_world_size
from syncprims._data import replicas


def compare_replicas(
    models: Sequence[nn.Module], optimizer: Optimizer, step: int, *, buffers: bool
) -> None:
    """Check that models and the tensors of their optimizer are the same on all ranks. Collective.

    :raises RankMismatch: on all ranks, if they are not.
    """
    if get_world_size() == 1:
        return
    chosen = [m for m in models if not isinstance(m, DDP) or _spans_all(m)]
    mine: replicas.Digests = {}
    for number, model in enumerate(chosen):
        of_model = {
            **replicas.digest_model(model),
            **(replicas.digest_buffers(model) if buffers else {}),
        }
        where = f" of model {number}" if len(chosen) > 1 else ""
        mine.update((name + where, digest) for name, digest in of_model.items())
    mine.update(replicas.digest_optimizer(optimizer, chosen))
    whole = hashlib.sha256(
        repr(sorted(mine.items())).encode()
    ).digest()  # the others only if this differs
    if len(set(all_gather(whole, name="replicas"))) > 1:
        error = replicas.difference(
            dict(enumerate(all_gather(mine, name="replicas"))), f"after step {step}"
        )
        if error is not None:
            raise error


def _spans_all(model: DDP) -> bool:
    return distributed.get_world_size(model.process_group) == get_world_size()
