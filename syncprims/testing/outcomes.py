"""The outcomes of the ranks of a world, from which a test gets results or one exception.

When one rank raises, the others raise errors that report it. So the ranks' exceptions are sorted by
type, not by time: a *consequence* reports another rank, and everything else is a *cause*. Causes
are raised, and consequences are noted on them.

A world in which ranks wait forever has consequences only. There are two cases, and both end as one
`DeadlockError`, which shows where every rank is:

- A rank waits for one that has ended, such as one that skipped a barrier. Its board reports that
  the other has finished, and the call raises `PeerLost`, as in production.
- Ranks wait for each other. In threads the scheduler shows, at once, that no rank can continue; in
  processes the ranks find it out as in production, only sooner. The calls raise
  `CollectiveMismatch`, which lists these ranks as missing.

A program that handles these errors itself ends well, as it would in production.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from syncprims._protocol.call_site import users_part
from syncprims._protocol.deadlock import describe_group
from syncprims._protocol.diagnosis import CURE_MISMATCH
from syncprims._world.exit_hooks import reason
from syncprims.errors import (
    TORN,
    CollectiveMismatch,
    PeerFailed,
    PeerLost,
    SyncError,
    UnequalCallSites,
    chain_of,
    is_consequence,
    leaves,
)
from syncprims.interface import Label

from . import errors
from .faults import Delay, Fault, Kill, Raise, Stop, is_due
from .meetings import Line, RecordedCall, find_meetings, group_calls, iterate_rounds
from .rank_threads import StartedThreads, rank_threads
from .scheduler import Seed

E = TypeVar("E", bound=BaseException)

_HERE = str(Path(__file__).parent)
_CORE = str(Path(__file__).parent.parent)
_SHOWN = 8  # calls of a rank, where they are listed
#: For errors of torch, by a part of their texts.
_ADVICE = {
    "rendezvous: environment variable": (
        "torch.distributed works in a test world if torch=True is given"
    ),
    "autograd's threading in combination with fork": (
        "this process had trained before the world was forked from it: run the test in a process "
        "of pytest of its own, or with kind='threads'"
    ),
}

#: ``left``: it had not ended when the world was given up. ``died``: its process ended by itself,
#: without a result.
End = Literal["returned", "raised", "killed", "stopped", "died", "left"]


# -- what an exception says ------------------------------------------------------------------------


def _first_cause(errors: Sequence[BaseException]) -> BaseException:
    """Return the first that is no consequence, or else the first."""
    return next((error for error in errors if not is_consequence(error)), errors[0])


def headline(error: BaseException) -> str:
    """Return ``ValueError: bad value``, on one line."""
    first = errors.text_of(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


# -- how ranks end ---------------------------------------------------------------------------------


@dataclass
class RankOutcome:
    """The calls that one rank has made so far, and its end."""

    rank: int
    end: End = "left"
    result: Any = None
    error: BaseException | None = None
    consequence: bool = False  #: its error only reports that of another rank
    handled: str = ""  #: the exception that it handled when a call of this library failed
    detail: str = ""  #: how a process died, or what a rank does that has not ended
    #: all except that of the start
    calls: list[RecordedCall] = field(default_factory=list[RecordedCall])
    #: where each of its threads, by their native numbers, waits or waited without result, and
    #: whether nothing but a note ends that; a text if it waits for any of several notes
    waiting: dict[int, tuple[RecordedCall | str, bool]] = field(
        default_factory=dict[int, tuple[RecordedCall | str, bool]]
    )
    torn: bool = False  #: it has seen a group break, and may have handled that
    struck: list[Fault] = field(default_factory=list[Fault])

    def take(self, event: Literal["call", "fault", "wait"], fact: Any) -> None:
        """Record a step of the rank: a call, a fault, or a wait."""
        match event:
            case "call":
                self.calls.append(fact)
            case "fault":
                self.struck.append(fact)
                if isinstance(fact, Kill | Stop):
                    self.end = "killed" if isinstance(fact, Kill) else "stopped"
            case "wait":
                thread, waits, only_notes = fact
                self.waiting.pop(thread, None)
                if waits is not None:
                    self.waiting[thread] = waits, only_notes

    @property
    def waits(self) -> RecordedCall | str | None:
        """Where it waits, or waited without result: its latest wait."""
        return next((waits for waits, _ in reversed(self.waiting.values())), None)

    @property
    def waits_for_notes(self) -> bool:
        """Whether nothing but a note ends that wait."""
        return next((only_notes for _, only_notes in reversed(self.waiting.values())), False)

    @property
    def failed_in_call(self) -> bool:
        """Whether the rank has raised an error of this library, or a group of such errors."""
        raised = leaves(self.error)
        return bool(raised) and all(isinstance(leaf, SyncError) for leaf in raised)

    @property
    def is_waiting(self) -> bool:
        """Whether the rank ended in a call, and raised no other error after it."""
        return self.waits is not None and (self.end == "left" or self.failed_in_call)

    def run_program(
        self,
        fn: Callable[[], Any],
        world: AbstractContextManager[object],
        await_threads: Callable[[], None],
        threads: StartedThreads,
    ) -> None:
        """Run ``fn()`` as the program of this rank in `world`, and record how it ended.

        As when Python exits, its threads may still make calls before the rank leaves:
        ``await_threads()`` returns when they have ended.
        """
        rank_threads.set(threads)

        def run() -> None:
            self.result = fn()
            await_threads()
            if threads.errors:
                raise threads.errors[0]

        try:
            with world:
                errors.call_presentably(run)
            self.end = "returned"
        except BaseException as error:
            # A world may be given up where an error of Python's own follows from that.
            kinds = {type(link) for leaf in leaves(error) for link in chain_of(leaf)}
            if errors.WorldAborted in kinds:
                pass
            elif errors.Killed in kinds:
                self.end = "killed"
            elif reason(error) is None:
                self.end = "returned"
            else:
                self.fail(_first_cause([error, *threads.errors]))

    def fail(self, error: BaseException) -> None:
        """Record that the rank has raised `error`.

        Its traceback begins in user code, and ends there if the library has raised the error.
        """
        for text, advice in _ADVICE.items():
            if text in errors.text_of(error):
                add_note(error, advice)
        trace = error.__traceback__
        raised_in = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)][-1:]
        refused = isinstance(error, ValueError) and "".join(raised_in).startswith(_CORE)
        if isinstance(error, SyncError) or refused:
            served = sys.modules.get("syncprims.c10d.torch_internals")
            trace = users_part(trace, served.BETWEEN if served else ()) or trace
        first = trace
        while first is not None and first.tb_next is not None:
            name = first.tb_frame.f_code.co_filename
            if not name.startswith((_CORE, threading.__file__)):
                break
            first = first.tb_next
        self.end, self.error = "raised", BaseException.with_traceback(error, first)
        self.consequence = is_consequence(error)
        # What it handled: a `finally` with a barrier, after an exception that others do not know.
        chain = chain_of(error) if isinstance(error, TORN) else []
        handled = [link for link in chain if not isinstance(link, TORN)]
        self.handled = headline(handled[0]) if handled else ""


@dataclass
class WorldRun:
    """The outcome of a whole world."""

    outcomes: list[RankOutcome]
    faults: Sequence[Fault]  #: that were to happen
    seed: Seed | None = None  #: of its schedule, where there is one
    gave_up: str = ""  #: why it was given up, if it was
    is_deadlock: bool = False  #: that is why
    stacks: str = ""  #: of all ranks, then
    steps: int = 0  #: decisions of the schedule
    trace: list[tuple[int, RecordedCall]] = field(default_factory=list[tuple[int, RecordedCall]])
    #: Where ranks have lost the turn, which no schedule has decided.
    undecided: Mapping[int, str] = field(default_factory=dict[int, str])

    def stood_still(self, stopped: Sequence[int]) -> None:
        """Record that no rank goes on, though faults have stopped only these."""
        self.gave_up = "no rank goes on: what one waits for, no thread of this process can do"
        self.is_deadlock = not stopped
        if stopped:
            self.gave_up = (
                f"the others wait for ranks {stopped}, which are stopped but not dead: without a "
                f"timeout they wait for as long as that lasts"
            )

    def timed_out(self, limit: float, stacks: Mapping[int, Sequence[str]]) -> None:
        """Record that the world was given up after `limit` seconds.

        `stacks` has the lines of the stacks of ranks, outermost first.
        """
        self.stacks = "\n".join(
            "\n".join([f"stack of rank {rank}:", *map(str.rstrip, _trim_stack(lines))])
            for rank, lines in stacks.items()
        )
        self.gave_up = (
            f"the world still runs after {limit:g} s of real time: a rank is busy outside of the "
            f"library's calls, or there is much to do. See where the ranks are, or allow more: "
            f"timeout=. Ranks that wait for each other in C may need kind='processes'"
        )

    @property
    def uncontrolled(self) -> str:
        """Why a seed did not decide the order; "" if it did."""
        places = "; ".join(f"rank {rank} {place}" for rank, place in self.undecided.items())
        return places and f"the order was not decided by the seed: {places}"

    @property
    def calls(self) -> dict[int, list[RecordedCall]]:
        """The calls of each rank."""
        return {outcome.rank: outcome.calls for outcome in self.outcomes}

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


def _trim_stack(stack: Sequence[str]) -> list[str]:
    """Return the lines of a stack, outermost first, from the user's first to the user's last."""
    starts = [i for i, line in enumerate(stack) if _HERE in line and "run_program" in line]
    rest = list(stack[max(starts, default=-1) + 1 :])
    backends = getattr(sys.modules.get("syncprims.backends"), "__file__", None) or _HERE
    ours = [f'"{path}' for path in (_CORE, str(Path(backends).parent), threading.__file__)]
    for end in (0, -1):
        while rest and any(path in rest[end] for path in ours):
            rest.pop(end)
    return rest or ["  in the library"]


# -- what is raised --------------------------------------------------------------------------------


def results_of(run: WorldRun, replay: str, *, equal_rounds: bool = True) -> list[Any]:
    """Return the result of each rank, or raise the error of the world; `replay` is noted on errors.

    With `equal_rounds`, ranks must have made as many calls as the others, and calls without a name
    that met from different lines are a warning.

    The errors are removed from the run. The frames of an error refer to the run, and such a cycle
    would keep all variables until the garbage collector runs.
    """
    __tracebackhide__ = True
    error: BaseException | None = None
    try:
        if equal_rounds:
            _warn_of_lines(run, replay)
        error = _find_error(run, equal_rounds=equal_rounds)
        if error is not None:
            raise add_note(add_note(error, replay), run.uncontrolled)
    finally:
        error = None  # this frame belongs to its traceback
        for outcome in run.outcomes:
            outcome.error = None
    return [outcome.result for outcome in run.outcomes]


def _find_error(run: WorldRun, *, equal_rounds: bool) -> BaseException | None:
    """Return the error of the world; None if all is well."""
    failed = [outcome for outcome in run.outcomes if outcome.error is not None]
    causes = [outcome for outcome in failed if not outcome.consequence]
    if causes:
        return _join_causes(run, causes)
    if run.gave_up:
        text = f"{run.gave_up}\n{_all_lines(run)}\n{run.stacks}".rstrip()
        return errors.DeadlockError(text) if run.is_deadlock else errors.StallError(text)
    if failed:
        return _choose_consequence(run, failed)
    # Whatever is known of its end: a rank that did not return did not pass.
    passed = ("returned", "killed", "stopped")
    died = [outcome.rank for outcome in run.outcomes if outcome.end not in passed]
    if died:
        return errors.RankDied(
            f"{_named(died)} died without a result\n{_all_lines(run)}\n"
            f"To let a rank die in a test, use a fault: Kill(rank=..., at=...).",
            rank=died[0],
        )
    if not equal_rounds or run.struck or any(outcome.torn for outcome in run.outcomes):
        return None
    if any(len(set(map(len, calls))) > 1 for _, calls in group_calls(run.calls)):
        what = "all ranks finished, but not with the same calls"
        return errors.UnequalRounds(_described(what, run))
    return None


def _warn_of_lines(run: WorldRun, replay: str) -> None:
    """Warn of calls without a name that met from different lines, once for each set of lines."""
    __tracebackhide__ = True
    registry = globals().setdefault("__warningregistry__", {})
    seen: set[frozenset[Line]] = set()
    for one in find_meetings(run.calls):
        lines = frozenset(one.lines.values())
        if not one.is_doubtful or lines in seen:
            continue
        seen.add(lines)
        shown = "\n".join(f"  {_named(ranks)}: {text}" for text, ranks in one.places.items())
        text = (
            f"ranks made the same call on different lines (round {one.number}"
            f"{_of_group(' of', one.board, run)}):\n{shown}\n"
            f"If these are different calls, they are paired wrongly, and their values are mixed "
            f"up. Give each call a name=: calls of different names never meet. If they are one "
            f"call in both branches (`if is_main(): ...; barrier()` and `else: barrier()`), "
            f"nothing is wrong: give them one name=, or make the call once, after the branch."
        )
        at = max(one.lines.items())[1]
        try:
            warnings.warn_explicit(text, UnequalCallSites, at.path, at.number, registry=registry)
        except UnequalCallSites as error:
            raise add_note(error, replay) from None


def _join_causes(run: WorldRun, causes: Sequence[RankOutcome]) -> BaseException:
    """Return the lowest rank's cause, or a group, in the order of rounds, if the types differ."""
    # pytest's skip and xfail are statements of the test, and no failures.
    pytests = sys.modules.get("_pytest.outcomes")
    skips = (pytests.Skipped, pytests.XFailed) if pytests is not None else ()
    real = [outcome for outcome in causes if not isinstance(outcome.error, skips)] or causes
    # By name: a class that is made in a function is another one each time.
    if len({(type(o.error).__module__, type(o.error).__qualname__) for o in real}) == 1:
        return _with_report(real[0], run, [real[0].rank])
    real = sorted(real, key=lambda outcome: (len(outcome.calls), outcome.rank))
    ranks = [outcome.rank for outcome in real]
    text = f"{_named(ranks)} of {len(run.outcomes)} failed independently"
    return BaseExceptionGroup(text, [_with_report(outcome, run, ranks) for outcome in real])


