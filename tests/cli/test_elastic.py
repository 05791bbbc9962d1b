"""`syncprims run --elastic`: the run goes on without lost ranks, and replaces them."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import soak
from support import ROOT
from support.launches import Launches
from support.rank_environment import PATIENCE, clean_environ
from support.traces import command, only_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills ranks by pid")

#: Ranks count steps together until 3 of them have met in epoch `EPOCH` and 10 steps more are done.
LOOP = """
from syncprims import *
import signal
me = int(os.environ["RANK"])
change = init().change
replaces = change is not None
state, stop = {"step": 0, "end": None}, Trigger("stop")
while state["end"] is None or state["step"] < state["end"]:
    try:
        if change is not None:
            state, change = hand_over(state, change), None
        if state["step"] == 5 and me in DIE and not replaces:
            os.kill(os.getpid(), signal.SIGKILL)
        step = state["step"] + all_reduce(1) // get_world_size()
        end = step + 10 if current().epoch >= EPOCH and state["end"] is None else state["end"]
        state = {"step": step, "end": end}
        stop.check()
        if stop.joiners:
            change = reform()
    except (PeerLost, PeerFailed):
        change = reform(min_ranks=LEAST)
print("done", get_rank(), get_world_size(), replaces)
"""


@pytest.fixture
def launches(tmp_path: Path) -> Launches:
    return Launches(tmp_path / "job.py")


def loop(*die: int, epoch: int, least: int = 1) -> str:
    return f"DIE, EPOCH, LEAST = {die}, {epoch}, {least}\n{LOOP}"


def test_the_others_go_on_without_a_lost_rank(launches: Launches) -> None:
    done = launches.run(loop(1, epoch=1), "--elastic", "2:3")
    assert done.code == 0, done.err
    assert sorted(done.out.split("\n")[:2]) == [
        "[rank 0] done 0 2 False",
        "[rank 2] done 1 2 False",
    ]
    assert "lost rank 1 (killed by SIGKILL); 2 ranks left, no replacement is left" in done.err


def test_a_replacement_joins(launches: Launches) -> None:
    done = launches.run(
        loop(1, epoch=1).replace("epoch >= EPOCH", "world_size == 3 and current().epoch"),
        "--elastic", "2:3", "--max-restarts", "2",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == [
        "[rank 0] done 0 3 False", "[rank 1] done 2 3 True", "[rank 2] done 1 3 False"
    ]  # fmt: skip
    assert "2 ranks left, replacement 1 of 2" in done.err


def test_a_rank_and_its_replacement_are_rows_of_one_trace(launches: Launches) -> None:
    source = loop(1, epoch=1).replace("epoch >= EPOCH", "world_size == 3 and current().epoch")
    trace = launches.script.parent / "trace"
    flags = "--elastic", "2:3", "--max-restarts", "2", "--trace", str(trace)
    assert launches.run(source, *flags).code == 0
    run = only_run(trace)
    assert [(one.rank, one.left is None) for one in run.ranks] == [
        (0, False), (1, True), (2, False), (3, False)
    ]  # fmt: skip
    said = command(trace).stdout
    assert re.search(r"\n +1 .* killed by SIGKILL\n", said)
    assert re.search(r"\nprocess 1, after .*: rank 1 is lost, ended: killed by SIGKILL\n", said)
    assert re.search(r"\nprocess 3, after .*: joins as rank 2 of 3\n", said)


@pytest.mark.parametrize("others", ["all", "some"])
def test_a_rank_that_dies_before_the_end_of_its_start_is_replaced(
    others: str, launches: Launches
) -> None:
    """Before it has joined, or while it waits for one that has not joined yet."""
    dies = """
    from pathlib import Path
    import threading
    first, rank, others = Path(sys.argv[1]), int(os.environ["RANK"]), sys.argv[2]
    if rank == 1 and not first.exists():
        if others == "some":
            threading.Timer(1, lambda: (first.touch(), os.kill(os.getpid(), 9))).start()
            init()
        first.touch()
        os.kill(os.getpid(), 9)
    while rank == 2 and others == "some" and not first.exists(): time.sleep(0.01)
    """
    source = textwrap.dedent(dies) + loop(epoch=0).replace(
        "epoch >= EPOCH", "world_size == 3 and True"
    )
    done = launches.run(
        source, "--elastic", "2:3", "--max-restarts", "2",
        args=[str(launches.script.parent / "first"), others],
    )  # fmt: skip
    assert done.code == 0, done.err
    assert sorted(line.split()[4] for line in done.out.splitlines()) == ["3", "3", "3"]
    assert "lost rank 1 (killed by SIGKILL); 2 ranks left, replacement 1 of 2" in done.err


@pytest.mark.parametrize(("survives", "code"), [(True, 0), (False, 137)])
def test_a_replacement_that_comes_too_late_is_no_failure(
    launches: Launches, survives: bool, code: int
) -> None:
    """A loss is one, unless the others have made a world without the lost rank."""
    source = """
    from pathlib import Path
    first, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    def await_file(name):
        while not first.with_name(name).exists(): time.sleep(0.01)
    if rank == 1 and first.exists():
        first.with_name("comes").touch()
        await_file("done-0"), await_file("done-2")
    barrier()
    if rank == 1:
        first.touch()
        os.kill(os.getpid(), 9)
    if sys.argv[2] == "True":
        try: barrier()
        except PeerLost: reform()
    await_file("comes")
    shutdown()
    first.with_name(f"done-{rank}").touch()
    """
    flags = "--elastic", "2:3", "--max-restarts", "3"
    args = [str(launches.script.parent / "first"), str(survives)]
    done = launches.run(source, *flags, args=args)
    assert done.code == code, done.err
    assert ("rank 1 failed first (killed by SIGKILL)" in done.err) != survives
    assert done.err.count("left, replacement") == 1
    assert "the replacement for rank 1 came too late: the others had ended" in done.err


#: In each epoch, the next rank of `LOSSES` is lost; the others go on. Then rank 0 ends the run.
STORY = """
from syncprims import *
me = int(os.environ["RANK"])
def end(how):
    if how == "raise": raise ValueError("bad shard")
    os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else sys.exit(how)
