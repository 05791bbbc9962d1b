"""Worlds for unit tests: they start in milliseconds, and report exactly what went wrong.

No other part of the library imports this package.
"""

from __future__ import annotations

from .contract import BackendContract as BackendContract
from .errors import DeadlockError as DeadlockError
from .errors import FaultMissed as FaultMissed
from .errors import RankDied as RankDied
from .errors import StallError as StallError
from .errors import UncontrolledError as UncontrolledError
from .errors import UnequalRounds as UnequalRounds
from .faults import Delay as Delay
from .faults import Fault as Fault
from .faults import Kill as Kill
from .faults import Raise as Raise
from .faults import Stop as Stop
from .faults import sleep as sleep
from .once_per_session import once_per_session as once_per_session
from .worlds import Explored as Explored
from .worlds import Point as Point
from .worlds import every_point as every_point
from .worlds import explore as explore
from .worlds import run_world as run_world
