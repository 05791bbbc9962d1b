"""What ranks are about to share, compared first: so nothing is mixed up, and nobody waits."""

from __future__ import annotations

import hashlib
from itertools import zip_longest
from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

from syncprims import RankMismatch, all_gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def check_alike(what: str, mine: Sequence[str], advice: str) -> None:
    """Accept ranks that all describe their parts alike, one line for each part. Collective.

    :raises RankMismatch: on all ranks otherwise, showing the first part that differs.
    """
    # Descriptions are long and mostly equal, so they travel only where they are not.
    digests = all_gather(hashlib.sha256("\n".join(mine).encode()).digest())
    if len(set(digests)) == 1:
        return
    columns = zip_longest(*all_gather(list(mine)), fillvalue="nothing more")
    first = next(parts for parts in columns if len(set(parts)) > 1)
    lines = "\n".join(f"  rank {rank}: {part}" for rank, part in enumerate(first))
    raise RankMismatch(f"{what} differs between ranks, first here:\n{lines}\n{advice}")


def kind_of(tensor: torch.Tensor) -> str:
    """Return what has to be equal for values to be copied as they are."""
    shape = "of no shape yet" if is_lazy(tensor) else tuple(tensor.shape)
    return f"{shape}, {str(tensor.dtype).removeprefix('torch.')}"
