"""What a test gets from a world: each rank's result, or the one exception that says most.

Ranks fail in company: one raises, and all others report that. So what ranks raised is sorted into
causes and consequences, by what the errors are and not by when they came: causes are raised, the
consequences noted. A world in which ranks wait for ever has consequences only; its cause is what
the ranks did, and that is what a `DeadlockError` shows.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from syncprims.errors import PeerLost, SyncError

from . import report
from .errors import DeadlockError, FaultMissed, RankDied, StallError, UnequalRounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .faults import Fault
    from .runs import Outcome, Run

E = TypeVar("E", bound=BaseException)

_CURE = (
    "Every rank must make the same calls in the same order: look for a branch, an early return or "
    "a loop count that differs between ranks."
)
_OUTCOMES = ("Skipped", "XFailed")  # pytest's: what a test says of itself, and no failure


def conclude(run: Run, replay: str = "") -> list[Any]:
    """Return each rank's result, or raise why there is none; `replay` says how to see it again."""
    __tracebackhide__ = True
    failed = [outcome for outcome in run.outcomes if outcome.error is not None]
    causes = [outcome for outcome in failed if not outcome.consequence]
    if causes:
        _raise_causes(run, causes, replay)
    if run.gave_up:
        text = f"{run.gave_up}\n{report.lines(run)}\n{run.stacks}".rstrip()
        raise _noted(StallError(text), replay)
    if failed:
        _raise_consequence(run, failed, replay)
    died = [outcome for outcome in run.outcomes if outcome.end == "died"]
    if died:
        error = RankDied(
            f"{report.named(o.rank for o in died)} died without a result\n{report.lines(run)}\n"
            f"To let a rank die in a test, use a fault: Kill(rank=..., at=...).",
            rank=died[0].rank,
        )
        raise _noted(error, replay)
    if not run.struck and not any(outcome.torn for outcome in run.outcomes):
        _check_equal_rounds(run, replay)
    return [outcome.result for outcome in run.outcomes]


def refuse_missed(run: Run, missed: Sequence[Fault]) -> None:
    """Raise if there are faults that should have struck."""
    __tracebackhide__ = True
    if not missed:
        return
    fault = missed[0]
    came = report.calls(run.outcomes[fault.rank], len(run.outcomes))
    raise FaultMissed(
        f"{fault} never struck, and tests nothing: rank {fault.rank} {came}. Let at= be the number "
        f"of a round, or the name or kind of a call",
        rank=fault.rank,
    )


def _raise_causes(run: Run, causes: Sequence[Outcome], replay: str) -> NoReturn:
    """Raise the cause of the earliest round; several, if they are of different types."""
    __tracebackhide__ = True
    found = [o for o in causes if not _is_pytests(o.error)] or causes
    real = sorted(found, key=lambda o: (len(o.calls), o.rank))
    # By name: a class that is made in a function is another one each time.
    kinds = {(type(o.error).__module__, type(o.error).__qualname__) for o in real}
    if len(kinds) == 1:
        first = min(real, key=lambda outcome: outcome.rank)
        _note(first, run, [first], replay)
        assert first.error is not None
        raise first.error
    for outcome in real:
        _note(outcome, run, real, "")
    errors = [outcome.error for outcome in real if outcome.error is not None]
    text = f"{report.named(o.rank for o in real)} of {len(run.outcomes)} failed independently"
    raise _noted(BaseExceptionGroup(text, errors), replay)


def _is_pytests(error: BaseException | None) -> bool:
    kinds = type(error).__mro__
    return any(kind.__module__ == "_pytest.outcomes" for kind in kinds) and any(
        kind.__name__ in _OUTCOMES for kind in kinds
    )


def _note(outcome: Outcome, run: Run, shown: Sequence[Outcome], replay: str) -> None:
    """Note on a rank's exception which rank it was, and how the others fared."""
    if len(run.outcomes) == 1 and not replay:
        return
    text = f"rank {outcome.rank} of {len(run.outcomes)}: "
    text += report.where(outcome, len(run.outcomes))
    rest = report.others(run, [o.rank for o in shown])
    if rest:
        text += f"\n{rest}"
    assert outcome.error is not None
    _noted(outcome.error, text)
    _noted(outcome.error, replay)


def _noted(error: E, note: str) -> E:
    if note and note not in getattr(error, "__notes__", ()):
        with contextlib.suppress(Exception):  # an exception may forbid it
            error.add_note(note)
    return error


def _raise_consequence(run: Run, failed: Sequence[Outcome], replay: str) -> NoReturn:
    """Raise what the ranks report of something that is none's exception: a deadlock, a death."""
    __tracebackhide__ = True
    for outcome in failed:
        error = outcome.error
        assert error is not None
        gone = error.rank if isinstance(error, PeerLost) else None
        if run.stuck or (gone is not None and run.outcomes[gone].end == "returned"):
            error.__cause__ = None  # the lines below say where it was, and more
            raise _noted(_deadlock(run), replay) from error
    first = min(failed, key=lambda outcome: (not outcome.buried, outcome.rank))
    _note(first, run, [first], replay)
    assert first.error is not None
    raise first.error


def _deadlock(run: Run) -> SyncError:
    waiting = [o.rank for o in run.outcomes if o.end != "returned" and o.waits is not None]
    done = [o.rank for o in run.outcomes if o.end == "returned"]
    verb = "waits" if len(waiting) == 1 else "wait"
    end = f"; {report.named(done)} {'has' if len(done) == 1 else 'have'} finished" if done else ""
    parts = [
        f"{report.named(waiting)} of {len(run.outcomes)} {verb} and can never go on{end}",
        report.lines(run),
        report.first_difference(run),
        _CURE,
    ]
    return DeadlockError(
        "\n".join(part for part in parts if part), rank=waiting[0], missing=done, arrived=waiting
    )


def _check_equal_rounds(run: Run, replay: str) -> None:
    """Raise if ranks have ended well with different numbers of rounds in a group."""
    __tracebackhide__ = True
    counts: dict[tuple[int, ...], dict[int, int]] = {}
    for outcome in run.outcomes:
        for seen in outcome.calls:
            of = counts.setdefault(seen.members, dict.fromkeys(seen.members, 0))
            of[outcome.rank] += 1
    if all(len(set(of.values())) == 1 for of in counts.values()):
        return
    error = UnequalRounds(
        f"all ranks finished, but not with the same calls\n{report.lines(run)}\n"
        f"{report.first_difference(run)}\n{_CURE}"
    )
    raise _noted(error, replay)
