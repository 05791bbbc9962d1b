"""`syncprims who` in a shell, and the launcher's table on SIGQUIT."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from support.observed import await_report
from support.rank_environment import clean_environ, free_port, run_python
from support.rank_worlds import PATIENCE

from syncprims.cli import main
from syncprims.who import who
from syncprims.who.finding import NOTABLE
from syncprims.who.processes import find_py_spy

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

JOB = """
import time
from pathlib import Path
import syncprims as sp
sp.barrier("start")
if sp.get_rank() == 1:
    while not Path("go").exists():
        time.sleep(0.005)
sp.barrier("epoch end")
"""
RUN = [sys.executable, "-m", "syncprims", "run", "-n", "2", "job.py"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
KEYS = {"run_id", "backend", "world_size", "ranks", "finding"}
RANK_KEYS = {"rank", "pid", "state", "call", "name", "site", "group", "round", "waiting_s"}
FINDING_KEYS = {"kind", "waiting_for", "text"}


@contextlib.contextmanager
def job(
    folder: Path, command: list[str], source: str = JOB, **variables: str
) -> Generator[subprocess.Popen[str]]:
    """Start a job of two ranks, of which rank 1 comes when the file ``go`` is there."""
    (folder / "job.py").write_text(source)
    process = subprocess.Popen(
        command, cwd=folder, env={**clean_environ(), **variables}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    except BaseException:
        process.terminate()  # a rank that waits for another event would never end
        raise
    finally:
        (folder / "go").touch()
        process.communicate(timeout=PATIENCE)


def hangs(process: subprocess.Popen[str], name: str | None = "epoch end") -> Any:
    """Return what is seen once rank 0 waits for rank 1 in the call of this name."""
    return await_report(
        process.pid,
        lambda r: (
            r.finding.waiting_for == [1]
            and r.finding.waited_s > NOTABLE
            and r.ranks[0].name == name
        ),
    )


def command(*words: str, of: str = "who") -> subprocess.CompletedProcess[str]:
    return run_python("-m", "syncprims", of, *words)


def test_people_and_programs_read_the_same(tmp_path: Path) -> None:
    with job(tmp_path, RUN) as started:
        seen = hangs(started)
        printed = command(str(started.pid), "--stuck-after", "1000")
        asked = command(seen.run_id, "--json", "--stuck-after", "0.1")
    assert (printed.returncode, printed.stderr) == (0, "")
    head, columns, first, second, *rest = printed.stdout.splitlines()
    assert head.startswith(f"{seen.run_id}: 2 ranks, backend file, in /")
    assert columns.split() == ["rank", "pid", "state", "call", "group", "waits", "behind", "doing"]
    assert "waiting  barrier 'epoch end' (job.py:9)" in first
    assert "running  barrier 'start' (job.py:5)" in second
    assert rest[0].startswith("rank 1 has not come to barrier 'epoch end' (job.py:9), where rank 0")
    assert rest[1].startswith("  rank 1 was last seen at barrier 'start' (job.py:5); it ")
    assert asked.returncode == 3
    found = json.loads(asked.stdout)
    assert found.keys() >= KEYS
    assert found["finding"].keys() >= FINDING_KEYS
    assert all(rank.keys() >= RANK_KEYS for rank in found["ranks"])
    waiting, absent = found["ranks"]
    assert (waiting["call"], waiting["name"], waiting["site"]) == (
        "barrier", "epoch end", "job.py:9",
    )  # fmt: skip
    assert (absent["rank"], absent["state"], absent["waiting_s"]) == (1, "running", None)
    assert (found["finding"]["kind"], found["finding"]["waiting_for"]) == ("waiting", [1])


#: One rank sleeps. The others wait: in a collective, and in a line that waits for one in C.
HANGS_IN_TORCH = """
import sys, time
import torch, torch.distributed as dist
import syncprims as sp
sp.barrier("start")
rank, one = sp.get_rank(), torch.zeros(1)
store = "file://" + sys.argv[1]
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=3)
if sys.argv[2] == "backward":
    replicas = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    loss = replicas(one).sum()
    if rank != 1: loss.backward()
