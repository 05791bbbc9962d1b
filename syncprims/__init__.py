"""Synchronization primitives for distributed training scripts, with interchangeable backends.

Nothing happens on import. The first primitive starts the world from the environment; which backend
it runs on is chosen by ``SYNCPRIMS_BACKEND``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncprims._api.collectives import all_gather as all_gather
from syncprims._api.collectives import all_ranks as all_ranks
from syncprims._api.collectives import all_reduce as all_reduce
from syncprims._api.collectives import any_rank as any_rank
from syncprims._api.collectives import assert_same as assert_same
from syncprims._api.collectives import barrier as barrier
from syncprims._api.collectives import broadcast as broadcast
from syncprims._api.collectives import get_local_rank as get_local_rank
from syncprims._api.collectives import get_local_world_size as get_local_world_size
from syncprims._api.collectives import get_node_rank as get_node_rank
from syncprims._api.collectives import get_num_nodes as get_num_nodes
from syncprims._api.collectives import get_rank as get_rank
from syncprims._api.collectives import get_world_size as get_world_size
from syncprims._api.collectives import group as group
from syncprims._api.collectives import in_turn as in_turn
from syncprims._api.collectives import is_last as is_last
from syncprims._api.collectives import is_local_main as is_local_main
from syncprims._api.collectives import is_main as is_main
from syncprims._api.collectives import main_first as main_first
from syncprims._api.collectives import split as split
from syncprims._api.decorators import on_last as on_last
from syncprims._api.decorators import on_local_main as on_local_main
from syncprims._api.decorators import on_local_rank as on_local_rank
from syncprims._api.decorators import on_main as on_main
from syncprims._api.decorators import on_rank as on_rank
from syncprims._api.output import get_logger as get_logger
from syncprims._api.output import print_main as print_main
from syncprims._api.output import progress as progress
from syncprims._api.trigger import Trigger as Trigger
from syncprims._api.trigger import check_trigger as check_trigger
from syncprims._api.trigger import set_trigger as set_trigger
from syncprims._world.group import Group as Group
from syncprims._world.runtime import current as current
from syncprims._world.runtime import init as init
from syncprims._world.runtime import shutdown as shutdown
from syncprims._world.version import version as version
from syncprims._world.world import World as World
from syncprims.errors import BackendUnavailable as BackendUnavailable
from syncprims.errors import CheckpointError as CheckpointError
from syncprims.errors import CollectiveMismatch as CollectiveMismatch
from syncprims.errors import ConcurrentCall as ConcurrentCall
from syncprims.errors import ConfigurationError as ConfigurationError
from syncprims.errors import EncodingError as EncodingError
from syncprims.errors import Failure as Failure
from syncprims.errors import ForkedProcess as ForkedProcess
from syncprims.errors import PeerFailed as PeerFailed
from syncprims.errors import PeerLost as PeerLost
from syncprims.errors import RankMismatch as RankMismatch
from syncprims.errors import SyncError as SyncError
from syncprims.errors import SyncTimeout as SyncTimeout
from syncprims.errors import WorldClosed as WorldClosed
from syncprims.interface import Topology as Topology

__all__ = [  # noqa: RUF022 - in the order of the reference
    "init", "shutdown", "current", "World", "Topology", "version",
    "get_rank", "get_world_size", "get_local_rank", "get_local_world_size", "get_node_rank",
    "get_num_nodes", "is_main", "is_local_main", "is_last",
    "barrier", "broadcast", "all_gather", "all_reduce", "any_rank", "all_ranks", "assert_same",
    "group", "Group", "main_first", "in_turn",
    "on_main", "on_local_main", "on_last", "on_rank", "on_local_rank", "split",
    "Trigger", "set_trigger", "check_trigger", "print_main", "progress", "get_logger",
    "SyncError", "Failure", "ConfigurationError", "BackendUnavailable", "CollectiveMismatch",
    "RankMismatch", "SyncTimeout", "PeerLost", "PeerFailed", "EncodingError", "WorldClosed",
    "ForkedProcess", "ConcurrentCall", "CheckpointError",
]  # fmt: skip

__version__: str  #: the installed release

if not TYPE_CHECKING:  # where every misspelt name would become a str

    def __getattr__(name: str) -> str:
        if name == "__version__":  # reading it is slow: not at import
            return version()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
