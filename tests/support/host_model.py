"""A model of hosts that meet at a store, explored in every order of steps.

The steps at the store are those of the backend's own `Decisions`. Around them stands what a host
does, as `docs/concepts/hosts.md` describes it, with one rank per host. A host has one task at a
time: a method of `Decisions` that is called again from its beginning for each of its requests, with
the answers to the requests before. So a state is plain data, and all states can be visited.

Faults come between any two steps: a link is cut and restored (a paused store is a cut of all
links, and a paused host is cut off without knowing it), a host dies, a deadline passes. A host
whose requests are not answered may give up.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

from syncprims.errors import Evicted, SyncTimeout
from syncprims.interface import Label, Note, Status

_decisions: Any = import_module("syncprims.backends.torch.decisions")
_rendezvous: Any = import_module("syncprims.backends.torch.rendezvous")
_roster: Any = import_module("syncprims.backends.torch.roster")
_membership: Any = import_module("syncprims._world.membership")
_world: Any = import_module("syncprims._world.world")
NOTE = Note(Label("barrier"))
CUT = "cut off"


class Host(NamedTuple):
    """What a host knows and does. After its post, it waits for the decision if it has no task."""

    posted: int = 0
    passed: int = 0
    raised: str = ""  #: the store's verdict, or :data:`CUT` if the host gave up
    link: bool = True
    alive: bool = True
    task: tuple[str, ...] = ()  #: its name and its text
    answers: tuple[Any, ...] = ()  #: to the requests of its task so far


class State(NamedTuple):
    """The state of all hosts and of the store."""

    hosts: tuple[Host, ...]
    store: tuple[tuple[str, bytes], ...] = ()
    cuts: int = 0  #: that may still come
    deaths: int = 0
    deadlines: int = 0

    def change(self, number: int, **facts: Any) -> State:
        """Return the state after a change of one host."""
        hosts = list(self.hosts)
        hosts[number] = hosts[number]._replace(**facts)
        return self._replace(hosts=tuple(hosts))

    def read(self, key: str) -> bytes:
        """Return the store's value of a key; empty if there is none."""
        return dict(self.store).get(key, b"")


class _Next(Exception):
    """A task has come to a request that has no answer yet."""


class _Waits(Exception):
    """A task waits for others. What it has learned since so many answers, it learns again."""


class _Store:
    """The client's side of the store: gives the answers, and stops at the request after them."""

    def __init__(self, answers: tuple[Any, ...]) -> None:
        self._answers = answers
        self.given = 0

    def __getattr__(self, name: str) -> Any:
        def request(*arguments: Any) -> Any:
            if name == "check":  # and get: one request, whose answer is empty if there is no value
                return "/left/" not in arguments[0][0]  # hosts end by death only
            if name == "wait":  # a host begins with it once the key is there
                return None
            if self.given < len(self._answers):
                self.given += 1
                return self._answers[self.given - 1]
            raise _Next(name, *arguments)

        return request


