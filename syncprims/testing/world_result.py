"""What a test gets from a world: the result of each rank, or the one exception that says most.

When one rank raises, the others raise errors that report it. So the ranks' exceptions are sorted by
type, not by time: a *consequence* reports another rank, and everything else is a *cause*. Causes
are raised, and consequences are noted on them.

A world in which ranks wait forever has consequences only. There are two cases, and both end as one
`DeadlockError`, which shows where every rank is:

- A rank waits for one that has ended, such as one that skipped a barrier. Its board reports that
  the other has finished, and the call raises `PeerLost`, as in production.
- Ranks wait for each other. In threads the scheduler shows, at once, that no rank can continue; in
  processes the ranks find it out as in production, in about a second. The calls raise
  `CollectiveMismatch`, which lists these ranks as missing.

A program that handles these errors itself ends well, as it would in production.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from syncprims._protocol.deadlock import describe_group
from syncprims._protocol.diagnosis import CURE_MISMATCH
from syncprims.errors import CollectiveMismatch, PeerLost
from syncprims.interface import Label

from .errors import DeadlockError, FaultMissed, RankDied, StallError, UnequalRounds
from .faults import Fault, Raise, exception_type, is_due
from .outcomes import RankOutcome, RecordedCall, WorldRun, headline, leaves
from .probe import JOIN

E = TypeVar("E", bound=BaseException)

_SHOWN = 8  # calls of a rank, where they are listed


def results_of(run: WorldRun, replay: str) -> list[Any]:
    """Return the result of each rank, or raise why there is none; `replay` is noted on errors.

    The run has its errors no more then. The frames of an error refer to the run: in a cycle, they
    would keep all variables until the garbage collector runs.
    """
    __tracebackhide__ = True
    try:
        _raise_failures(run, replay)
    finally:
        for outcome in run.outcomes:
            outcome.error = None
    return [outcome.result for outcome in run.outcomes]


def _raise_failures(run: WorldRun, replay: str) -> None:
    """Raise what the world has failed with, if it has."""
    __tracebackhide__ = True
    failed = [outcome for outcome in run.outcomes if outcome.error is not None]
    causes = [outcome for outcome in failed if not outcome.consequence]
    if causes:
        _raise_causes(run, causes, replay)
    if run.gave_up:
        text = f"{run.gave_up}\n{_all_lines(run)}\n{run.stacks}".rstrip()
        raise add_note(StallError(text), replay)
    if failed:
        _raise_consequence(run, failed, replay)
    died = [outcome.rank for outcome in run.outcomes if outcome.end == "died"]
    if died:
        error = RankDied(
            f"{_named(died)} died without a result\n{_all_lines(run)}\n"
            f"To let a rank die in a test, use a fault: Kill(rank=..., at=...).",
            rank=died[0],
        )
        raise add_note(error, replay)
    if not run.struck and not any(outcome.torn for outcome in run.outcomes):
        _check_equal_rounds(run, replay)


def check_faults_struck(run: WorldRun, missed: Sequence[Fault]) -> None:
    """Raise `FaultMissed` if there are faults that should have struck."""
    __tracebackhide__ = True
    if missed:
        fault = missed[0]
        raise FaultMissed(
            f"{fault} never struck, and tests nothing: rank {fault.rank} "
            f"{_calls(run.outcomes[fault.rank], run)}. Set at= to the number of a round, or to the "
            f"name or kind of a call",
            rank=fault.rank,
        )


# -- what is raised --------------------------------------------------------------------------------


def _raise_causes(run: WorldRun, causes: Sequence[RankOutcome], replay: str) -> NoReturn:
    """Raise the lowest rank's cause, or a group, in the order of rounds, if the types differ."""
    __tracebackhide__ = True
    # pytest's skip and xfail are statements of the test, and no failures.
    pytests = sys.modules.get("_pytest.outcomes")
    skips = (pytests.Skipped, pytests.XFailed) if pytests is not None else ()
    real = [outcome for outcome in causes if not isinstance(outcome.error, skips)] or causes
    # By name: a class that is made in a function is another one each time.
    kinds = {(type(o.error).__module__, type(o.error).__qualname__) for o in real}
    if len(kinds) == 1:
        first = min(real, key=lambda outcome: outcome.rank)
        raise _with_report(first, run, [first.rank], replay)
    real = sorted(real, key=lambda outcome: (len(outcome.calls), outcome.rank))
    ranks = [outcome.rank for outcome in real]
    errors = [_with_report(outcome, run, ranks, "") for outcome in real]
    text = f"{_named(ranks)} of {len(run.outcomes)} failed independently"
    raise add_note(BaseExceptionGroup(text, errors), replay)


