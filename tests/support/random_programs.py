"""Random programs of synchronizations, run by forked ranks under random faults.

    python -m support.random_programs SEED [TIMES]

The seed decides the program, its values and its faults. Only the scheduling is not determined.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import syncprims as sp
from support.forks import prepare_forks
from support.histories import Event, History, Kind, Step, show, violations
from support.rank_worlds import PATIENCE, environment, fork
from support.rank_worlds import Kind as World
from syncprims._api.trigger import SelfClearingTrigger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.rank_worlds import ServedStore

_OPS = ("sum", "min", "max")
_KINDS: list[Kind] = [
    *("barrier", "barrier", "broadcast", "broadcast", "all_reduce", "all_gather"),
    *("any_rank", "all_ranks", "check", "check"),
]


class Hurt(Exception):
    """An exception that a rank raises, in its own code or within a call."""


class Plan(NamedTuple):
    """A program and the faults of its ranks, generated from one seed."""

    seed: int
    ranks: int
    steps: list[Step]
    delays: dict[tuple[int, int], float]  #: rank and step -> seconds of sleep before it
    own: dict[tuple[int, int], str]  #: rank and step -> "kill" or "raise", before it
    signals: list[tuple[float, int, signal.Signals]]  #: seconds after the join, rank, signal

    @property
    def faults(self) -> list[str]:
        """The faults, as text."""
        said = [f"rank {r} does {what} before step {step}" for (r, step), what in self.own.items()]
        return said + [f"{s.name} to rank {r} after {t * 1e3:.3f} ms" for t, r, s in self.signals]


def plan(seed: int) -> Plan:
    """Return the plan for this seed."""
    dice = random.Random(seed)
    ranks = dice.choice((2, 2, 3, 3, 4, 4, 5, 6, 8))
    steps = [Step("init")] + [_step(dice, ranks) for _ in range(dice.randint(3, 14))]
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
    return Plan(seed, ranks, steps, delays, own, sorted(signals))


def _step(dice: random.Random, ranks: int) -> Step:
    kind = dice.choice(_KINDS)
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
        length = of_all.choice((1, 7, 500))  # whole numbers, so that sums are exact
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


class _Recorder:
    """The log file of one rank. Each event is one write, so that a kill leaves complete lines."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __call__(self, step: int, what: str, fact: Any = None) -> None:
        # Written before the call and after its return. A rank may seem to have entered earlier or
        # left later than it did, but never the opposite.
        text = json.dumps(fact)
        line = f'[{step}, "{what}", {time.monotonic_ns()}, {text}]\n'
        os.write(self._fd, line.encode())


def _read(path: Path) -> list[Event]:
    lines = path.read_text().split("\n")
    return [Event(*json.loads(line)) for line in lines[:-1]]  # an incomplete line is not an event


class _Rank:
    """The execution of a program on one rank."""

    def __init__(self, made: Plan, rank: int, log: int, joined: int) -> None:
        self._plan = made
        self._rank = rank
        self._record = _Recorder(log)
        self._joined = joined
        self._armed = False
        self._hurt = False
        self._at = 0
        self._triggers = {name: SelfClearingTrigger(name, lag=1) for name in ("stop", "save")}

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
            self._armed = True
            try:
                got = self._call(step, sent)
            except sp.SyncError as error:
                self._armed = False
                self._record(number, "verdict", _facts(error))
                self._ask_again(number)
                return
            self._armed = False
            self._record(number, "exit", shown(got))

    def _ask_again(self, number: int) -> None:
        try:
            sp.barrier()
        except sp.SyncError as error:
            self._record(number, "again", _facts(error))
        else:
            self._record(number, "again", "passed")

    def _call(self, step: Step, sent: Any) -> Any:
        if step.kind == "barrier":
            return sp.barrier(step.name)
        if step.kind == "broadcast":
            return sp.broadcast(sent, src=step.src or 0)
        if step.kind == "all_gather":
            return sp.all_gather(sent)
        if step.kind == "all_reduce":
            op: Any = step.op or "sum"
            return sp.all_reduce(sent, op)
        if step.kind == "any_rank":
            return sp.any_rank(sent)
        if step.kind == "all_ranks":
            return sp.all_ranks(sent)
        trigger = self._triggers[step.name or ""]
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
        assert not found, "\n".join([*found, show(history)])


def main() -> None:
    """Run one seed, once or several times, and print the history by rank."""
    seed, times = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    prepare_forks()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(times):
            history = run(seed, Path(folder), Path(folder))
            found = violations(history)
            if found or times == 1:
                print(show(history), *found, sep="\n")
            if found:
                sys.exit(1)


if __name__ == "__main__":
    main()
