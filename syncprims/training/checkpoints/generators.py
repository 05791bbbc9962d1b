"""The random numbers that come next: Python's, numpy's and torch's, on this rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from syncprims import get_local_world_size


def capture() -> dict[str, Any]:
    """Return the state of all generators that a training uses by default."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": {
            "kind": kind, "keys": keys, "position": int(position),
            "has_gauss": int(has_gauss), "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": {str(device): torch.cuda.get_rng_state(device) for device in _devices()},
    }  # fmt: skip


def restore(state: dict[str, Any]) -> None:
    """Let all generators go on from there.

    :raises ValueError: if a GPU whose generator is in the state is not here, or the reverse.
    """
    devices = {str(device) for device in _devices()}
    if devices != state["cuda"].keys():
        raise ValueError(
            f"it was saved with the generators of GPUs {sorted(state['cuda'])}, and here are "
            f"{sorted(devices)}; with rng=False they are left as they are"
        )
    python, numbers = state["python"], state["numpy"]
    words = tuple(int(word) for word in python["words"])
    random.setstate((python["version"], words, python["gauss"]))
    np.random.set_state(
        (numbers["kind"], numbers["keys"], numbers["position"], numbers["has_gauss"],
         numbers["cached"])
    )  # fmt: skip
    torch.set_rng_state(state["torch"])
    for device, one in state["cuda"].items():
        torch.cuda.set_rng_state(one, int(device))


def _devices() -> list[int]:
    """Return the GPUs whose random numbers this rank uses: all if it is alone, else its own."""
    if not torch.cuda.is_available():
        return []
    alone = get_local_world_size() == 1
    return list(range(torch.cuda.device_count())) if alone else [torch.cuda.current_device()]
