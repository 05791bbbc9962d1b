"""A model of hosts that meet at a store, explored in every order of steps.

The steps at the store are those of the backend's own `Decisions`. Around them stands what a host
does, as `docs/concepts/hosts.md` describes it, with one rank per host. Each action of a host is a
function that is called again from its beginning for each of its steps, with what the steps before
have returned. So a state is plain data, and all states can be visited.

Faults come between any two steps: a link is cut and restored (a paused store is a cut of all
links), a host dies, a deadline passes. A host whose requests are not answered may give up.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from syncprims.interface import Label, Note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Op = Callable[..., Any]

_decisions: Any = import_module("syncprims.backends.torch.decisions")
NOTE = Note(Label("barrier"))


class Host(NamedTuple):
    """What a host knows and has done."""

    posted: int = 0
    passed: int = 0
    raised: str = ""  #: the store's verdict, or that the host gave up
    cut_at: int = 0  #: the round at which it gave up
    link: bool = True
    alive: bool = True
    known: tuple[tuple[int, bytes], ...] = ()  #: decisions, by round


class Action(NamedTuple):
    """A function that a host runs, step by step."""

    host: int
    name: str
    arguments: tuple[Any, ...]
    results: tuple[Any, ...] = ()  #: of its steps so far


class State(NamedTuple):
    """The state of all hosts and of the store."""

    hosts: tuple[Host, ...]
    actions: tuple[Action, ...]
    store: tuple[tuple[str, bytes], ...] = ()
    cuts: int = 0  #: that may still come
    deaths: int = 0
    deadlines: int = 0

    def decision(self, number: int) -> bytes:
        """Return the store's decision about a round; empty if there is none."""
        return dict(self.store).get(f"b/{number}/decision", b"")


class _Next(Exception):
    """An action has come to a step that it has not made yet."""


class _Store:
    """The client's side of the store: each request is a step."""

    def __init__(self, op: Op) -> None:
        self._op = op

    def append(self, key: str, data: bytes) -> None:
        self._op("append", key, bytes(data))

    def add(self, key: str, more: int) -> int:
        return int(self._op("add", key, more))

    def get(self, key: str) -> bytes:
        return bytes(self._op("get", key))

    def check(self, keys: list[str]) -> bool:
        return bool(self._op("check", keys[0]))

    def compare_set(self, key: str, expected: str, new: bytes) -> bytes:
        assert not expected
        return bytes(self._op("compare_set", key, bytes(new)))


