"""A rank that ends before its first call: the others are told, and only if it is true."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import soak
from support.launches import Launches, command
from support.rank_worlds import Scripts, environment

# Only the launcher sets these variables.
from syncprims._world.launchers import make_rank_variables

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def launches(tmp_path: Path) -> Launches:
    return Launches(tmp_path / "job.py")


#: How rank 1 ends, and what the others say.
LOST = "PeerLost: rank 1 ended ({}) before its first call, while rank {{rank}} is in {{call}}"
FAILED = "PeerFailed: rank 1 failed, while others wait in {{call}}: {}"
ENDINGS = [
    ("pass", LOST.format("exit code 0")),
    ("os._exit(4)", LOST.format("exit code 4")),
    ("os.kill(os.getpid(), signal.SIGKILL)", LOST.format("killed by SIGKILL")),
    ("sys.exit(3)", FAILED.format("SystemExit: 3")),
    ("raise ValueError('bad')", FAILED.format("ValueError: bad")),
]
#: The launcher ends ranks some seconds after a failure. So rank 1 fails once the others have begun.
READY = """
if get_rank() != 1: open(f"ready-{get_rank()}", "w")
while not all(os.path.exists(f"ready-{rank}") for rank in (0, 2)): time.sleep(0.01)
"""
WAIT = "if get_rank() != 1: barrier('saved')\n"


@pytest.mark.parametrize(
    ("ending", "words", "late"),
    [*((*one, "") for one in ENDINGS), (*ENDINGS[1], "if is_main(): time.sleep(0.3)\n")],
)
def test_our_launcher_names_it(launches: Launches, ending: str, words: str, late: str) -> None:
    done = launches.run(f"{READY}{late}if get_rank() == 1:\n    {ending}\n{WAIT}")
    assert done.code != 0
    told = [line for line in done.err.splitlines() if "] syncprims.Peer" in line]
    assert told, done.err
    call = f"barrier 'saved' (job.py:{8 + bool(late)})"
    assert told[0].split("] syncprims.")[1] in [
        words.format(rank=rank, call=call) for rank in (0, 2)
    ]


@pytest.mark.parametrize("imports", ["", "import syncprims"])
@pytest.mark.parametrize("backend", ["file", soak("torch")])
def test_the_error_of_a_rank_that_has_no_name_of_ours_is_told(
    launches: Launches, imports: str, backend: str
) -> None:
    """It is known by its stderr alone."""
    source = f"""
import os, subprocess, time
{imports}
if os.environ["RANK"] == "1":
    while not os.path.exists("ready"): time.sleep(0.01)
    subprocess.Popen(["sleep", "600"])  # holds the stderr
    from no_such_package import anything
{"import torch" * (backend == "torch")}
from syncprims import *
open("ready", "w").close()
try:
    barrier("saved")
except PeerFailed as error:
    told = error.failures[1]
    assert "from no_such_package import anything" in told.traceback
    print(told.headline, flush=True)
    raise
