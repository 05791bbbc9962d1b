"""How a world in a test went, rank by rank: what a verdict is made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from syncprims.errors import TORN

from .faults import Delay
from .probe import Seen

if TYPE_CHECKING:
    from .faults import Fault
    from .schedules import Seed

#: ``left``: it had not ended when the world was given up. ``died``: its process ended by itself,
#: without a result.
End = Literal["returned", "raised", "killed", "stopped", "died", "left"]


@dataclass
class Outcome:
    """How one rank ended."""

    rank: int
    end: End = "left"
    result: Any = None
    error: BaseException | None = None
    buried: str = ""  #: what it was handling when a call failed: that came first
    idle: bool = False  #: it could go on, and it was another's turn
    detail: str = ""  #: how a process ended
    calls: list[Seen] = field(default_factory=list[Seen])
    waits: Seen | None = None  #: where it waits, or waited for what never came
    consequence: bool = False  #: its error only reports another rank's
    torn: bool = False  #: it has seen a group break, and may have coped
    waited: bool = False  #: its error came while it waited
    struck: list[Fault] = field(default_factory=list["Fault"])

    @property
    def last(self) -> Seen | None:
        """The last call it came to."""
        return self.calls[-1] if self.calls else None


@dataclass
class Run:
    """How a whole world ended."""

    outcomes: list[Outcome]
    seed: Seed | None = None  #: of its schedule, where there is one
    stuck: bool = False  #: it came to a deadlock
    gave_up: str = ""  #: why it was given up, if it was
    stacks: str = ""  #: of all ranks, then
    steps: int = 0  #: decisions of the schedule
    faults: list[Fault] = field(default_factory=list["Fault"])  #: that were to happen
    trace: list[tuple[int, Seen]] = field(default_factory=list[tuple[int, Seen]])

    @property
    def struck(self) -> list[Fault]:
        """The faults that have happened."""
        return [fault for outcome in self.outcomes for fault in outcome.struck]

    @property
    def missed(self) -> list[Fault]:
        """The faults that have not happened, unless something may have ended the world before."""
        early = any(outcome.torn or outcome.end != "returned" for outcome in self.outcomes)
        if early or any(not isinstance(fault, Delay) for fault in self.struck):
            return []
        return [fault for fault in self.faults if fault not in self.struck]

    def path(self) -> list[tuple[int, tuple[int, ...], bytes]]:
        """Return who posted what, one after another: equal for equal runs."""
        return [(rank, seen.members, seen.label.encode()) for rank, seen in self.trace]


def buried(error: BaseException | None) -> str:
    """Return the headline of what was being handled when a call of this library failed; or "".

    As where a `finally` meets the others after an exception that they know nothing of.
    """
    if not isinstance(error, TORN):
        return ""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if not isinstance(error, TORN):
            return headline(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return ""


def headline(error: BaseException) -> str:
    """Return ``ValueError: bad value``, on one line."""
    try:
        first = str(error).strip().split("\n", 1)[0]
    except Exception:  # a user's __str__ must not hide the failure
        first = ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def is_consequence(error: BaseException | None) -> bool:
    """Tell whether an error only reports another rank's, or was raised over one that does.

    What a test asserts while it handles such a one is the test's own, and no consequence.
    """
    if isinstance(error, AssertionError):
        return False
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, TORN):
            return True
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
