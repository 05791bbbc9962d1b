"""Guarantees of the file backend only: its directory, cleanup and limits."""

from __future__ import annotations

import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.launches import await_condition
from support.rank_worlds import Died, Kind, Ranks, Scripts, Signs

import syncprims as sp

# The backend is imported before the ranks are forked.
from syncprims._world.registry import load_backend
from syncprims._world.runtime import get_world


@pytest.fixture
def world(meeting_place: Path) -> Ranks:
    return Ranks(Kind("file", 4), meeting_place)


def count(folder: str) -> int:
    return len(list(Path(folder).iterdir()))


def refusal(directory: Path, **variables: str) -> str:
    """Return what a rank says that may not meet in `directory`."""

    def program() -> str:
        with pytest.raises(sp.SyncError) as caught:
            sp.init()
        assert isinstance(caught.value, sp.ConfigurationError | sp.BackendUnavailable)
        return str(caught.value)

    (said,) = Ranks(Kind("file", 1), directory).run_alone(program, **variables)
    return str(said)


def test_generations_never_mix(world: Ranks) -> None:
    """10,000 barriers with random delays, each with its round's number in a flag's payload."""

    def program() -> tuple[int, int]:
        jitter = random.Random(sp.get_rank())
        fds = count("/proc/self/fd")
        files = sum(len(names) for _, _, names in os.walk(os.environ["SYNCPRIMS_DIR"]))
        for k in range(10_000):
            if jitter.random() < 0.001:
                time.sleep(jitter.random() * 0.003)  # the delay under test
            sp.barrier()
            if k % 500 == 0:
                assert sp.all_gather(k) == [k] * 4
                assert sp.broadcast((k, "x" * 3000), src=k // 500 % 4)[0] == k
        sp.barrier("before counting")
        grown = sum(len(names) for _, _, names in os.walk(os.environ["SYNCPRIMS_DIR"])) - files
        return count("/proc/self/fd") - fds, grown

    for fds, files in world.run(program):
        # Each rank keeps a bounded tail of files for what did not fit into a cell.
        assert fds <= 3 + 1  # an eye on each peer
        assert files <= 4 * 8
    world.check_nothing_left()


def test_everything_is_private(world: Ranks) -> None:
    def program() -> list[tuple[str, int]]:
        sp.broadcast("x" * 5000)
        root = Path(os.environ["SYNCPRIMS_DIR"])
        modes = [(p.name, stat.S_IMODE(p.stat().st_mode)) for p in root.rglob("*")]
        sp.barrier("all have looked")
        return modes

    os.umask(before := os.umask(0))
    previous = os.umask(0)
    try:
        (modes, *_) = world.run(program)
    finally:
        os.umask(previous)
    assert before == previous
    assert len(modes) > 7
    assert {mode for _, mode in modes} == {0o700, 0o600}


def test_without_a_run_id_an_explicit_directory_will_do(scripts: Scripts) -> None:
    for _ in range(2):
        ended = scripts.run("print(all_gather(rank))", run_id="")
        assert [one.out for one in ended] == ["[0, 1, 2]\n"] * 3, [one.err for one in ended]


def test_two_processes_of_one_rank_are_told(meeting_place: Path, tmp_path: Path) -> None:
    scripts = Scripts(Kind("file", 2), meeting_place, tmp_path)
    first = scripts.start("init()\nprint('in', flush=True)\ntime.sleep(60)\n", run_id="one")
    for process in first:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
    second = scripts.start("init()", run_id="one", SYNCPRIMS_JOIN_TIMEOUT="2")
    for ended in scripts.wait(second):
        assert ended.code == 1
        assert "is taken by another living process" in ended.err
        assert "SYNCPRIMS_RUN_ID" in ended.err
    for process in first:
        process.kill()
    scripts.wait(first)


def test_a_restarted_run_never_meets_ranks_of_the_earlier_one(scripts: Scripts) -> None:
    """Two of its ranks still wait for the third, which comes only after the restarted run."""
    source = """
        count = os.environ['TORCHELASTIC_RESTART_COUNT']
        while count == '0' and rank == 2 and not os.path.exists('released'):
            time.sleep(0.01)
        print(all_gather(count))
    """

    def start(count: str) -> list[subprocess.Popen[str]]:
        return scripts.start(source, run_id="torchrun's", TORCHELASTIC_RESTART_COUNT=count)

    earlier = start("0")
    try:
        joined = scripts.directory.glob
        await_condition(lambda: len([*joined("*/world-1/alive-*")]) == 2, "they did not join")
        restarted = scripts.wait(start("1"))
    finally:
        (scripts.script.parent / "released").touch()
        ended = scripts.wait(earlier)
    assert {rank.out for rank in restarted} == {"['1', '1', '1']\n"}
    assert {rank.out for rank in ended} == {"['0', '0', '0']\n"}


def test_a_link_a_file_and_an_unwritable_place_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    link = tmp_path / "link"
    link.symlink_to(target)
    assert f"{link} cannot be used as a meeting place: it is a link" in refusal(link)
    plain = tmp_path / "plain"
    plain.write_text("mine")
    assert "it is not a directory" in refusal(plain)
    assert plain.read_text() == "mine"
    assert "SYNCPRIMS_DIR" in refusal(plain / "below")
    assert "SYNCPRIMS_DIR" in refusal(Path("/proc/nowhere"))


def test_no_room_for_a_group_is_a_shared_failure(meeting_place: Path) -> None:
    def program() -> Any:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        usual = resource.getrlimit(resource.RLIMIT_FSIZE)
        if sp.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, usual[1]))
        with pytest.raises(sp.SyncError) as caught:
            sp.group([1])
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        return type(caught.value).__name__, sp.group([1]).ranks, sp.all_gather("in step")

    outcomes = Ranks(Kind("file", 2), meeting_place).run(program)
    assert [said for said, *_ in outcomes] == ["PeerFailed", "BackendUnavailable"]
    assert [rest for _, *rest in outcomes] == [[(1,), ["in step"] * 2]] * 2