class Model:
    """So many `hosts` that make `rounds` rounds."""

    def __init__(self, hosts: int, rounds: int, **faults: Any) -> None:
        self.rounds = rounds
        members = {host: [host] for host in range(hosts)}
        self.decisions = _decisions.Decisions("b", members)
        ranks = tuple(Action(host, "rank", ()) for host in range(hosts))
        self._known_steps: dict[Action, tuple[Any, ...]] = {}
        self.start = State((Host(),) * hosts, ranks, **faults)

    # -- what hosts do ---------------------------------------------------------------------------

    def rank(self, op: Op, host: int) -> None:
        """Make all rounds, as the board's `collect`, `verdict` and `abort`."""
        for number in range(1, self.rounds + 1):
            op("post", number)
            what, text = op("wait", number)
            if what == "abort":
                op("ask", number, text)
                what = op("await_answer", number)
            if what != "pass":
                return

    def contribute(self, op: Op, host: int, number: int) -> None:
        """Contribute the host's notes, and decide if they are the last."""
        decision = self.decisions.contribute(_Store(op), number, host, [NOTE])
        if decision is not None:
            op("learn", number, decision)

    def await_decision(self, op: Op, host: int, number: int) -> None:
        """Wait for the decision."""
        op("learn", number, self.decisions.wait(_Store(op), number))

    def look(self, op: Op, host: int, number: int) -> None:
        """Decide in place of a host that was counted last and has not done it."""
        pieces = self.decisions.contributions(_Store(op), number)
        decision = self.decisions.complete(_Store(op), number, pieces)
        if decision is not None:
            op("learn", number, decision)

    def abort(self, op: Op, host: int, number: int, text: str) -> None:
        """Break a round, unless it is decided."""
        op("learn", number, self.decisions.abort(_Store(op), number, text.encode()))

    def publish_cut(self, op: Op, host: int, first: int, posted: int) -> None:
        """Break the first round that is not complete, after this host has given up."""
        end = _decisions.MemberEnd(host, posted, "failed", failure=f"host {host} was cut off")
        self.decisions.end(_Store(op), first, end)

    # -- steps -----------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield what may happen next, and the state after it."""
        for index, action in enumerate(state.actions):
            host = state.hosts[action.host]
            if not host.alive or not self._is_first(state, index):
                continue
            step = self._next_step(action)
            for result, after in self._apply(state, action, *step):
                actions = list(after.actions)
                actions[index] = action._replace(results=(*action.results, result))
                yield (
                    f"host {action.host}: {step}",
                    self._tidy(after._replace(actions=tuple(actions))),
                )
        yield from self._looks(state)
        yield from self._faults(state)

    def _looks(self, state: State) -> Iterator[tuple[str, State]]:
        """Have a host that waits look at the round: the one counted last may be gone."""
        for action in state.actions:
            step, busy = self._next_step(action), ("contribute", "look")
            looks = any(a.host == action.host and a.name in busy for a in state.actions)
            if step[0] == "wait" and not looks and self._silent(state, action.host):
                after = self._submit(state, action.host, "look", step[1])
                yield f"host {action.host} looks", after

    def _tidy(self, state: State) -> State:
        """Remove what can make no difference any more: so there are fewer states."""
        actions = tuple(
            action
            for action in state.actions
            if self._next_step(action)
            and not (
                action.name == "await_decision"
                and self._is_past(state, action.host, action.arguments)
            )
        )
        hosts = tuple(
            host._replace(known=tuple(k for k in host.known if k[0] > host.passed))
            for host in state.hosts
        )
        return state._replace(actions=actions, hosts=hosts)

    def _is_past(self, state: State, host: int, arguments: tuple[int, ...]) -> bool:
        return bool(state.hosts[host].raised) or arguments[0] <= state.hosts[host].passed

    def _is_first(self, state: State, index: int) -> bool:
        """Return whether no earlier request of the same link is unanswered."""
        own = state.actions[index]
        if own.name in ("rank", "await_decision"):
            return True
        earlier = state.actions[:index]
        queued = ("contribute", "look", "abort", "publish_cut")
        return not any(a.host == own.host and a.name in queued for a in earlier)

    def _next_step(self, action: Action) -> tuple[Any, ...]:
        """Return what an action does next; empty at its end."""
        found = self._known_steps.get(action)
        if found is None:
            found = self._known_steps[action] = self._replay(action)
        return found

    def _replay(self, action: Action) -> tuple[Any, ...]:
        before = iter(action.results)
        step: tuple[Any, ...] = ()

        def op(*what: Any) -> Any:
            nonlocal step
            for result in before:
                return result
            step = what
            raise _Next

        with contextlib.suppress(_Next):
            getattr(self, action.name)(op, action.host, *action.arguments)
        return step

    def _apply(
        self, state: State, action: Action, what: str, *facts: Any
    ) -> Iterator[tuple[Any, State]]:
        host = state.hosts[action.host]
        if action.name == "rank":
            yield from getattr(self, f"_{what}")(state, action.host, *facts)
        elif host.link:
            if what == "learn":
                number, decision = facts
                known = dict(host.known)
                if (known.get(number) or _decisions.END)[:1] == _decisions.END:
                    known[number] = decision
                yield None, self._with(state, action.host, known=tuple(sorted(known.items())))
            else:
                yield from self._at_store(state, what, *facts)

    def _at_store(
        self, state: State, what: str, key: str, *data: Any
    ) -> Iterator[tuple[Any, State]]:
        keys = dict(state.store)
        value: Any = keys.get(key)
        if what == "append":
            value = keys[key] = (value or b"") + data[0]
        elif what == "add":
            value = int(value or b"0") + data[0]
            keys[key] = b"%d" % value
        elif what == "compare_set":
            value = keys.setdefault(key, data[0])
        elif what == "check":
            value = key in keys
        elif value is None:
            return  # a client waits for the key
        yield value, state._replace(store=tuple(sorted(keys.items())))

    def _with(self, state: State, number: int, **facts: Any) -> State:
        hosts = list(state.hosts)
        hosts[number] = hosts[number]._replace(**facts)
        return state._replace(hosts=tuple(hosts))

    def _submit(self, state: State, host: int, name: str, *arguments: Any) -> State:
        return state._replace(actions=(*state.actions, Action(host, name, arguments)))

    # -- steps of a rank -------------------------------------------------------------------------

    def _post(self, state: State, host: int, number: int) -> Iterator[tuple[Any, State]]:
        after = self._with(state, host, posted=number)
        after = self._submit(after, host, "contribute", number)
        yield None, self._submit(after, host, "await_decision", number)

    def _wait(self, state: State, host: int, number: int) -> Iterator[tuple[Any, State]]:
        known = _decision_known(state, host, number)
        if known[:1] == _decisions.END:
            yield ("abort", known[1:].decode()), state
        elif known:
            yield from (((what, ""), after) for what, after in self._obey(state, host, known))
        else:
            yield from (((what, ""), after) for what, after in self._give_up(state, host, number))
            for other in self._silent(state, host):
                yield ("abort", f"host {other} is lost"), state
            if state.deadlines:
                after = state._replace(deadlines=state.deadlines - 1)
                yield ("abort", "the deadline has passed"), after

    def _silent(self, state: State, host: int) -> list[int]:
        """Return the hosts whose heartbeat this one misses; it sees none if it is cut off."""
        if not state.hosts[host].link:
            return []
        return [number for number, h in enumerate(state.hosts) if not (h.alive and h.link)]

    def _ask(self, state: State, host: int, number: int, text: str) -> Iterator[tuple[Any, State]]:
        yield None, self._submit(state, host, "abort", number, text)

    def _await_answer(self, state: State, host: int, number: int) -> Iterator[tuple[Any, State]]:
        known = _decision_known(state, host, number) or bytes(_decisions.END)
        if known[:1] != _decisions.END:
            yield from self._obey(state, host, known)
        else:
            yield from self._give_up(state, host, number)

    def _obey(self, state: State, host: int, known: bytes) -> Iterator[tuple[str, State]]:
        """Do what the store has decided."""
        if known[:1] == _decisions.COMPLETE:
            yield "pass", self._with(state, host, passed=state.hosts[host].passed + 1)
        else:
            yield "raise", self._with(state, host, raised=known[1:].decode())

    def _give_up(self, state: State, host: int, number: int) -> Iterator[tuple[str, State]]:
        """Give up, if this host is cut off; the others are told when it is not any more."""
        if not state.hosts[host].link:
            after = self._with(state, host, raised="cut off", cut_at=number)
            yield "raise", self._submit(after, host, "publish_cut", number, number)

    # -- faults ----------------------------------------------------------------------------------

    def _faults(self, state: State) -> Iterator[tuple[str, State]]:
        for number, host in enumerate(state.hosts):
            if not host.alive:
                continue
            if not host.link:
                yield f"the link of host {number} is back", self._with(state, number, link=True)
            elif state.cuts:
                after = self._with(state, number, link=False)
                yield f"the link of host {number} is cut", after._replace(cuts=state.cuts - 1)
            if state.deaths:
                after = self._with(state, number, alive=False)
                yield f"host {number} dies", after._replace(deaths=state.deaths - 1)

    # -- what must hold --------------------------------------------------------------------------

    def violation(self, state: State, steps: list[tuple[str, State]]) -> str:
        """Return what is wrong with a state; empty if nothing is."""
        hosts = state.hosts
        posted, passed = min(h.posted for h in hosts), max(h.passed for h in hosts)
        if passed > posted:
            return f"round {passed} was passed, and a host has not posted to it"
        for number in range(1, self.rounds + 1):
            decision = state.decision(number)
            if decision and decision[:1] != _decisions.COMPLETE and passed >= number:
                return f"round {number} was broken, and a host passed round {passed}"
        told = {h.raised for h in hosts if h.raised and not h.cut_at}
        if len(told) > 1:
            return f"hosts that were not cut off raise different verdicts: {told}"
        working = any("dies" not in what and "is cut" not in what for what, _ in steps)
        if not working and any(h.alive and not h.raised and h.passed < self.rounds for h in hosts):
            return "a host waits for ever"
        return ""


