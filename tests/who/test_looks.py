"""Worlds of real processes that are read from outside: who waits for whom, and who is at fault."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.intruders import needs_root
from support.observed import await_report, running
from support.random_programs import plan
from support.random_programs import run as run_random_program
from support.rank_bugs import BUGS, GOLDEN, RANKS
from support.rank_worlds import PATIENCE, Kind, Signs, fork

import syncprims as sp

# Only the launcher sets these variables.
from syncprims._world.launchers import make_rank_variables
from syncprims.interface import Label, Status, WaitView
from syncprims.who import WorldReport, who
from syncprims.who.finding import NOTABLE, BoardView, RankWait, WorldView, judge
from syncprims.who.observation import Observation
from syncprims.who.processes import find_py_spy

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

PAIR, TRIO = Kind("file", 2), Kind("file", 3)


def names(report: WorldReport, *ranks: int) -> bool:
    """Return whether a finding is that others wait for these ranks."""
    return report.finding.kind == "waiting" and report.finding.waiting_for == list(ranks)


def call_of(report: WorldReport, rank: int) -> str:
    one = report.ranks[rank]
    return f"{one.call}{'' if one.name is None else f' {one.name!r}'} ({one.site})"


def loop_in_python() -> None:
    while True:
        pass


def loop_in_c() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")


def sleep() -> None:
    time.sleep(3600)


def fill_a_pipe() -> None:
    _, writer = os.pipe()
    while True:
        os.write(writer, bytes(65536))


def open_a_fifo() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.mkfifo("a-fifo")
        Path("a-fifo").read_bytes()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


LINE = ", in loop_in_python (test_looks.py:" if find_py_spy() else "computes"
HANGS: dict[Callable[[], None], tuple[str, str]] = {
    loop_in_python: ("running", LINE),
    loop_in_c: ("running", "computes"),
    sleep: ("running", "sleeps in "),
    fill_a_pipe: ("running", "write on pipe:"),
    open_a_fifo: ("running", "openat of a-fifo"),
    stop: ("stopped", "kill -CONT "),
}


@pytest.mark.parametrize(
    ("hang", "kind"), [*((hang, PAIR) for hang in HANGS), (loop_in_c, Kind("torch", 2))]
)
def test_the_late_rank_is_named(hang: Callable[[], None], kind: Kind, meeting_place: Path) -> None:
    def program() -> None:
        sp.all_reduce(1.0)
        sp.barrier("start")
        if sp.get_rank() == 1:
            hang()
        sp.barrier("epoch end")

    state, doing = HANGS[hang]

    def is_it(report: WorldReport) -> bool:
        there = report.ranks and report.ranks[0].name == "epoch end"  # and not at the start
        return bool(there) and names(report, 1) and doing in report.ranks[1].doing

    with running(kind, meeting_place, program) as pids:
        seen = await_report(meeting_place, is_it)
    assert seen.finding.stuck
    assert [one.pid for one in seen.ranks] == pids
    assert (seen.backend, seen.world_size) == (kind.backend, 2)
    assert [one.state for one in seen.ranks] == ["waiting", state]
    assert call_of(seen, 0).startswith("barrier 'epoch end' (")
    assert call_of(seen, 1).startswith("barrier 'start' (")
    assert [one.round for one in seen.ranks] == [3, 2]
    assert [one.behind for one in seen.ranks] == [0, 1]
    assert (seen.ranks[0].waiting_s or 0) >= 0.2
    assert seen.ranks[1].waiting_s is None
    first, second = seen.finding.text.splitlines()
    assert first.startswith("rank 1 has not come to barrier 'epoch end' (")
    assert ", where rank 0 has waited for " in first
    assert second.startswith("  rank 1 was last seen at barrier 'start' (")
    assert doing in second
    assert "'start'" in (seen.last_barrier or "")


EXPECTED: dict[str, str] = json.loads(GOLDEN.read_text())
_LINE = re.compile(
    r"rank (\d+): (waits in its|finished after its|finished without) (?:a call|round (\d+), (.*))"
)
HANGING = sorted(
    name
    for name, text in EXPECTED.items()
    if text.startswith("DeadlockError") and "in group" not in text
)


@pytest.mark.parametrize("name", HANGING)
@pytest.mark.parametrize("kind", [TRIO, pytest.param(Kind("torch", 3), marks=pytest.mark.soak)])
def test_every_bug_is_seen_as_by_threads(kind: Kind, name: str, meeting_place: Path) -> None:
    """Where others end in a test, here they go on without the calls that the first ones wait in."""
    program = BUGS[name]
    found = [_LINE.match(line.strip()) for line in EXPECTED[name].splitlines()]
    lines = {int(match[1]): match for match in found if match is not None}
    assert sorted(lines) == list(range(RANKS))
    waiting = [rank for rank, match in lines.items() if match[2].startswith("waits")]
    absent = [rank for rank in lines if rank not in waiting]
    rounds = [int(lines[rank][3] or 0) for rank in range(RANKS)]
    with running(kind, meeting_place, program):
        seen = await_report(
            meeting_place,
            lambda r: (
                names(r, *absent)
                and [one.rank for one in r.ranks if one.state == "waiting"] == waiting
                and [one.round for one in r.ranks] == rounds
            ),
        )
    first = program.__code__.co_firstlineno
    for rank, match in lines.items():
        one = seen.ranks[rank]
        if match[4] is None:
            assert one.call == "init"
            continue
        label = Label(one.call or "", one.name).call
        assert match[4].startswith(label)
        assert match[4].endswith(f"(bug.py:{int((one.site or '').rpartition(':')[2]) - first + 1})")


def test_a_rank_that_waits_for_another_is_not_at_fault(meeting_place: Path) -> None:
    """Across groups, the last one of the chain is."""

    def program() -> None:
        pair, other = sp.group([0, 1]), sp.group([1, 2])
        if sp.get_rank() == 0:
            pair.barrier("first")
        if sp.get_rank() == 1:
            other.barrier("second")
        if sp.get_rank() == 2:
            sleep()

    with running(TRIO, meeting_place, program):
        seen = await_report(
            meeting_place,
            lambda r: (
                names(r, 2)
                and r.ranks[0].state == "waiting"
                and [one.group for one in r.ranks] == [[0, 1], [1, 2], [1, 2]]
            ),
        )
    text = seen.finding.text
    assert "rank 2 has not come to barrier 'second' (" in text
    assert ") in group [1, 2], where rank 1 has waited for " in text
    assert "  rank 2 has made no call in this group; it sleeps" in text


@pytest.mark.parametrize("late_at", ["barrier", "all_reduce"])
def test_groups_of_the_same_ranks_are_told_apart(late_at: str, meeting_place: Path) -> None:
    """As all ranks, and the default group of torch.distributed."""
    import torch
    import torch.distributed as dist

    def all_reduce() -> None:
        dist.all_reduce(torch.ones(1))

    def program() -> None:
        sp.init().open_process_group()
        all_reduce()
        sp.barrier("start")
        if sp.get_rank() == 1:
            sleep()
        if late_at == "barrier":
            sp.barrier()
        else:
            all_reduce()

    with running(PAIR, meeting_place, program):
        seen = await_report(
            meeting_place,
            lambda r: (
                names(r, 1)
                and f"come to {late_at} " in r.finding.text
                and r.last_barrier is not None
                and "'start'" in r.last_barrier
            ),
        )
    assert [one.state for one in seen.ranks] == ["waiting", "running"]
    assert [one.call for one in seen.ranks] == [late_at] * 2
    assert [one.behind for one in seen.ranks] == [0, 1]
    assert "'start'" in (seen.last_barrier or "")
    if late_at == "barrier":
        assert seen.ranks[0].group is None
        assert " in group " not in seen.finding.text
    else:
        assert seen.ranks[0].group == [0, 1]
        assert re.search(r"\) in group \[0, 1\] 'group .+', where rank 0 ", seen.finding.text)
        assert [one.round for one in seen.ranks] == [2, 1]


def test_a_rank_whose_save_waits_is_at_fault_if_others_wait_for_it(
    meeting_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save waits in a thread of its own: that is no deadlock."""
    from syncprims.training import save_state

    def program() -> None:
        if sp.get_rank() == 1:
            monkeypatch.setattr("os.fsync", lambda _: sleep())  # of this process
        save_state(tmp_path / "saved", {}, block=False)
        if sp.get_rank() == 0:
            sleep()
        sp.barrier("next")

    with running(PAIR, meeting_place, program):
        seen = await_report(
            meeting_place,
            lambda r: "'next'" in r.finding.text and "'saves in the" in r.finding.text,
        )
    assert names(seen, 0), seen.finding
    assert "rank 0 has not come to barrier 'next' (" in seen.finding.text
    assert ") in group [0, 1] 'saves in the background', where rank 0 has" in seen.finding.text