def test_a_receiver_without_descriptors_is_a_shared_failure(meeting_place: Path) -> None:
    def program() -> Any:
        usual = resource.getrlimit(resource.RLIMIT_NOFILE)
        sp.barrier()
        if sp.get_rank() == 1:
            free = os.dup(0)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, usual[1]))
        with pytest.raises((OSError, sp.PeerFailed), match="raise the limit") as caught:
            sp.broadcast(np.ones(1_000_000) if sp.is_main() else None)
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        return type(caught.value).__name__, sp.broadcast(np.ones(1_000_000))[0]

    outcomes = Ranks(Kind("file", 2), meeting_place).run(program)
    assert outcomes == [("PeerFailed", 1), ("SharedMemoryError", 1)]


def test_a_rank_that_cannot_read_a_note_breaks_the_group(meeting_place: Path, signs: Signs) -> None:
    """The others have passed that round, and learn of it in their next call."""

    def program() -> Any:
        sp.barrier("start")
        if sp.is_main():
            sp.broadcast(b"x" * 100_000)
            with pytest.raises(sp.PeerFailed, match=r"broadcast .*SharedMemoryError"):
                sp.barrier("next")
            return signs.give("learned")
        os.close(free := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))
        with pytest.raises(sp.SharedMemoryError, match="what rank 0 sends; raise the limit"):
            sp.broadcast(b"")
        signs.wait("learned")
        return None

    Ranks(Kind("file", 2), meeting_place).run(program)


def test_a_long_wait_costs_little(meeting_place: Path) -> None:
    def program() -> float:
        sp.barrier()
        if sp.get_rank() == 1:
            time.sleep(2)  # the long wait
        used = time.process_time()
        sp.barrier()
        return time.process_time() - used

    waited, _ = Ranks(Kind("file", 2), meeting_place).run(program)
    assert waited < 0.5  # seconds of processor, a bound far above what it takes


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_no_thread_is_started(world: Ranks) -> None:
    def program() -> int:
        sp.barrier()
        return count("/proc/self/task")

    before = count("/proc/self/task")
    assert before >= 1
    assert all(count <= 2 for count in world.run(program))  # itself, and the tests' watchdog


def test_what_others_keep_in_the_directory_stays(tmp_path: Path) -> None:
    place = tmp_path / "project"
    place.mkdir(mode=0o755)
    (place / "flake" / "world-1").mkdir(parents=True)
    (place / "flake" / "world-1" / "results.csv").write_text("precious")
    for name in ("uv.lock", "poetry.lock", "flake.lock"):
        (place / name).touch()
    before = sorted(path.relative_to(place) for path in place.rglob("*"))
    Ranks(Kind("file", 2), place).run(lambda: sp.barrier())
    assert sorted(path.relative_to(place) for path in place.rglob("*")) == before


def test_a_large_payload_does_not_stay_in_memory(meeting_place: Path) -> None:
    def program() -> int:
        sp.broadcast(b"x" * 5_000_000)
        for _ in range(3):
            sp.barrier()
        left = sum(p.stat().st_size for p in meeting_place.rglob("board-*-[0-9]*-*"))
        sp.barrier("all have looked")
        return left

    assert Ranks(Kind("file", 2), meeting_place).run(program) == [0, 0]


def test_an_abort_is_finished_if_its_giver_died(meeting_place: Path, signs: Signs) -> None:
    """Rank 0 is killed in the very pause between the abort and its decision."""

    def program() -> Any:
        sp.barrier()
        if sp.get_rank() == 2:
            signs.wait(1)  # absent, until there has long been a verdict
        if sp.get_rank() == 0:
            aborts = sys.modules["syncprims.backends.file.abort"]
            dying = SimpleNamespace(sleep=lambda seconds: os.kill(os.getpid(), 9))
            vars(aborts)["time"] = dying
        with pytest.raises(sp.SyncError) as caught:
            sp.barrier("load", timeout=0.3 if sp.get_rank() == 0 else 600)
        signs.give(sp.get_rank())
        return type(caught.value).__name__

    outcomes = Ranks(Kind("file", 3), meeting_place).outcomes(program)
    assert isinstance(outcomes[0], Died)
    assert outcomes[1:] == ["SyncTimeout"] * 2