def _decision_known(state: State, host: int, number: int) -> bytes:
    """Return the decision about a round that a host knows; empty if it knows none."""
    return dict(state.hosts[host].known).get(number, b"")


def explore(model: Model) -> int:
    """Visit every state and return their number.

    A visited state is kept as its hash only, of 64 bits: there are up to millions of them.

    :raises AssertionError: with the way to the first state that is wrong.
    """
    came_from: dict[int, int | None] = {hash(model.start): None}
    next_states = [model.start]
    while next_states:
        states, next_states = next_states, []
        for state in states:
            steps = list(model.steps(state))
            wrong = model.violation(state, steps)
            if wrong:
                way = _way_to(model, state, came_from)
                raise AssertionError("\n".join([wrong, *way, *map(str, state.hosts)]))
            for _, after in steps:
                if hash(after) not in came_from:
                    came_from[hash(after)] = hash(state)
                    next_states.append(after)
    return len(came_from)


def _way_to(model: Model, state: State, came_from: dict[int, int | None]) -> list[str]:
    """Return the names of the steps from the start to `state`."""
    hashes = [hash(state)]
    while (before := came_from[hashes[-1]]) is not None:
        hashes.append(before)
    way: list[str] = []
    at = model.start
    for wanted in reversed(hashes[:-1]):
        what, at = next(step for step in model.steps(at) if hash(step[1]) == wanted)
        way.append(what)
    return way
