"""Torch's default group in a world whose backend has no engine of torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncprims.errors import ConfigurationError

from .torch_internals import NAME, dist, is_rendezvous_replaced

if TYPE_CHECKING:
    from contextlib import ExitStack

    from syncprims._world.world import World

_HOST = "127.0.0.1"


def open_default_group(world: World, at_end: ExitStack) -> None:
    """Make torch's default group, of all ranks, if there is none. Collective.

    What ends it is added to `at_end`, which the world closes.

    :raises ConfigurationError: where ranks are threads that share torch's groups.
    """
    served = is_rendezvous_replaced()
    if world.backend_name == "threads" and not served:
        raise ConfigurationError(
            "ranks are threads here, and share torch.distributed's groups: run the world of this "
            "test with torch=True, or with kind='processes'"
        )
    own = not dist.is_initialized()
    store: Any = None  # then torch finds one by the environment
    if not served and world.num_nodes == 1:
        if world.rank == 0:
            store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        port = world.group.broadcast(store and store.port, name="open_process_group")
        if own and store is None:
            store = dist.TCPStore(_HOST, port, is_master=False, wait_for_workers=False)
    if own:
        dist.init_process_group(NAME, store=store, rank=world.rank, world_size=world.world_size)
        at_end.callback(_close)
    world.group.barrier("open_process_group")  # a rank that leaves at once would end the store


def _close() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
