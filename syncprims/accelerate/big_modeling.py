"""Models on the meta device, and weights loaded into them.

Scripts import these names from a module of this name.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from syncprims.training import load_checkpoint_in_model as load_checkpoint_in_model

from .utils import not_offered as _not_offered


def init_on_device(device: torch.device | str) -> AbstractContextManager[Any]:
    """Return a context in which new tensors, and so models, are on `device`."""
    return torch.device(device)


def init_empty_weights(include_buffers: bool = True) -> AbstractContextManager[Any]:
    """Return a context in which models are made without memory for their tensors.

    :raises TypeError: without `include_buffers`: buffers are on the meta device, too.
    """
    if not include_buffers:
        raise TypeError("init_empty_weights(include_buffers=False) is not offered")
    return torch.device("meta")


def __getattr__(name: str) -> Any:
    raise _not_offered(__name__, name)