def _choose_consequence(run: WorldRun, failed: Sequence[RankOutcome]) -> BaseException:
    """Return a `DeadlockError`, or else what the ranks report: the death of a rank."""
    for outcome in failed:
        is_deadlock = any(_is_deadlock(leaf, outcome, run) for leaf in leaves(outcome.error))
        if outcome.error is not None and outcome.is_waiting and is_deadlock:
            # One report: its lines say where all ranks are, and more than this rank's error.
            return _deadlock(run).with_traceback(outcome.error.__traceback__)
    # A `PeerFailed` reports the error of another rank, which that rank itself has raised.
    first = min(failed, key=lambda o: (not o.handled, isinstance(o.error, PeerFailed), o.rank))
    return _with_report(first, run, [first.rank])


def _is_deadlock(error: BaseException, outcome: RankOutcome, run: WorldRun) -> bool:
    """Return whether this rank has raised `error` because it waited for notes that never come."""
    if isinstance(error, PeerLost) and error.rank is not None:
        # The steps of a `reform` are calls of no world.
        world = next((call.world for call in reversed(outcome.calls) if call.world), ())
        return run.outcomes[world[error.rank] if world else error.rank].end == "returned"
    return isinstance(error, CollectiveMismatch) and bool(error.missing)  # a cycle of waits


