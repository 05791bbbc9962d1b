"""Process groups of torch: of this library, and of Gloo."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Generator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed

import syncprims as sp
import syncprims.c10d

T = TypeVar("T")
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


def with_gloo(program: Callable[[], T], folder: Path) -> Callable[[], T]:
    """Return what runs a program in a group of Gloo, whose ranks meet at a file in `folder`."""
    place = folder / uuid.uuid4().hex

    def run() -> T:
        ranks = {"rank": sp.get_rank(), "world_size": sp.get_world_size()}
        dist.init_process_group("gloo", init_method=f"file://{place}", **ranks)
        try:
            return program()
        finally:
            dist.destroy_process_group()

    return run


def seconds(number: float) -> timedelta:
    """Return a timeout as torch takes it."""
    return timedelta(seconds=number)
