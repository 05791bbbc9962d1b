"""`syncprims doctor`: measurements inside the job, and a report in plain words."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from support.rank_environment import clean_environ

import syncprims as sp
from syncprims.cli.console import Style
from syncprims.cli.doctor import report
from syncprims.doctor.findings import Finding, findings, listed
from syncprims.doctor.measurements import clock_offset, examine

if TYPE_CHECKING:
    from pathlib import Path

    from support.rank_worlds import Ranks

GB = 1 << 30
PLAIN = Style(io.StringIO(), {})


def rank(number: int, **more: Any) -> dict[str, Any]:
    """Return the facts of a healthy rank: four on each machine, each with four processors."""
    machine = more.pop("machine", number // 4)
    return {
        "rank": number, "node": machine, "host": f"host{machine}", "pid": 1,
        "machine": f"machine{machine}", "memory": f"memory{machine}", "launcher": "torchrun",
        "python": "3.13.1", "versions": {"syncprims": "1.0", "torch": "2.9", "numpy": "2.4"},
        "processors": 16, "allowed": list(range(16)), "load": 1.0, "threads": 4, "gpus": None,
        "meeting_place": "/dev/shm/run", "file_system": "tmpfs", "free": 8 * GB,
        "shared_memory": {"path": "/dev/shm", "free": 8 * GB}, **more,
    }  # fmt: skip


def job(ranks: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    nodes = len({facts["node"] for facts in ranks})
    groups = ["world", "node"] if nodes > 1 else ["world"]
    return {
        "backend": "torch", "world_size": len(ranks), "num_nodes": nodes, "ranks": ranks,
        "latency": [
            {"group": group, "call": "barrier", "median_us": 5.0, "p99_us": 9.0} for group in groups
        ],
        "bandwidth": [
            {"call": "broadcast", "where": "memory", "bytes": 1 << 20, "ms": 0.5, "gb_per_s": 2.0}
        ],
        "clocks": [{"rank": n, "ahead_s": 0.0, "uncertainty_s": 1e-5} for n in range(nodes)],
        **more,
    }  # fmt: skip


def test_a_healthy_job_has_nothing_wrong() -> None:
    found = job([rank(r) for r in range(8)])
    assert findings(found) == []
    lines = report(found, [], PLAIN)
    assert lines[-1] == "  nothing is wrong"
    assert lines[0] == "8 ranks on 2 nodes, backend torch, started by torchrun"
    assert any("host1" in line and "4-7" in line for line in lines)


SICK: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("versions", job([rank(0), rank(1), rank(2, versions={"syncprims": "1.0", "torch": "2.8",
                                                          "numpy": None})]),
     "problem", "torch differs: 2.9 on ranks 0-1; 2.8 on rank 2", "install the same torch"),
    ("python", job([rank(0), rank(1, python="3.11.0")]), "problem",
     "python differs: 3.13.1 on rank 0; 3.11.0 on rank 1", "environment"),
    ("containers", job([rank(0), rank(1), rank(2, memory="other"), rank(3, memory="other")]),
     "problem", "ranks 0-1 and ranks 2-3 run on one machine, but do not share", "--ipc=host"),
    ("nodes of one machine", job([rank(0), rank(1, node=1)]), "note",
     "nodes 0-1 are one machine", "as one node"),
    ("a node of two machines", job([rank(0), rank(1, machine=1, node=0)]), "problem",
     "ranks 0-1 are one node by their variables", "LOCAL_WORLD_SIZE"),
    ("too many threads", job([rank(r, threads=None) for r in range(4)]), "problem",
     "ranks 0-3 start 64 threads of their math libraries on 16 processors", "OMP_NUM_THREADS=4"),
    ("idle processors", job([rank(r, threads=1) for r in range(4)]), "note",
     "ranks 0-3 start 4 threads in all, and host host0 has 16 processors", "--threads 4"),
    ("too many ranks", job([rank(r, allowed=[0, 1], processors=2, threads=1) for r in range(4)]),
     "note", "ranks 0-3 share 2 processors", "fewer ranks"),
    ("a busy machine", job([rank(r, load=40.0) for r in range(4)]), "note",
     "host host0 is busy with something else: a load of 40.0 on 16 processors", "look again"),
    ("a quota", job([rank(r, processors=2, threads=1) for r in range(4)]),
     "note", "ranks 0-3 share 2 processors", "fewer ranks"),
    ("little space", job([rank(0), rank(1, free=20 << 20)]), "problem",
     "rank 1 has 20 MB left", "--shm-size"),
    ("slow barriers", job([rank(0), rank(1)], latency=[
        {"group": "world", "call": "barrier", "median_us": 900.0, "p99_us": 901.0}]),
     "problem", "takes 900 us", "taskset"),
    ("a slow network", job([rank(0), rank(1, machine=1)], latency=[
        {"group": "world", "call": "barrier", "median_us": 3e4, "p99_us": 3e4},
        {"group": "node", "call": "barrier", "median_us": 5.0, "p99_us": 5.0}]),
     "problem", "a barrier over 2 nodes takes 30.0 ms", "MASTER_ADDR"),
    ("little bandwidth", job([rank(0), rank(1, machine=1)], bandwidth=[
        {"call": "broadcast", "where": "memory", "bytes": 9, "ms": 9.0, "gb_per_s": 0.01}]),
     "problem", "arrays travel at 0.010 GB/s", "GLOO_SOCKET_IFNAME"),
    ("clocks", job([rank(r) for r in range(5)], clocks=[
        {"rank": 0, "ahead_s": 0.0, "uncertainty_s": 1e-5},
        {"rank": 4, "ahead_s": -2.5, "uncertainty_s": 1e-3}]),
     "problem", "the clock of host host1 is 2.500 s behind rank 0's", "chrony"),
    ("devices unused", job([rank(0, gpus=["0"]), rank(1, gpus=["1"])], backend="file"), "note",
     "host host0 has CUDA devices, and backend file", "--gpus all"),
    ("too few devices", job([rank(0, gpus=["0"]), rank(1, gpus=["0"])]), "problem",
     "ranks 0-1 see 1 CUDA device on host host0", "CUDA_VISIBLE_DEVICES"),
    ("alone", job([rank(0)]), "note", "a world of one", "syncprims run -n 4 -m syncprims doctor"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("found", "level", "text", "cure"), [s[1:] for s in SICK], ids=[s[0] for s in SICK]
)
def test_what_is_wrong_is_said_with_its_cure(
    found: dict[str, Any], level: str, text: str, cure: str
) -> None:
    said = findings(found)
    assert [one.level for one in said] == sorted((one.level for one in said), reverse=True)
    (one,) = [one for one in said if text in one.text]
    assert one.level == level
    assert cure in one.cure
    lines = "\n".join(report(found, said, PLAIN))
    assert f"{level}: " in lines
    assert ("nothing is wrong" in lines) == all(one.level == "note" for one in said)


def test_clocks_no_matter_who_comes_late() -> None:
    """Rounds at known true times, in which a clock that is 5 s ahead is found out."""
    came_a, left_a, came_b, left_b = [], [], [], []
    for number in range(20):
        a, b = number * 1.0, number + (0.2 if number % 2 else -0.1)
        released = max(a, b)
        came_a.append(a)
        left_a.append(released + 0.001)
        came_b.append(b + 5)
        left_b.append(released + 5.003)
    found = clock_offset((came_a, left_a), (came_b, left_b))
    assert abs(found["ahead_s"] - 5) <= found["uncertainty_s"] <= 0.002 + 1e-9


def test_ranks_are_listed_short() -> None:
    assert listed([3, 0, 1, 2, 8, 10, 11]) == "0-3, 8, 10-11"
    assert listed([]) == ""


WORLDS = [("single", 1, 1), ("file", 2, 1), ("threads", 2, 1), ("torch", 4, 2)]


def kinds() -> Any:
    from support.rank_worlds import Kind

    return [Kind(*kind) for kind in WORLDS]


@pytest.mark.parametrize("kind", kinds(), ids=str, indirect=True)
def test_it_measures_every_backend(world: Ranks) -> None:
    def program() -> dict[str, Any]:
        return examine(sp.current(), dict(os.environ), seconds=0.005)

    found = world.run(program)
    assert found == [found[0]] * world.ranks
    one = found[0]
    assert [facts["rank"] for facts in one["ranks"]] == list(range(world.ranks))
    groups = {"world", "node"} if world.kind.hosts > 1 else {"world"}
    assert {row["group"] for row in one["latency"]} == groups
    assert all(0 < row["median_us"] <= row["p99_us"] for row in one["latency"])
    assert {row["call"] for row in one["bandwidth"]} == (
        {"broadcast", "all_reduce"} if world.ranks > 1 else set()
    )
    assert all(row["gb_per_s"] > 0 for row in one["bandwidth"])
    assert len(one["clocks"]) == world.kind.hosts
    for row in one["clocks"]:  # all on this machine: one clock
        assert abs(row["ahead_s"]) <= row["uncertainty_s"] + 1e-6
    json.dumps(one)
    assert all(isinstance(said, Finding) for said in findings(one))


def run(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "syncprims", *words], env={**clean_environ(), **(env or {})},
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip


def test_inside_a_run_it_prints_once() -> None:
    done = run("run", "-n", "2", "-m", "syncprims", "doctor", "--seconds", "0.005")
    assert done.returncode == 0, done.stderr
    assert {line.split("]")[0] for line in done.stdout.splitlines()} == {"[rank 0"}
    for words in ("2 ranks on 1 node, backend file", "barrier", "all_reduce", "Findings", "0-1"):
        assert done.stdout.count(words) >= 1
    assert "\033" not in done.stdout
    found = json.loads(run("doctor", "--json", "--seconds", "0.005").stdout)
    assert found["world_size"] == 1
    assert found["findings"][-1]["text"].startswith("this is a world of one")


DYING = """
import os, signal, sys
import syncprims.doctor.measurements as measurements

if os.environ["RANK"] == "1":
    measurements.bandwidth = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
from syncprims.cli import main
sys.exit(main(["doctor", "--seconds", "0.005"]))
"""


def test_a_rank_that_dies_in_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    done = run("run", "-n", "3", str(tmp_path / "dying.py"))
    assert done.returncode == 137
    assert "syncprims: rank 1 was lost: killed by SIGKILL" in done.stderr
    assert "syncprims run: rank 1 failed first (killed by SIGKILL)" in done.stderr
    assert "Findings" not in done.stdout
