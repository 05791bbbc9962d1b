"""Torch's default group in a world whose backend has no engine of torch's."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from syncprims._world.scratch import scratch_directory
from syncprims.errors import ConfigurationError

from .torch_internals import NAME, dist, is_rendezvous_replaced

if TYPE_CHECKING:
    from syncprims._world.world import World


def open_default_group(world: World, at_end: contextlib.ExitStack) -> None:
    """Make torch's default group, of all ranks, if there is none. Collective.

    What ends it is added to `at_end`, which the world closes.

    :raises ConfigurationError: where ranks are threads that share torch's groups.
    """
    if world.backend_name == "threads" and not is_rendezvous_replaced():
        raise ConfigurationError(
            "ranks are threads here, and share torch.distributed's groups: run the world of this "
            "test with torch=True, or with kind='processes'"
        )
    with contextlib.ExitStack() as ends:
        folder = ends.enter_context(scratch_directory("store")) if world.rank == 0 else None
        path = world.group.broadcast(folder and str(folder / "store"), name="open_process_group")
        if dist.is_initialized():
            return
        method = f"file://{path}" if world.num_nodes == 1 else None  # else by the environment
        dist.init_process_group(
            NAME, init_method=method, rank=world.rank, world_size=world.world_size
        )
        ends.callback(_close)
        world.group.barrier("open_process_group")  # a rank that leaves at once removes the store
        at_end.push(ends.pop_all())


def _close() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
