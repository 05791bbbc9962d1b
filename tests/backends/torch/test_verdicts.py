"""One verdict per round across hosts: in a model, and with stores that are stopped."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.host_model import Model, Reforms, explore
from support.network_hosts import network, why_not
from support.rank_worlds import Kind, Ranks, Signs, fork, served_store

import syncprims as sp

LIMIT = 2.0  # seconds: SYNCPRIMS_HEARTBEAT

FAULTS = [
    {"hosts": 2, "rounds": 2},
    {"hosts": 2, "rounds": 2, "cuts": 1},
    {"hosts": 2, "rounds": 2, "deaths": 1},
    {"hosts": 2, "rounds": 2, "deadlines": 1},
    {"hosts": 2, "rounds": 1, "cuts": 1, "deaths": 1},
    {"hosts": 2, "rounds": 1, "cuts": 1, "deadlines": 1},
    {"hosts": 2, "rounds": 1, "cuts": 2},
    pytest.param({"hosts": 3, "rounds": 1, "cuts": 1}, marks=pytest.mark.soak),
]


REFORMS = [
    {"hosts": 2, "last": 2},
    pytest.param({"hosts": 3, "last": 1}, marks=pytest.mark.soak),
    {"hosts": 2, "last": 1, "cuts": 1},
    {"hosts": 2, "last": 1, "deadlines": 1},
    pytest.param({"hosts": 2, "last": 2, "cuts": 1, "deadlines": 1}, marks=pytest.mark.soak),
    pytest.param({"hosts": 2, "last": 1, "cuts": 2, "deaths": 1}, marks=pytest.mark.soak),
]


def name_of(faults: dict[str, int]) -> str:
    return "-".join(f"{count} {what}" for what, count in faults.items())


@pytest.mark.parametrize("faults", FAULTS, ids=name_of)
def test_in_every_order_a_round_has_one_verdict(faults: dict[str, int]) -> None:
    assert explore(Model(**faults)) > 0


@pytest.mark.parametrize("faults", REFORMS, ids=name_of)
def test_in_every_order_an_epoch_has_one_membership(faults: dict[str, int]) -> None:
    assert explore(Reforms(**faults)) > 0


def pause(pid: int, signs: Signs) -> None:
    """Stop a process for longer than a heartbeat may be missing, once a rank asks for it."""
    signs.wait("stop")
    os.kill(pid, signal.SIGSTOP)
    time.sleep(2.5 * LIMIT)  # the pause under test
    os.kill(pid, signal.SIGCONT)


def rounds_with_a_pause(signs: Signs, pid_of: Callable[[], int]) -> Callable[[], Any]:
    """Return a program whose last rank has a process stopped while the rounds go on."""

    def program() -> Any:
        sp.barrier("begin")
        if sp.is_last():
            pausing = fork(lambda: pause(pid_of(), signs), os.environ.copy())
            signs.give("stop")
        end = time.monotonic() + 4 * LIMIT
        rounds = 0
        while sp.any_rank(time.monotonic() < end):
            rounds += 1
            assert sp.all_gather(rounds) == [rounds] * sp.get_world_size()
            time.sleep(0.005)  # a step that computes: the rounds leave the processors to others
        if sp.is_last():
            os.waitpid(pausing, 0)
        return rounds > 0

    return program


KIND = Kind("torch", 4, hosts=2)


def test_a_store_stopped_for_long_costs_no_ranks_life(meeting_place: Path, signs: Signs) -> None:
    with served_store() as store:
        program = rounds_with_a_pause(signs, lambda: store.pid)
        variables = {**store.variables, "SYNCPRIMS_HEARTBEAT": str(LIMIT)}
        assert Ranks(KIND, meeting_place).run(program, **variables) == [True] * KIND.ranks


def test_who_serves_the_store_may_stop(meeting_place: Path, signs: Signs, tmp_path: Path) -> None:
    def program() -> Any:
        if sp.is_main():
            (tmp_path / "pid").write_text(str(os.getpid()))
        return rounds_with_a_pause(signs, lambda: int((tmp_path / "pid").read_text()))()

    world = Ranks(KIND, meeting_place)
    assert world.run(program, SYNCPRIMS_HEARTBEAT=str(LIMIT)) == [True] * KIND.ranks


def test_a_deadline_while_the_store_is_stopped(meeting_place: Path, signs: Signs) -> None:
    """The store has not decided it, so one host may pass a round that the other gave up. No more.

    Rank 1 gives up at its deadline. Rank 0 comes later, and passes that round or does not, as the
    store finds it. It never passes the next one, and never hangs in it.
    """

    def program() -> Any:
        sp.barrier("begin")
        if sp.get_rank() == 0:
            signs.give("begun")
            signs.wait("gave up")
            os.kill(store.pid, signal.SIGCONT)
        else:
            signs.wait("begun")  # or the store stops before rank 0 knows of that round
            os.kill(store.pid, signal.SIGSTOP)
        said = []
        for number in range(3):
            try:
                sp.barrier(f"{number}", timeout=0.2 if sp.get_rank() == 1 else None)
                said.append("passed")
            except sp.SyncError as error:
                said.append(type(error).__name__)
                signs.give("gave up")
        return said

    with served_store() as store:
        variables = {**store.variables, "SYNCPRIMS_HEARTBEAT": "1"}
        kind = Kind("torch", 2, hosts=2)
        first, second = Ranks(kind, meeting_place).run(program, **variables)
    assert second == ["SyncTimeout"] * 3
    assert "passed" not in first[1:]
    assert set(first) <= {"passed", "SyncTimeout", "PeerFailed"}


@pytest.mark.soak
@pytest.mark.root
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_host_that_is_cut_off_and_comes_back_hangs_nobody(tmp_path: Path) -> None:
    with network(2, 2, tmp_path) as net:
        net.run(
            """
            barrier("begin")
            report("begun")
            number = 0
            try:
                while True:
                    number += 1
                    all_gather(number)
            except SyncError as error:
                said = [number, type(error).__name__, getattr(error, "rank", None), str(error)]
            try:
                barrier("again")
                said.append("passed")
            except SyncError:
                said.append("refused")
            report("end", json.dumps(said))
            shutdown()
            os._exit(0)
            """,
            SYNCPRIMS_HEARTBEAT="2",
        )
        net.await_reports(*(f"begun-{rank}" for rank in range(4)))
        net.cut(net.hosts[1])
        net.await_reports("end-2", "end-3")
        net.mend(net.hosts[1])
        net.await_reports("end-0", "end-1")
        said = [json.loads(net.report_of(rank)) for rank in range(4)]
    assert said[0] == said[1], "one verdict on a host"
    assert said[2] == said[3], "one verdict on a host"
    assert {last for *_, last in said} == {"refused"}
    assert 0 <= said[0][0] - said[2][0] <= 1, "at most the round that was under way"
