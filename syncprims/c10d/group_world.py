"""The world that a process group lives in: the one that runs, or one that the group starts.

And the other way round: the default group that a world opens.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from syncprims._world.nodes import identify_host
from syncprims._world.runtime import (
    current,
    find_world,
    get_settings,
    join_as,
    keep_until_exit,
    leave_group_world,
    names_backend,
)
from syncprims.errors import ConfigurationError, SyncTimeout

from .torch_internals import NAME, dist, find_backing_store, is_rendezvous_replaced

if TYPE_CHECKING:
    from contextlib import ExitStack

    from syncprims._world.world import World

_LOOK_EVERY = 0.005  # seconds between two looks into the store


class GroupWorld:
    """A world, and whether it ends with the default process group."""

    def __init__(self, world: World, *, started: bool) -> None:
        self.world = world
        self._started = started

    def end(self) -> None:
        """End the world, if the process group has started it."""
        if self._started:
            self._started = False
            leave_group_world(self.world)


def join_group_world(store: Any, rank: int, world_size: int) -> GroupWorld:
    """Return the world of a default process group.

    It is the one that runs. If there is none, it is started: by the environment, if that names a
    backend; else as the store says, which all ranks of the group share. On one host they meet in
    shared memory, and several hosts meet at the server of that store.

    :raises ConfigurationError: if the world has other numbers than the group.
    """
    _keep_server(store)
    world, started = find_world(), False
    if world is None:
        started = True
        world = current() if names_backend() else _start(store, rank, world_size)
    if (world.rank, world.world_size) != (rank, world_size):
        found = GroupWorld(world, started=started)
        found.end()
        raise ConfigurationError(
            f"init_process_group({NAME!r}) with rank={rank} and world_size={world_size}: the world "
            f"of this process has rank={world.rank} and world_size={world.world_size}. Give both "
            f"the same numbers, or call shutdown() first",
            rank=world.rank,
        )
    return GroupWorld(world, started=started)


def _keep_server(store: Any) -> None:
    """Keep the server of the store until this process ends.

    Otherwise a rank that initializes again could meet the server of the group before, which is
    about to end on rank 0, and the two would wait for each other. A second store of the same port
    shares the server that is there.
    """
    backing = find_backing_store(store)
    if isinstance(backing, dist.TCPStore):
        keep_until_exit((backing.host, backing.port), backing)


def _start(store: Any, rank: int, world_size: int) -> World:
    """Start a world of the ranks that share `store`."""
    turn = (int(store.add("syncprims/joined", 1)) - 1) // world_size  # earlier groups used it, too
    prefix = f"syncprims/{turn}"
    host = identify_host()
    if rank == 0:
        store.set(f"{prefix}/run", uuid.uuid4().hex)
    store.set(f"{prefix}/host/{rank}", host)
    hosts = _read_all(store, [f"{prefix}/host/{other}" for other in range(world_size)])
    variables = {
        "SYNCPRIMS_RANK": str(rank),
        "SYNCPRIMS_WORLD_SIZE": str(world_size),
        "SYNCPRIMS_RUN_ID": _read_all(store, [f"{prefix}/run"])[0],
        "SYNCPRIMS_BACKEND": "single" if world_size == 1 else "file",
    }
    if len(set(hosts)) > 1:
        server = find_backing_store(store)
        if not isinstance(server, dist.TCPStore):
            raise ConfigurationError(
                f"the ranks of init_process_group({NAME!r}) are on several hosts, and their store "
                f"is a {type(server).__name__}: they meet at a TCPStore only. Initialize with "
                f"env:// or tcp://, or start the ranks with torchrun"
            )
        variables |= {
            "SYNCPRIMS_BACKEND": "torch",
            "MASTER_ADDR": server.host,
            "MASTER_PORT": str(server.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # it is served already
        }
    return join_as(variables)


def _read_all(store: Any, keys: list[str]) -> list[str]:
    """Return the values of all keys, once they are there.

    :raises SyncTimeout: naming the ranks whose keys are missing.
    """
    limit = get_settings().join_timeout
    begin = time.monotonic()
    while not store.check(keys):
        if time.monotonic() - begin > limit:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise SyncTimeout(
                f"init_process_group({NAME!r}) timed out after {limit:g} s: ranks {missing} did "
                f"not come. See what keeps them, or allow more: SYNCPRIMS_JOIN_TIMEOUT",
                call="init_process_group",
                missing=missing,
                waited=limit,
            )
        time.sleep(_LOOK_EVERY)
    return [bytes(store.get(key)).decode() for key in keys]


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
