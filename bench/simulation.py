"""Rounds between hosts as a discrete-event simulation, for sizes that no machine at hand has.

What the torch backend's `board.py` and `decisions.py` do, message by message, and the time it takes
at the store, at the hosts and on the way. The times come from `constants.json`, as `constants.py`
has measured them. Microseconds throughout. `simulate.py` is the command.
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

# As in the backend; tests/test_simulate.py holds them against it.
FIRST_LOOK, LONGEST_LOOK, LOOK_PER_HOST = 0.05 * SECOND, 1.0 * SECOND, 0.002 * SECOND
MOST_LOOKED_AT = 8
LARGEST_SHARED = 8 * 1024 - 16  # bytes of a decision that one rank can share with its host
PIECE_HEAD, NOTES_HEAD = 8, 12  # bytes: of a host's piece, of its notes
#: Of a broadcast's decision, what says which note is whose: compressed, as all but one are equal.
WHICH_HEAD, WHICH_OF_RANK = 16, 0.018
LIMIT, BEATS = 10.0 * SECOND, 5

#: Messages of each kind of request; a client's `get` is a `wait` for the key, then a `read`.
MESSAGES = {
    "contribute": 2, "wait": 1, "read": 1, "check": 1, "add": 1, "compare_set": 1, "delete": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """What things take, in microseconds."""

    server: dict[str, float]  #: the store, for one request of each kind; `wake`: for each waiter
    server_per_kb: float
    client: float  #: a client, for one request
    handoff: float  #: from one thread of a rank to another
    host: float  #: all that a host of one rank does for a round, the requests included
    piece: float  #: to read what one host has contributed, and to write it into the decision
    member: float  #: to read one member's note in a decision
    note: int  #: bytes of one
    link: float  #: one way

    @classmethod
    def load(cls, path: Path = CONSTANTS, link: float | None = None) -> Costs:
        """Read what was measured; `link` replaces the way over the loopback."""
        costs = cls(**json.loads(path.read_text())["costs"])
        return costs if link is None else replace(costs, link=link)


@dataclass(frozen=True)
class Case:
    """What is simulated."""

    hosts: int
    ranks: int = 8  #: of each host
    rounds: int = 30
    period: float = 0.0  #: from one round to the next; 0: as fast as they go
    spread: float = 0.0  #: within which hosts come to a round
    late: float = 0.0  #: by how much host 0 comes later than that
    distinct: int = 1  #: notes of a round: 1 for a barrier, 2 for a broadcast
    processors: int | None = None  #: that all share with the store; None: each host has its own

    @property
    def piece(self) -> int:
        """Bytes that one host contributes."""
        return PIECE_HEAD + NOTES_HEAD

    def decision(self, note: int) -> int:
        """Return the bytes of a decision, with notes of so many bytes."""
        ranks = self.hosts * self.ranks
        which = WHICH_HEAD + ranks * WHICH_OF_RANK if self.distinct > 1 else 0
        return int(1 + NOTES_HEAD + self.distinct * note + which)

    def readers(self, note: int) -> int:
        """Return how many ranks of each host read the decision from the store."""
        return 1 if self.decision(note) <= LARGEST_SHARED else self.ranks


@dataclass
class Result:
    """What came of it."""

    took: list[float] = field(default_factory=list)  #: from the last arrival, of each host's rounds
    calls: list[float] = field(default_factory=list)  #: from one round to the next, at each host
    busy: float = 0.0  #: the store
    messages: int = 0
    sent: float = 0.0  #: bytes to and from the store
    span: float = 0.0
    looks: int = 0

    def quantile(self, share: float) -> float:
        """Return the time within which that share of all goes on after the last arrival."""
        return quantile(self.took, share)

    @property
    def load(self) -> float:
        """The share of the time for which the store was busy."""
        return self.busy / self.span


def quantile(times: list[float], share: float) -> float:
    """Return the smallest of `times` that at least such a share does not exceed."""
    ranked = sorted(times)
    return ranked[max(0, -int(-share * len(ranked) // 1) - 1)]


class Clock:
    """What happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Resume, Any]] = []
        self._count = 0

    def at(self, time: float, do: Resume, value: Any = None) -> None:
        """Call `do(value)` at that time."""
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, do, value))

    def run(self, over: Callable[[], bool]) -> None:
        """Let everything happen until it is over."""
        while self._heap and not over():
            self.now, _, do, value = heapq.heappop(self._heap)
            do(value)

    def sleep(self, time: float) -> Step:
        """Go on after that time."""
        return lambda resume: self.at(self.now + time, resume)


class Processors:
    """Some that all share, first come first served; or as many as anybody wants."""

    def __init__(self, clock: Clock, count: int | None) -> None:
        self._clock = clock
        self._free = None if count is None else [0.0] * count

    def end(self, work: float) -> float:
        """Return when work that is asked for now will be done."""
        if self._free is None:
            return self._clock.now + work
        end = max(self._clock.now, heapq.heappop(self._free)) + work
        heapq.heappush(self._free, end)
        return end

    def work(self, work: float) -> Step:
        """Go on once it is done."""
        return lambda resume: self._clock.at(self.end(work), resume)


