"""Launchers, and models without memory: in Accelerate these have modules of their own."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from .configuration import not_offered as _not_offered
from .saving import load_checkpoint_in_model as load_checkpoint_in_model


def notebook_launcher(
    function: Any,
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    **others: Any,
) -> None:
    """Run ``function(*args)`` on `num_processes` ranks of this machine; with 1 or None, here.

    Each rank is a process on the file backend, so no port is used. Arguments about ports,
    rendezvous and nodes are accepted if they ask for one node.

    :raises ValueError: if there is a world here already, or more nodes than one are asked for.
    """
    if others.get("num_nodes", 1) != 1:
        raise ValueError("notebook_launcher starts ranks on one machine; use torchrun for several")
    if others.get("max_restarts", 0):
        raise ValueError("notebook_launcher does not restart; use syncprims run --max-restarts")
    if num_processes is None or num_processes <= 1:
        function(*args)
        return
    plain = mixed_precision in ("no", "NO")
    variables = {} if plain else {"ACCELERATE_MIXED_PRECISION": mixed_precision}
    _start(lambda: function(*args), num_processes, variables)


def debug_launcher(function: Any, args: tuple[Any, ...] = (), num_processes: int = 2) -> None:
    """Run ``function(*args)`` on `num_processes` ranks of this machine, without accelerators."""
    _start(lambda: function(*args), num_processes, {"ACCELERATE_USE_CPU": "yes"})


def _start(function: Callable[[], object], ranks: int, variables: dict[str, str]) -> None:
    from syncprims.testing import run_world  # a room of its own

    def rank() -> None:
        os.environ.update({name: str(value).lower() for name, value in variables.items()})
        function()

    run_world(rank, ranks, kind="processes", timeout=None)


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
