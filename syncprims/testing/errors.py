"""How a test world can fail, in addition to the exceptions of its ranks."""

from __future__ import annotations

from syncprims.errors import CollectiveMismatch, SyncError


class DeadlockError(SyncError, RuntimeError):
    """No rank can continue and at least one waits; a line for each rank shows where it is."""


class StallError(SyncError, TimeoutError):
    """The world does not end, but there is no deadlock: a rank is busy, or stopped by a fault.

    The message contains the stacks of all ranks.
    """


class UnequalRounds(CollectiveMismatch):
    """All ranks ended without an error, but some made more calls than others."""


class RankDied(SyncError, RuntimeError):
    """The process of a rank ended without a result, and no other rank noticed it."""


class FaultMissed(SyncError, RuntimeError):
    """A fault never struck, although nothing ended the world early: no call matches its `at`.

    A test with such a fault could not fail.
    """


class UncontrolledError(SyncError, RuntimeError):
    """The same seed gave two different runs: the test depends on something else than the seed."""


class Killed(BaseException):
    """Ends the thread of a rank that a fault kills. Later calls of that rank raise it again."""


class WorldAborted(BaseException):
    """Ends the threads of all ranks when their world is given up."""


for _public in (DeadlockError, StallError, UnequalRounds, RankDied, FaultMissed, UncontrolledError):
    _public.__module__ = "syncprims.testing"  # tracebacks show the name that users import