def wait_little_for_exit_codes() -> dict[str, Any]:
    """Believe early that a process which has left its world lives on; return what is patched."""
    load_backend("file")
    liveness = vars(sys.modules["syncprims.backends.file.liveness"])
    assert liveness["_EXIT_GRACE"]
    liveness["_EXIT_GRACE"] = 0.2
    return liveness


def test_a_rank_that_finishes_after_the_last_barrier_harms_nobody(meeting_place: Path) -> None:
    """Its note is up, so the others pass, however late they look; and it is never called lost."""

    def program() -> list[str]:
        wait_little_for_exit_codes()
        said = []
        for number in range(25):
            with sp.init():
                trio = sp.group([0, 1, 2])
                if sp.get_rank() < 3:
                    if sp.get_rank() == number % 3:
                        time.sleep(0.002)  # the others wait for this one, without rank 3
                    trio.barrier("three of four")
                sp.barrier("last")
                if sp.get_rank() == number % 4:
                    continue  # leaves at once
                if number % 5 == 0:
                    with pytest.raises(sp.PeerLost, match="finished after round") as caught:
                        sp.barrier("one too many")
                    said.append(type(caught.value).__name__)
        return said

    outcomes = Ranks(Kind("file", 4), meeting_place).run_alone(program)
    assert {word for said in outcomes for word in said} == {"PeerLost"}


def test_a_rank_that_is_just_joining_or_leaving_is_not_lost(meeting_place: Path) -> None:
    """Between looking at a rank's lock and at its word, it may sit down or leave."""

    def program() -> Any:
        rank = int(os.environ["SYNCPRIMS_RANK"])
        liveness = wait_little_for_exit_codes()["Liveness"]
        look = liveness._has_left

        def look_slowly(*where: Any) -> bool:
            free = bool(look(*where))
            time.sleep(0.05)  # the very gap under test
            return free

        liveness._has_left = look_slowly
        for number in range(6):
            time.sleep(0.02 * ((rank + number) % 3))
            with sp.init():
                sp.barrier("together")
                if rank == number % 3:
                    continue
                with pytest.raises(sp.PeerLost, match="finished after round"):
                    sp.barrier("one too many")
        return "passed"

    assert Ranks(Kind("file", 3), meeting_place).run_alone(program) == ["passed"] * 3


def test_a_disk_without_any_room_keeps_ranks_in_step(meeting_place: Path) -> None:
    def program() -> Any:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        sp.barrier()
        said: list[Any] = []
        for number in range(4):
            if number == 1 and sp.is_main():
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            try:
                payload = b"x" * 100_000 if number == 1 and sp.is_main() else b""
                said.append(sp.all_gather((number, payload))[1][0])
            except OSError as error:
                said.append(str(error))
            except sp.PeerFailed as error:
                said.append(error.failures[0].type)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return said

    own, other = Ranks(Kind("file", 2), meeting_place).run(program)
    assert "writing 100" in own.pop(1)  # what did not fit, not the excuse for it
    assert own == [0, 2, 3]
    assert other == [0, "syncprims.SharedMemoryError", 2, 3]


def test_a_late_rank_is_noticed_soon_after_a_long_wait(meeting_place: Path) -> None:
    """The wait is made long by a clock that runs a thousand times too fast on the waiting rank."""

    def program() -> list[float]:
        moments: list[float] = []
        sp.barrier()
        if sp.is_main():
            board = get_world().rounds.board
            board.now = lambda: 1000 * time.monotonic()  # type: ignore[method-assign]
        for _ in range(5):
            if not sp.is_main():
                time.sleep(0.3)  # late, which is what is tried
            sp.barrier(timeout=100_000)
            moments.append(time.monotonic())
        return moments

    moments = zip(*Ranks(Kind("file", 2), meeting_place).run(program), strict=True)
    # A busy machine may delay some; a rank that sleeps too long would notice none soon.
    assert min(abs(first - second) for first, second in moments) < 0.1


def test_no_file_takes_the_place_of_a_closed_stream(scripts: Scripts, tmp_path: Path) -> None:
    ended = scripts.run(
        """
        for fd in range(3):
            os.close(fd)
        barrier()
        group([0]), group([1])
        streams = [os.fstat(fd).st_rdev == os.stat(os.devnull).st_rdev for fd in range(3)]
        with open(f"result-{rank}", "w") as file:
            file.write(str(all_gather(streams)))
        """
    )
    assert [one.code for one in ended] == [0] * len(ended)
    found = [path.read_text() for path in tmp_path.glob("result-*")]
    assert found == [str([[True] * 3] * len(ended))] * len(ended)