elif rank == 0: dist.all_reduce(one)
if rank == 1: time.sleep(1000)
dist.all_reduce(one, async_op=True).wait()
"""

#: Nobody waits: ranks make collectives one after the other, or compute with lines that may wait.
MOVES_IN_TORCH = """
import sys, time
import torch, torch.distributed as dist
import syncprims as sp
rank, many = sp.get_rank(), torch.ones(300, 300)
store = "file://" + sys.argv[1]
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=3)
dist.all_reduce(many)
sp.barrier("loop")
while sys.argv[2] == "collectives": dist.all_reduce(many)
if rank == 1: time.sleep(1000)
while True: (many @ many).sum().item()
"""


def torch_job(tmp_path: Path, source: str, mode: str) -> Any:
    pytest.importorskip("torch")
    if find_py_spy() is None:
        pytest.skip("only py-spy shows where they are")
    run = [*RUN[:-2], "3", "--grace", "1", RUN[-1], str(tmp_path / "store"), mode]
    return job(tmp_path, run, source, OMP_NUM_THREADS="1")


@pytest.mark.parametrize("mode", ["all_reduce", "backward"])
def test_ranks_that_hang_in_collectives_of_torch_are_stuck(mode: str, tmp_path: Path) -> None:
    with torch_job(tmp_path, HANGS_IN_TORCH, mode) as started:
        # Both have stood there for a second: on a busy machine, one may still be on its way.
        await_report(
            started.pid,
            lambda r: (
                (r.finding.kind, r.finding.waiting_for) == ("torch", [1])
                and r.finding.waited_s > 1
                and all(r.ranks[rank].doing.endswith("of torch") for rank in (0, 2))
            ),
            stuck_after=1000,
        )
        printed = command(str(started.pid), "--stuck-after", "1")
        started.terminate()
    assert printed.returncode == 3, printed
    found = re.search(r"\n(.*) been in (\w+) of torch for ([0-9.]+) s", printed.stdout)
    assert found, printed
    first = {"all_reduce": "rank 0 has", "backward": "ranks [0, 2] have"}[mode]
    assert found.groups()[:2] in [(first, mode), ("rank 2 has", "wait")]
    assert float(found[3]) >= 1
    assert "\n  rank 1: sleeps in " in printed.stdout
    line = {"all_reduce": 13, "backward": 12}[mode]
    assert f"in <module> (job.py:{line}), in {mode} of torch" in printed.stdout
    if mode == "all_reduce":
        assert "in <module> (job.py:15), in wait of torch" in printed.stdout


@pytest.mark.parametrize("mode", ["collectives", "alone"])
def test_ranks_that_go_on_in_torch_are_not_stuck(mode: str, tmp_path: Path) -> None:
    with torch_job(tmp_path, MOVES_IN_TORCH, mode) as started:
        await_report(started.pid, lambda r: "'loop'" in str(r.last_barrier))
        printed = command(str(started.pid), "--stuck-after", "1")
        started.terminate()
    assert (printed.returncode, "all is moving" in printed.stdout) == (0, True), printed


def test_a_run_is_found_where_open_files_are_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of processes that nobody may inspect, and on macOS."""
    with job(tmp_path, RUN) as started:
        seen = hangs(started)
        monkeypatch.setattr("syncprims.who.worlds._processes", list)
        monkeypatch.setattr("syncprims.who.worlds._Search.add_worlds_of", lambda *_: None)
        monkeypatch.setattr("syncprims.who.observation.find_descendants", lambda _: set())
        scratch = Path(seen.path).parents[3]
        ways = (started.pid, seen.run_id, seen.run_id[:9], scratch, *Path(seen.path).parents[:3])
        for which in (*ways, seen.ranks[1].pid):
            assert [one.path for one in who(which)] == [seen.path], which
        assert seen.path in [one.path for one in who()]


def test_a_rank_that_hangs_before_its_first_call_is_shown(tmp_path: Path) -> None:
    """And the process that it waits for, as for a worker of a loader."""
    hangs_early = """
        import multiprocessing, os, time
        def load():
            while not os.path.exists("go"):
                time.sleep(0.005)
        if os.environ["RANK"] == "1":
            fork = multiprocessing.get_context("fork")
            fork.Process(target=fork.Event().wait, daemon=True).start()
            worker = fork.Process(target=load)
            worker.start()
            worker.join()
        import syncprims as sp
        sp.barrier("start")
        """
    name = "caf\udce9"  # of a variable that is not UTF-8
    with job(tmp_path, RUN, textwrap.dedent(hangs_early), NAME=name) as started:
        seen = hangs(started, name=None)
        early = seen.ranks[1]
        assert early.state == "absent"
        assert early.pid is not None
        assert b"RANK=1" in Path(f"/proc/{early.pid}/environ").read_bytes().split(b"\0")
        assert str(seen.finding.text).startswith("rank 1 has not come to")
        if find_py_spy() is not None:
            assert re.search(r"; its process \d+ is in load \(job.py:[56]\)", early.doing)
            assert "in load" in seen.finding.text


