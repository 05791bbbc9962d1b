"""Random programs of synchronizations, run by forked ranks under random faults.

The seed decides the program, its values and its faults. Only the scheduling is not determined.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pprint
import random
import select
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

import syncprims as sp
from support.rank_worlds import PATIENCE, ServedStore, environment, fork
from support.rank_worlds import Kind as World

# Behind check_trigger, of which a program has one: here each case has its own.
from syncprims._api.trigger import SelfClearingTrigger

Kind = Literal[
    "init", "barrier", "broadcast", "all_reduce", "all_gather", "any_rank", "all_ranks", "check",
    "main_first", "group",
]  # fmt: skip
What = Literal["enter", "exit", "verdict", "again", "raise", "kill", "end"]


class Step(NamedTuple):
    """A call of a program; "group" is two: in a group of every second rank, and among all."""

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


_OPS = ("sum", "min", "max")
_KINDS: list[Kind] = [
    *("barrier", "barrier", "broadcast", "broadcast", "all_reduce", "all_gather"),
    *("any_rank", "all_ranks", "check", "check"),
]


class Hurt(Exception):
    """An exception that a rank raises, in its own code or within a call."""


def in_thread(call: Callable[[], Any]) -> Any:
    """Make a call in a thread that this one joins."""
    outcome: Future[Any] = Future()
    started = threading.Event()

    def run() -> None:
        started.wait()  # a signal's handler that raises within start() would break Python's own
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    started.set()
    thread.join()
    return outcome.result()


class Plan(NamedTuple):
    """A program and the faults of its ranks, generated from one seed."""

    seed: int
    ranks: int
    steps: list[Step]
    delays: dict[tuple[int, int], float]  #: rank and step -> seconds of sleep before it
    own: dict[tuple[int, int], str]  #: rank and step -> "kill" or "raise", before it
    signals: list[tuple[float, int, signal.Signals]]  #: seconds after the join, rank, signal
    threaded: set[tuple[int, int]]  #: rank and step of calls that a thread makes

    @property
    def faults(self) -> list[str]:
        """The faults and threads, as text."""
        said = [f"rank {r} does {what} before step {step}" for (r, step), what in self.own.items()]
        said += [f"rank {r} makes step {step} in a thread" for r, step in sorted(self.threaded)]
        return said + [f"{s.name} to rank {r} after {t * 1e3:.3f} ms" for t, r, s in self.signals]


def plan(seed: int) -> Plan:
    """Return the plan for this seed."""
    dice = random.Random(seed)
    ranks = dice.choice((2, 2, 3, 3, 4, 4, 5, 6, 8))
    steps = [Step("init")] + [draw_step(dice, ranks) for _ in range(dice.randint(3, 14))]
    places = [(rank, step) for rank in range(ranks) for step in range(1, len(steps))]
    delays = {place: dice.uniform(0, 0.003) for place in places if dice.random() < 0.08}
    own: dict[tuple[int, int], str] = {}
    signals: list[tuple[float, int, signal.Signals]] = []
    for _ in range(dice.choice((0, 1, 1, 1, 2, 2, 3))):
        rank, step = dice.choice(places)
        moment = dice.uniform(0, 0.010)
        fault = dice.choice(("kill", "kill", "own kill", "own raise", "hurt", "stop", "stop"))
        if fault.startswith("own"):
            own[rank, step] = fault.split()[1]
        elif fault == "stop":
            signals.append((moment, rank, signal.SIGSTOP))
            signals.append((moment + dice.uniform(0.001, 0.040), rank, signal.SIGCONT))
        else:
            sent = signal.SIGKILL if fault == "kill" else signal.SIGUSR1
            signals.append((moment, rank, sent))
    often = dice.choice((0.2, 1.0)) if dice.random() < 0.4 else 0.0
    threaded = {place for place in places if dice.random() < often}
    return Plan(seed, ranks, steps, delays, own, sorted(signals), threaded)


def draw_step(dice: random.Random, ranks: int, kinds: Sequence[Kind] = _KINDS) -> Step:
    """Return a random step of a world of so many ranks."""
    kind = dice.choice(kinds)
    if kind == "barrier":
        return Step("barrier", name=dice.choice((None, "load", "epoch end")))
    if kind == "broadcast":
        return Step("broadcast", src=dice.randrange(ranks))
    if kind == "all_reduce":
        return Step("all_reduce", op=dice.choice(_OPS))
    if kind == "check":
        return Step("check", name=dice.choice(("stop", "save")))
    return Step(kind)


def value(seed: int, step: Step, number: int, rank: int) -> Any:
    """Return what `rank` sends at this step, with equal shapes on all ranks if required."""
    of_all = random.Random(f"{seed} {number}")
    own = random.Random(f"{seed} {number} {rank}")
    if step.kind in ("any_rank", "all_ranks", "check"):
        rare = of_all.choice((0.0, 0.3, 1.0))
        return own.random() < rare
    if step.kind == "all_reduce":
        if of_all.random() < 0.5:
            return own.randrange(-(10**20), 10**20)
        length = of_all.choice((1, 7, 3000))  # whole numbers, so that sums are exact
        array = np.array([own.randrange(1000) for _ in range(length)], np.float64)
        return {"n": own.randrange(1000), "v": array} if of_all.random() < 0.5 else array
    if step.kind == "broadcast" and rank != step.src:
        return None
    if step.kind in ("broadcast", "all_gather"):
        form = of_all.choice(("small", "array", "list", "large"))
        if form in ("array", "list"):
            counts = np.arange(own.randrange(1, 50), dtype=np.int32) * own.randrange(100)
            return [counts, own.randrange(100)] if form == "list" else counts
        size = own.randrange(2100, 60_000) if form == "large" else own.randrange(20)
        return {"seed": seed, "step": number, "rank": rank, "blob": own.randbytes(size)}
    return None


def shown(thing: Any) -> Any:
    """Return `thing` in a form for JSON, equal exactly for equal things."""
    if isinstance(thing, np.ndarray):
        return [f"array {thing.dtype}", *thing.tolist()]
    if isinstance(thing, bytes):
        return [f"bytes {len(thing)}", zlib.crc32(thing)]
    if isinstance(thing, dict):
        return [[key, shown(inner)] for key, inner in thing.items()]
    if isinstance(thing, list):
        return [shown(inner) for inner in thing]
    return thing


def _read(path: Path) -> list[Event]:
    lines = path.read_text().split("\n")
    return [Event(*json.loads(line)) for line in lines[:-1]]  # an incomplete line is not an event


class _Rank:
    """The execution of a program on one rank."""

    def __init__(self, made: Plan, rank: int, log: int, joined: int) -> None:
        self._plan = made
        self._rank = rank
        self._log = log
        self._joined = joined
        self._armed = False
        self._hurt = False
        self._at = 0
        self._triggers = {name: SelfClearingTrigger(name, lag=1) for name in ("stop", "save")}

    def _record(self, step: int, what: What, fact: Any = None) -> None:
        # In one write, so that a kill leaves complete lines. It comes before the call and after its
        # return: a rank may seem to have entered earlier or left later than it did, and never the
        # opposite.
        line = f'[{step}, "{what}", {time.monotonic_ns()}, {json.dumps(fact)}]\n'
        os.write(self._log, line.encode())

    def run(self) -> None:
        signal.signal(signal.SIGUSR1, self._on_signal)
        self._record(0, "enter")
        world = sp.init()
        self._record(0, "exit")
        os.write(self._joined, b"+")
        try:
            with world:
                self._steps()
        except Hurt:
            self._armed = False
        self._record(len(self._plan.steps) - 1, "end")

    def _on_signal(self, *_: object) -> None:
        self._hurt = True
        if self._armed:
            self._raise()

    def _raise(self) -> None:
        self._armed = False
        self._record(self._at, "raise")
        raise Hurt(f"rank {self._rank} at step {self._at}")

    def _steps(self) -> None:
        for number, step in enumerate(self._plan.steps):
            if number == 0:
                continue
            self._at = number
            time.sleep(self._plan.delays.get((self._rank, number), 0.0))
            own = self._plan.own.get((self._rank, number))
            if own == "kill":
                self._record(number, "kill")
                os.kill(os.getpid(), signal.SIGKILL)
            if own == "raise" or self._hurt:
                self._raise()
            sent = value(self._plan.seed, step, number, self._rank)
            self._record(number, "enter", shown(sent))
            call = functools.partial(self._call, step, sent)
            try:
                threaded = (self._rank, number) in self._plan.threaded
                got = in_thread(call) if threaded else call()
            except sp.SyncError as error:
                self._armed = False
                self._record(number, "verdict", _facts(error))
                self._ask_again(number)
                return
            self._armed = False
            self._record(number, "exit", got)

    def _call(self, step: Step, sent: Any) -> Any:
        self._armed = True
        return make_call(step, sent, self._triggers)

    def _ask_again(self, number: int) -> None:
        try:
            sp.barrier()
        except sp.SyncError as error:
            self._record(number, "again", _facts(error))
        else:
            self._record(number, "again", "passed")


def make_call(step: Step, sent: Any, triggers: Mapping[str, sp.Trigger]) -> Any:
    """Make the call of a step, and return what it gives, in the form of :func:`shown`."""
    match step.kind:
        case "barrier":
            return sp.barrier(step.name)
        case "broadcast":
            return shown(sp.broadcast(sent, src=step.src or 0))
        case "all_gather":
            return shown(sp.all_gather(sent))
        case "all_reduce":
            op: Any = step.op or "sum"
            return shown(sp.all_reduce(sent, op))
        case "any_rank":
            return sp.any_rank(sent)
        case "all_ranks":
            return sp.all_ranks(sent)
        case "main_first":
            with sp.main_first():
                return None
        case "group":
            even = sp.group(range(0, sp.get_world_size(), 2))
            return sp.broadcast(even.all_gather(sp.get_rank()) if sp.get_rank() % 2 == 0 else None)
    trigger = triggers[step.name or ""]
    if sent:
        trigger.set()
    found = trigger.check()
    return [found, list(trigger.ranks) if found else []]


def _facts(error: sp.SyncError) -> list[Any]:
    return [type(error).__name__, error.rank, sorted(error.missing)]


def run(seed: int, directory: Path, logs: Path, store: ServedStore | None = None) -> History:
    """Run the program of `seed` on ranks that use `directory`, and return their history.

    With a `store`, the ranks behave as if they were on two or three hosts.
    """
    made = plan(seed)
    world, more = World("file", made.ranks), {}
    if store is not None:
        hosts = next(h for h in (2, 3, made.ranks) if made.ranks % h == 0)
        world = World("torch", made.ranks, hosts)
        more = {**store.variables, "SYNCPRIMS_HEARTBEAT": "8"}
    reader, writer = os.pipe()
    pids: list[int] = []
    paths = [logs / f"{seed}-{rank}" for rank in range(made.ranks)]
    try:
        for rank, path in enumerate(paths):
            env = environment(world, rank, directory, f"seed {seed}", **more)
            log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o600)
            pids.append(fork(_Rank(made, rank, log, writer).run, env))
            os.close(log)
        kills, hung = _hurt(pids, made, reader)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # none of them has been reaped
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        os.close(reader)
        os.close(writer)
    events = [_read(path) for path in paths]
    for path in paths:
        path.unlink()
    return History(seed, made.steps, events, codes, kills, hung, made.faults)


def _hurt(pids: Sequence[int], made: Plan, joined: int) -> tuple[dict[int, int], list[int]]:
    """Send signals after all have joined, then wait; return the kills and the hanging ranks."""
    deadline = time.monotonic() + PATIENCE
    eyes = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids)}
    kills: dict[int, int] = {}
    try:
        poll = select.poll()
        poll.register(joined, select.POLLIN)
        seen = 0
        while seen < made.ranks and poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            seen += len(os.read(joined, made.ranks))
        poll.unregister(joined)
        begin = time.monotonic()
        due = list(made.signals)
        for eye in eyes:
            poll.register(eye, select.POLLIN)
        alive = dict(eyes)
        while (alive or due) and time.monotonic() < deadline:
            until = begin + due[0][0] if due else deadline
            for eye, _ in poll.poll(max(0.0, until - time.monotonic()) * 1e3):
                poll.unregister(eye)
                del alive[eye]
            while due and begin + due[0][0] <= time.monotonic():
                _, rank, number = due.pop(0)
                if number == signal.SIGKILL:
                    kills.setdefault(rank, time.monotonic_ns())
                os.kill(pids[rank], number)
        return kills, sorted(alive.values())
    finally:
        for eye in eyes:
            os.close(eye)


def check(
    seeds: Sequence[int], directory: Path, logs: Path, store: ServedStore | None = None
) -> None:
    """Run these seeds and assert that every history keeps all promises."""
    for seed in seeds:
        history = run(seed, directory, logs, store)
        found = violations(history)
        assert not found, "\n".join([*found, pprint.pformat(history._asdict())])