def _deadlock(run: WorldRun) -> errors.DeadlockError:
    waiting = [o.rank for o in run.outcomes if o.is_waiting]
    done = [o.rank for o in run.outcomes if o.end == "returned"]
    verb = "waits" if len(waiting) == 1 else "wait"
    end = f"; {_named(done)} {'has' if len(done) == 1 else 'have'} finished" if done else ""
    what = f"{_named(waiting)} of {len(run.outcomes)} {verb} and can never go on{end}"
    return errors.DeadlockError(
        _described(what, run), rank=waiting[0], missing=done, arrived=waiting
    )


def check_faults_struck(run: WorldRun, missed: Sequence[Fault]) -> None:
    """Raise `FaultMissed` if there are faults that should have struck."""
    __tracebackhide__ = True
    if missed:
        fault = missed[0]
        calls = run.outcomes[fault.rank].calls
        count = f"{len(calls)} round{'s' * (len(calls) > 1)}"
        texts = list(dict.fromkeys(_call(call, run) for call in calls))  # each call once
        shown = ", ".join(texts[:_SHOWN]) + (", ..." if len(texts) > _SHOWN else "")
        raise errors.FaultMissed(
            f"{fault} never happened, so it tested nothing: rank {fault.rank} "
            f"{f'came to {count}: {shown}' if calls else 'made no call'}. Set at= to the number "
            f"of a round, or to the name or kind of a call",
            rank=fault.rank,
        )


