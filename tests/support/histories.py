"""Histories of the ranks of one world, and a check that they keep every promise.

A history is pure data: the steps of one program that every rank runs, the events that each rank
recorded before and after each step, and how each rank ended. :func:`violations` checks it without
any knowledge of how it was produced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Kind = Literal[
    "init", "barrier", "broadcast", "all_reduce", "all_gather", "any_rank", "all_ranks", "check"
]
What = Literal["enter", "exit", "verdict", "again", "raise", "kill", "end"]


class Step(NamedTuple):
    """A call of a program. "check" is the check of a trigger with ``lag=1``."""

    kind: Kind
    name: str | None = None
    src: int | None = None
    op: str | None = None

    def __str__(self) -> str:
        facts = [str(fact) for fact in self[1:] if fact is not None]
        return " ".join([self.kind, *facts])


class Event(NamedTuple):
    """A recorded event of one rank: its step, kind, time in monotonic nanoseconds, and fact.

    The fact of "enter" is what this rank sends, and of "exit" what it received. The fact of
    "verdict", and of the "again" when it repeats a call, is the class of the error, its rank and
    the missing ranks.
    """

    step: int
    what: What
    at: int
    fact: Any = None


class History(NamedTuple):
    """A run of one program."""

    seed: int
    steps: Sequence[Step]
    events: list[list[Event]]  #: by rank
    codes: Sequence[int]  #: exit codes by rank; negative: the signal
    kills: dict[int, int]  #: rank -> time at which it was killed
    hung: Sequence[int] = ()  #: ranks that had to be ended
    faults: Sequence[str] = ()  #: the injected faults, as text

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(len(self.events))

    def when(self, what: What) -> dict[int, Event]:
        """Return the first event of this kind of each rank that has one."""
        found: dict[int, Event] = {}
        for rank, events in enumerate(self.events):
            for event in events:
                if event.what == what:
                    found.setdefault(rank, event)
        return found

    def at_step(self, step: int, what: What) -> dict[int, Event]:
        """Return the event of this kind at this step, of each rank that has one."""
        return {
            rank: event
            for rank, events in enumerate(self.events)
            for event in events
            if event.step == step and event.what == what
        }

    def dead(self) -> dict[int, int]:
        """Return the ranks that SIGKILL ended, each with the earliest time at which this is known.

        Ranks that had ended before the kill are left out.
        """
        moments = {rank: event.at for rank, event in self.when("kill").items()}
        moments = {**self.kills, **moments}
        return {rank: at for rank, at in moments.items() if self.codes[rank] == -9}


def waits_for(steps: Sequence[Step]) -> list[int]:
    """Return, for each step, the last step that all ranks must enter before any rank leaves it.

    A check with a lag waits for the previous one, so the value never decreases.
    """
    last: dict[str | None, int] = {}
    known = -1
    found: list[int] = []
    for number, step in enumerate(steps):
        if step.kind == "check":
            known = max(known, last.get(step.name, -1))
            last[step.name] = number
        else:
            known = number
        found.append(known)
    return found


def violations(history: History) -> list[str]:
    """Return the violated promises of `history`; empty if all were kept."""
    return [
        *_ends(history),
        *_early(history),
        *_values(history),
        *_causes(history),
        *_agreement(history),
    ]


def _ends(history: History) -> Iterator[str]:
    for rank in history.hung:
        yield f"rank {rank} never ended"
    ended = history.when("end")
    dead = history.dead()
    for rank in history.ranks:
        if rank in dead or rank in history.hung:
            continue
        if rank not in ended or history.codes[rank] != 0:
            yield f"rank {rank} ended by itself, with exit code {history.codes[rank]}"


def _early(history: History) -> Iterator[str]:
    for number, needed in enumerate(waits_for(history.steps)):
        if needed < 0:
            continue
        entered = history.at_step(needed, "enter")
        for rank, left in history.at_step(number, "exit").items():
            for other in history.ranks:
                if other not in entered:
                    yield f"rank {rank} left step {number}, and rank {other} never came to {needed}"
                elif entered[other].at > left.at:
                    yield f"rank {rank} left step {number} before rank {other} came to {needed}"


def _values(history: History) -> Iterator[str]:
    before: dict[str | None, int] = {}
    for number, step in enumerate(history.steps):
        sent = {r: event.fact for r, event in history.at_step(number, "enter").items()}
        if step.kind == "check":
            previous = before.get(step.name)
            before[step.name] = number
            if previous is None:
                sent = {}
            else:
                sent = {r: event.fact for r, event in history.at_step(previous, "enter").items()}
            complete = previous is None or len(sent) == len(history.ranks)
        else:
            complete = len(sent) == len(history.ranks)
        if not complete:
            continue  # a rank that left anyway is reported as having left early
        expected = _expected(step, sent)
        for rank, left in history.at_step(number, "exit").items():
            if left.fact != expected:
                yield (
                    f"rank {rank} got {left.fact!r} from step {number} ({step}), "
                    f"where {expected!r} is right"
                )


def _expected(step: Step, sent: dict[int, Any]) -> Any:
    everyone = [sent[rank] for rank in sorted(sent)]
    if step.kind == "broadcast":
        return sent[step.src or 0]
    if step.kind == "all_gather":
        return everyone
    if step.kind == "all_reduce":
        return _reduced(everyone, step.op)
    if step.kind == "any_rank":
        return any(everyone)
    if step.kind == "all_ranks":
        return all(everyone)
    if step.kind == "check":
        setters = [rank for rank, flag in sorted(sent.items()) if flag]
        return [bool(setters), setters]
    return None


def _reduced(values: list[Any], op: str | None) -> Any:
    if isinstance(values[0], list):
        return [_reduced(list(column), op) for column in zip(*values, strict=True)]
    if isinstance(values[0], str):  # the form of an array
        return values[0]
    if op == "min":
        return min(values)
    return max(values) if op == "max" else sum(values)


def _causes(history: History) -> Iterator[str]:
    """Check that errors name only ranks that failed, and not before they failed."""
    for rank, verdict in history.when("verdict").items():
        yield from _cause(history, rank, verdict)


def _cause(history: History, rank: int, verdict: Event) -> Iterator[str]:
    dead = history.dead()
    raised = {other: event.at for other, event in history.when("raise").items()}
    kind, culprit, missing = verdict.fact
    causes = {"PeerLost": dead, "PeerFailed": raised}.get(kind)
    if causes is None or culprit not in causes:
        yield f"rank {rank} got {kind} about rank {culprit}, and no such failure happened"
    elif verdict.at < causes[culprit]:
        yield f"rank {rank} got {kind} about rank {culprit} before it happened"
    for other in missing:
        if other not in dead and other not in raised:
            yield f"rank {rank} got an error that rank {other} is gone, but it was not"


def _agreement(history: History) -> Iterator[str]:
    verdicts = history.when("verdict")
    survivors = [
        r for r in history.ranks if r not in history.dead() and r not in history.when("raise")
    ]
    last = len(history.steps) - 1
    if not verdicts:
        passed = history.at_step(last, "exit")
        for rank in survivors:
            if rank not in passed:
                yield f"rank {rank} neither passed all steps nor got a verdict"
        return
    if len({repr(event.fact) for event in verdicts.values()}) > 1:
        yield f"verdicts differ: { {rank: event.fact for rank, event in verdicts.items()} }"
    if len({event.step for event in verdicts.values()}) > 1:
        yield f"torn at different steps: { {rank: e.step for rank, e in verdicts.items()} }"
    for rank in survivors:
        if rank not in verdicts:
            yield f"rank {rank} got no verdict, and others did"
    for rank, again in history.when("again").items():
        kind, _, missing = expected = verdicts[rank].fact
        if kind == "PeerFailed" and not missing and isinstance(again.fact, list):
            # An exception that is reported to all ranks breaks nothing: the next call has a verdict
            # of its own. Its rank has left since, and others may have failed.
            yield from _cause(history, rank, again)
        elif again.fact != expected:
            yield f"rank {rank} asked again and got {again.fact}, not {expected}"
    needs = waits_for(history.steps)
    torn = min(needs[event.step] for event in verdicts.values())
    for rank, events in enumerate(history.events):
        for event in events:
            if event.what == "exit" and needs[event.step] >= torn:
                yield f"rank {rank} passed step {event.step}, where others got a verdict"


def show(history: History) -> str:
    """Return the history as text, by rank, with times relative to its first event."""
    begin = min((event.at for events in history.events for event in events), default=0)

    def clock(at: int) -> str:
        return f"{(at - begin) / 1e6:9.3f} ms"

    lines = [f"seed {history.seed}, {len(history.ranks)} ranks; replay it with"]
    lines.append(f"    python -m support.random_programs {history.seed}")
    lines += [f"  {fault}" for fault in history.faults]
    for rank, events in enumerate(history.events):
        lines.append(f"rank {rank}, exit code {history.codes[rank]}")
        if rank in history.kills:
            lines.append(f"  {clock(history.kills[rank])}  killed")
        for event in events:
            step = f"{event.step:3} {history.steps[event.step]}"
            lines.append(f"  {clock(event.at)}  {event.what:7} {step:24} {event.fact!r:.120}")
    return "\n".join(lines)