class Model:
    """So many `hosts` that make `rounds` rounds."""

    def __init__(self, hosts: int, rounds: int, **faults: Any) -> None:
        self.rounds = rounds
        self.start = State((Host(),) * hosts, **faults)
        self._decisions = _decisions.Decisions("b", {host: [host] for host in range(hosts)})

    def _run(self, host: int, number: int, store: Any, name: str, text: str = "") -> Any:
        """Run a task of a host about round `number`, and return the decision that it learns."""
        if name == "contribute":
            return self._decisions.contribute(store, number, host, [NOTE])
        if (
            name == "look"
        ):  # the host whose entry decided may have died before it notified the others
            log = self._decisions.read(store, number)
            if log.decision is not None:
                self._decisions.notify(store, number, log)
            return log.decision
        if name == "announce":
            return self._decisions.announce(store, number, host)
        if name == "wait":
            return self._decisions.wait(store, number)
        if name == "abort":
            return self._decisions.abort(store, number, host, text.encode())
        end = _decisions.MemberEnd(host, number, "failed", failure=f"host {host} was cut off")
        return self._decisions.end(store, number, host, end)

    def _decision(self, state: State, number: int) -> bytes:
        """Return the decision about a round; empty if there is none."""
        return self._decisions.parse(state.read(f"b/{number}/log")).decision or b""

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield what may happen next, and the state after it."""
        for number, host in enumerate(state.hosts):
            if host.alive:
                for what, after in (*self._act(state, number, host), *_suffer(state, number, host)):
                    yield f"host {number} {what}", after

    def _act(self, state: State, number: int, host: Host) -> Iterator[tuple[str, State]]:
        waits = host.posted > host.passed and not host.raised
        if host.task and host.link:
            yield from self._continue(state, number, host)
        if waits and not host.link:
            after = state.change(number, raised=CUT)
            yield "gives up", after if host.task else after.change(number, task=("end",))
        elif waits and not host.task:
            yield from self._wait(state, number, host)
        elif not (waits or host.raised) and host.passed < self.rounds:
            yield "posts", state.change(number, posted=host.posted + 1, task=("contribute",))

    def _continue(self, state: State, number: int, host: Host) -> Iterator[tuple[str, State]]:
        """Make the next request of a host's task, or end the task."""
        try:
            decision = self._run(number, host.posted, _Store(host.answers), *host.task)
        except _Next as request:
            yield from _request(state, number, *request.args)
            return
        ends_again = host.task[0] == "abort" and decision[:1] == _decisions.END
        assert not ends_again, "an abort ends with no verdict, and its host waits for ever"
        after = state.change(number, task=(), answers=())
        if host.raised and host.task != ("end",):  # the others learn it, now that the link is back
            after = after.change(number, task=("end",))
        elif decision and not host.raised:
            after = self._learn(after, number, decision)
        yield f"ends its {host.task[0]}", after

    def _wait(self, state: State, number: int, host: Host) -> Iterator[tuple[str, State]]:
        """Yield what a host may do that waits for the decision about its round."""
        round_key = f"b/{host.posted}"
        if number not in self._decisions.parse(state.read(f"{round_key}/log")).waiting:
            yield "announces its wait", state.change(number, task=("announce",))
        elif f"{round_key}/decided" in dict(state.store):
            yield "is notified", state.change(number, task=("wait",))
        for other, it in enumerate(state.hosts):
            if not (it.alive and it.link):  # its heartbeat is missed
                yield "looks", state.change(number, task=("look",))
                yield "aborts", state.change(number, task=("abort", f"host {other} is lost"))
        if state.deadlines:
            after = state.change(number, task=("abort", "the deadline has passed"))
            yield "is late", after._replace(deadlines=state.deadlines - 1)

    def _learn(self, state: State, number: int, decision: bytes) -> State:
        kind, text = decision[:1], decision[1:].decode(errors="replace")
        if kind == _decisions.END:
            return state.change(number, task=("abort", text))
        if kind == _decisions.VERDICT:
            return state.change(number, raised=text)
        return state.change(number, passed=state.hosts[number].passed + 1)

    # -- what must hold --------------------------------------------------------------------------

    def violation(self, state: State, steps: list[tuple[str, State]]) -> str:
        """Return what is wrong with a state; empty if nothing is."""
        hosts = state.hosts
        posted, passed = min(h.posted for h in hosts), max(h.passed for h in hosts)
        if passed > posted:
            return f"round {passed} was passed, and a host has not posted to it"
        for number in range(1, passed + 1):
            if self._decision(state, number)[:1] != _decisions.COMPLETE:
                return f"round {passed} was passed, and round {number} is not complete"
        verdicts = {h.raised for h in hosts} - {"", CUT}
        if len(verdicts) > 1:
            return f"hosts that were not cut off raise different verdicts: {verdicts}"
        working = any("dies" not in what and "is cut" not in what for what, _ in steps)
        if not working and any(h.alive and not h.raised and h.passed < self.rounds for h in hosts):
            return "a host waits for ever"
        return ""


