"""What a world in a test can end with, beside what its ranks raise."""

from __future__ import annotations

from syncprims.errors import CollectiveMismatch, SyncError


class DeadlockError(SyncError, RuntimeError):
    """Nobody can go on and somebody waits; a line for each rank says where."""


class StallError(SyncError, TimeoutError):
    """The world does not end, but not because ranks wait for each other: one is busy, or stopped.

    The stacks of all ranks are in the message.
    """


class UnequalRounds(CollectiveMismatch):
    """The ranks ended well, but some had made more calls than others."""


class RankDied(SyncError, RuntimeError):
    """The process of a rank ended without a result, and nobody else noticed."""


class FaultMissed(SyncError, RuntimeError):
    """A fault never struck, and nothing had ended the world before: its `at` is no such call.

    A test with such a fault could not fail.
    """


class UncontrolledError(SyncError, RuntimeError):
    """The same seed gave two different runs: something in the test is not decided by it."""


class Killed(BaseException):
    """Ends the thread of a rank that a fault kills. What it still calls raises this again."""


class WorldAborted(BaseException):
    """Ends the threads of ranks when their world is given up."""


for _kind in (DeadlockError, StallError, UnequalRounds, RankDied, FaultMissed, UncontrolledError):
    _kind.__module__ = "syncprims.testing"  # tracebacks show the name that users import
