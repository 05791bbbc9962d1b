"""The world that a process group lives in: the one that runs, or one that the group starts.

And the other way round: the default group that a world opens.
"""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from typing import Any

from syncprims._world import runtime
from syncprims._world.world import RunningWorld, World
from syncprims.errors import ConfigurationError

from .torch_internals import NAME, dist, find_backing_store, is_rendezvous_replaced


def join_group_world(store: object, rank: int, world_size: int) -> tuple[RunningWorld, bool]:
    """Return the world of a default process group, and whether it was started for that.

    It is the one that runs. If there is none, it is started: by the environment, if that names a
    backend; else by the store, which all ranks of the group share. They meet at the server of a
    TCPStore. Ranks with a store of another kind must be on one host.

    :raises ConfigurationError: if the world has other numbers than the group.
    """
    _keep_server(store)
    world, started = runtime.find_world(), False
    if world is None:
        started = True
        world = (
            runtime.get_world() if runtime.names_backend() else start_world(store, rank, world_size)
        )
    if (world.rank, world.world_size) != (rank, world_size):
        if started:
            runtime.leave_group_world(world)
        raise ConfigurationError(
            f"init_process_group({NAME!r}) with rank={rank} and world_size={world_size}: the world "
            f"of this process has rank={world.rank} and world_size={world.world_size}. Give both "
            f"the same numbers, or call shutdown() first",
            rank=world.rank,
        )
    return world, started


def _keep_server(store: object) -> None:
    """Keep the server of the store until this process ends.

    Otherwise a rank that initializes again could meet the server of the group before, which is
    about to end on rank 0, and the two would wait for each other. A second store of the same port
    shares the server that is there.
    """
    backing = find_backing_store(store)
    if isinstance(backing, dist.TCPStore):
        runtime.keep_until_exit((backing.host, backing.port), backing)


def make_variables(store: Any, rank: int, world_size: int) -> dict[str, str]:
    """Return the variables of a new world, on one host, of the ranks that share `store`."""
    turn = (int(store.add("syncprims/joined", 1)) - 1) // world_size  # earlier groups used it, too
    run_id = bytes(store.compare_set(f"syncprims/{turn}", "", uuid.uuid4().hex)).decode()
    return {
        "SYNCPRIMS_RANK": str(rank),
        "SYNCPRIMS_WORLD_SIZE": str(world_size),
        "SYNCPRIMS_RUN_ID": run_id,
        "SYNCPRIMS_BACKEND": "single" if world_size == 1 else "file",
    }


def start_world(store: object, rank: int, world_size: int) -> RunningWorld:
    """Start a world of the ranks that share `store`: at its server, if it has one."""
    variables = make_variables(store, rank, world_size)
    server = find_backing_store(store)
    if world_size > 1 and isinstance(server, dist.TCPStore):
        variables |= {
            "SYNCPRIMS_BACKEND": "gloo",
            "MASTER_ADDR": server.host,
            "MASTER_PORT": str(server.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # it is served already
        }
    return runtime.join_as(variables)


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
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = world.group.broadcast(store and store.port, name="open_process_group")
        if own and store is None:
            store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    if own:
        dist.init_process_group(NAME, store=store, rank=world.rank, world_size=world.world_size)
        at_end.callback(_close)
    world.group.barrier("open_process_group")  # a rank that leaves at once would end the store


def _close() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
