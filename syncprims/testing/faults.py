"""Faults: what can go wrong on a rank, at its k-th round or at a call of some name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from syncprims._protocol.validation import require
from syncprims.interface import Label

from .orders import Mode


class FaultTarget(NamedTuple):
    """The way in which faults happen to a rank; here the rank is this process."""

    kill: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL)
    stop: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGSTOP)
    sleep: Callable[[float], None] = time.sleep  #: for so many seconds of its time
    start_replacement: Callable[[], None] = lambda: None  #: worlds of threads only
    #: Records for :func:`explore` that the rank accesses something that ranks share.
    access: Callable[[Hashable, Mode], None] = lambda thing, mode: None


#: The rank that runs in this context.
current_target: ContextVar[FaultTarget] = ContextVar(
    "syncprims_target", default=FaultTarget()  # noqa: B039 - it is immutable
)  # fmt: skip


def sleep(seconds: float) -> None:
    """Return after so many seconds of this rank's time: virtual in threads, else real."""
    current_target.get().sleep(seconds)


def access(thing: Hashable, *, write: bool = True) -> None:
    """Declare that this rank reads, or changes, a thing that ranks share: a file, a global.

    Call it just before. In a world of threads another rank may get the turn first, and
    ``explore(strategy="all")`` runs both orders of two accesses to an equal `thing` of which one is
    a write. Elsewhere it does nothing.
    """
    target = current_target.get()
    target.sleep(0.0)
    target.access(("declared", thing), "write" if write else "read")


@dataclass(frozen=True)
class Fault:
    """Something that happens to `rank` just before it posts to a round.

    `at` is the number of the round among all that this rank takes part in, from 1, or the name or
    kind of a call: ``at="epoch end"``, ``at="barrier"``. It happens once.

    :raises ValueError: if there is no such round.
    :raises TypeError: if `at` is neither a number nor a name.
    """

    rank: int
    at: int | str = 1

    def __post_init__(self) -> None:
        if type(self.rank) is not int or type(self.at) not in (int, str):
            raise TypeError(
                f"{self}: rank is a whole number, and at is one or the name or kind of a call"
            )
        if self.rank < 0 or (isinstance(self.at, int) and self.at < 1):
            raise ValueError(f"{self}: ranks count from 0, and rounds from 1")


@dataclass(frozen=True)
class Kill(Fault):
    """The rank dies. In a world of threads its stack is unwound; the other ranks see it dead."""


@dataclass(frozen=True)
class Join(Fault):
    """Another rank starts to run the program, and joins in the next `reform`.

    It may do so in place of a lost rank: no world has more ranks than it began with. Its result
    comes after those of the first ranks, if it has joined. Worlds of threads only.
    """


@dataclass(frozen=True)
class Stop(Fault):
    """The rank is suspended and never continues, but it is not dead."""


@dataclass(frozen=True)
class Delay(Fault):
    """The rank comes late: by virtual seconds in a world of threads, by real ones in processes."""

    seconds: float = 1.0

    def __post_init__(self) -> None:
        """Check `seconds`."""
        super().__post_init__()
        require(self.seconds, (int, float), "seconds is a number")
        if not self.seconds >= 0:
            raise ValueError(f"{self}: seconds are 0 or more")


@dataclass(frozen=True)
class Raise(Fault):
    """The call raises `error` on this rank."""

    error: BaseException | type[BaseException] = RuntimeError

    def __post_init__(self) -> None:
        """Check `error`."""
        super().__post_init__()
        if not issubclass(exception_type(self.error), BaseException):
            raise TypeError(f"{self}: error is an exception, or a class of them")


def exception_type(error: BaseException | type[BaseException]) -> type[Any]:
    """Return the class of `error`, which may be one itself."""
    return error if isinstance(error, type) else type(error)


def is_due(fault: Fault, number: int, label: Label) -> bool:
    """Return whether `fault` strikes its rank at the round of this number and label."""
    return fault.at in (number, label.name, label.kind)


def apply_fault(fault: Fault, target: FaultTarget) -> None:
    """Make `fault` happen to the rank that runs here."""
    match fault:
        case Kill():
            target.kill()
        case Stop():
            target.stop()
        case Delay():
            target.sleep(fault.seconds)
        case Join():
            target.start_replacement()
        case Raise():
            raise fault.error
        case _:
            raise NotImplementedError(f"{fault} is no Kill, Raise, Delay, Join or Stop")