def _with_report(outcome: RankOutcome, run: WorldRun, shown: Container[int]) -> BaseException:
    """Return the exception of a rank; notes say which rank it was, and how the others ended.

    :param shown: ranks whose exceptions are raised, too.
    """
    error = outcome.error
    assert error is not None
    if len(run.outcomes) > 1 or run.seed is not None:
        lines = [f"rank {outcome.rank} of {len(run.outcomes)}: {_position(outcome, run)}"]
        for other in run.outcomes:
            if other.rank not in shown:
                ended = other.failed_in_call and _failed_in(other, run)
                lines.append(f"  rank {other.rank}: {ended or _position(other, run)}")
        where = _different_lines(run) if isinstance(error, CollectiveMismatch) else ""
        add_note(add_note(error, "\n".join(lines)), where)
    return error


def add_note(error: E, note: str) -> E:
    """Return `error` with this note, unless it is empty or there already."""
    with contextlib.suppress(BaseException):  # an exception may forbid it
        if note and note not in getattr(error, "__notes__", ()):
            BaseException.add_note(error, note)
    return error


# -- what is said ----------------------------------------------------------------------------------


def _described(what: str, run: WorldRun) -> str:
    parts = [what, _all_lines(run), _different_lines(run), _first_difference(run), CURE_MISMATCH]
    return "\n".join(part for part in parts if part)


