"""Worlds for unit tests: they start in milliseconds, and report exactly what went wrong.

No other part of the library imports this package.
"""

from __future__ import annotations

from .contract import BackendContract
from .dealing import assert_dealt
from .errors import (
    DeadlockError,
    FaultMissed,
    RankDied,
    StallError,
    UncontrolledError,
    UnequalRounds,
    UnfinishedWork,
)
from .faults import Delay, Fault, Join, Kill, Raise, Stop, access, sleep
from .once_per_session import once_per_session
from .worlds import Explored, Point, every_point, explore, run_world

__all__ = [  # noqa: RUF022 - by what they are for
    "run_world", "explore", "Explored", "every_point", "Point", "access", "sleep",
    "Fault", "Kill", "Raise", "Delay", "Stop", "Join",
    "DeadlockError", "StallError", "UnequalRounds", "RankDied", "FaultMissed", "UnfinishedWork",
    "UncontrolledError",
    "once_per_session", "assert_dealt", "BackendContract",
]  # fmt: skip
