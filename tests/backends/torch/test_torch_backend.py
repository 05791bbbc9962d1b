"""The torch backend beside the program's own torch.distributed, and its use of the store."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import soak
from support.process_groups import dist
from support.rank_environment import environ_of_ranks, free_port, record_warnings, run_ranks
from support.rank_worlds import Died, Kind, Ranks, Signs, fork, served_store

import syncprims as sp
from syncprims._world.runtime import get_world

TOUR = """
import json, sys, threading
from pathlib import Path
import torch
import torch.distributed as dist
import syncprims as sp

sp.barrier()
total = sp.all_reduce(torch.arange(10_000.0) + sp.get_rank())
with sp.main_first():
    pass
seen = [
    sp.current().backend_name, sp.all_gather(sp.get_local_rank()), total[:2].tolist(),
    sp.any_rank(sp.is_last()), dist.is_initialized(),
    # One host is done with the store once all have come.
    type(sp.current().rounds.board).__name__, [t.name for t in threading.enumerate()],
]
(Path(sys.argv[1]) / f"end-{sp.get_rank()}").write_text(json.dumps(seen))
"""


def tour(command: list[str], ranks: int, folder: Path, place: Path) -> list[Any]:
    """Return what each rank has seen that a launcher starts."""
    script = folder / "script.py"
    script.write_text(TOUR)
    run_ranks(place, [sys.executable, "-m", *command, script, folder], {})
    return [json.loads((folder / f"end-{rank}").read_text()) for rank in range(ranks)]


ON_ONE_HOST = ["SharedMemoryBoard", ["MainThread"]]


@pytest.mark.parametrize("ranks", [2, soak(4)])
def test_torchrun_is_found_by_itself(ranks: int, tmp_path: Path, meeting_place: Path) -> None:
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    first = sum(range(ranks))
    found = ["torch", list(range(ranks)), [first, first + ranks], True, False, *ON_ONE_HOST]
    assert tour(torchrun, ranks, tmp_path, meeting_place) == [found] * ranks
    assert not list(meeting_place.iterdir())


def test_our_launcher_needs_no_store(tmp_path: Path, meeting_place: Path) -> None:
    command = ["syncprims", "run", "-n", "2", "--backend", "gloo"]
    said = tour(command, 2, tmp_path, meeting_place)
    assert said == [["gloo", [0, 1], [1, 3], True, False, *ON_ONE_HOST]] * 2


def test_our_variables_set_by_hand_take_a_store_for_a_name(meeting_place: Path) -> None:
    world = Ranks(Kind("gloo", 2), meeting_place)
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    gathered = world.run_alone(lambda: sp.all_gather(sp.get_rank()), SYNCPRIMS_RUN_ID="", **store)
    assert gathered == [[0, 1]] * 2


def test_the_programs_own_group_before_and_after(tmp_path: Path, meeting_place: Path) -> None:
    def rank(number: int) -> list[Any]:
        names = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        os.environ.update({name: str(value) for name, value in names.items()}, GROUP_RANK="0")
        sp.barrier()
        launcher = sp.current().topology.launcher
        dist.init_process_group("gloo")  # after: a world that runs already minds nothing
        total = torch.ones(1)
        dist.all_reduce(total)
        seen: list[Any] = [launcher, total.item()]
        sp.barrier()
        sp.shutdown()
        dist.all_reduce(total)  # and closes nothing that it has not opened
        with sp.init():  # before
            seen += [total.item(), sp.all_gather(sp.get_rank())]
        dist.destroy_process_group()
        with sp.init():
            return [*seen, sp.broadcast("whole")]

    with served_store() as store:  # as the agent of torchrun does
        said = forked(rank, tmp_path, environ_of_ranks(meeting_place, **store.variables))
    assert said == [["torchrun", 2.0, 4.0, [0, 1], "whole"]] * 2


def test_a_group_that_is_not_the_launchers_world_is_refused(meeting_place: Path) -> None:
    port = free_port()
    code = (
        "import torch.distributed as dist, syncprims\n"
        f"dist.init_process_group('gloo', init_method='tcp://127.0.0.1:{port}', rank=0,"
        " world_size=1)\n"
        "syncprims.barrier()"
    )
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = run_ranks(meeting_place, [sys.executable, "-c", code], variables, code=1)
    assert "torch.distributed has rank=0 and world_size=1" in done.stderr
    assert "torchrun says rank=1 and world_size=2" in done.stderr


def test_who_never_came_is_named(meeting_place: Path, signs: Signs) -> None:
    def program() -> Any:
        if sp.get_rank() == 2:
            return None
        # On a busy machine one may be slower to start than the deadline is long.
        signs.gather(sp.get_rank(), 0, 1, 3)
        with pytest.raises(sp.SyncTimeout) as caught:
            sp.barrier()
        error = caught.value
        return error.missing, error.arrived, "rank 2 never joined" in str(error)

    world = Ranks(Kind("torch", 4, hosts=2), meeting_place)
    outcomes = world.run_alone(program, SYNCPRIMS_JOIN_TIMEOUT="8")
    assert outcomes.pop(2) is None
    assert outcomes == [([2], [0, 1, 3], True)] * 3


def test_who_ended_while_it_joined_has_not_never_joined(meeting_place: Path, signs: Signs) -> None:
    def die(_: Any) -> None:  # once this rank has entered, while it waits for rank 2
        signs.give("dead")
        os.kill(os.getpid(), signal.SIGKILL)

    def program() -> Any:
        from importlib import import_module

        if sp.get_rank() == 1:
            rendezvous = import_module("syncprims.backends.torch.rendezvous").Rendezvous
            rendezvous._await_result = die
        # On a busy machine one may be slower to start than the deadline is long.
        signs.gather(sp.get_rank(), 0, 1, 2)
        if sp.get_rank() == 2:
            signs.wait("dead")
        with pytest.raises(sp.SyncTimeout) as caught:
            sp.barrier()
        text = str(caught.value)
        return caught.value.missing, "\n  rank 1 ended or stopped while it joined\n" in text

    world = Ranks(Kind("torch", 3, hosts=3), meeting_place)
    first, dead, last = world.outcomes(program, start=False, SYNCPRIMS_JOIN_TIMEOUT="8")
    assert isinstance(dead, Died)
    assert (first, last) == (([1], True), ([1], True))


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_joins_says_for_whom_it_waits(absent: int, meeting_place: Path) -> None:
    def program() -> Any:
        if sp.get_rank() == absent:
            return []
        said = record_warnings()
        with pytest.raises(sp.SyncError):
            sp.barrier()
        return said

    world = Ranks(Kind("torch", 2, hosts=2), meeting_place)
    times = {"SYNCPRIMS_JOIN_TIMEOUT": "4", "SYNCPRIMS_WARN_AFTER": "0.5"}
    said = world.run_alone(program, **times)[1 - absent]
    assert 1 <= len(said) <= 3  # with growing pauses
    what = r"ranks \[1\]" if absent else r"the store at 127\.0\.0\.1:\d+"
    assert re.match(rf"still waiting for {what} at init for \d+ s; ", said[0])


def test_an_unreachable_store_ends_a_program_as_any_error_does(meeting_place: Path) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place |= {"GROUP_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place["SYNCPRIMS_JOIN_TIMEOUT"] = "2"
    command = [sys.executable, "-c", "import syncprims; syncprims.barrier()"]
    done = run_ranks(meeting_place, command, place, code=1)  # and not SIGABRT's code
    last = done.stderr.splitlines()[-1]
    assert "cannot reach the store" in last
    assert "Connection refused" in last
    assert "c10d" not in done.stderr  # torch's C++ has nothing to report


def test_a_store_that_is_served_later_is_met(meeting_place: Path, signs: Signs) -> None:
    def program() -> Any:
        if sp.get_rank() == 0:
            signs.wait("first")
        signs.give("first")
        return sp.all_gather(sp.get_rank())

    assert Ranks(Kind("torch", 2, hosts=2), meeting_place).run_alone(program) == [[0, 1]] * 2


def test_who_sits_down_and_then_cannot_go_on_leaves_nothing(meeting_place: Path) -> None:
    def program() -> Any:
        from importlib import import_module

        heartbeat = import_module("syncprims.backends.torch.host_state").Heartbeat

        def fail(*_: Any) -> None:
            raise RuntimeError("Connection reset by peer")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(heartbeat, "beat", fail)
            with pytest.raises(sp.BackendUnavailable, match="cannot reach the store"):
                sp.init()
        with sp.init():
            return sp.all_gather(sp.get_rank())

    world = Ranks(Kind("torch", 2, hosts=2), meeting_place)
    assert world.run_alone(program) == [[0, 1]] * 2
    world.check_nothing_left()


def test_a_rank_killed_while_it_joins_makes_room(meeting_place: Path, signs: Signs) -> None:
    """As after a restart over several agents, which have one run id: its entry is at the store."""

    def join() -> Any:
        with sp.init():
            return sp.all_gather(sp.get_rank())

    def killed_while_joining() -> None:
        from importlib import import_module

        rendezvous: Any = import_module("syncprims.backends.torch.rendezvous")

        def die(*_: Any) -> None:
            signs.give("killed")
            os.kill(os.getpid(), signal.SIGKILL)

        rendezvous.Rendezvous._await_result = die
        sp.init()

    def program() -> Any:
        if sp.get_rank() == 1:
            pid = fork(killed_while_joining, os.environ.copy())
            os.waitpid(pid, 0)
            signs.wait("complete")  # the other rank has completed the epoch with the dead entry
            return join()
        signs.wait("killed")
        from importlib import import_module

        rendezvous: Any = import_module("syncprims.backends.torch.rendezvous").Rendezvous
        enter = rendezvous._enter

        def enter_and_say(self: Any, store: Any) -> Any:
            epoch = enter(self, store)
            signs.give("complete")
            return epoch

        rendezvous._enter = enter_and_say
        return join()

    with served_store() as store:
        world = Ranks(Kind("torch", 2, hosts=2), meeting_place)
        assert world.run_alone(program, **store.variables) == [[0, 1]] * 2


def counting(program: Callable[[Counter[str]], Any]) -> Callable[[], Any]:
    """Have `program` run with a count of all that this rank asks of a store."""

    def run() -> Any:
        from importlib import import_module

        stores = import_module("syncprims.backends.torch.store")
        calls: Counter[str] = Counter()

        class Counting:
            def __init__(self, store: Any) -> None:
                self._store = store

            def __getattr__(self, name: str) -> Any:
                calls[name] += 1
                return getattr(self._store, name)

        connect = stores.StoreEndpoint.connect
        stores.StoreEndpoint.connect = lambda source: Counting(connect(source))
        with sp.init():
            return program(calls)

    return run


ROUNDS = 200


@pytest.mark.parametrize(("ranks", "hosts"), [(2, 2), (8, 2), (3, 3), (6, 3)])
def test_messages_grow_with_hosts_only(ranks: int, hosts: int, meeting_place: Path) -> None:
    def program(calls: Counter[str]) -> tuple[int, float]:
        for _ in range(20):
            sp.barrier()
        before, begin = calls.total(), time.monotonic()
        for _ in range(ROUNDS):
            sp.barrier()
        return calls.total() - before, time.monotonic() - begin

    world = Ranks(Kind("torch", ranks, hosts), meeting_place)
    results = world.run_alone(counting(program), SYNCPRIMS_HEARTBEAT="1000")
    asked = sum(count for count, _ in results) / ROUNDS
    # On a busy machine, each rank that has waited for 20 ms does what another may have failed to.
    late = ranks * max(took for _, took in results) / ROUNDS / 0.02
    # Each host appends and reads. Together they look at most 16 times. Who waits for longer says so
    # (append, read), and is notified (wait, read, delete, and the other's set). One removes a log.
    assert 2 * hosts <= asked <= 8 * hosts + 17 + late


def test_a_store_does_not_grow(meeting_place: Path) -> None:
    def program() -> tuple[int, int]:
        from importlib import import_module

        stores = import_module("syncprims.backends.torch.store")
        settings = sp.current().settings
        host, port = settings.store or ("", 0)
        store = stores.StoreEndpoint(host, port, "look", 10.0).connect()
        seen: list[int] = []
        for _ in range(2):
            for number in range(300):
                if number % 16 == 4 * sp.get_rank():
                    time.sleep(0.004)  # so long that the others announce that they wait
                sp.any_rank(False)
            sp.all_gather("x" * 100)
            sp.barrier()
            seen.append(store.num_keys())
            sp.barrier()
        return seen[0], seen[1]

    for early, late in Ranks(Kind("torch", 4, hosts=2), meeting_place).run(program):
        assert abs(late - early) <= 12, "the keys of a few rounds, which are about to go"


@pytest.mark.parametrize("heartbeats", [6, soak(120)])
def test_a_long_body_in_main_first_times_nothing_out(heartbeats: int, meeting_place: Path) -> None:
    limit = 0.3

    def program() -> str:
        with sp.main_first():
            if sp.is_main():
                end = time.monotonic() + heartbeats * limit
                while time.monotonic() < end:  # loads a model
                    sum(range(10_000))
        return sp.broadcast("whole")

    world = Ranks(Kind("torch", 4, hosts=2), meeting_place)
    variables = {"SYNCPRIMS_TIMEOUT": "0.2", "SYNCPRIMS_HEARTBEAT": str(limit)}
    assert world.run(program, **variables) == ["whole"] * 4


def test_large_objects_pass_by_the_store(meeting_place: Path) -> None:
    def program(size: int) -> Any:
        rank = sp.get_rank()
        array = torch.full((size // 100,), rank)
        mine: dict[str, Any] = {"text": chr(97 + rank) * size, "array": array}
        shared = sp.broadcast(mine, src=2)
        gathered = sp.all_gather(mine["text"])
        mixed = sp.all_gather("x" * size if rank == 1 else rank)
        return (
            shared["text"] == "c" * size,
            shared["array"].unique().tolist(),
            gathered == [chr(97 + r) * size for r in range(4)],
            [len(m) if isinstance(m, str) else m for m in mixed],
        )

    sizes = (60_000, 70_000, 3_000_000)
    world = Ranks(Kind("torch", 4, hosts=2), meeting_place)
    found = world.run(lambda: [program(size) for size in sizes])
    assert found == [[(True, [2], True, [0, size, 2, 3]) for size in sizes]] * 4


def test_a_round_minds_no_fate_that_arrives_meanwhile(meeting_place: Path) -> None:
    def program() -> list[int]:
        decisions = vars(get_world().rounds.board)["_elsewhere"]  # of a link's thread
        over = threading.Event()

        def arrive() -> None:
            number = first = 1 << 40  # rounds that are far away
            while not over.is_set():
                decisions[number] = b""
                number += 1
                if number - first > 2000:
                    del decisions[first]
                    first += 1

        thread = threading.Thread(target=arrive)
        thread.start()
        sys.setswitchinterval(1e-6)
        try:
            return [sp.all_reduce(1) for _ in range(50)]
        finally:
            sys.setswitchinterval(0.005)
            over.set()
            thread.join()

    assert Ranks(Kind("torch", 2, hosts=2), meeting_place).run(program) == [[2] * 50] * 2


@pytest.mark.parametrize(
    ("ranks", "seconds"), [(4, 0.05), *((2, 0.05 + number * 0.006) for number in range(3))]
)
def test_who_dies_in_a_transfer_is_named(ranks: int, seconds: float, meeting_place: Path) -> None:
    """Alone on its host, it is named by the missing heartbeat, and not by an error of Gloo."""

    def program() -> Any:
        value = torch.zeros(4_000_000)
        sp.barrier()
        if sp.get_rank() == ranks - 1:
            import signal

            signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends it, in there
        with pytest.raises(sp.PeerLost) as caught:  # noqa: PT012
            for _ in range(100):
                sp.all_reduce(value)
        return caught.value.rank, "all_reduce" in str(caught.value)

    world = Ranks(Kind("torch", ranks, hosts=2), meeting_place)
    outcomes = world.outcomes(program, start=False, SYNCPRIMS_HEARTBEAT="1")
    assert outcomes[:-1] == [(ranks - 1, True)] * (ranks - 1)


_ONE_TASK = {
    "SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
}  # fmt: skip


@pytest.mark.parametrize(("outer", "inner", "store", "launcher"), [
    ({}, {}, "tcp", "torch.distributed"),
    soak(_ONE_TASK, {}, "tcp", "torch.distributed"),
    soak({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "pod-0"}, {}, "tcp", "torch.distributed"),
    ({}, {"WORLD_SIZE": "2", "LOCAL_RANK": "{}", "NODE_RANK": "0"}, "tcp", "torch.distributed"),
    (_ONE_TASK, {"RANK": "{}", "WORLD_SIZE": "2", "LOCAL_RANK": "{}"}, "file", "torchrun"),
], ids=["no launcher", "SLURM", "a pod", "half a set, as Lightning's", "a FileStore"])  # fmt: skip
def test_an_initialized_group_says_who_one_is(
    outer: dict[str, str],
    inner: dict[str, str],
    store: str,
    launcher: str,
    tmp_path: Path,
    meeting_place: Path,
) -> None:
    url = f"tcp://127.0.0.1:{free_port()}" if store == "tcp" else f"file://{tmp_path}/group"

    def rank(number: int) -> list[Any]:
        os.environ.update({name: value.format(number) for name, value in inner.items()})
        dist.init_process_group("gloo", init_method=url, rank=number, world_size=2)
        sp.barrier()
        place = sp.current().topology
        told = [sp.all_gather(sp.get_rank()), *place[:6], place.launcher]
        dist.barrier()
        return told

    said = forked(rank, tmp_path, environ_of_ranks(meeting_place, **outer))
    assert said == [[[0, 1], rank, 2, rank, 2, 0, 1, launcher] for rank in range(2)]


def forked(rank: Callable[[int], Any], folder: Path, variables: dict[str, str]) -> list[Any]:
    """Return what each of two forked processes returns, which know of each other by themselves."""
    ends = [folder / f"end-{number}" for number in range(2)]

    def run(number: int) -> None:
        ends[number].write_text(json.dumps(rank(number)))
        sp.shutdown()

    pids = [fork(partial(run, number), variables) for number in range(2)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    return [json.loads(end.read_text()) for end in ends]


def test_a_world_started_before_the_group_is_refused(tmp_path: Path, meeting_place: Path) -> None:
    port = free_port()

    def refusal() -> str:
        with pytest.raises(sp.ConfigurationError) as caught:
            sp.barrier()
        return str(caught.value)

    def rank(number: int) -> list[Any]:
        with sp.main_first():  # too early: nothing says that there are two
            pass
        url = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=url, rank=number, world_size=2)
        texts = [refusal(), refusal()]
        sp.init()
        return [*texts, sp.get_rank(), sp.all_gather(number)]

    said = forked(rank, tmp_path, environ_of_ranks(meeting_place))
    for number, (first, again, *found) in enumerate(said):
        assert f"torch.distributed says rank={number} and world_size=2" in first
        assert "rank=0 and world_size=1" in first
        assert "after init_process_group()" in first
        assert again == first
        assert found == [number, [0, 1]]