"""
    launches.script.write_text(source)
    done = subprocess.run(
        command("-n", "2", "--backend", backend, str(launches.script)),
        env=launches.environ, cwd=launches.script.parent, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    headline = "ModuleNotFoundError: No module named 'no_such_package'"
    assert f"[rank 0] {headline}" in done.stdout, done.stderr
    assert f"syncprims run: rank 1 failed first (exit code 1): {headline}\n" in done.stderr
    assert done.returncode == 1


def test_a_forked_child_is_not_the_rank(launches: Launches) -> None:
    done = launches.run(
        """
        if os.environ["RANK"] == "1":
            if os.fork() == 0: raise ValueError("of a child")
            os.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        barrier()
        """
    )
    assert "syncprims run: rank 1 failed first (killed by SIGKILL)\n" in done.err


def test_the_error_has_its_facts(launches: Launches) -> None:
    done = launches.run(
        """
        if is_main():
            try:
                barrier("sizes")
            except PeerLost as error:
                assert {error.rank} <= {*error.missing} <= {1, 2}, error.missing
                assert error.arrived == [0], error.arrived
                assert error.call.startswith("barrier 'sizes' (job.py:"), error.call
                sys.exit(0)
            sys.exit(9)
        """,
        n=3,
    )
    assert done.code == 0, done.err


@pytest.mark.parametrize("backend", ["file", soak("torch")])
def test_a_late_rank_is_told_the_cause(launches: Launches, backend: str, tmp_path: Path) -> None:
    """Rank 1 has joined and was told; rank 0 joins after that."""
    # The launcher waits some seconds for rank 0 to report: its first call must not import torch.
    done = launches.run(
        f"""
        {"import torch" * (backend == "torch")}
        if get_rank() == 2: sys.exit()
        while is_main() and not os.path.exists({str(tmp_path / "told")!r}): time.sleep(0.01)
        try:
            barrier("saved")
        finally:
            open({str(tmp_path / "told")!r}, "w").close()
        """,
        *("--backend", backend),
    )
    text = "PeerLost: rank 2 ended (exit code 0) before its first call, while rank"
    assert f"[rank 0] syncprims.{text} 0 is in barrier" in done.err
    assert f"[rank 1] syncprims.{text} 1 is in barrier" in done.err


GIVES_UP = """
def give_up():
    try:
        barrier("saved", timeout=1)
    except SyncTimeout:
        open({sign!r}, "w").close()
        sys.exit(0)

