"""The simulation of many hosts: its formulas, and agreement with the backend."""

from __future__ import annotations

import dataclasses
import sys
from importlib import import_module
from typing import Any

import pytest
from support import ROOT

from syncprims.interface import Label, Note

BENCH = ROOT / "bench"
NOTE = Note(Label("barrier", "", None, None, "train.py:12"))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return import_module("simulation")


@pytest.fixture
def simulate(bench: Any) -> Any:
    return import_module("simulate")


def costs(bench: Any, **changes: Any) -> Any:
    """Everything takes no time, but for what is said."""
    kinds = ("contribute", "wait", "read", "check", "add", "compare_set", "delete", "wake")
    nothing = {"server": dict.fromkeys(kinds, 0.0), "server_per_kb": 0.0, "client": 0.0}
    rest = {"handoff": 0.0, "host": 0.0, "piece": 0.0, "member": 0.0, "note": 50, "link": 0.0}
    return bench.Costs(**{**nothing, **rest, **changes})


class CountingStore:
    """A store in a dictionary, which counts the messages that TCPStore would be sent."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {}
        self.messages = 0

    def append(self, key: str, data: bytes) -> None:
        self.messages += 1
        self.keys[key] = self.keys.get(key, b"") + data

    def add(self, key: str, more: int) -> int:
        self.messages += 1
        self.keys[key] = self.keys.get(key, 0) + more
        return int(self.keys[key])

    def get(self, key: str) -> bytes:
        self.messages += 2  # the client waits for the key first
        return bytes(self.keys[key])

    def compare_set(self, key: str, _old: str, new: bytes) -> bytes:
        self.messages += 1
        return bytes(self.keys.setdefault(key, new))

    def delete_key(self, key: str) -> bool:
        self.messages += 1
        return self.keys.pop(key, None) is not None


@pytest.mark.parametrize("hosts", [1, 2, 5])
def test_a_round_takes_as_many_messages_as_the_backend_sends(bench: Any, hosts: int) -> None:
    decisions: Any = import_module("syncprims.backends.torch.decisions")
    store = CountingStore()
    rounds = decisions.Decisions("b", {host: [host] for host in range(hosts)})
    for number in range(1, 21):
        before = store.messages
        for host in range(hosts):
            rounds.contribute(store, number, host, [NOTE])
        for _ in range(hosts):
            rounds.wait(store, number)
    case = bench.Case(hosts, ranks=1, rounds=10)
    result = bench.simulate(case, costs(bench))
    assert result.messages / case.rounds == store.messages - before == 4 * hosts + 6


def test_the_decision_has_the_size_that_the_backend_gives_it(bench: Any) -> None:
    decisions: Any = import_module("syncprims.backends.torch.decisions")
    source = NOTE._replace(payload=b"a")
    length = len(NOTE.encode()) + 4
    for notes, distinct in (([NOTE] * 24, 1), ([source] + [NOTE] * 23, 2)):
        case = bench.Case(3, ranks=8, distinct=distinct)
        size = len(decisions.COMPLETE + decisions.encode_notes(notes))
        assert abs(case.decision(length) - size) <= 8


def test_its_waits_are_those_of_the_backend(bench: Any) -> None:
    board: Any = import_module("syncprims.backends.torch.board")
    host_state: Any = import_module("syncprims.backends.torch.host_state")
    seconds = [bench.FIRST_LOOK, bench.LONGEST_LOOK, bench.LOOK_PER_HOST]
    expected = [board._FIRST_LOOK, board._LONGEST_LOOK, board._LOOK_PER_HOST]
    assert seconds == [figure * 1e6 for figure in expected]
    assert bench.MOST_LOOKED_AT == board._MOST_LOOKED_AT
    assert host_state.MOST == bench.LARGEST_SHARED
    assert bench.BEATS == host_state.BEATS


def test_a_round_of_one_host_is_the_sum_of_its_ways(bench: Any) -> None:
    """Contribute, wait, read: there and back. Decide: there. The woken read, too: ten ways."""
    result = bench.simulate(bench.Case(1, rounds=3), costs(bench, link=10.0))
    # Before the next, the link removes three keys, of which two ways overlap with the reading.
    assert result.took == [100.0, 140.0, 140.0]


def test_requests_queue_at_the_store(bench: Any) -> None:
    """Of ten hosts' reads at once, each waits for those before it; first, one reads the notes."""
    server = costs(bench).server | {"read": 7.0}
    result = bench.simulate(bench.Case(10, rounds=1), costs(bench, server=server))
    assert sorted(result.took) == [7.0 * n for n in range(2, 12)]
    assert result.busy == 77.0


def test_shared_processors_do_one_thing_at_a_time(bench: Any) -> None:
    alone = costs(bench, host=100.0)
    own = bench.simulate(bench.Case(4, ranks=1, rounds=1), alone)
    shared = bench.simulate(bench.Case(4, ranks=1, rounds=1, processors=2), alone)
    assert set(own.took) == {100.0}
    assert sorted(shared.took) == [100.0, 100.0, 200.0, 200.0]


def test_who_waits_looks_around_ever_less_often(bench: Any) -> None:
    """A host that waits looks after 50, 150 and 350 ms."""
    for late, looks in ((149_000.0, 1), (349_000.0, 2), (351_000.0, 3)):
        case = bench.Case(2, rounds=1, late=late)
        assert bench.simulate(case, costs(bench)).looks == looks
    assert bench.simulate(bench.Case(2, rounds=1), costs(bench)).looks == 0


def test_a_decision_that_cannot_be_shared_is_read_by_every_rank(bench: Any) -> None:
    case = bench.Case(20, rounds=1, distinct=2)
    assert (case.readers(50), case.readers(5000)) == (1, 8)
    large = dataclasses.replace(costs(bench), note=5000)
    assert bench.simulate(case, large).messages == 20 * (4 + 7 * 2) + 6


def test_the_same_seed_gives_the_same_rounds(bench: Any) -> None:
    case = bench.Case(8, rounds=5, period=1e5, spread=1e4)
    first, again, other = (
        bench.simulate(case, costs(bench, link=5.0), seed).calls for seed in (1, 1, 2)
    )
    assert first == again != other


def test_quantiles(bench: Any) -> None:
    times = [float(n) for n in range(1, 101)]
    assert [bench.quantile(times, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]


def test_the_arithmetic_agrees_with_the_simulation(bench: Any, simulate: Any) -> None:
    measured = bench.Costs.load()
    result = bench.simulate(bench.Case(64, rounds=4), measured)
    assert result.looks == 0
    assert result.busy / 4 == pytest.approx(simulate.demand(64, measured)[0], rel=0.03)


def test_a_store_is_all_but_busy_where_it_saturates(bench: Any, simulate: Any) -> None:
    measured = bench.Costs.load()
    for rate in (1.0, 10.0):
        most = simulate.saturates_at(measured, rate)
        loads = [
            (rate * round_ + beats) / 1e6
            for round_, beats in (simulate.demand(most + n, measured) for n in (0, 1))
        ]
        assert loads[0] < 1 <= loads[1]


def test_it_reproduces_what_was_measured(simulate: Any) -> None:
    found = simulate.checks()
    assert len(found) >= 3
    assert all(abs(check.error) <= simulate.TOLERANCE for check in found), found


@pytest.fixture(autouse=True)
def forget() -> Any:
    """Other tests shall find no module of the bench."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(BENCH) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]