change = init().change
replaces, state, stop = change is not None, {"lost": 0}, Trigger("stop")
while True:
    try:
        if change is not None:
            state, change = hand_over(state, change), None
        if state["lost"] == len(LOSSES):
            break
        lost, how = LOSSES[state["lost"]]
        if me == lost and not replaces:
            end(how)
        stop.check()
        if stop.joiners:
            change = reform()
    except (PeerLost, PeerFailed):
        change = reform()
        state = {"lost": state["lost"] + 1}
if me == 0 and END:
    end(END)
barrier("last")
"""
#: How a rank ends, its exit code, and what is said of it.
ENDS: dict[str | int, tuple[int, str]] = {
    "kill": (137, "(killed by SIGKILL)"),
    "raise": (1, "(exit code 1): ValueError: bad shard"),
    5: (5, "(exit code 5): SystemExit: 5"),
}


@pytest.mark.parametrize("seed", [*range(4), *map(soak, range(4, 60))])
def test_the_code_is_that_of_the_cause_and_never_of_a_loss_before(
    launches: Launches, seed: int
) -> None:
    rng = random.Random(seed)
    n = rng.randint(2, 4)
    lost = rng.sample(range(1, n), rng.randint(1, n - 1))
    losses = [(rank, rng.choice([*ENDS])) for rank in lost]
    last = [*ENDS, 0][seed % 4]
    flags = ["--elastic", f"1:{n}", "--max-restarts", str(rng.randint(0, 2))]
    done = launches.run(f"LOSSES, END = {losses}, {last!r}\n{STORY}", *flags, n=n)
    code, how = ENDS.get(last, (0, ""))
    assert done.code == code, done.err
    failed = [line for line in done.report if "failed" in line and "left" not in line]
    assert failed[:1] == ([f"syncprims run: rank 0 failed first {how}"] if code else []), done.err
    for rank, way in losses:
        assert f"lost rank {rank} {ENDS[way][1]}" in done.err


def test_the_run_ends_when_too_few_are_left(launches: Launches) -> None:
    done = launches.run(loop(0, 1, epoch=1, least=2), "--elastic", "2:3")
    assert done.code in (1, 137), done.err
    assert re.search(r"ranks? (0|1|0-1) failed", done.err)


@pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn's digits")
def test_the_digits_are_learned_without_a_rank_that_is_killed(tmp_path: Path) -> None:
    """As a user who ends a process by hand, in the middle of the training."""
    with subprocess.Popen(
        [sys.executable, "-m", "syncprims", "run", "--elastic", "2:4", "--max-restarts", "1",
         str(ROOT / "examples" / "digits.py"), "--cache", str(tmp_path / "digits.npz")],
        env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        assert launcher.stdout is not None
        said = ""
        while "epoch  0" not in said:
            line = launcher.stdout.readline()
            assert line, launcher.communicate()
            said += line
        children = subprocess.run(
            ["pgrep", "-P", str(launcher.pid), "-f", "digits.py"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        os.kill(int(children.stdout.split()[2]), signal.SIGKILL)
        out, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 0, err
    assert re.search(r"step \d+: 1 lost, [01] joined, [34] ranks continue", said + out)
    assert re.search(r"[34] ranks hold the same weights, bit for bit", out)
    assert float(re.findall(r"([\d.]+)% right", out)[-1]) >= 93