if not is_main(): give_up()
while not os.path.exists({sign!r}): time.sleep(0.01)
"""


@pytest.mark.parametrize("backend", ["file", soak("torch")])
def test_who_joined_has_made_a_call(launches: Launches, backend: str, tmp_path: Path) -> None:
    source = GIVES_UP.format(sign=str(tmp_path / "given up")) + "barrier('saved')\n"
    done = launches.run(source, "--backend", backend, n=2)
    assert "PeerLost: rank 1 joined and ended (exit code 0), while rank 0 is in barrier" in done.err


def test_a_rank_of_an_earlier_world_has_made_a_call(launches: Launches) -> None:
    done = launches.run("with init(): barrier()\nif is_main(): init(); barrier('saved')\n", n=2)
    assert "PeerLost: rank 1 joined and ended (exit code 0), while rank 0 is in init" in done.err


def test_a_rank_records_its_own_end(scripts: Scripts, meeting_place: Path) -> None:
    ended = scripts.run("if rank == 0: barrier('saved')\n", SYNCPRIMS_JOIN_TIMEOUT="600")
    assert [one.code for one in ended] == [1, 0, 0]
    told = ended[0].err.partition("PeerLost: ")[2]
    assert told[7:].startswith("ended (exit code 0) before its first call"), told  # rank 1 or 2
    assert "while rank 0 is in barrier 'saved' (script.py:4)" in ended[0].err
    assert not any(meeting_place.iterdir())


def test_who_waited_records_its_end(scripts: Scripts, meeting_place: Path, tmp_path: Path) -> None:
    ended = scripts.run(
        f"""
        signs = [{str(tmp_path)!r} + f"/gave-up-{{one}}" for one in (1, 2)]
        if rank != 0:
            try:
                barrier("saved", timeout=0.3)
            except SyncTimeout:
                open(signs[rank - 1], "w").close()
        while not all(map(os.path.exists, signs)): time.sleep(0.01)  # else one sees an end
        if rank != 0: sys.exit(4)
        barrier("saved")
        """
    )
    assert [one.code for one in ended] == [1, 4, 4]
    told = ended[0].err.partition("PeerFailed: ")[2]
    assert told[7:].startswith("failed, while others wait in barrier 'saved' (script.py:13): "), (
        told
    )
    assert "SystemExit: 4" in told
    assert not any(meeting_place.iterdir())


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [("sys.exit(3)", 3, "SystemExit: 3"), ("raise ValueError('bad')", 1, "ValueError: bad")],
)
def test_a_rank_records_its_own_error(scripts: Scripts, ending: str, code: int, words: str) -> None:
    ended = scripts.run(f"if rank == 1: {ending}\nbarrier('saved')\n")
    assert [one.code for one in ended] == [1, code, 1]
    assert "PeerFailed: rank 1 failed, while others wait in barrier 'saved'" in ended[0].err
    assert f": {words}\n" in ended[0].err


def test_a_run_without_calls_leaves_nothing(scripts: Scripts, meeting_place: Path) -> None:
    assert [one.code for one in scripts.run("pass\n")] == [0, 0, 0]
    assert not any(meeting_place.iterdir())


def test_a_program_that_a_rank_starts_is_not_the_rank(scripts: Scripts) -> None:
    """It has the variables of the rank, imports the library, and ends without a call."""
    ended = scripts.run(
        """
        import subprocess
        if rank == 1:
            subprocess.run([sys.executable, "-c", "import syncprims"], check=True)
            if os.fork() == 0: sys.exit()  # nor is a forked child
            os.wait()
            if len(sys.argv) > 1: sys.exit()
            subprocess.run([sys.executable, *sys.argv, "again"], check=True)
            time.sleep(1)
        barrier("all are here")
        """
    )
    assert [one.code for one in ended] == [0, 0, 0], ended


def test_earlier_runs_are_others(meeting_place: Path, tmp_path: Path, scripts: Scripts) -> None:
    (tmp_path / "prepare.py").write_text("import syncprims\n")
    for _ in range(2):
        # One rank alone: the others do not remove what it records.
        place = environment(scripts.kind, 1, meeting_place, "again")
        subprocess.run([sys.executable, str(tmp_path / "prepare.py")], env=place, check=True)
        ended = scripts.run("if rank == 1: time.sleep(1)\nbarrier()\n", run_id="again")
        assert [one.code for one in ended] == [0, 0, 0], ended


def test_a_program_is_not_the_rank(meeting_place: Path, tmp_path: Path, scripts: Scripts) -> None:
    """As where a launcher runs one program after another on each rank."""
    (tmp_path / "prepare.py").write_text("import syncprims\n")
    run = scripts.start("if rank == 1: time.sleep(2)\nbarrier()\n", run_id="chain")
    place = environment(scripts.kind, 1, meeting_place, "chain")
    subprocess.run([sys.executable, str(tmp_path / "prepare.py")], env=place, check=True)
    assert [one.code for one in scripts.wait(run)] == [0, 0, 0]


def torchrun(launches: Launches, backend: str, meeting_place: Path) -> str:
    """Return what two ranks under torchrun, of which one fails, write to stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(launches.script)],
        env={**launches.environ, "SYNCPRIMS_BACKEND": backend, "SYNCPRIMS_DIR": str(meeting_place),
             "SYNCPRIMS_JOIN_TIMEOUT": "600"},  # longer than the limit of a test
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    return done.stderr


@pytest.mark.parametrize("backend", [soak("file"), "torch"])
def test_ranks_of_torchrun_record_it(launches: Launches, meeting_place: Path, backend: str) -> None:
    launches.write("if is_main(): barrier('saved')\n")
    said = torchrun(launches, backend, meeting_place)
    assert "before its first call, while rank 0 is in barrier 'saved'" in said
    assert "rank 1 ended" in said


@pytest.mark.soak
def test_who_joined_at_a_store(launches: Launches, meeting_place: Path, tmp_path: Path) -> None:
    launches.write(GIVES_UP.format(sign=str(tmp_path / "given up")) + "barrier('saved')\n")
    said = torchrun(launches, "torch", meeting_place)
    assert "rank 1 joined and ended" in said


def test_a_world_of_one_leaves_no_record(tmp_path: Path) -> None:
    place = {**os.environ, **make_rank_variables(0, 1), "SYNCPRIMS_DIR": str(tmp_path / "meet")}
    subprocess.run([sys.executable, "-c", "import syncprims"], env=place, check=True)
    assert not (tmp_path / "meet").exists()
