"""What can be made to go wrong on a rank, at its k-th round or at a call of a name."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from syncprims._protocol.validation import require

if TYPE_CHECKING:
    from syncprims.interface import Label


class Victim(Protocol):
    """What can be done to a rank, in whatever kind of world."""

    def kill(self) -> None:
        """End it without a word, as SIGKILL does."""
        ...

    def stop(self) -> None:
        """Let it never go on, as SIGSTOP does."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let it come later."""
        ...


here: ContextVar[Victim | None] = ContextVar("syncprims_victim", default=None)


def sleep(seconds: float) -> None:
    """Return when so much time has passed for this rank: virtual in threads, else real."""
    rank = here.get()
    if rank is None:
        time.sleep(seconds)
    else:
        rank.sleep(seconds)


@dataclass(frozen=True)
class Fault:
    """Something that happens to `rank` just before it posts to a round.

    `at` is the number of the round among all that this rank takes part in, from 1, or the name or
    kind of a call: ``at="epoch end"``, ``at="barrier"``. It happens once.

    :raises ValueError: if there is no such round.
    :raises TypeError: if it is neither a number nor a name.
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

    def strikes(self, rank: int, number: int, label: Label) -> bool:
        """Tell whether it happens to this rank at this round."""
        if rank != self.rank:
            return False
        return (
            number == self.at if isinstance(self.at, int) else self.at in (label.name, label.kind)
        )

    def do(self, victim: Victim) -> None:
        """Let it happen."""
        raise NotImplementedError


@dataclass(frozen=True)
class Kill(Fault):
    """The rank dies. In a world of threads its stack is unwound, but it is dead for the others."""

    def do(self, victim: Victim) -> None:
        """Let it happen."""
        victim.kill()


@dataclass(frozen=True)
class Stop(Fault):
    """The rank is stopped and never goes on, but is not dead."""

    def do(self, victim: Victim) -> None:
        """Let it happen."""
        victim.stop()


@dataclass(frozen=True)
class Delay(Fault):
    """The rank comes late: by virtual seconds in a world of threads, by real ones in processes."""

    seconds: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        super().__post_init__()
        require(self.seconds, (int, float), "seconds is a number")
        if not self.seconds >= 0:
            raise ValueError(f"{self}: seconds are 0 or more")

    def do(self, victim: Victim) -> None:
        """Let it happen."""
        victim.sleep(self.seconds)


def kind_of(error: BaseException | type[BaseException]) -> type[Any]:
    """Return the class of what is raised."""
    return error if isinstance(error, type) else type(error)


@dataclass(frozen=True)
class Raise(Fault):
    """The call raises `error` on this rank."""

    error: BaseException | type[BaseException] = RuntimeError

    def __post_init__(self) -> None:
        """Refuse what cannot be raised."""
        super().__post_init__()
        if not issubclass(kind_of(self.error), BaseException):
            raise TypeError(f"{self}: error is an exception, or a class of them")

    def do(self, victim: Victim) -> None:
        """Let it happen."""
        raise self.error
