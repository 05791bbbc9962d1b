"""A discrete-event simulation of rounds between hosts, for sizes that cannot be measured here.

It handles every message that the torch backend sends (`board.py` and `decisions.py`), and its time
at the store, at the hosts and on the network. `constants.py` measures these times and writes them
to `constants.json`. All times are in microseconds. `simulate.py` is the command.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    Resume = Callable[[Any], None]
    Step = Callable[[Resume], None]
    Steps = Generator[Step, Any, None]

CONSTANTS = Path(__file__).with_name("constants.json")
SECOND = 1e6

# As in the backend; tests/project/test_simulation.py compares them.
FIRST_LOOK, LONGEST_LOOK, LOOK_PER_HOST = 0.05 * SECOND, 1.0 * SECOND, 0.002 * SECOND
MOST_LOOKED_AT = 8
LARGEST_SHARED = 8 * 1024 - 16  # bytes of a decision that one rank can share with its host
PIECE_HEAD, NOTES_HEAD = 8, 12  # bytes of headers: of a host's piece, of its notes
#: In the decision of a broadcast, the bytes that say which rank posted which note (compressed).
WHICH_HEAD, WHICH_OF_RANK = 16, 0.018
LIMIT, BEATS = 10.0 * SECOND, 5

#: Messages per request. A `get` of a client is a `wait` for the key, then a `read`.
MESSAGES = {
    "contribute": 2, "wait": 1, "read": 1, "check": 1, "add": 1, "compare_set": 1, "delete": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """The costs of each step, in microseconds."""

    server: dict[str, float]  #: of the store, per request; `wake`: per waiter
    server_per_kb: float
    client: float  #: of a client, per request
    handoff: float  #: from one thread of a rank to another
    host: float  #: of a one-rank host per round, requests included
    piece: float  #: to read the piece of a host, and write it into the decision
    member: float  #: to read the note of one member in a decision
    note: int  #: bytes of a note
    link: float  #: one way

    @classmethod
    def load(cls, path: Path = CONSTANTS, link: float | None = None) -> Costs:
        """Read the measured costs. `link` replaces the delay of the loopback."""
        costs = cls(**json.loads(path.read_text())["costs"])
        return costs if link is None else replace(costs, link=link)


@dataclass(frozen=True)
class Case:
    """A case to simulate."""

    hosts: int
    ranks: int = 8  #: per host
    rounds: int = 30
    period: float = 0.0  #: from one round to the next; 0: a tight loop
    spread: float = 0.0  #: hosts arrive within this time
    late: float = 0.0  #: additional delay of host 0
    distinct: int = 1  #: different notes: 1 for a barrier, 2 for a broadcast
    processors: int | None = None  #: shared by all and the store; None: own ones

    @property
    def piece(self) -> int:
        """Bytes that one host contributes to the store."""
        return PIECE_HEAD + NOTES_HEAD

    def decision(self, note: int) -> int:
        """Return the bytes of a decision with notes of this size."""
        ranks = self.hosts * self.ranks
        which = WHICH_HEAD + ranks * WHICH_OF_RANK if self.distinct > 1 else 0
        return int(1 + NOTES_HEAD + self.distinct * note + which)

    def readers(self, note: int) -> int:
        """Return how many ranks of each host read the decision from the store."""
        return 1 if self.decision(note) <= LARGEST_SHARED else self.ranks


@dataclass
class Result:
    """The result of a simulation."""

    took: list[float] = field(default_factory=list)  #: from the last arrival, per round and host
    calls: list[float] = field(default_factory=list)  #: from one round to the next, per host
    busy: float = 0.0  #: of the store
    messages: int = 0
    sent: float = 0.0  #: bytes to and from the store
    span: float = 0.0
    looks: int = 0

    def quantile(self, share: float) -> float:
        """Return the time after the last arrival within which that share of hosts continues."""
        return quantile(self.took, share)

    @property
    def load(self) -> float:
        """The share of the time in which the store was busy."""
        return self.busy / self.span


def quantile(times: list[float], share: float) -> float:
    """Return the smallest of `times` that at least this share of them does not exceed."""
    ranked = sorted(times)
    return ranked[max(0, -int(-share * len(ranked) // 1) - 1)]


class Clock:
    """The queue of events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Resume, Any]] = []
        self._count = 0

    def at(self, time: float, do: Resume, value: Any = None) -> None:
        """Call `do(value)` at this time."""
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, do, value))

    def run(self, over: Callable[[], bool]) -> None:
        """Process events until `over()` is true."""
        while self._heap and not over():
            self.now, _, do, value = heapq.heappop(self._heap)
            do(value)

    def sleep(self, time: float) -> Step:
        """Continue after this time."""
        return lambda resume: self.at(self.now + time, resume)