def test_every_world_shows_the_lines_of_its_late_ranks(meeting_place: Path) -> None:
    def program() -> None:
        if sp.get_rank() == 1:
            loop_in_python()
        sp.barrier()

    world = partial(running, PAIR, meeting_place, program)
    with world() as first, world() as second:
        for pids in (first, second):
            await_report(pids[0], lambda r: names(r, 1) and r.finding.waited_s > NOTABLE)
        seen = who(meeting_place)
    assert [LINE in report.ranks[1].doing for report in seen] == [True, True], seen


def test_ranks_that_never_joined_are_absent(meeting_place: Path) -> None:
    def program() -> None:
        pass

    lonely = make_rank_variables(0, 3)
    with running(Kind("file", 1), meeting_place, program, **lonely):
        seen = await_report(meeting_place, lambda r: r.finding.kind == "waiting")
    assert [one.state for one in seen.ranks] == ["joining", "absent", "absent"]
    assert seen.finding.waiting_for == [1, 2]
    assert "ranks [1, 2] have not come to init (" in seen.finding.text
    assert "\n  rank 1 never joined\n" in seen.finding.text


def test_a_rank_between_two_rounds_of_a_loop_has_left_the_first(meeting_place: Path) -> None:
    def program() -> None:
        for step in range(9):
            if (step, sp.get_rank()) == (3, 1):
                sleep()
            sp.barrier("step")

    with running(PAIR, meeting_place, program):
        seen = await_report(meeting_place, lambda r: names(r, 1) and "1 round" in r.finding.text)
    first, second = seen.finding.text.splitlines()
    assert first.startswith("rank 1 has not come to barrier 'step' (")
    assert re.match(r"  rank 1 was last seen at barrier 'step' \(.*\), 1 round before this one; it "
                    r"sleeps", second)  # fmt: skip