class Reforms(Model):
    """So many `hosts`, each of which calls `reform` until it is in the epoch `last`.

    Of a host, `passed` is its epoch. It calls at any time, as if it had lost somebody.
    """

    def __init__(self, hosts: int, last: int, **faults: Any) -> None:
        self._last = last
        self.start = State((Host(),) * hosts, **faults)
        groups = [_rendezvous.HostGroup(f"host {n}", [n], place=str(n)) for n in range(hosts)]
        self._placement = _rendezvous.Placement("t", groups)
        self._vote: Any = functools.cache(self._vote_on)
        self._read: Any = functools.cache(self._read_store)

    def _act(self, state: State, number: int, host: Host) -> Iterator[tuple[str, State]]:
        if host.task and host.link:
            members, _ = self._read(state.store)
            what, result = self._vote(number, host, members[host.passed])
            if what == "asks":
                yield from _request(state, number, *result)
                return
            after = state.change(number, task=(), answers=())
            if what == "waits":
                after = state.change(number, answers=host.answers[:result])
            elif what == "returns":
                assert result.processes == members[result.number], "two memberships"
                assert number in result.processes, "a host passes that was excluded"
                after = after.change(number, passed=result.number)
            elif result:
                after = after.change(number, raised=what)
            yield what, after
        elif host.task:
            yield "gives up", state.change(number, task=(), answers=())
        elif host.passed < self._last and not host.raised:
            yield "calls reform", state.change(number, task=("reform",))
            if state.deadlines:
                after = state.change(number, task=("reform", "without patience"))
                yield "calls reform for no time", after._replace(deadlines=state.deadlines - 1)

    def _vote_on(self, number: int, host: Host, members: tuple[int, ...]) -> tuple[str, Any]:
        """Return what `reform` does next on a host, and a fact about that."""
        store = _Store(host.answers)
        silent: set[int] = set()
        connection = SimpleNamespace(
            placement=self._placement,
            host=number,
            liveness=SimpleNamespace(state=lambda process: ["alive"]),
            heartbeat=SimpleNamespace(
                limit=1.0,
                silence=lambda host: float(host in silent),
                look=lambda store, hosts: silent.update(store.silent(tuple(sorted(hosts)))),
            ),
            requests=SimpleNamespace(ask=lambda work, limit: work(store)),
        )
        roster = _roster.Roster(self._placement)
        processes = _roster.Processes(number, connection, roster, elastic=False)
        processes._admitted.update(roster.local)  # it was in the first epoch, with all of them
        processes.members = members

        def wait(ready: Callable[[], bool], until: float, awaited: Any) -> None:
            given = store.given
            silent.clear()
            processes.look(store)
            if not ready():
                raise _Waits(given)

        backend = SimpleNamespace(
            process=number,
            members=members,
            capacity=roster.first,
            decide=processes.decide,
            publish=lambda topic, value: processes.publish(value),
            published=lambda topic, process: processes.published(process),
            state=processes.state,
            arrived=processes.arrived,
            wait=wait,
        )
        ranks = [_world.Member(process, rank, 0) for rank, process in enumerate(members)]
        board = SimpleNamespace(
            collected=0, virtual_time=False, status=lambda rank: Status(), now=lambda: 0.0
        )
        world = SimpleNamespace(
            rank=members.index(number),
            epoch=host.passed,
            decided=_membership.Epoch(host.passed, len(ranks), ranks),
            rounds=SimpleNamespace(board=board),
            settings=SimpleNamespace(warn_after=math.inf, agent_store=False),
            backend=backend,
            rounds_completed=lambda: 0,
        )
        deadline = 0.0 if len(host.task) > 1 else math.inf
        terms = _membership._Terms("reform()", 1, 0.0, deadline)
        try:
            return "returns", _membership._Vote(world, terms, SyncTimeout()).hold()
        except _Next as request:
            return "asks", request.args
        except _Waits as wait_since:
            return "waits", wait_since.args[0]
        except (Evicted, SyncTimeout) as error:
            return f"raises {type(error).__name__}", isinstance(error, Evicted)

    def _read_store(
        self, store: tuple[tuple[str, bytes], ...]
    ) -> tuple[dict[int, Any], dict[int, int]]:
        """Return the hosts of each epoch, none if it was refused; and the latest calls."""
        members: dict[int, Any] = {0: (*range(len(self.start.hosts)),)}
        calls: dict[int, int] = {}
        for key, value in store:
            if key.startswith("t/reform/epoch-"):
                decision = _membership._decode(value.decode())
                is_epoch = isinstance(decision, _membership.Epoch)
                members[int(key.rpartition("-")[2])] = decision.processes if is_epoch else ()
            elif key == "t/reform/log":
                for process, said in map(json.loads, value.splitlines()):
                    calls[process] = json.loads(said)[0]
        return members, calls

    def violation(self, state: State, steps: list[tuple[str, State]]) -> str:
        """Return what is wrong with a state; empty if nothing is."""
        members, calls = self._read(state.store)
        latest = [hosts for hosts in members.values() if hosts][-1]
        for number, host in enumerate(state.hosts):
            if host.raised and number in latest:
                return f"host {number} was excluded, and is a member of the latest epoch"
            if host.alive and number not in latest and state.cuts == self.start.cuts:
                return f"host {number} was left out, and nobody was ever cut off"
        votes = {n for slot, n in calls.items() if state.hosts[slot].alive} - {*members}
        return "hosts wait for each other in two votes" if len(votes) > 1 else ""


