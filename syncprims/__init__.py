"""Synchronization primitives for distributed training scripts, with interchangeable backends.

Nothing happens on import. The first primitive starts the world from the environment; which backend
it runs on is chosen by ``SYNCPRIMS_BACKEND``.
"""

from __future__ import annotations

from .errors import BackendUnavailable as BackendUnavailable
from .errors import CheckpointError as CheckpointError
from .errors import CollectiveMismatch as CollectiveMismatch
from .errors import ConcurrentCall as ConcurrentCall
from .errors import ConfigurationError as ConfigurationError
from .errors import EncodingError as EncodingError
from .errors import Failure as Failure
from .errors import ForkedProcess as ForkedProcess
from .errors import PeerFailed as PeerFailed
from .errors import PeerLost as PeerLost
from .errors import RankMismatch as RankMismatch
from .errors import SyncError as SyncError
from .errors import SyncTimeout as SyncTimeout
from .errors import WorldClosed as WorldClosed
from .execution import on_last as on_last
from .execution import on_local_main as on_local_main
from .execution import on_local_rank as on_local_rank
from .execution import on_main as on_main
from .execution import on_rank as on_rank
from .group import Group as Group
from .interface import Topology as Topology
from .membership import World as World
from .output import get_logger as get_logger
from .output import print_main as print_main
from .output import progress as progress
from .sync import all_gather as all_gather
from .sync import all_ranks as all_ranks
from .sync import all_reduce as all_reduce
from .sync import any_rank as any_rank
from .sync import assert_same as assert_same
from .sync import barrier as barrier
from .sync import broadcast as broadcast
from .sync import get_local_rank as get_local_rank
from .sync import get_local_world_size as get_local_world_size
from .sync import get_node_rank as get_node_rank
from .sync import get_num_nodes as get_num_nodes
from .sync import get_rank as get_rank
from .sync import get_world_size as get_world_size
from .sync import group as group
from .sync import in_turn as in_turn
from .sync import is_last as is_last
from .sync import is_local_main as is_local_main
from .sync import is_main as is_main
from .sync import main_first as main_first
from .sync import split as split
from .trigger import Trigger as Trigger
from .trigger import check_trigger as check_trigger
from .trigger import set_trigger as set_trigger
from .version import version as version
from .world import current as current
from .world import init as init
from .world import shutdown as shutdown