def test_ranks_that_go_on_all_move(meeting_place: Path) -> None:
    def program() -> None:
        while True:
            sp.barrier("step")

    with running(TRIO, meeting_place, program):
        await_report(meeting_place, lambda r: r.ranks[0].round > 100)
        seen = await_report(meeting_place, lambda r: r.finding.kind == "moving", stuck_after=30)
    assert seen.finding.text == "all is moving"
    assert not seen.finding.stuck
    assert seen.finding.waiting_for == []
    assert {one.state for one in seen.ranks} <= {"running", "waiting"}


def test_a_lost_rank_is_told_while_another_cannot_see_it(meeting_place: Path) -> None:
    def program() -> None:
        if sp.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        sp.barrier()

    with running(TRIO, meeting_place, program) as pids:
        await_report(meeting_place, lambda r: r.ranks[1].state == "stopped")
        os.kill(pids[0], signal.SIGKILL)
        killed = "rank 0 was lost: killed by SIGKILL"  # known after its locks are free
        seen = await_report(meeting_place, lambda r: killed in r.finding.text)
        assert (seen.finding.kind, seen.ranks[0].state) == ("lost", "lost")
        for pid in pids[1:]:
            os.kill(pid, signal.SIGKILL)
        seen = await_report(meeting_place, lambda r: r.finding.kind == "ended")
        assert "no rank lives any more: rank 0 was lost" in seen.finding.text
        assert all(report.path != seen.path for report in who())


