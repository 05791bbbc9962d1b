"""How a world went, rank by rank, and what an exception says about its cause."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard

from syncprims._protocol.call_site import users_part
from syncprims._protocol.deadlock import describe_group
from syncprims._protocol.threads import busy_threads
from syncprims.errors import TORN, SyncError
from syncprims.interface import Label

from .errors import Killed, WorldAborted
from .exception_transport import text_of
from .faults import Delay, Fault
from .scheduler import Seed

_HERE = str(Path(__file__).parent)
_CORE = str(Path(__file__).parent.parent)

#: ``left``: it had not ended when the world was given up. ``died``: its process ended by itself,
#: without a result.
End = Literal["returned", "raised", "killed", "stopped", "died", "left"]


class RecordedCall(NamedTuple):
    """One round that a rank came to."""

    members: tuple[int, ...]  #: of the board
    label: Label
    board: str = ""  #: its name

    @property
    def at(self) -> tuple[tuple[int, ...], str]:
        """The board: no other one has these members and this name."""
        return self.members, self.board

    @property
    def group(self) -> str:
        """The group whose board it is, as messages show it."""
        return describe_group(self.members, self.board)


@dataclass
class RankOutcome:
    """What one rank has done so far, and in the end, how it ended."""

    rank: int
    end: End = "left"
    result: Any = None
    error: BaseException | None = None
    handled: str = ""  #: the exception that it handled when a call of this library failed
    idle: bool = False  #: it could continue, but another rank had the turn
    detail: str = ""  #: how a process ended
    #: all except that of the start
    calls: list[RecordedCall] = field(default_factory=list[RecordedCall])
    waits: RecordedCall | None = None  #: where it waits, or waited without result
    waits_any: str = ""  #: the call that waits for any of several notes, or waited without result
    consequence: bool = False  #: its error only reports that of another rank
    torn: bool = False  #: it has seen a group break, and may have handled that
    struck: list[Fault] = field(default_factory=list[Fault])

    @property
    def last(self) -> RecordedCall | None:
        """The last call it came to."""
        return self.calls[-1] if self.calls else None

    @property
    def failed_in_call(self) -> bool:
        """Whether it has raised an error of this library, or a group of those."""
        found = leaves(self.error)
        return bool(found) and all(isinstance(leaf, SyncError) for leaf in found)

    @property
    def is_waiting(self) -> bool:
        """Whether it was in a call to the end; not if it has raised another error after it."""
        raised = self.end == "raised" and not self.failed_in_call
        waits = self.waits is not None or bool(self.waits_any)
        return self.end != "returned" and waits and not raised

    def run_program(
        self,
        fn: Callable[[], Any],
        world: AbstractContextManager[object],
        await_threads: Callable[[], None],
    ) -> None:
        """Run ``fn()`` as the program of this rank in `world`, and record how it ended.

        As when Python exits, its threads may still make calls before the rank leaves:
        ``await_threads()`` returns when they have ended.
        """
        try:
            with world:
                self.result = fn()
                await_threads()
            self.end = "returned"
        except BaseException as error:
            found = {type(leaf) for leaf in leaves(error)}
            if WorldAborted in found:
                pass
            elif Killed in found:
                self.end = "killed"
            elif isinstance(error, SystemExit) and not error.code:
                self.end = "returned"
            else:
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Record that the rank has raised `error`.

        Its traceback begins, and for a library error ends, in user code.
        """
        trace = error.__traceback__
        if isinstance(error, SyncError):
            served = sys.modules.get("syncprims.c10d.torch_internals")
            trace = users_part(trace, served.BETWEEN if served else ()) or trace
        first = trace
        while first is not None and first.tb_next is not None:
            name = first.tb_frame.f_code.co_filename
            if not name.startswith((_CORE, threading.__file__)):
                break
            first = first.tb_next
        self.end, self.error = "raised", error.with_traceback(first)
        self.consequence = is_consequence(error)
        # What it handled: a `finally` with a barrier, after an exception that others do not know.
        chain = _chain(error) if isinstance(error, TORN) else []
        self.handled = next((headline(one) for one in chain if not isinstance(one, TORN)), "")


@dataclass
class WorldRun:
    """How a whole world ended."""

    outcomes: list[RankOutcome]
    faults: Sequence[Fault]  #: that were to happen
    seed: Seed | None = None  #: of its schedule, where there is one
    gave_up: str = ""  #: why it was given up, if it was
    stacks: str = ""  #: of all ranks, then
    steps: int = 0  #: decisions of the schedule
    trace: list[tuple[int, RecordedCall]] = field(default_factory=list[tuple[int, RecordedCall]])

    def stopped(self, ranks: Sequence[int]) -> None:
        """Record that the world was given up because faults have stopped these ranks."""
        self.gave_up = (
            f"the others wait for ranks {ranks}, which are stopped but not dead: without a "
            f"timeout they wait for as long as that lasts"
        )

    def timed_out(self, limit: float, stacks: str) -> None:
        """Record that the world was given up after `limit` seconds."""
        self.stacks = stacks
        self.gave_up = (
            f"the world still runs after {limit:g} s of real time: a rank is busy outside of the "
            f"library's calls, or there is much to do. See where the ranks are, or allow more: "
            f"timeout="
        )

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

    def path(self) -> list[tuple[int, tuple[int, ...], str, bytes]]:
        """Return which rank posted what, in order: equal for equal runs."""
        return [(rank, c.members, c.board, c.label.encode()) for rank, c in self.trace]


def await_threads() -> None:
    """Return when no thread of this process is left for which Python would wait at its exit."""
    while any(
        thread.ident in busy_threads() and not thread.daemon
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
    ):
        time.sleep(0.005)


# -- exceptions ------------------------------------------------------------------------------------


def _chain(error: BaseException) -> list[BaseException]:
    """Return `error`, what it was raised from or while handling, and so on."""
    chain: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and all(found is not one for one in chain):
        chain.append(found)
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return chain


def _is_group(error: BaseException | None) -> TypeGuard[BaseExceptionGroup[BaseException]]:
    return isinstance(error, BaseExceptionGroup)


def leaves(error: BaseException | None) -> list[BaseException]:
    """Return `error`, or the exceptions in it if it is a group, as of tasks that run together."""
    if _is_group(error):
        return [leaf for one in error.exceptions for leaf in leaves(one)]
    return [] if error is None else [error]


def is_consequence(error: BaseException) -> bool:
    """Return whether an error only reports that of another rank, or was raised over one that does.

    A group is one if all in it are. What a test asserts while it handles such an error is the
    test's own, and no consequence.
    """
    return not isinstance(error, AssertionError) and any(
        isinstance(one, TORN) or (_is_group(one) and all(map(is_consequence, one.exceptions)))
        for one in _chain(error)
    )


def headline(error: BaseException) -> str:
    """Return ``ValueError: bad value``, on one line."""
    first = text_of(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def trim_stack(stack: Sequence[str]) -> list[str]:
    """Return the lines of a stack, outermost first, from the user's first to the user's last."""
    starts = [i for i, line in enumerate(stack) if _HERE in line and "run_program" in line]
    rest = list(stack[max(starts, default=-1) + 1 :])
    backends = getattr(sys.modules.get("syncprims.backends"), "__file__", None) or _HERE
    ours = [f'"{path}' for path in (_CORE, str(Path(backends).parent), threading.__file__)]
    while rest and any(path in rest[-1] for path in ours):
        rest.pop()
    return rest or ["  in the library"]