def _raise_consequence(run: WorldRun, failed: Sequence[RankOutcome], replay: str) -> NoReturn:
    """Raise a `DeadlockError`, or else what the ranks report: the death of a rank."""
    __tracebackhide__ = True
    for outcome in failed:
        error = outcome.error
        is_deadlock = any(_is_deadlock(leaf, run) for leaf in leaves(error))
        if error is not None and outcome.is_waiting and is_deadlock:
            error.__cause__ = None  # the lines of the deadlock say where it was, and more
            raise add_note(_deadlock(run), replay) from error
    first = min(failed, key=lambda outcome: (not outcome.handled, outcome.rank))
    raise _with_report(first, run, [first.rank], replay)


def _is_deadlock(error: BaseException, run: WorldRun) -> bool:
    """Return whether a rank has raised `error` because it waited for notes that never come."""
    if isinstance(error, PeerLost):
        return error.rank is not None and run.outcomes[error.rank].end == "returned"
    return isinstance(error, CollectiveMismatch) and bool(error.missing)  # a cycle of waits


def _deadlock(run: WorldRun) -> DeadlockError:
    waiting = [o.rank for o in run.outcomes if o.is_waiting]
    done = [o.rank for o in run.outcomes if o.end == "returned"]
    verb = "waits" if len(waiting) == 1 else "wait"
    end = f"; {_named(done)} {'has' if len(done) == 1 else 'have'} finished" if done else ""
    what = f"{_named(waiting)} of {len(run.outcomes)} {verb} and can never go on{end}"
    return DeadlockError(_described(what, run), rank=waiting[0], missing=done, arrived=waiting)


def _check_equal_rounds(run: WorldRun, replay: str) -> None:
    """Raise if ranks have ended well with different numbers of rounds in a group."""
    __tracebackhide__ = True
    counts: dict[tuple[tuple[int, ...], str], dict[int, int]] = {}
    for outcome in run.outcomes:
        for call in outcome.calls:
            of = counts.setdefault(call.at, dict.fromkeys(call.members, 0))
            of[outcome.rank] += 1
    if any(len(set(of.values())) > 1 for of in counts.values()):
        what = "all ranks finished, but not with the same calls"
        raise add_note(UnequalRounds(_described(what, run)), replay)


def _with_report(
    outcome: RankOutcome, run: WorldRun, shown: Container[int], replay: str
) -> BaseException:
    """Return the exception of a rank; notes say which rank it was, and how the others ended.

    :param shown: ranks whose exceptions are raised, too.
    """
    error = outcome.error
    assert error is not None
    if len(run.outcomes) > 1 or replay:
        lines = [f"rank {outcome.rank} of {len(run.outcomes)}: {_position(outcome, run)}"]
        lines += [f"  rank {o.rank}: {_end(o, run)}" for o in run.outcomes if o.rank not in shown]
        add_note(add_note(error, "\n".join(lines)), replay)
    return error


def add_note(error: E, note: str) -> E:
    """Return `error` with this note, unless it is empty or there already."""
    if note and note not in getattr(error, "__notes__", ()):
        with contextlib.suppress(Exception):  # an exception may forbid it
            error.add_note(note)
    return error


# -- what is said ----------------------------------------------------------------------------------


def _described(what: str, run: WorldRun) -> str:
    parts = [what, _all_lines(run), _first_difference(run), CURE_MISMATCH]
    return "\n".join(part for part in parts if part)


def _all_lines(run: WorldRun) -> str:
    return "\n".join(f"  rank {o.rank}: {_position(o, run)}" for o in run.outcomes)


