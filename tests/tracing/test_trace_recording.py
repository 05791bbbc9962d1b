"""`SYNCPRIMS_TRACE`: every round of every rank is recorded, even if the rank is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import several
from support.rank_environment import record_warnings, run_python
from support.rank_worlds import Kind, Ranks, Scripts, await_end
from support.traces import Entry, command, entries, only_run

import syncprims as sp
from syncprims.testing import Join, Kill, explore, run_world
from syncprims.tracing.analysis import analyse
from syncprims.tracing.reading import TraceRun, find_runs, read_run
from syncprims.tracing.recorder import ROUND

FEW = pytest.mark.parametrize(
    "kind", [Kind("single", 1), Kind("file", 2), Kind("threads", 4)], ids=str, indirect=True
)


def check_causality(run: TraceRun) -> None:
    """Assert that nobody left a round before all had come: the files share one clock."""
    arrived: dict[tuple[int, int], int] = {}
    for trace in run.ranks:
        for one in trace.rounds:
            key = int(one["group"]), int(one["number"])
            arrived[key] = max(arrived.get(key, 0), int(one["posted"]))
    for trace in run.ranks:
        rounds = trace.rounds[trace.rounds["kind"] == ROUND]
        assert (rounds["posted"] <= rounds["since"]).all()
        assert (rounds["since"] <= rounds["done"]).all()
        for one in rounds:
            assert one["done"] >= arrived[int(one["group"]), int(one["number"])]


def test_every_round_of_every_rank_is_written_down(world: Ranks, tmp_path: Path) -> None:
    def program() -> None:
        for _ in range(3):
            sp.barrier("step")
        sp.all_reduce(1.0)
        sp.broadcast({"lr": 1e-3})
        with sp.main_first(name="load"):
            pass
        sp.any_rank(False)

    world.run(program, SYNCPRIMS_TRACE=str(tmp_path / "trace"))
    run = only_run(tmp_path / "trace")
    assert [trace.rank for trace in run.ranks] == list(range(world.ranks))
    calls = ["init", *["barrier 'step'"] * 3, "all_reduce", "broadcast from rank 0",
             "main_first 'load'", "any_rank"]  # fmt: skip
    for trace in run.ranks:
        assert entries(run, trace.rank) == [
            Entry(call, number, "") for number, call in enumerate(calls, 1)
        ]
        assert trace.left is not None
        assert trace.left[1] == ""
        assert trace.world_size == world.ranks
    sites = {call.site for call in run.calls if call.kind != "init"}
    assert all(site.startswith("tests/tracing/test_trace_recording.py:") for site in sites)
    assert run.groups == [(tuple(range(world.ranks)), "", 0)]
    check_causality(run)


@several(2)
def test_rounds_of_two_groups_on_one_line_are_told_apart(world: Ranks, tmp_path: Path) -> None:
    def program() -> None:
        alone = sp.group([0])
        for barrier in [sp.barrier, alone.barrier][: 2 - sp.get_rank()]:
            barrier("same")

    world.run(program, SYNCPRIMS_TRACE=str(tmp_path))
    run = only_run(tmp_path)
    assert run.groups == [((0, 1), "", 0), ((0,), "", 0)]
    of_main = run.ranks[0].rounds
    barriers = [number for number, call in enumerate(run.calls) if call.kind == "barrier"]
    assert sorted(of_main["group"][np.isin(of_main["call"], barriers)].tolist()) == [0, 1]


@FEW
def test_a_deferred_round_was_not_waited_for_meanwhile(world: Ranks, tmp_path: Path) -> None:
    def program() -> None:
        stop = sp.Trigger("stop", lag=1)
        for _ in range(4):
            stop.check()
            sp.barrier("work")

    world.run(program, SYNCPRIMS_TRACE=str(tmp_path))
    run = only_run(tmp_path)
    for trace in run.ranks:
        found = entries(run, trace.rank)
        assert [e.call for e in found].count("barrier 'work'") == 4
        assert [e.call for e in found].count("trigger 'stop'") == 4
        triggers = [n for n, call in enumerate(run.calls) if call.kind == "trigger"]
        rounds = trace.rounds[np.isin(trace.rounds["call"], triggers)]
        settled = rounds[rounds["done"] > 0]
        if world.kind.backend != "threads":  # whose time stands still
            assert (settled["since"] > settled["posted"]).all()


@several(2)
def test_a_round_that_ends_in_an_error_says_which(world: Ranks, tmp_path: Path) -> None:
    def program() -> None:
        try:
            with sp.main_first(name="load"):
                if sp.is_main():
                    raise KeyError("no data")
        except (KeyError, sp.PeerFailed):
            pass
        with contextlib.suppress(sp.RankMismatch):
            sp.all_reduce([1.0] * (1 + sp.get_rank()))
        sp.barrier("whole")
        with contextlib.suppress(sp.CollectiveMismatch):
            sp.barrier("left") if sp.is_main() else sp.any_rank(False)

    world.outcomes(program, SYNCPRIMS_TRACE=str(tmp_path / "t"))
    run = only_run(tmp_path / "t")
    first, second = (entries(run, rank)[1:] for rank in (0, 1))
    assert [e.outcome for e in first] == ["KeyError", "RankMismatch", "", "CollectiveMismatch"]
    assert [e.outcome for e in second] == ["PeerFailed", "RankMismatch", "", "CollectiveMismatch"]
    assert second[-1].call == "any_rank"


def test_a_killed_rank_loses_nothing_of_what_it_did(scripts: Scripts, tmp_path: Path) -> None:
    ends = scripts.run(
        """
        for _ in range(100):
            barrier("step")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        barrier("after")
        """,
        SYNCPRIMS_TRACE=str(tmp_path / "t"),
    )
    assert ends[1].code == -signal.SIGKILL
    run = only_run(tmp_path / "t")
    killed = entries(run, 1)
    assert [e.call for e in killed] == ["init", *["barrier 'step'"] * 100]
    assert {e.outcome for e in killed} == {""}
    for survivor in (0, 2):
        assert entries(run, survivor)[-1] == Entry("barrier 'after'", 102, "PeerLost")
    lefts = [trace.left for trace in run.ranks]
    assert lefts[1] is None
    assert lefts[0] is not None
    assert lefts[0][1] == "PeerLost"


def test_one_that_is_killed_as_it_waits_says_where(scripts: Scripts, tmp_path: Path) -> None:
    processes = scripts.start(
        """
        barrier("start")
        if rank == 2:
            sys.stdin.read()
            time.sleep(600)  # ended by the test
        barrier("never")
        """,
        SYNCPRIMS_TRACE=str(tmp_path / "t"),
    )

    def waits(rank: int) -> bool:
        """Return whether the file says for whom the rank waits; it may not be whole yet."""
        paths = list((tmp_path / "t").glob(f"*/rank-{rank}.trace"))
        with contextlib.suppress(sp.ConfigurationError):
            run = read_run(paths[0].parent) if paths else None
            if run is not None and any(trace.rank == rank for trace in run.ranks):
                return [one.outcome for one in entries(run, rank)[-1:]] == ["2"]
        return False

    try:
        while not (waits(0) and waits(1)):
            time.sleep(0.05)
    finally:
        for process in processes:  # at one time: a rank notices the end of another at once
            process.send_signal(signal.SIGSTOP)
        for process in processes:
            process.kill()
        scripts.wait(processes)
    done = command(tmp_path / "t")
    assert done.stdout.count("killed, or still running: waits at barrier 'never'") == 2
    assert "Rank 2 has not come to barrier 'never'" in done.stdout
    assert "; 2 ranks have waited " in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize("what", ["full", "a file in the way"])
def test_a_bad_disk_never_breaks_the_run(what: str, tmp_path: Path, meeting_place: Path) -> None:
    target = tmp_path / "t"
    if what != "full":
        target.write_text("not a directory")

    def program() -> tuple[list[str], int]:
        import resource

        warnings = record_warnings()
        if what == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, resource.RLIM_INFINITY))
        else:
            sp.init()
        for _ in range(8000):
            sp.barrier("step")
        return warnings, sp.all_reduce(1)

    ranks = Ranks(Kind("file", 2), meeting_place)
    start = what == "full"
    outcomes = ranks.outcomes(program, start=start, SYNCPRIMS_TRACE=str(target))
    for rank, outcome in enumerate(outcomes):
        said, total = outcome
        assert total == 2
        (warning,) = said
        assert warning.startswith(f"the trace of rank {rank} ends: cannot write")
        assert str(target) in warning
    if what == "full":  # what was written before is there
        run = only_run(target)
        assert all(len(trace.rounds) > 6000 for trace in run.ranks)


@pytest.mark.parametrize("kind", [Kind("file", 2)], ids=str, indirect=True)
def test_a_forked_child_does_not_write_into_its_parents_file(world: Ranks, tmp_path: Path) -> None:
    def program() -> None:
        sp.barrier("before")
        pid = os.fork()
        if not pid:
            try:
                sp.barrier("in the child")
            except sp.ForkedProcess:
                os._exit(0)
            os._exit(1)
        await_end(pid)
        assert os.waitpid(pid, 0)[1] == 0
        sp.barrier("after")

    world.run(program, SYNCPRIMS_TRACE=str(tmp_path / "t"))
    run = only_run(tmp_path / "t")
    for rank in range(2):
        assert [e.call for e in entries(run, rank)] == [
            "init", "barrier 'before'", "barrier 'after'"
        ]  # fmt: skip
    assert (
        b"in the child" not in find_runs(tmp_path / "t")[-1].joinpath("rank-0.trace").read_bytes()
    )


def test_the_file_keeps_its_limit_and_the_latest(tmp_path: Path, meeting_place: Path) -> None:
    def program() -> None:
        for number in range(20_000):
            sp.barrier(f"step {number}")  # names that never come again

    Ranks(Kind("single", 1), meeting_place).run(
        program, SYNCPRIMS_TRACE=str(tmp_path / "t"), SYNCPRIMS_TRACE_LIMIT="1"
    )
    run = only_run(tmp_path / "t")
    files = [*find_runs(tmp_path / "t")[-1].iterdir()]
    assert sum(file.stat().st_size for file in files) <= 1 << 20
    (trace,) = run.ranks
    assert trace.dropped
    numbers = [e.number for e in entries(run, 0)]
    assert numbers == list(range(numbers[0], 20_002))  # without a gap
    assert len(numbers) > 2000
    assert "rank 0: old rounds are deleted" in command(tmp_path / "t").stderr


def test_runs_in_one_directory_do_not_mix(tmp_path: Path, meeting_place: Path) -> None:
    ranks = Ranks(Kind("file", 2), meeting_place)

    def twice() -> None:
        sp.barrier("first")
        sp.shutdown()
        with sp.init():
            sp.barrier("second")

    ranks.run_alone(twice, SYNCPRIMS_TRACE=str(tmp_path / "t"), SYNCPRIMS_RUN_ID="the same")
    ranks.run(lambda: sp.barrier("third"), SYNCPRIMS_TRACE=str(tmp_path / "t"))
    folders = find_runs(tmp_path / "t")
    assert len(folders) == 3
    for folder, call in zip(folders, ("first", "second", "third"), strict=True):
        run = read_run(folder)
        assert run.complaints == []
        for rank in range(2):
            assert [e.call for e in entries(run, rank)] == ["init", f"barrier '{call}'"]
    latest = command(tmp_path / "t").stdout
    assert f"Run {folders[2].name}, 2 ranks (--run shows another one: {folders[0].name}, " in latest
    earlier = command(tmp_path / "t", "--run", folders[0].name).stdout
    assert "'first'" in earlier
    assert "'third'" not in earlier


def test_an_elastic_run_is_one_trace_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program() -> None:
        stop = sp.Trigger("stop")
        if sp.init().change is None:
            try:
                sp.barrier("one")
            except sp.PeerLost:
                sp.reform()
            sp.group([1]).barrier("alone") if sp.get_rank() else sp.group([1])
            while not stop.joiners:
                stop.check()
            sp.reform()
        sp.broadcast("state", src=1)
        if sp.get_rank() == 0:
            raise ValueError("bad shard")
        with contextlib.suppress(sp.PeerFailed):
            sp.barrier("two")
        sp.reform()
        sp.barrier("end")

    monkeypatch.setenv("SYNCPRIMS_TRACE", str(tmp_path))
    with pytest.raises(ValueError, match="bad shard"):
        run_world(program, 3, faults=[Kill(0, at="one"), Join(2, at="alone")])
    run = only_run(tmp_path)
    assert run.epochs == {0: (0, 1, 2), 1: (1, 2), 2: (1, 2, 3), 3: (2, 3)}
    assert run.lost == {0: "killed by SIGKILL", 1: ""}
    assert sorted(e.call for e in entries(run, 3)) == [
        "barrier 'end'", "barrier 'two'", "broadcast from rank 1", "init", "init"
    ]  # fmt: skip
    assert [t.left and t.left[1] for t in run.ranks] == ["Killed", "ValueError", "", ""]
    check_causality(run)
    marks = {(mark.rank, mark.text, mark.joins) for mark in analyse(run).marks}
    assert marks == {
        (0, "rank 0 is lost, ended: killed by SIGKILL", False),
        (1, "rank 0 is lost, ended: with ValueError", False),
        (3, "joins as rank 2 of 3", True),
    }
    done = command(tmp_path, "--png", tmp_path / "timeline.png")
    assert f"Run {run.name}, 4 processes in 4 epochs" in done.stdout
    assert "\nprocess 3, after " in done.stdout
    assert not done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {(e["pid"], e["name"]) for e in events if e.get("s") == "p"} == {
        (rank, text) for rank, text, _ in marks
    }
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 2}
    assert tracks == {
        "epoch 0, as rank 2: all ranks", "epoch 1, as rank 1: all ranks",
        "epoch 1, as rank 1: process 2", "epoch 2, as rank 1: all ranks",
        "epoch 3, as rank 0: all ranks",
    }  # fmt: skip


def test_a_start_that_fails_leaves_its_trace(tmp_path: Path, meeting_place: Path) -> None:
    ranks = Ranks(Kind("file", 2), meeting_place)

    def program() -> None:
        if sp.is_main():
            sp.init()

    outcomes = ranks.outcomes(
        program, start=False, SYNCPRIMS_TRACE=str(tmp_path / "t"), SYNCPRIMS_JOIN_TIMEOUT="0.3"
    )
    assert isinstance(outcomes[0], sp.SyncTimeout)
    (folder,) = find_runs(tmp_path / "t")
    assert folder.name.startswith("failed-start-")
    assert entries(read_run(folder), 0) == [Entry("init", 1, "SyncTimeout")]


def test_worlds_of_tests_are_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCPRIMS_TRACE", str(tmp_path))
    explore(lambda: sp.barrier("step"), 2, schedules=5)
    assert not list(tmp_path.iterdir())
    run_world(lambda: sp.barrier("step"), 3)
    assert len(only_run(tmp_path).ranks) == 3


def test_without_a_trace_nothing_of_it_is_loaded() -> None:
    code = "import sys, syncprims; syncprims.barrier(); print(*sys.modules)"
    loaded = set(run_python("-c", code).stdout.split())
    assert "syncprims._protocol.rounds" in loaded
    assert "syncprims.tracing" not in loaded


def test_an_installation_without_the_room_of_traces_says_so(tmp_path: Path) -> None:
    code = "import sys; sys.modules['syncprims.tracing'] = None; import syncprims; syncprims.init()"
    done = run_python("-c", code, SYNCPRIMS_TRACE=str(tmp_path))
    said = f"ConfigurationError: SYNCPRIMS_TRACE={tmp_path} asks for a trace, and this installation"
    assert said in done.stderr
    assert "unset SYNCPRIMS_TRACE" in done.stderr
