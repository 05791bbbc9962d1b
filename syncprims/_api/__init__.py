"""The functions that users call, and all names of the package ``syncprims``."""

from __future__ import annotations

from syncprims._world.group import Group
from syncprims._world.runtime import current, init, shutdown
from syncprims._world.world import Change, World, version
from syncprims.errors import (
    BackendUnavailable,
    CheckpointError,
    CollectiveMismatch,
    ConcurrentCall,
    ConfigurationError,
    EncodingError,
    Evicted,
    Failure,
    ForkedProcess,
    PeerFailed,
    PeerLost,
    RankMismatch,
    SharedMemoryError,
    SyncError,
    SyncTimeout,
    SyncWarning,
    UnequalCallSites,
    WorldClosed,
)
from syncprims.interface import Topology

from .collectives import (
    all_gather,
    all_ranks,
    all_reduce,
    any_rank,
    assert_same,
    barrier,
    broadcast,
    get_local_rank,
    get_local_world_size,
    get_node_rank,
    get_num_nodes,
    get_rank,
    get_world_size,
    group,
    in_turn,
    is_last,
    is_local_main,
    is_main,
    main_first,
    split,
)
from .decorators import on_last, on_local_main, on_local_rank, on_main, on_rank
from .elastic import hand_over, reform
from .output import get_logger, print_main, progress
from .trigger import Trigger, check_trigger, set_trigger

__all__ = [  # noqa: RUF022 - in the order of the reference
    "init", "shutdown", "current", "World", "Topology", "version",
    "get_rank", "get_world_size", "get_local_rank", "get_local_world_size", "get_node_rank",
    "get_num_nodes", "is_main", "is_local_main", "is_last",
    "barrier", "broadcast", "all_gather", "all_reduce", "any_rank", "all_ranks", "assert_same",
    "group", "Group", "main_first", "in_turn",
    "on_main", "on_local_main", "on_last", "on_rank", "on_local_rank", "split",
    "reform", "Change", "hand_over",
    "Trigger", "set_trigger", "check_trigger", "print_main", "progress", "get_logger",
    "SyncError", "Failure", "ConfigurationError", "BackendUnavailable", "CollectiveMismatch",
    "RankMismatch", "SyncTimeout", "PeerLost", "PeerFailed", "Evicted", "EncodingError",
    "WorldClosed", "ForkedProcess", "ConcurrentCall", "CheckpointError", "SharedMemoryError",
    "SyncWarning", "UnequalCallSites",
]  # fmt: skip