def _position(outcome: RankOutcome, run: WorldRun) -> str:
    """Return where a rank is, or how it ended."""
    last = _last_round(outcome, run)
    after = f"after its {last}" if last else "before its first call"
    if outcome.end == "raised" and outcome.error is not None and not outcome.is_waiting:
        if last and outcome.failed_in_call:
            return f"raised {_error_name(outcome)} in its {last}"
        if last and _is_injected(outcome):
            after = f"at its {last}"
        return f"raised {headline(outcome.error)} {after}"
    if outcome.end == "returned":
        return f"finished {after}" if last else "finished without a call"
    if outcome.end in ("killed", "stopped"):
        return f"{outcome.end} by a fault at its {last}"
    if outcome.end == "died":
        return f"{outcome.detail or 'its process ended'}" + (f" {after}" if last else "")
    if outcome.is_waiting and outcome.waits_any:
        return f"waits in {outcome.waits_any} {after}"
    if outcome.is_waiting and outcome.waits is not None and outcome.waits.label.kind != JOIN:
        return f"waits in its {last}"
    return f"{'could go on, and is not on turn,' if outcome.idle else 'is busy'} {after}"


def _end(outcome: RankOutcome, run: WorldRun) -> str:
    """Return how a rank ended that is not the cause."""
    if outcome.failed_in_call and outcome.last:
        return f"{_error_name(outcome)} in its {_last_round(outcome, run)}"
    return _position(outcome, run)


def _last_round(outcome: RankOutcome, run: WorldRun) -> str:
    call = outcome.last
    return f"round {len(outcome.calls)}, {_call(call, run)}" if call else ""


def _call(call: RecordedCall, run: WorldRun) -> str:
    return str(call.label) if _is_only(call.at, run) else f"{call.label} in group {call.group}"


def _is_only(board: tuple[tuple[int, ...], str], run: WorldRun) -> bool:
    """Return whether this is the board of all ranks, and they have met at no other."""
    size = len(run.outcomes)
    whole = {call.at for one in run.outcomes for call in one.calls if len(call.members) == size}
    return whole == {board}


def _calls(outcome: RankOutcome, run: WorldRun) -> str:
    """Return ``came to 2 rounds: barrier (a.py:3), all_gather (a.py:4)``, each call once."""
    if not outcome.calls:
        return "made no call"
    calls = list(dict.fromkeys(_call(call, run) for call in outcome.calls))
    shown = ", ".join(calls[:_SHOWN]) + (", ..." if len(calls) > _SHOWN else "")
    count = len(outcome.calls)
    return f"came to {count} round{'s' * (count > 1)}: {shown}"


def _first_difference(run: WorldRun) -> str:
    """Return where ranks first made different calls, or one made none; "" if they never did.

    If all made the same calls, it is the first round that they reached from different lines: these
    may be correct, but are the place to look if they are not.
    """
    boards = {call.at for outcome in run.outcomes for call in outcome.calls}
    places = ""
    for members, board in sorted(boards, key=lambda at: (-len(at[0]), *at)):
        calls = {
            rank: [call.label for call in run.outcomes[rank].calls if call.at == (members, board)]
            for rank in members
        }
        only = _is_only((members, board), run)
        of = "" if only else f" of group {describe_group(members, board)}"
        for number in range(max(map(len, calls.values()))):
            labels = {r: c[number] if number < len(c) else None for r, c in calls.items()}
            shown = f"round {number + 1}{of} is {_grouped(labels)}"
            if len(set(labels.values())) > 1:
                return f"first difference: {shown}{places}"
            if not places and len({label.site for label in labels.values() if label}) > 1:
                places = f"\nfirst met from different lines: {shown}"
    return places.lstrip("\n")


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


def _error_name(outcome: RankOutcome) -> str:
    over = f", while it handled {outcome.handled}," if outcome.handled else ""
    return f"{type(outcome.error).__name__}{over}"


def _is_injected(outcome: RankOutcome) -> bool:
    """Return whether the error of a rank is one that a fault made its last call raise."""
    number, last = len(outcome.calls), outcome.last
    return last is not None and any(
        isinstance(fault, Raise)
        and isinstance(outcome.error, exception_type(fault.error))
        and is_due(fault, number, last.label)
        for fault in outcome.struck
    )
