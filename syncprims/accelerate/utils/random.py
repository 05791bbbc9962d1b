"""Seeds, and random states made equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from syncprims import broadcast
from syncprims.training import set_seed as set_seed


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Give one generator of all ranks the state of rank 0's. Collective.

    :raises ValueError: for an unknown kind, and for ``"generator"`` without one.
    """
    kind = getattr(rng_type, "value", rng_type)
    if kind == "torch":
        torch.set_rng_state(broadcast(torch.get_rng_state()))
    elif kind == "cuda":
        torch.cuda.set_rng_state(broadcast(torch.cuda.get_rng_state()))
    elif kind == "generator" and generator is not None:
        generator.set_state(broadcast(generator.get_state()))
    else:
        raise ValueError(f"rng_type={rng_type!r}: it takes 'torch', 'cuda', or 'generator' and one")


def synchronize_rng_states(
    rng_types: Sequence[Any], generator: torch.Generator | None = None
) -> None:
    """Give these generators of all ranks the states of rank 0's. Collective."""
    for kind in rng_types:
        synchronize_rng_state(kind, generator)