def _all_lines(run: WorldRun) -> str:
    return "\n".join(f"  rank {o.rank}: {_position(o, run)}" for o in run.outcomes)


def _position(outcome: RankOutcome, run: WorldRun) -> str:
    """Return where a rank is, or how it ended."""
    last = _last_round(outcome, run)
    after = f"after its {last}" if last else "before its first call"
    match outcome.end:
        case "returned":
            return f"finished {after}" if last else "finished without a call"
        case "killed" | "stopped":
            return f"{outcome.end} by a fault at its {last}"
        case "died":
            return f"{outcome.detail or 'its process ended'}" + (f" {after}" if last else "")
        case "raised" if outcome.error is not None and not outcome.is_waiting:
            if outcome.failed_in_call and last:
                return f"raised {_failed_in(outcome, run)}"
            raises = [fault for fault in outcome.struck if isinstance(fault, Raise)]
            if any(is_due(fault, len(outcome.calls), outcome.calls[-1].label) for fault in raises):
                after = f"at its {last}"
            return f"raised {headline(outcome.error)} {after}"
        case _:
            pass
    if outcome.is_waiting and not outcome.detail:
        text = f"{outcome.waits} {after}" if isinstance(outcome.waits, str) else f"its {last}"
        return f"waits in {text}"
    return f"{outcome.detail or 'is busy'} {after}"


def _failed_in(outcome: RankOutcome, run: WorldRun) -> str:
    """Return the error of this library that a rank has raised, and its round; "" without one."""
    over = f", while it handled {outcome.handled}," if outcome.handled else ""
    last = _last_round(outcome, run)
    return f"{type(outcome.error).__name__}{over} in its {last}" if last else ""


def _last_round(outcome: RankOutcome, run: WorldRun) -> str:
    calls = outcome.calls
    return f"round {len(calls)}, {_call(calls[-1], run)}" if calls else ""


def _call(call: RecordedCall, run: WorldRun) -> str:
    return f"{call.label}{_of_group(' in', call.at, run)}"


def _of_group(word: str, board: tuple[tuple[int, ...], str], run: WorldRun) -> str:
    """Return `word` and the group of this board; "" if all ranks met there, and at no other."""
    size = len(run.outcomes)
    whole = {call.at for o in run.outcomes for call in o.calls if len(call.members) == size}
    return "" if whole == {board} else f"{word} group {describe_group(*board)}"


def _first_difference(run: WorldRun) -> str:
    """Return where ranks first made different calls, or one made none; "" if they never did."""
    waiting: dict[object, dict[str, list[int]]] = {}  # by ranks and call; by group
    for rank, outcome in enumerate(run.outcomes):
        if outcome.is_waiting and outcome.calls:
            last = outcome.calls[-1]
            groups = waiting.setdefault((last.members, last.label), {})
            groups.setdefault(describe_group(*last.at), []).append(rank)
    for groups in waiting.values():
        if len(groups) > 1:
            shown = ", and ".join(f"{_named(ranks)} in group {g}" for g, ranks in groups.items())
            return (
                f"first difference: the same call on {shown}. Groups of the same ranks must be "
                f"made and used in the same order on all of them"
            )
    for board, number, calls in iterate_rounds(run.calls):
        labels = {rank: call and call.label for rank, call in calls.items()}
        if len(set(labels.values())) > 1:
            shown = _grouped(labels)
            return f"first difference: round {number}{_of_group(' of', board, run)} is {shown}"
    return ""


def _different_lines(run: WorldRun) -> str:
    """Return where ranks first made the same call from different lines; "" if they never did."""
    one = next(find_meetings(run.calls), None)
    if one is None:
        return ""
    shown = ", ".join(f"{_named(ranks)} came from {text}" for text, ranks in one.places.items())
    where = f"round {one.number}{_of_group(' of', one.board, run)}"
    return f"first difference of lines: {where}: {shown}"


def _grouped(labels: Mapping[int, Label | None]) -> str:
    """Return ``barrier (a.py:3) on rank 0, and none on ranks [1, 2]``."""
    by_text: dict[str, list[int]] = {}
    for rank, label in labels.items():
        by_text.setdefault("none" if label is None else str(label), []).append(rank)
    return ", and ".join(f"{text} on {_named(ranks)}" for text, ranks in by_text.items())


def _named(ranks: Iterable[int]) -> str:
    """Return ``rank 2``, or ``ranks [1, 2]``."""
    found = sorted(ranks)
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {found}"
