"""Process groups of torch for the tests of ``syncprims.c10d``."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

import syncprims as sp
import syncprims.c10d
from support import warm_torch as warm_torch

if TYPE_CHECKING:
    from collections.abc import Generator

dist: Any = torch.distributed


@contextlib.contextmanager
def process_group(**options: Any) -> Generator[None]:
    """Serve ``torch.distributed`` within the block, in the world that runs."""
    dist.init_process_group(
        "syncprims",
        store=dist.HashStore(),  # which only the default group would use, to start a world
        rank=sp.get_rank(),
        world_size=sp.get_world_size(),
        **options,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def seconds(number: float) -> timedelta:
    """Return a timeout as torch takes it."""
    return timedelta(seconds=number)