class Processors:
    """Processors that all share in order of arrival, or an unlimited number."""

    def __init__(self, clock: Clock, count: int | None) -> None:
        self._clock = clock
        self._free = None if count is None else [0.0] * count

    def end(self, work: float) -> float:
        """Return the time at which work that is requested now will end."""
        if self._free is None:
            return self._clock.now + work
        end = max(self._clock.now, heapq.heappop(self._free)) + work
        heapq.heappush(self._free, end)
        return end

    def work(self, work: float) -> Step:
        """Continue when the work is done."""
        return lambda resume: self._clock.at(self.end(work), resume)


class Store:
    """The store: one thread that serves one request after the other."""

    def __init__(self, clock: Clock, processors: Processors, costs: Costs, result: Result) -> None:
        self._clock = clock
        self._processors = processors
        self._costs = costs
        self._result = result
        self._queue: deque[tuple[str, float, Callable[[], Any] | None, Resume]] = deque()
        self._running = False
        self.counts: dict[int, int] = {}
        self._decisions: set[int] = set()
        self._waiters: dict[int, list[Resume]] = {}

    def ask(self, kind: str, size: float = 0.0, effect: Callable[[], Any] | None = None) -> Step:
        """Continue with the result of `effect` when the answer of the store has arrived."""

        def send(resume: Resume) -> None:
            request = (kind, size, effect, resume)
            self._clock.at(self._clock.now + self._costs.link, self._arrive, request)

        return send

    def await_decision(self, number: int) -> Step:
        """Continue when a round has its decision."""

        def wait(resume: Resume) -> None:
            if number in self._decisions:
                self._clock.at(self._clock.now + self._costs.link, resume)
            else:
                self._waiters.setdefault(number, []).append(resume)

        def send(resume: Resume) -> None:
            request = ("wait", 0.0, lambda: wait(resume), None)
            self._clock.at(self._clock.now + self._costs.link, self._arrive, request)

        return send

    def count_up(self, number: int) -> int:
        """Count one more host in a round."""
        self.counts[number] = self.counts.get(number, 0) + 1
        return self.counts[number]

    def decide(self, number: int) -> None:
        """Store the decision of a round and wake its waiters."""
        self._decisions.add(number)
        waiters = self._waiters.pop(number, [])
        self._queue.extendleft(("wake", 0.0, None, waiter) for waiter in reversed(waiters))

    def _arrive(self, request: Any) -> None:
        self._queue.append(request)
        if not self._running:
            self._next()

    def _next(self, _: Any = None) -> None:
        self._running = bool(self._queue)
        if self._running:
            kind, size, effect, resume = self._queue.popleft()
            work = self._costs.server[kind] + self._costs.server_per_kb * size / 1024
            self._result.busy += work
            self._result.messages += MESSAGES.get(kind, 0)
            self._result.sent += size
            self._clock.at(self._processors.end(work), self._done, (effect, resume))

    def _done(self, request: Any) -> None:
        effect, resume = request
        value = None if effect is None else effect()
        if resume is not None:
            self._clock.at(self._clock.now + self._costs.link, resume, value)
        self._next()