def test_two_hosts_each_show_their_ranks_and_what_they_know_of_others(
    meeting_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program() -> None:
        sp.barrier("start")
        if sp.get_rank() == 3:
            sleep()
        sp.barrier("end")

    def both(report: WorldReport) -> bool:
        return names(report, 3) and sum(one.state == "waiting" for one in report.ranks) >= 1

    def await_all(is_it: Callable[[WorldReport], bool]) -> WorldReport:
        deadline = time.monotonic() + PATIENCE
        while True:
            (seen,) = who(meeting_place / "host-0", stuck_after=0.2, all_hosts=True)
            if is_it(seen):
                return seen
            assert time.monotonic() < deadline, seen

    with running(Kind("torch", 4, hosts=2), meeting_place, program) as pids:
        other = await_report(meeting_place / "host-1", both)
        here = await_report(meeting_place / "host-0", both)
        all_ranks = await_all(lambda r: r.ranks[2].state == "waiting")
        os.kill(pids[3], signal.SIGSTOP)
        silent = await_all(lambda r: r.ranks[3].state == "elsewhere")
        # As a reader of another version, whose descriptions have other fields.
        monkeypatch.setattr("syncprims.who.worlds.description.RankDescription", lambda pid: pid)
        other_version = await_all(lambda r: True)
    assert [one.state for one in here.ranks] == ["waiting", "waiting", "elsewhere", "elsewhere"]
    assert [one.state for one in other.ranks] == ["elsewhere", "elsewhere", "waiting", "running"]
    assert here.run_id == other.run_id
    assert here.world_size == 4
    assert "rank 3 was last seen at barrier 'start'" in here.finding.text
    assert "'start'" in (here.last_barrier or "")  # and not 'end', which only this host has reached
    assert here.ranks[3].pid is None
    assert here.ranks[3].doing.startswith("on host ")
    assert call_of(here, 2).startswith("barrier 'end' (")
    assert [one.state for one in all_ranks.ranks] == ["waiting"] * 3 + ["running"]
    assert names(all_ranks, 3)
    assert "where ranks [0, 1, 2] have waited for " in all_ranks.finding.text
    line = f"(pid {pids[3]}), in sleep (test_looks.py:{sleep.__code__.co_firstlineno + 1})"
    assert f"; it is {all_ranks.ranks[3].doing}" in all_ranks.finding.text
    assert all_ranks.ranks[3].doing.endswith(line)
    assert names(silent, 3)
    assert f"(pid {pids[3]}): it is stopped, or " in silent.finding.text
    assert other_version.finding.kind == "unreadable"
    assert "of another version of syncprims" in other_version.finding.text


def test_a_world_is_found_by_run_directory_and_process(meeting_place: Path) -> None:
    with running(PAIR, meeting_place, lambda: None) as pids:
        seen = await_report(pids[0], lambda r: r.ranks[1].state == "running")
        path = Path(seen.path)
        places: list[Any] = [seen.run_id, seen.run_id[:12], pids[1], str(pids[1]), os.getpid()]
        places += [meeting_place, path, path.parent]
        for which in places:
            assert [report.path for report in who(which)] == [seen.path], which
        assert seen.path in [report.path for report in who()]
        with pytest.raises(sp.ConfigurationError, match="no world runs with run id 'gone'"):
            who("gone")
        with pytest.raises(sp.ConfigurationError, match="no world runs in /"):
            who(meeting_place / "gone")


def test_worlds_are_read_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import syncprims.who; syncprims.who.who()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


def test_a_process_that_is_no_rank_is_told(meeting_place: Path) -> None:
    pid = fork(sleep, os.environ.copy())
    try:
        with pytest.raises(sp.ConfigurationError, match=f"process {pid} is no rank of a world"):
            who(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with pytest.raises(sp.ConfigurationError, match=f"no process {pid}"):
        who(pid)


@needs_root
def test_another_user_sees_nothing_and_is_told_why(meeting_place: Path) -> None:
    reader, writer = os.pipe()

    def look() -> None:
        os.setgroups([])
        os.setresuid(65534, 65534, 65534)
        texts: list[str] = []
        for which in (pids[0], meeting_place):
            with pytest.raises(sp.ConfigurationError) as caught:
                who(which)
            texts.append(str(caught.value))
        texts.append(str([report.path for report in who()]))
        os.write(writer, json.dumps(texts).encode())

    try:
        with running(PAIR, meeting_place, lambda: None) as pids:
            path = await_report(pids[0], lambda r: r.ranks[1].state == "running").path
            child = fork(look, os.environ.copy())
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        by_pid, by_path, listed = json.loads(os.read(reader, 65536))
    finally:
        os.close(reader)
        os.close(writer)
    assert "belongs to user 0: only that user, or root, can see its world" in by_pid
    assert "belong to other users: only they, or root, see them" in by_path
    assert path not in listed


_INSIDE = """
import sys, time
import syncprims as sp
sp.barrier("start")
time.sleep(3600)
"""


@needs_root
def test_pids_are_those_of_the_reader(meeting_place: Path, tmp_path: Path) -> None:
    """Ranks in a container have other numbers there; one that is not seen has none."""
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces here")
    script = tmp_path / "inside.py"
    script.write_text(_INSIDE)
    variables = {
        "SYNCPRIMS_RANK": "0", "SYNCPRIMS_WORLD_SIZE": "1", "SYNCPRIMS_RUN_ID": "inside",
        "SYNCPRIMS_BACKEND": "file", "SYNCPRIMS_DIR": str(meeting_place),
    }  # fmt: skip
    outer = subprocess.Popen(
        [*unshare, sys.executable, str(script)], env={**os.environ, **variables}
    )
    try:
        seen = await_report(meeting_place, lambda r: r.ranks[0].state == "running")
        pid = seen.ranks[0].pid
        assert pid is not None
        assert b"inside.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
        done = subprocess.run(
            [*unshare, sys.executable, "-m", "syncprims", "who", "--json", str(meeting_place)],
            capture_output=True, text=True, timeout=PATIENCE, check=True,
        )  # fmt: skip
        (rank,) = json.loads(done.stdout)["ranks"]
        assert (rank["pid"], rank["state"]) == (None, "running")
    finally:
        outer.kill()
        outer.wait()


def test_the_reader_writes_nothing_and_locks_nothing(meeting_place: Path, signs: Signs) -> None:
    def program() -> None:
        if sp.get_rank() == 1:
            stop()
        sp.barrier()

    def look() -> None:
        allowed = os.O_RDONLY, os.O_RDWR | os.O_WRONLY

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and str(arguments[0]).startswith(str(meeting_place)):
                assert arguments[2] & allowed[1] == allowed[0], arguments
            assert event not in ("os.kill", "os.remove", "os.mkdir", "os.rename", "os.truncate")
            if event == "fcntl.flock":  # of a rank that has gone, if it can be taken
                assert arguments[1] == fcntl.LOCK_SH | fcntl.LOCK_NB

        sys.addaudithook(watch)
        await_report(meeting_place, lambda r: names(r, 1))
        signs.give("looked")

    with running(PAIR, meeting_place, program):
        await_report(meeting_place, lambda r: r.ranks[1].state == "stopped")
        before = sorted(path.name for path in meeting_place.rglob("*"))
        child = fork(look, os.environ.copy())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert signs.given("looked")
        assert sorted(path.name for path in meeting_place.rglob("*")) == before


def test_damaged_files_are_no_crash(meeting_place: Path, tmp_path: Path) -> None:
    dice = random.Random(20)

    def program() -> None:
        sp.group([0, 1]).barrier("pair")
        if sp.get_rank() == 1:
            sleep()
        sp.barrier("end")

    with running(PAIR, meeting_place, program):
        seen = await_report(meeting_place, lambda r: names(r, 1))
        world = Path(seen.path)
        copy = tmp_path / "copy" / world.parent.name / world.name
        kinds: set[str] = set()
        for number in range(300):
            shutil.rmtree(tmp_path / "copy", ignore_errors=True)
            copy.mkdir(parents=True)
            for path in world.iterdir():
                if path.is_file() and not path.is_symlink():
                    (copy / path.name).write_bytes(path.read_bytes())
            victim = dice.choice([p for p in sorted(copy.iterdir()) if p.stat().st_size])
            data = bytearray(victim.read_bytes())
            if number % 3 == 0:
                del data[dice.choice((0, 1, 40, 4096, max(0, len(data) - 1), len(data) // 2)) :]
            else:
                for _ in range(dice.choice((1, 8, 64))):
                    data[dice.randrange(min(len(data), dice.choice((64, 512, 8192))))] = (
                        dice.randrange(256)
                    )
            victim.write_bytes(data)
            kinds |= {report.finding.kind for report in looked_at(copy)}
        assert "unreadable" in kinds
        assert kinds <= {"unreadable", "waiting", "lost", "ended", "moving", "finished", "failed"}
        header = next(p for p in copy.iterdir() if re.fullmatch("board-[0-9a-f]+", p.name))
        shutil.copy(world / header.name, header)
        with header.open("r+b") as file:
            file.write(b"syncprims board 999")
        (report,) = looked_at(copy)
        if report.finding.kind == "unreadable":  # the other files may be damaged from before
            assert "version of syncprims" in report.finding.text


def looked_at(path: Path) -> list[WorldReport]:
    with contextlib.closing(Observation(path, 0.2)) as observation:
        observation.look()
        return observation.look()


@pytest.mark.parametrize("reads", [200, pytest.param(10_000, marks=pytest.mark.soak)])
def test_reads_in_random_programs_are_true(reads: int, meeting_place: Path, tmp_path: Path) -> None:
    done = threading.Event()
    wrong: list[str] = []
    count = 0
    killed: dict[str, set[int]] = {}

    def read() -> None:
        nonlocal count
        while not done.is_set():
            try:
                with contextlib.closing(Observation(meeting_place, 20.0)) as observation:
                    while not done.is_set() and (reports := observation.look()):
                        count += 1
                        for report in reports:
                            check(report)
            except sp.ConfigurationError:
                pass  # no world at this moment
            except BaseException as error:
                wrong.append(repr(error))
                raise

    def check(report: WorldReport) -> None:
        # The name of a run is not readable at its very end. Then nothing is said of its ranks.
        seed = report.run_id.removeprefix("seed ")
        if report.finding.kind in ("deadlock", "unreadable") or report.finding.stuck:
            wrong.append(f"{report}")
        for one in report.ranks:
            late = one.state == "lost" and one.rank not in killed.get(seed, set())
            wrong.extend([f"{report}"] * late)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        seed = 7000
        while count < reads and not wrong:
            seed += 1
            made = plan(seed)
            own = {rank for (rank, _), what in made.own.items() if what == "kill"}
            sent = {rank for _, rank, number in made.signals if number == signal.SIGKILL}
            # Also ranks that the test kills because they are late would be lost.
            killed[str(seed)] = own | sent
            run_random_program(seed, meeting_place, tmp_path)
    finally:
        done.set()
        reader.join()
    assert wrong == []


def view(boards: list[BoardView], size: int) -> WorldView:
    states = {rank: Status(0, None, "alive") for rank in range(size)}
    return WorldView("run", "file", size, boards, {}, {}, states)


def board(calls: dict[int, tuple[int, str]], waits: dict[int, WaitView]) -> BoardView:
    statuses = {r: Status(n, Label("barrier", name), "alive") for r, (n, name) in calls.items()}
    return BoardView(tuple(sorted(calls)), statuses, waits)


def test_a_cycle_across_groups_is_told_as_its_error_tells_it() -> None:
    all_ = board({0: (1, "all"), 1: (0, "x"), 2: (1, "all")}, {0: WaitView(1), 2: WaitView(1)})
    pair = board({0: (0, "x"), 1: (1, "pair")}, {1: WaitView(1)})
    waits = {
        0: RankWait(all_, 1, 3.0, [1]),
        1: RankWait(pair, 1, 3.0, [0]),
        2: RankWait(all_, 1, 3.0, [1]),
    }
    finding = judge(view([all_, pair], 3), waits, {}, 30)
    assert (finding.kind, finding.waiting_for, finding.stuck) == ("deadlock", [0, 1], False)
    assert finding.text == (
        "ranks wait for each other in different groups, and none can go on:\n"
        "  rank 0: barrier 'all' (?) in group [0, 1, 2]\n"
        "  rank 1: barrier 'pair' (?) in group [0, 1]\n"
        "Every rank must make the calls of different groups in the same order."
    )


def test_a_wait_for_data_is_no_wait_for_a_rank() -> None:
    all_ = board({0: (4, "all"), 1: (4, "all")}, {0: WaitView(4)})
    finding = judge(view([all_], 2), {0: RankWait(all_, 4, 31.0, [])}, {}, 30)
    assert (finding.kind, finding.waiting_for, finding.stuck) == ("waiting", [], True)
    assert finding.text == (
        "still at barrier 'all' (?) after 31 s: all ranks [0, 1] have come, and the data is under "
        "way"
    )


def test_a_short_wait_is_no_finding() -> None:
    all_ = board({0: (4, "all"), 1: (3, "all")}, {0: WaitView(4)})
    assert judge(view([all_], 2), {0: RankWait(all_, 4, 0.4, [1])}, {}, 30).kind == "moving"
    assert judge(view([all_], 2), {0: RankWait(all_, 4, 1.5, [1])}, {}, 30).waiting_for == [1]