def _request(
    state: State, number: int, name: str, key: Any, *data: Any
) -> Iterator[tuple[str, State]]:
    """Yield the possible results of a host's request, with the answer that it has then."""
    host = state.hosts[number]
    if name == "silent":  # whose heartbeat is missing: of a host that is gone, sooner or later
        gone = [n for n in key if not (state.hosts[n].alive and state.hosts[n].link)]
        for missing in ((), *((n,) for n in gone), tuple(gone))[: 2 ** len(gone)]:
            yield f"misses {missing}", state.change(number, answers=(*host.answers, missing))
        return
    sent = [one.encode() if isinstance(one, str) else one for one in data]
    answer, store = _answer(dict(state.store), name, key, sent)
    after = state.change(number, answers=(*host.answers, answer))
    yield f"{name} {key}", after._replace(store=tuple(sorted(store.items())))


def _answer(
    keys: dict[str, bytes], name: str, key: str, data: list[Any]
) -> tuple[Any, dict[str, bytes]]:
    """Return the store's answer to a request, and its keys then."""
    value = keys.get(key, b"")
    if name == "append":
        value = keys[key] = value + data[0]
    elif name == "add":
        value = int(value or b"0") + data[0]
        keys[key] = b"%d" % value
    elif name == "set":
        keys[key] = data[0]
    elif name == "compare_set" and not data[0]:
        value = keys.setdefault(key, data[1])
    elif name == "compare_set":  # a read
        value = value or data[0]
    return value, keys


def _suffer(state: State, number: int, host: Host) -> Iterator[tuple[str, State]]:
    """Yield the faults that may come to a host, and the return of its link."""
    if not host.link:
        yield "has its link back", state.change(number, link=True)
    elif state.cuts:
        yield "is cut off", state.change(number, link=False)._replace(cuts=state.cuts - 1)
    if state.deaths:
        yield "dies", state.change(number, alive=False)._replace(deaths=state.deaths - 1)


def explore(model: Model) -> int:
    """Visit every state and return their number.

    A visited state is kept as its hash only, of 64 bits: there are up to millions of them.

    :raises AssertionError: with the way to the first state that is wrong.
    """
    came_from: dict[int, tuple[int, str]] = {hash(model.start): (0, "")}
    next_states = [model.start]
    while next_states:
        states, next_states = next_states, []
        for state in states:
            at, steps = hash(state), list(model.steps(state))
            wrong = model.violation(state, steps)
            if wrong:
                way: list[str] = []
                while what := came_from[at][1]:
                    way.insert(0, what)
                    at = came_from[at][0]
                raise AssertionError("\n".join([wrong, *way, *map(str, state.hosts)]))
            for what, after in steps:
                if hash(after) not in came_from:
                    came_from[hash(after)] = at, what
                    next_states.append(after)
    return len(came_from)