class Host:
    """One host: its progress, and the queue of the thread that sends."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.done = 0  #: rounds
        self.went_on = 0.0
        self.jobs: deque[Steps] = deque()
        self.sending = False


class Simulation:
    """All hosts and the store."""

    def __init__(self, case: Case, costs: Costs, seed: int = 0) -> None:
        self.case = case
        self.costs = costs
        self.result = Result()
        self._clock = Clock()
        self._processors = Processors(self._clock, case.processors)
        self._store = Store(self._clock, self._processors, costs, self.result)
        self._dice = random.Random(seed)
        self._last_post: dict[int, float] = {}
        self._unfinished = case.hosts
        self._sending = 0  # hosts
        #: The work of a host between the decision and its next call.
        read = costs.member * case.hosts * case.ranks
        self._before = costs.handoff + costs.client
        self._after = max(0.0, costs.host - 2 * self._before - costs.client) + read

    def run(self) -> Result:
        """Simulate all rounds."""
        for index in range(self.case.hosts):
            host = Host(index)
            self._come(host)
            self._start(self._beats())
        self._clock.run(lambda: not self._unfinished and not self._sending)
        self.result.span = max(self._clock.now, self.case.rounds * self.case.period)
        return self.result

    # -- steps ----------------------------------------------------------------------------------

    def _start(self, steps: Steps, then: Callable[[], None] | None = None) -> None:
        def resume(value: Any) -> None:
            try:
                step = steps.send(value)
            except StopIteration:
                if then is not None:
                    then()
            else:
                step(resume)

        resume(None)

    def _submit(self, host: Host, steps: Steps) -> None:
        """Queue these steps for the thread of the host that sends."""
        host.jobs.append(steps)
        if not host.sending:
            self._send_next(host)

    def _send_next(self, host: Host) -> None:
        self._sending += bool(host.jobs) - host.sending
        host.sending = bool(host.jobs)
        if host.sending:
            self._start(host.jobs.popleft(), lambda: self._send_next(host))

    # -- a host ---------------------------------------------------------------------------------

    def _come(self, host: Host) -> None:
        """Start the next round of a host, or finish the host."""
        case, number = self.case, host.done + 1
        if number > case.rounds:
            self._unfinished -= 1
            return
        due = (number - 1) * case.period + self._dice.uniform(0.0, case.spread)
        due += case.late if host.index == 0 else 0.0
        self._clock.at(max(due, self._clock.now), lambda _: self._post(host, number))

    def _post(self, host: Host, number: int) -> None:
        self._last_post[number] = self._clock.now  # the last host to post overwrites the others
        self._submit(host, self._contribute(number))
        self._start(self._wait(host, number))
        self._start(self._look_out(host, number))

    def _contribute(self, number: int) -> Steps:
        case, store, costs = self.case, self._store, self.costs
        piece = case.piece + costs.note
        yield self._processors.work(self._before)
        count = yield store.ask("contribute", piece, lambda: store.count_up(number))
        if count == case.hosts:
            yield from self._get(piece * case.hosts)
            yield self._processors.work(costs.piece * case.hosts)
            decision = case.decision(costs.note)
            yield store.ask("compare_set", 2 * decision, lambda: store.decide(number))
            for _ in range(3):  # the keys of an old round
                yield store.ask("delete")

    def _wait(self, host: Host, number: int) -> Steps:
        store, costs = self._store, self.costs
        decision = self.case.decision(costs.note)
        yield self._processors.work(self._before)
        yield store.await_decision(number)
        yield self._processors.work(costs.client)
        yield store.ask("read", decision)
        others = self.case.readers(costs.note) - 1
        if others:  # too large to pass on: each rank reads it, all at the same time
            for _ in range(others - 1):
                self._start(self._get(decision))
            yield from self._get(decision)
        yield self._processors.work(self._after)
        self.result.took.append(self._clock.now - self._last_post[number])
        if number > 1:
            self.result.calls.append(self._clock.now - host.went_on)
        host.done, host.went_on = number, self._clock.now
        self._come(host)

    def _look_out(self, host: Host, number: int) -> Steps:
        """Look for missing hosts while waiting, at growing intervals."""
        most = max(LONGEST_LOOK, LOOK_PER_HOST * self.case.hosts)
        every = max(FIRST_LOOK, LOOK_PER_HOST * self.case.hosts)
        yield self._clock.sleep(every)
        while host.done < number:
            if host.sending:
                yield self._clock.sleep(FIRST_LOOK / 2)  # the sleeps of the waiting thread
                continue
            every = min(most, 2 * every)
            self._submit(host, self._look(number))
            yield self._clock.sleep(every)

    def _look(self, number: int) -> Steps:
        store, costs = self._store, self.costs
        self.result.looks += 1
        contributed = yield self._client("check", 0, lambda: store.counts.get(number, 0))
        if contributed:
            yield from self._get(contributed * (self.case.piece + costs.note))
        missing = min(MOST_LOOKED_AT, self.case.hosts - contributed)
        for kind in ("add", "check"):  # heartbeats and messages of the missing hosts
            for _ in range(missing):
                yield self._client(kind, 0)

    def _get(self, size: float) -> Steps:
        """Read a key that exists. A client waits for it first in any case."""
        yield self._client("wait", 0)
        yield self._client("read", size)

    def _client(self, kind: str, size: float, effect: Callable[[], Any] | None = None) -> Step:
        """Send a request to the store, including the time of the client."""
        ask = self._store.ask(kind, size, effect)
        return lambda resume: self._clock.at(
            self._processors.end(self.costs.client), lambda _: ask(resume)
        )

    def _beats(self) -> Steps:
        """Send heartbeats until the end."""
        every = LIMIT / BEATS
        yield self._clock.sleep(self._dice.uniform(0.0, every))
        while True:
            yield self._store.ask("add")
            yield self._clock.sleep(self._dice.uniform(0.75, 1.0) * every)


def simulate(case: Case, costs: Costs, seed: int = 0) -> Result:
    """Simulate a case. The same seed gives the same result."""
    return Simulation(case, costs, seed).run()
