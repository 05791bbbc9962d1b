"""The errors of test worlds, and how exceptions of ranks reach another process."""

from __future__ import annotations

import builtins
import contextlib
import pickle
import sys
import traceback
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple, cast

from syncprims.errors import CollectiveMismatch, SyncError, describe, is_consequence, is_group


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


class UnfinishedWork(SyncError, RuntimeError):
    """A rank has not waited for a call of ``torch.distributed``, or used its tensors before."""


class UncontrolledError(SyncError, RuntimeError):
    """The same seed gave two different runs: the test depends on something other than the seed."""


class Killed(BaseException):
    """Ends the thread of a rank that a fault kills. Later calls of that rank raise it again."""


class WorldAborted(BaseException):
    """Ends the threads of all ranks when their world is given up."""


for _public in (
    DeadlockError, StallError, UnequalRounds, RankDied, FaultMissed, UnfinishedWork,
    UncontrolledError,
):  # fmt: skip
    _public.__module__ = "syncprims.testing"  # tracebacks show the name that users import


# -- exceptions for another process ----------------------------------------------------------------
# Not by `tblib`: it restores tracebacks, and not the exceptions whose pickles cannot be loaded.


_PYTESTS = "_pytest.outcomes"


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, or "" if that raises: a user's code must not hide the failure."""
    try:
        return str(error)
    except BaseException:
        return ""


def presentable(error: BaseException) -> BaseException:
    """Return `error`, or what stands for it if its own code raises where others look at it."""
    try:
        error.__traceback__ = error.__traceback__  # as `contextlib` does
        if not is_consequence(error):  # those of this library are made in great number
            traceback.format_exception(error)
        return error
    except WorldAborted:
        raise
    except BaseException:
        stand_in = RemoteError(": ".join(describe(error)))
        return stand_in.with_traceback(cast("Any", BaseException).__traceback__.__get__(error))


def call_presentably(fn: Callable[[], object]) -> None:
    """Call ``fn()``; what it raises is presentable."""
    try:
        fn()
        return
    except (Killed, WorldAborted):
        raise
    except BaseException as raised:
        error = presentable(raised)
    try:
        raise error  # not in the block above: what it stands for would be its context
    finally:
        del error  # its traceback has this frame


class RemoteError(Exception):
    """Stands for an exception of an unknown type, or one whose own code raises."""


class RemoteTraceback(Exception):
    """The traceback of an exception that was raised in another process."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


class PackedException(NamedTuple):
    """An exception as plain data."""

    module: str  #: of its type
    name: str  #: of its type, qualified
    text: str
    pickled: bytes  #: empty if it does not survive pickling
    traceback: str
    members: tuple[PackedException, ...] = ()  #: of a group that does not survive pickling

    def unpack(self) -> BaseException:
        """Return an exception of equal type and text; its cause shows the original traceback."""
        error: BaseException = RemoteError(f"{self.module}.{self.name}: {self.text}")
        with contextlib.suppress(BaseException):  # its own code raises, or its type is not here
            error = pickle.loads(self.pickled) if self.pickled else self._rebuild() or error
        cast("Any", BaseException).__cause__.__set__(error, RemoteTraceback(self.traceback))
        return presentable(error)

    def _rebuild(self) -> BaseException | None:
        """Return an exception of this type and text without calling its constructor."""
        cls = attrgetter(self.name)(sys.modules[self.module])
        if self.members:
            return cast("BaseException", cls(self.text, [m.unpack() for m in self.members]))
        if self.module == _PYTESTS:
            return cast("BaseException", cls(self.text))
        error: BaseException = cls.__new__(cls)
        error.args = (self.text,)
        return error if str(error) == self.text else None


def pack_exception(error: BaseException) -> PackedException:
    """Return `error` as plain data; :meth:`PackedException.unpack` restores it."""
    error = presentable(error)
    kind, pickled = type(error), b""
    with contextlib.suppress(BaseException):  # what its own code raises
        data = pickle.dumps(error)
        if type(pickle.loads(data)) is kind:
            pickled = data
    # The outcomes of pytest name another module.
    by_pytest = kind.__module__ == "builtins" and not hasattr(builtins, kind.__name__)
    module = _PYTESTS if by_pytest else kind.__module__
    members: tuple[PackedException, ...] = ()
    text = text_of(error)
    if is_group(error) and not pickled:
        text, members = error.message, tuple(map(pack_exception, error.exceptions))
    trace = "".join(traceback.format_exception(error))
    return PackedException(module, kind.__qualname__, text, pickled, trace, members)
