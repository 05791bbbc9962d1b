"""What to say of a world that went wrong: a line for each rank, and where they first differ."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from syncprims._protocol.call_site import users_part
from syncprims.errors import SyncError

from .faults import Raise, kind_of
from .probe import JOIN
from .runs import headline

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncprims.interface import Label

    from .probe import Seen
    from .runs import Outcome, Run


_SHOWN = 8  # calls of a rank, where they are listed


def lines(run: Run) -> str:
    """Return where each rank is, or how it ended."""
    return "\n".join(f"  rank {o.rank}: {where(o, len(run.outcomes))}" for o in run.outcomes)


def where(outcome: Outcome, ranks: int) -> str:
    """Return where a rank is, or how it ended."""
    last = f"round {len(outcome.calls)}, {_call(outcome.last, ranks)}" if outcome.last else ""
    if outcome.end == "raised" and outcome.error is not None and outcome.waits is None:
        if not last:
            return f"raised {headline(outcome.error)} before its first call"
        if isinstance(outcome.error, SyncError):
            return f"raised {_name(outcome)} in its {last}"
        when = "at" if _is_injected(outcome) else "after"
        return f"raised {headline(outcome.error)} {when} its {last}"
    if outcome.end == "returned":
        return f"finished after its {last}" if last else "finished without a call"
    if outcome.end in ("killed", "stopped"):
        return f"{outcome.end} by a fault at its {last}"
    if outcome.end == "died":
        return f"{outcome.detail or 'its process ended'}" + (f" after its {last}" if last else "")
    if outcome.waits is not None and outcome.waits.label.kind != JOIN:
        return f"waits in its {last}"
    is_ = "could go on, and is not on turn," if outcome.idle else "is busy"
    return f"{is_} after its {last}" if last else f"{is_} before its first call"


def first_difference(run: Run) -> str:
    """Return where the ranks first came for different things, or one did not come; "" if nowhere.

    Where all came for the same, it is the first round to which they came from different lines: that
    may be right, and is where to look when it is not.
    """
    boards = {seen.members: None for outcome in run.outcomes for seen in outcome.calls}
    places = ""
    for members in sorted(boards, key=lambda members: (-len(members), members)):
        calls = {
            rank: [seen.label for seen in run.outcomes[rank].calls if seen.members == members]
            for rank in members
        }
        of = "" if len(members) == len(run.outcomes) else f" of group {list(members)}"
        for number in range(max(map(len, calls.values()))):
            labels = {r: c[number] if number < len(c) else None for r, c in calls.items()}
            shown = f"round {number + 1}{of} is {_grouped(labels)}"
            if len({label and _key(label) for label in labels.values()}) > 1:
                return f"first difference: {shown}{places}"
            if not places and len({label.site for label in labels.values() if label}) > 1:
                places = f"\nfirst met from different lines: {shown}"
    return places.lstrip("\n")


def _key(label: Label) -> tuple[object, ...]:
    return label.kind, label.name, label.src, label.op


def _grouped(labels: dict[int, Label | None]) -> str:
    """Return ``barrier (a.py:3) on rank 0, and none on ranks [1, 2]``."""
    by_text: dict[str, list[int]] = {}
    for rank, label in labels.items():
        by_text.setdefault("none" if label is None else str(label), []).append(rank)
    return ", and ".join(f"{text} on {named(ranks)}" for text, ranks in by_text.items())


def named(ranks: Iterable[int]) -> str:
    """Return ``rank 2``, or ``ranks [1, 2]``."""
    found = sorted(ranks)
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {found}"


def _call(seen: Seen | None, ranks: int) -> str:
    if seen is None:
        return "?"
    group = "" if len(seen.members) == ranks else f" in group {list(seen.members)}"
    return f"{seen.label}{group}"


def _is_injected(outcome: Outcome) -> bool:
    """Tell whether a rank's error is what a fault has let its last call raise."""
    number, last = len(outcome.calls), outcome.last
    return last is not None and any(
        isinstance(fault, Raise)
        and isinstance(outcome.error, kind_of(fault.error))
        and fault.strikes(outcome.rank, number, last.label)
        for fault in outcome.struck
    )


def calls(outcome: Outcome, ranks: int) -> str:
    """Return ``came to 2 rounds: barrier (a.py:3), all_gather (a.py:4)``, each call once."""
    if not outcome.calls:
        return "made no call"
    kinds = list(dict.fromkeys(_call(seen, ranks) for seen in outcome.calls))
    shown = ", ".join(kinds[:_SHOWN]) + (", ..." if len(kinds) > _SHOWN else "")
    count = len(outcome.calls)
    return f"came to {count} round{'s' * (count > 1)}: {shown}"


def others(run: Run, but: Sequence[int]) -> str:
    """Return the lines of all ranks but these."""
    return "\n".join(
        f"  rank {outcome.rank}: {_met(outcome, len(run.outcomes))}"
        for outcome in run.outcomes
        if outcome.rank not in but
    )


def _met(outcome: Outcome, ranks: int) -> str:
    """Return how a rank ended that is not to blame."""
    if isinstance(outcome.error, SyncError) and outcome.last:
        return f"{_name(outcome)} in its round {len(outcome.calls)}, {_call(outcome.last, ranks)}"
    return where(outcome, ranks)


def shortened(error: BaseException) -> BaseException:
    """Return `error` with a traceback that begins and, if it is the library's, ends with the user.

    What starts a rank stands before that, and what the library did after it helps nobody.
    """
    trace = error.__traceback__
    if isinstance(error, SyncError):
        trace = users_part(trace) or trace
    core = str(Path(__file__).parent.parent)
    first = trace
    while first is not None and first.tb_next is not None:
        name = first.tb_frame.f_code.co_filename
        if not name.startswith((core, threading.__file__)):
            break
        first = first.tb_next
    return error.with_traceback(first)


def _name(outcome: Outcome) -> str:
    over = f", while it handled {outcome.buried}," if outcome.buried else ""
    return f"{type(outcome.error).__name__}{over}"


def users_lines(stack: Sequence[str]) -> list[str]:
    """Return the lines of a stack, outermost first, that are the user's.

    What started the rank stands before them, and the library's own calls after.
    """
    here = str(Path(__file__).parent)
    backends = Path(str(getattr(sys.modules.get("syncprims.backends"), "__file__", here))).parent
    starts = [i for i, line in enumerate(stack) if here in line and "be_rank" in line]
    rest = list(stack[max(starts, default=-1) + 1 :])
    core = str(Path(here).parent)
    ours = [f'"{path}' for path in (core, str(backends), threading.__file__)]
    while rest and any(path in rest[-1] for path in ours):
        rest.pop()
    return rest or ["  in the library"]