class Store:
    """One thread, which serves one request after the other."""

    def __init__(self, clock: Clock, processors: Processors, costs: Costs, result: Result) -> None:
        self._clock = clock
        self._processors = processors
        self._costs = costs
        self._result = result
        self._queue: deque[tuple[str, float, Callable[[], Any] | None, Resume]] = deque()
        self._running = False
        self.counts: dict[int, int] = {}
        self._decided: set[int] = set()
        self._waiters: dict[int, list[Resume]] = {}

    def ask(self, kind: str, size: float = 0.0, effect: Callable[[], Any] | None = None) -> Step:
        """Go on with what `effect` returns, once the store has done it and the answer is back."""

        def send(resume: Resume) -> None:
            request = (kind, size, effect, resume)
            self._clock.at(self._clock.now + self._costs.link, self._arrive, request)

        return send

    def await_decision(self, number: int) -> Step:
        """Go on when a round has its decision."""

        def wait(resume: Resume) -> None:
            if number in self._decided:
                self._clock.at(self._clock.now + self._costs.link, resume)
            else:
                self._waiters.setdefault(number, []).append(resume)

        def send(resume: Resume) -> None:
            request = ("wait", 0.0, lambda: wait(resume), None)
            self._clock.at(self._clock.now + self._costs.link, self._arrive, request)

        return send

    def count_up(self, number: int) -> int:
        """Count one more host at a round."""
        self.counts[number] = self.counts.get(number, 0) + 1
        return self.counts[number]

    def settle(self, number: int) -> None:
        """Give a round its decision, and wake all who wait for it."""
        self._decided.add(number)
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
    """One host: where it is, and what its link still has to do."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.done = 0  #: rounds
        self.went_on = 0.0
        self.jobs: deque[Steps] = deque()
        self.speaking = False


class Simulation:
    """All hosts, and the store."""

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
        self._speaking = 0  # hosts
        #: What a host does between the decision's arrival and the next call.
        read = costs.member * case.hosts * case.ranks
        self._before = costs.handoff + costs.client
        self._after = max(0.0, costs.host - 2 * self._before - costs.client) + read

    def run(self) -> Result:
        """Let all rounds happen."""
        for index in range(self.case.hosts):
            host = Host(index)
            self._come(host)
            self._start(self._beats())
        self._clock.run(lambda: not self._unfinished and not self._speaking)
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
        """Have the host's link do it, after what it does already."""
        host.jobs.append(steps)
        if not host.speaking:
            self._speak(host)

    def _speak(self, host: Host) -> None:
        self._speaking += bool(host.jobs) - host.speaking
        host.speaking = bool(host.jobs)
        if host.speaking:
            self._start(host.jobs.popleft(), lambda: self._speak(host))

    # -- a host ---------------------------------------------------------------------------------

    def _come(self, host: Host) -> None:
        """Let a host come to its next round, or be done."""
        case, number = self.case, host.done + 1
        if number > case.rounds:
            self._unfinished -= 1
            return
        due = (number - 1) * case.period + self._dice.uniform(0.0, case.spread)
        due += case.late if host.index == 0 else 0.0
        self._clock.at(max(due, self._clock.now), lambda _: self._post(host, number))

    def _post(self, host: Host, number: int) -> None:
        self._last_post[number] = self._clock.now  # at last that of the last
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
            yield store.ask("compare_set", 2 * decision, lambda: store.settle(number))
            for _ in range(3):  # the keys of a round that is over
                yield store.ask("delete")

    def _wait(self, host: Host, number: int) -> Steps:
        store, costs = self._store, self.costs
        decision = self.case.decision(costs.note)
        yield self._processors.work(self._before)
        yield store.await_decision(number)
        yield self._processors.work(costs.client)
        yield store.ask("read", decision)
        others = self.case.readers(costs.note) - 1
        if others:  # it cannot be passed on: each reads for itself, all at the same time
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
        """Look around, ever less often, while waiting."""
        most = max(LONGEST_LOOK, LOOK_PER_HOST * self.case.hosts)
        every = max(FIRST_LOOK, LOOK_PER_HOST * self.case.hosts)
        yield self._clock.sleep(every)
        while host.done < number:
            if host.speaking:
                yield self._clock.sleep(FIRST_LOOK / 2)  # the naps of who waits
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
        for kind in ("add", "check"):  # beats, and what the missing have published
            for _ in range(missing):
                yield self._client(kind, 0)

    def _get(self, size: float) -> Steps:
        """Read a key that is there: a client first waits for it all the same."""
        yield self._client("wait", 0)
        yield self._client("read", size)

    def _client(self, kind: str, size: float, effect: Callable[[], Any] | None = None) -> Step:
        """Ask the store, with the client's own time."""
        ask = self._store.ask(kind, size, effect)
        return lambda resume: self._clock.at(
            self._processors.end(self.costs.client), lambda _: ask(resume)
        )

    def _beats(self) -> Steps:
        """Give a sign of life now and then, as long as there is anybody."""
        every = LIMIT / BEATS
        yield self._clock.sleep(self._dice.uniform(0.0, every))
        while True:
            yield self._store.ask("add")
            yield self._clock.sleep(self._dice.uniform(0.75, 1.0) * every)


def simulate(case: Case, costs: Costs, seed: int = 0) -> Result:
    """Return what comes of a case; the same for the same seed."""
    return Simulation(case, costs, seed).run()