def test_it_watches_until_the_end(tmp_path: Path) -> None:
    with job(tmp_path, RUN) as started:
        seen = hangs(started)
        watch = subprocess.Popen(
            [sys.executable, "-m", "syncprims", "who", seen.run_id, "--watch", "0.01", "--json",
             "--stuck-after", "0.1"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environ(),
        )  # fmt: skip
        assert watch.stdout is not None
        first = watch.stdout.readline()
        (tmp_path / "go").touch()
        rest, err = watch.communicate(timeout=PATIENCE)
        assert started.wait(PATIENCE) == 0
    assert err == ""
    assert watch.returncode in (0, 3)  # that of the last look
    lines = [json.loads(line) for line in [first, *rest.splitlines()]]
    assert lines[0]["finding"]["stuck"]
    assert {line["run_id"] for line in lines} == {seen.run_id}


#: `syncprims who`, on a host where worlds can only be in the directory of the first argument.
WHO_ALONE = """
import sys
from functools import partial
from syncprims.cli import main
from syncprims.who import worlds
worlds.find_worlds = partial(worlds.find_worlds, path=sys.argv[1])
sys.exit(main(["who", *sys.argv[2:]]))
"""


def test_it_says_that_there_is_no_world_and_watches_for_one(tmp_path: Path) -> None:
    watch = subprocess.Popen(
        [sys.executable, "-c", WHO_ALONE, str(tmp_path), "--watch", "0.01"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environ(),
    )  # fmt: skip
    assert watch.stdout is not None
    try:
        first = watch.stdout.readline()
        with job(tmp_path, RUN, SYNCPRIMS_DIR=str(tmp_path)) as started:
            seen = hangs(started)
            line = watch.stdout.readline()
            while line and not line.startswith(seen.run_id):
                assert "no world" not in line
                line = watch.stdout.readline()
            (tmp_path / "go").touch()
            _, err = watch.communicate(timeout=PATIENCE)
    finally:
        watch.kill()
    assert first == "no world runs on this host, as far as this user can see\n"
    assert (watch.returncode, err, bool(line)) == (0, "", True)


def test_a_run_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["who", "gone"]) == 2
    assert "no world runs with run id 'gone' on this host" in capsys.readouterr().err


def test_the_launcher_prints_the_table_on_sigquit_and_harms_no_rank(tmp_path: Path) -> None:
    with job(tmp_path, RUN) as started:
        seen = hangs(started)
        started.send_signal(signal.SIGQUIT)
        assert started.stderr is not None
        lines = [started.stderr.readline() for _ in range(5)]
        assert lines[0].startswith(f"{seen.run_id}: 2 ranks, backend file")
        assert "rank 1 has not come to barrier 'epoch end'" in lines[4]
        (tmp_path / "go").touch()
        assert started.wait(PATIENCE) == 0


def test_ranks_of_torchrun_are_seen_also_without_it(tmp_path: Path) -> None:
    place = [f"--master-port={free_port()}", "--master-addr=127.0.0.1", "job.py"]
    with job(tmp_path, [*TORCHRUN, *place], OMP_NUM_THREADS="1") as started:
        pids = [one.pid for one in hangs(started).ranks]
        asked = command(str(started.pid), "--json", "--stuck-after", "0.1")
        started.kill()
        started.wait()
        seen = await_report(pids[1], lambda r: r.finding.waiting_for == [1])
        (tmp_path / "go").touch()
        deadline = time.monotonic() + PATIENCE
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert [one.pid for one in seen.ranks] == pids
    assert asked.returncode == 3
    found = json.loads(asked.stdout)
    assert (found["backend"], found["world_size"]) == ("torch", 2)
    assert found["run_id"] == seen.run_id
    assert found["run_id"].startswith("torchrun-")
    assert found["finding"]["waiting_for"] == [1]
    assert [one["pid"] for one in found["ranks"]] == pids
