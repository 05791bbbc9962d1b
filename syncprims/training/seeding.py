"""Random numbers: seeded alike on all ranks, saved, and restored."""

from __future__ import annotations

import random
from typing import Any

import torch

from syncprims import get_rank


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, numpy's and torch's generators, on all ranks alike.

    With `device_specific` each rank adds its number. With `deterministic` torch uses only
    algorithms that give the same bits each time.
    """
    import numpy

    seed += get_rank() if device_specific else 0
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def random_state() -> dict[str, Any]:
    """Return the state of every generator of this rank, made of plain data and tensors."""
    import numpy

    version, numbers, gauss = random.getstate()
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, [int(key) for key in keys], *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Continue with the generators as :func:`random_state` found them."""
    import numpy

    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
