"""`syncprims run`: starts ranks without torch, and leaves no process behind, whatever ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path
from typing import IO, Any

import pytest
from support.intruders import needs_root
from support.launches import Launches, await_condition, command, find_processes
from support.rank_environment import PATIENCE
from support.rank_worlds import CLOSING, CROWDED, skip_unless_crowded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def launches(tmp_path: Path) -> Launches:
    return Launches(tmp_path / "job.py")


def call(
    launches: Launches,
    line: list[str],
    cwd: Path | None = None,
    stdout: IO[bytes] | int = subprocess.PIPE,
    stderr: IO[bytes] | int = subprocess.PIPE,
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        line, env=launches.environ, cwd=cwd, stdout=stdout, stderr=stderr, check=False
    )


def await_lines(launcher: subprocess.Popen[str], said: str, n: int = 2) -> None:
    """Read one line of each of `n` ranks: what they say."""
    assert launcher.stdout is not None
    lines = sorted(launcher.stdout.readline() for _ in range(n))
    assert lines == [f"[rank {rank}] {said}\n" for rank in range(n)]


def test_ranks_meet_and_their_lines_are_prefixed(launches: Launches) -> None:
    done = launches.run(
        """
        assert all_gather(get_rank()) == [0, 1, 2]
        print("hello from", current().backend_name, sys.argv[1:])
        print("to stderr", file=sys.stderr, end="")
        """,
        args=["--backend", "-n", "5"],
    )
    said = "hello from file ['--backend', '-n', '5']"
    assert done.code == 0
    assert sorted(done.out.splitlines()) == [f"[rank {r}] {said}" for r in range(3)]
    assert sorted(done.err.splitlines()) == [f"[rank {r}] to stderr" for r in range(3)]


def test_descriptors_may_have_any_number(launches: Launches) -> None:
    skip_unless_crowded()
    launches.write("print('hello from', os.environ['RANK'])\n")
    words = ["run", "-n", "2", str(launches.script)]
    source = f"{CROWDED}from syncprims.cli import main\nsys.exit(main({words!r}))\n"
    done = call(launches, [sys.executable, "-c", source])
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.decode().splitlines())
    assert lines == [f"[rank {r}] hello from {r}" for r in range(2)]


def test_ranks_have_both_dialects_and_the_launchers_session(launches: Launches) -> None:
    """Linux schedules each session as one: ranks of several could not yield to each other."""
    done = launches.run(
        f"""
        assert (os.getsid(0), os.getpgrp()) == ({os.getsid(0)}, os.getpid())
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            assert os.environ[name] == os.environ["SYNCPRIMS_" + name], name
        given = int(open("/proc/sys/net/ipv4/ip_local_port_range").read().split()[0])
        port = int(os.environ["MASTER_PORT"])  # which the system gives to nobody else, if it can
        assert os.environ["MASTER_ADDR"] and port > 0 and (port < given or given <= 10_000)
        assert "SLURM_PROCID" not in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
        barrier()
        """,
        SLURM_PROCID="7", SLURM_NTASKS="8", SLURM_STEP_ID="0", RANK="1", WORLD_SIZE="2",
        TORCHELASTIC_RUN_ID="outer",
    )  # fmt: skip
    assert done.code == 0, done.err


def test_a_module_and_its_backend(launches: Launches) -> None:
    launches.write("print(current().backend_name, sys.argv[1:])\n")
    for words, said in (
        (["-m", "job", "-m", "x"], b"file ['-m', 'x']"),
        (["--backend", "single", "job.py"], b"single []"),
    ):
        done = call(launches, command("-n", "1", *words), cwd=launches.script.parent)
        assert done.stdout == b"[rank 0] %s\n" % said, done.stderr


@pytest.mark.parametrize(
    ("source", "code", "how"),
    [
        ("init()\nif get_rank() == 2: sys.exit(7)", 7, "exit code 7"),
        ("init()\nif get_rank() == 2: raise SystemExit('no config')", 1, "no config"),
        ("init()\nif get_rank() == 2: os.kill(os.getpid(), 9)", 137, "killed by SIGKILL"),
        ("init()\nif get_rank() == 2: os._exit(9)", 9, "exit code 9"),
        # Before it joins: nobody waits for it until the join times out.
        ("if os.environ['RANK'] == '2': import missing", 1, "No module named 'missing'"),
    ],
)
def test_every_ending_has_its_code(launches: Launches, source: str, code: int, how: str) -> None:
    # The others have some seconds from then on: on a loaded machine, Python may start no faster.
    up = """
    open(f"{__file__}-{os.environ['RANK']}", "w").close()
    while not all(os.path.exists(f"{__file__}-{rank}") for rank in range(3)): time.sleep(0.01)
    """
    done = launches.run(f"{textwrap.dedent(up)}{source}\nbarrier()\n")
    assert done.code == code
    report = done.err[done.err.index("syncprims run:") :]
    assert report.startswith("syncprims run: rank 2 failed first (")
    assert how in report
    assert re.search(r"\nranks 0-1: Peer(Lost|Failed) because of rank 2\n", done.err)


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("raise ValueError('bad shard')", 1, "ValueError: bad shard"),
        ("sys.exit(3)", 3, "SystemExit: 3"),
    ],
)
def test_the_headline_is_of_the_rank_whose_thread_runs_on(
    launches: Launches, ending: str, code: int, words: str
) -> None:
    done = launches.run(
        f"""
        import threading
        init()
        if get_rank() == 1:
            threading.Thread(target=threading.Event().wait).start()  # until the launcher ends it
            {ending}
        barrier()
        """
    )
    assert done.code == code
    report = done.err[done.err.index("syncprims run:") :]
    assert report.startswith(f"syncprims run: rank 1 failed first (exit code {code}): {words}")
    assert "ranks 0, 2: PeerFailed because of rank 1\n" in done.err


BAD = "if get_rank() == 1: raise ValueError('bad shard')"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            f"""
            import asyncio
            async def work():
                {BAD}
                barrier()
            async def main():
                async with asyncio.TaskGroup() as outer:
                    async with asyncio.TaskGroup() as inner: inner.create_task(work())
            asyncio.run(main())
            """,
            "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception): ValueError: bad",
        ),
        (
            f"""
            try:
                {BAD}
                barrier()
            except (PeerFailed, ValueError): sys.exit(1)
            """,
            "SystemExit: 1, while it handled ValueError: bad shard",
        ),
        (
            f"""
            try:
                {BAD}
                barrier()
            except PeerFailed: raise SystemExit(1)
            """,
            "ValueError: bad shard",
        ),
    ],
    ids=["group", "sys.exit", "SystemExit"],
)
def test_the_headline_looks_into_what_is_raised(
    launches: Launches, program: str, words: str
) -> None:
    """Each rank ends by an error that says nothing of it: only one was not told by another rank."""
    done = launches.run(f"init()\n{textwrap.dedent(program)}")
    assert f"syncprims run: rank 1 failed first (exit code 1): {words}" in done.err
    assert re.search(r"^ranks 0, 2: \w+ because of rank 1$", done.err, re.M), done.err
    assert done.code == 1


def test_an_exit_that_was_caught_is_not_the_cause(launches: Launches) -> None:
    done = launches.run(
        """
        try: sys.exit(3)
        except SystemExit: pass
        raise ValueError("bad shard")
        """,
        n=1,
    )
    assert "syncprims run: rank 0 failed first (exit code 1): ValueError: bad shard" in done.err


_A_HANDLED_FAILURE = """
        try:
            with init():
                if get_rank() == 0:
                    raise ValueError("handled")
                barrier()
        except (ValueError, PeerFailed):
            pass
"""


def test_a_rank_that_is_ended_is_not_blamed_for_an_earlier_world(launches: Launches) -> None:
    done = launches.run(
        _A_HANDLED_FAILURE
        + """
        init()
        barrier("all are here")
        if get_rank() == 1:
            raise RuntimeError("the real cause")
        signal.pause()  # until the launcher ends it
        """
    )
    report = done.err[done.err.index("syncprims run:") :]
    assert report.startswith("syncprims run: rank 1 failed first (exit code 1): RuntimeError: the")
    assert "handled" not in done.err


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_end_all_and_restart_none(launches: Launches, signum: int, code: int) -> None:
    source = """
    init()
    sleep = 'import time; time.sleep(99)'
    child = subprocess.Popen([sys.executable, '-c', sleep, __file__])
    print('ready')
    barrier() if is_main() else time.sleep(99)
    """
    with launches.start(source, "--max-restarts", "5", n=3) as launcher:
        await_lines(launcher, "ready", 3)
        launcher.send_signal(signum)
        out, err = launcher.communicate(timeout=PATIENCE)
        assert launcher.returncode == code
    assert "restart" not in out + err


def test_the_reason_of_an_earlier_world_is_not_shown(launches: Launches) -> None:
    done = launches.run(
        _A_HANDLED_FAILURE
        + """
        with init():
            barrier()
        init()
        if get_rank() == 1:
            raise RuntimeError("the real cause")
        barrier()
        """
    )
    report = done.err[done.err.index("syncprims run:") :]
    assert report.startswith("syncprims run: rank 1 failed first (exit code 1): RuntimeError: the")
    assert "handled" not in report


LOST = (
    b"syncprims run: [Errno 28] all ranks succeeded, but their output is lost: "
    b"No space left on device\n"
)


@pytest.mark.parametrize(
    ("stream", "full", "ended"),
    [("stdout", True, (1, LOST)), ("stderr", True, (1, None)), ("stdout", False, (141, b""))],
)
def test_an_output_that_nobody_takes_stops_nobody_and_is_told(
    stream: str, full: bool, ended: tuple[int, bytes], launches: Launches, tmp_path: Path
) -> None:
    source = f"print('x' * 1_000_000, file=sys.{stream})\nopen(sys.argv[1], 'a').write('.')\n"
    launches.write(source)
    line = command("-n", "2", str(launches.script), str(tmp_path / "done"))
    reader, writer = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("wb") as disk, os.fdopen(writer, "wb") as pipe:
        sink = disk if full else pipe
        streams = (sink, subprocess.PIPE) if stream == "stdout" else (subprocess.PIPE, sink)
        done = call(launches, line, None, *streams)
    assert (done.returncode, done.stderr) == ended
    assert (tmp_path / "done").read_text() == ".."


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("arguments", "stream", "codes"),
    [
        ("rnu", "stderr", (2, 2)),
        ("who no-such-run", "stderr", (2, 2)),
        ("run no-such-file.py", "stderr", (2, 2)),
        ("--help", "stdout", (1, 141)),
    ],
)
def test_a_last_word_that_cannot_be_written_changes_no_exit_code(
    launches: Launches, arguments: str, stream: str, codes: tuple[int, int], unbuffered: str
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    launches.environ["PYTHONUNBUFFERED"] = unbuffered
    line = [sys.executable, "-m", "syncprims", *arguments.split()]
    with Path("/dev/full").open("wb") as disk, os.fdopen(writer, "wb") as pipe:
        for sink, code in ((disk, codes[0]), (pipe, codes[1])):
            streams = (subprocess.DEVNULL, sink) if stream == "stderr" else (sink, None)
            done = subprocess.run(
                line, env=launches.environ, stdout=streams[0], stderr=streams[1], check=False
            )
            assert done.returncode == code


def test_a_log_on_a_full_disk_is_named(launches: Launches, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").symlink_to("/dev/full")
    done = launches.run("print('said')", f"--log-dir={tmp_path / 'logs'}", n=1)
    assert (done.code, done.out) == (1, "[rank 0] said\n")
    assert done.err.endswith(f"No space left on device, in {tmp_path}/logs/rank-0.log\n")


@needs_root
@pytest.mark.parametrize("most", [1, 2, 3], ids=["guard", "rank", "thread"])
def test_a_limit_of_processes_is_told_wherever_it_is_met(launches: Launches, most: int) -> None:
    """As a user who has no other process; the rank itself would be the last one of them."""
    launches.write("print('started')\n")
    launches.script.chmod(0o644)
    caps = "-all,+dac_read_search"  # to find Python, wherever it is
    user = ["setpriv", "--reuid=54322", "--clear-groups", f"--inh-caps={caps}"]
    limited = f"resource.setrlimit(resource.RLIMIT_NPROC, ({most},) * 2)"
    begin = f"import os, resource, sys; {limited}; os.execv(sys.argv[1], sys.argv[1:])"
    line = [sys.executable, "-c", begin, *command("-n", "1", str(launches.script))]
    done = call(launches, [*user, f"--ambient-caps={caps}", *line])
    assert done.returncode == 2, done.stderr
    assert b"started" not in done.stdout
    assert b"raise the limit: ulimit -n (files), ulimit -u (processes)" in done.stderr


@pytest.mark.parametrize("closed", [[1], [2], [0, 1, 2]], ids=str)
def test_closed_streams_stop_nobody(closed: list[int], launches: Launches) -> None:
    launches.write(
        "for stream in (sys.stdout, sys.stderr):\n"
        "    print('x' * 1_000_000, file=stream, flush=True)\n"  # more than a pipe holds
        "barrier()\n"
    )
    line = command("-n", "2", str(launches.script))
    done = call(launches, [sys.executable, "-c", CLOSING, str(closed), *line])
    assert done.returncode == 0, done.stderr
    assert (len(done.stdout) > 2_000_000) == (1 not in closed)
    assert (len(done.stderr) > 2_000_000) == (2 not in closed)


def test_output_of_any_shape_arrives(launches: Launches) -> None:
    done = launches.run(
        r"""
        raw = sys.stdout.buffer
        raw.write(b"bar 1\rbar 2\r"); raw.flush()
        raw.write(b"one\r"); raw.flush(); time.sleep(0.3); raw.write(b"\ntwo\n\nlatin \xe9\n")
        raw.write(b"y" * 3_000_000 + b"\nend")
        """,
        n=1,
    )
    lines = done.out.split("\n")
    said = [line.removeprefix("[rank 0] ") for line in lines[:6]]
    assert said == ["bar 1", "bar 2", "one", "two", "", "latin \ufffd"]
    assert sum(line.count("y") for line in lines) == 3_000_000
    assert lines[-2:] == ["[rank 0] end", ""]


#: Starts a process in a session of its own, which names the script; then says where the run meets.
CHILD = """
sleep = "import time; time.sleep(99)"
subprocess.Popen([sys.executable, "-c", sleep, __file__], start_new_session=True)
print(os.environ["SYNCPRIMS_DIR"])
"""
#: The same by a process that has no parent, and none of our variables.
ORPHAN = """
sleep = "import time; time.sleep(99)"
words = [sys.executable, "-c", sleep, __file__]
code = f"import subprocess; subprocess.Popen({words}, start_new_session=True, env={{}})"
subprocess.run([sys.executable, "-c", code])
print(os.environ["SYNCPRIMS_DIR"])
"""


def scratch_of(launcher: subprocess.Popen[str]) -> Path:
    """Return the scratch directory of a launch, whose ranks say where they meet."""
    assert launcher.stdout is not None
    return Path(launcher.stdout.readline().split()[-1]).parents[1]


def await_unread_output(stream: IO[str]) -> None:
    """Wait until a pipe is nearly full; the parts of its memory may be half empty."""

    def unread() -> int:
        return int.from_bytes(fcntl.ioctl(stream, termios.FIONREAD, bytes(4)), sys.byteorder)

    await_condition(lambda: unread() > 32_000, "the output does not come")


@pytest.mark.parametrize("child", [CHILD, ORPHAN], ids=["child", "orphan"])
@pytest.mark.parametrize("ending", ["barrier()", "raise ValueError('no')", "os.kill(0, 9)"])
def test_children_in_own_sessions_end_too(launches: Launches, child: str, ending: str) -> None:
    launches.run(f"{child}init()\nif is_main(): {ending}\nbarrier()\n", n=2)  # it checks


@pytest.mark.parametrize("source", ["while True: time.sleep(9)", "while True: barrier()"])
def test_ranks_and_children_die_with_a_killed_launcher(launches: Launches, source: str) -> None:
    with launches.start(f"{CHILD}{source}\n") as launcher:
        scratch = scratch_of(launcher)
        launcher.kill()
        launcher.wait()
        await_condition(lambda: not find_processes(launches.script), "ranks live on")
        await_condition(lambda: not scratch.exists(), "the scratch directory is left")


def test_a_killed_launcher_leaves_no_process_of_the_groups_of_its_ranks(launches: Launches) -> None:
    """Also without our variables."""
    child = CHILD.replace("start_new_session=True", "env={}")
    with launches.start(f"{child}time.sleep(99)\n") as launcher:
        assert launcher.stdout is not None
        for _ in range(2):
            assert launcher.stdout.readline()
        launcher.kill()
        launcher.wait()
        await_condition(lambda: not find_processes(launches.script), "children live on")


def test_ranks_die_even_if_the_guard_was_killed_too(launches: Launches) -> None:
    source = "print(os.environ['SYNCPRIMS_DIR'])\nbarrier()\nprint('ready')\ntime.sleep(99)\n"
    with launches.start(source) as launcher:
        assert launcher.stdout is not None
        scratch = scratch_of(launcher)
        while launcher.stdout.readline().split()[-1] != "ready":
            pass
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        launcher.kill()
        launcher.wait()
        await_condition(lambda: not find_processes(launches.script), "ranks live on")

    def removed() -> bool:
        """Return whether the directory of dead processes is gone, at the latest after one run."""
        assert launches.run("barrier()").code == 0
        return not scratch.exists()

    # Any launch removes it, also one of another test, and the killed ones may end after the kill.
    await_condition(removed, "later runs leave what is left of dead ones")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=str)
def test_a_launch_inside_a_launch_ends_with_it(launches: Launches, signum: int) -> None:
    inner = launches.script.with_name("inner.py")
    inner.write_text(
        "import time, syncprims\nsyncprims.barrier()\n"
        "open('ready', 'w').close() if syncprims.is_main() else None\ntime.sleep(99)\n"
    )
    source = f"""
    print(os.environ["SYNCPRIMS_DIR"])
    if is_main():
        subprocess.run({command("-n", "2", str(inner))}, start_new_session=True)
    barrier()
    """
    with launches.start(source) as launcher:
        scratch = scratch_of(launcher)
        await_condition(inner.with_name("ready").exists, "the inner ranks have not met")
        launcher.send_signal(signum)
        launcher.wait()
        await_condition(lambda: not find_processes(inner), "the inner ranks live on")
        await_condition(lambda: not scratch.exists(), "a scratch directory is left")


def test_a_directory_of_the_user_is_left_as_it_was(launches: Launches, tmp_path: Path) -> None:
    meet = tmp_path / "meet"
    for source, code in (("barrier()", 0), ("init()\nos.kill(os.getpid(), 9)", 137)):
        assert launches.run(source, SYNCPRIMS_DIR=str(meet)).code == code
        assert not any(meet.iterdir())


def test_a_second_interrupt_ends_the_ranks_at_once(launches: Launches) -> None:
    source = """
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: print("asked"))
    barrier()
    print("ready")
    while True: time.sleep(9)
    """
    with launches.start(source) as launcher:
        assert launcher.stderr is not None
        await_lines(launcher, "ready")
        launcher.send_signal(signal.SIGINT)
        line = launcher.stderr.readline()
        assert line.startswith("syncprims run: SIGINT: the ranks have 30 s to stop")
        await_lines(launcher, "asked")
        time.sleep(0.3)  # what comes sooner is the same request
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(timeout=PATIENCE) == 130


def test_a_second_sigterm_of_a_scheduler_loses_no_save(launches: Launches) -> None:
    """The save takes longer than what the others get after a failure."""
    source = """
    stop = Trigger("stop")
    stop.set_on_signal()
    barrier()
    print("ready")
    while not stop.check(): time.sleep(0.01)
    print("saving")
    time.sleep(6)
    print("saved")
    """
    with launches.start(source, "--grace", "60") as launcher:
        await_lines(launcher, "ready")
        launcher.send_signal(signal.SIGTERM)
        await_lines(launcher, "saving")
        time.sleep(1)  # longer than one request takes, for the launcher and for the ranks
        launcher.send_signal(signal.SIGTERM)
        await_lines(launcher, "saved")
        assert launcher.stderr is not None
        assert "SIGTERM: the ranks have 60 s to stop" in launcher.stderr.read()
        assert launcher.wait(timeout=PATIENCE) == 75


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGUSR1", 0)])
def test_children_of_a_rank_live_as_long_as_it_wants(
    name: str, code: int, launches: Launches
) -> None:
    """A signal to the launcher is for the ranks, which may need them for a last save."""
    source = f"""
    import multiprocessing, subprocess
    stop = Trigger("stop")
    stop.set_on_signal(signal.{name})
    reads = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool, subprocess.Popen(reads, stdin=subprocess.PIPE) as child:
        barrier()
        print("ready")
        while not stop.check(): time.sleep(0.01)
        print("saved", pool.apply(abs, [-3]), child.poll())
        child.stdin.close()
    """
    with launches.start(source) as launcher:
        await_lines(launcher, "ready")
        launcher.send_signal(getattr(signal, name))
        await_lines(launcher, "saved 3 None")
        assert launcher.wait(timeout=PATIENCE) == code


@pytest.mark.parametrize(("then", "code"), [("", 75), ("stop.clear()", 0)])
def test_a_run_that_one_rank_is_asked_to_stop_is_stopped(
    then: str, code: int, launches: Launches
) -> None:
    source = f"""
    stop = Trigger("stop")
    stop.set_on_signal()
    if get_rank() == 1: os.kill(os.getpid(), signal.SIGTERM)
    while not stop.check(): time.sleep(0.01)
    {then}
    """
    assert launches.run(source, n=2).code == code


def test_the_guard_says_what_it_is_and_passes_signals_on(launches: Launches) -> None:
    with launches.start("barrier()\nprint('ready')\ntime.sleep(99)\n") as launcher:
        await_lines(launcher, "ready")
        guard, *_ = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        title, path = f"syncprims run: guard of {launcher.pid}", Path(f"/proc/{guard}/cmdline")
        await_condition(lambda: path.read_text().rstrip("\0") == title, "it has another title")
        os.kill(int(guard), signal.SIGTERM)
        assert launcher.stderr is not None
        assert launcher.stderr.readline() == "syncprims run: SIGTERM: the ranks have 30 s to stop\n"
        assert launcher.wait(timeout=PATIENCE) == 143


def await_pause(launcher: subprocess.Popen[str]) -> None:
    """Wait until a launcher pauses before it restarts its ranks."""
    assert launcher.stderr is not None
    while "restart 3 of 9 in 2 s" not in launcher.stderr.readline():
        pass


@pytest.mark.parametrize(
    ("source", "flags", "comes"),
    [
        ("signal.signal(15, signal.SIG_IGN)\nprint('ready')\ntime.sleep(600)", "--grace 0.5",
         lambda launcher: await_lines(launcher, "ready")),
        ("while True: print('x' * 99)", "",
         lambda launcher: await_unread_output(launcher.stdout)),
        ("sys.exit(3)", "--max-restarts 9", await_pause),
    ],
    ids=["ignored", "while nobody reads", "before a restart"],
)  # fmt: skip
def test_a_sigterm_counts(launches: Launches, source: str, flags: str, comes: Any) -> None:
    with launches.start(source, *flags.split()) as launcher:
        comes(launcher)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=PATIENCE) == 143
        assert launcher.stderr is not None
        left = launcher.stderr.read()
        assert left == "" if comes is await_pause else "restart" not in left


@pytest.mark.soak
def test_output_that_is_read_late_is_whole(launches: Launches) -> None:
    """The ranks end before it is read: the pipes hold it. The launcher and its guard stay."""
    with launches.start("for _ in range(600): print('x' * 99)\n") as launcher:
        assert launcher.stdout is not None
        await_unread_output(launcher.stdout)
        await_condition(lambda: not find_processes(launches.script)[2:], "the ranks do not end")
        time.sleep(7)  # longer than the launcher waits for anything else
        out, _ = launcher.communicate(timeout=PATIENCE)
        assert launcher.returncode == 0
    assert out.count("x" * 99) == 1200


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_some_time_before_the_end_ends_nothing(launches: Launches, signum: int) -> None:
    source = f"""
    stop = Trigger("stop")
    stop.set_on_signal(signal.Signals({int(signum)}))
    barrier()
    print("ready")
    while not stop.check(): time.sleep(0.01)
    print("saved")
    """
    with launches.start(source) as launcher:
        await_lines(launcher, "ready")
        launcher.send_signal(signum)
        await_lines(launcher, "saved")
        assert launcher.wait(timeout=PATIENCE) == 0


@pytest.mark.parametrize(
    ("limit", "most", "says"),
    [("NOFILE", 64, "open files (ulimit -n)"), ("NPROC", 39, "processes of a user (ulimit -u)")],
)
def test_more_ranks_than_the_system_allows_are_refused_at_once(
    launches: Launches, limit: str, most: int, says: str
) -> None:
    if limit == "NPROC" and os.geteuid() == 0:
        pytest.skip("this limit does not hold for root")
    launches.write("open(sys.argv[1], 'w')\n")
    started = launches.script.with_name("started")
    line = [*command("-n", "40", str(launches.script), str(started))]
    limited = f"resource.setrlimit(resource.RLIMIT_{limit}, ({most},) * 2)"
    begin = f"import os, resource, sys; {limited}; os.execv(sys.argv[1], sys.argv[1:])"
    done = call(launches, [sys.executable, "-c", begin, *line])
    assert done.returncode == 2
    assert done.stderr.startswith(b"syncprims run: 40 ranks, and this system has room for ")
    assert says in done.stderr.decode()
    assert not started.exists()


def test_a_signal_counts_while_ranks_are_started(launches: Launches) -> None:
    launches.write("while True: time.sleep(9)\n")
    launcher = subprocess.Popen(
        command("-n", "300", str(launches.script)), env=launches.environ,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with launcher:
        await_condition(lambda: len(find_processes(launches.script)) > 3, "no rank was started")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=PATIENCE) == 143
    assert not find_processes(launches.script)


GENERATIONS = """
generation = os.environ["SYNCPRIMS_RESTART"]
assert os.environ["TORCHELASTIC_RESTART_COUNT"] == generation
assert all_gather(generation) == [generation] * 2
"""


def test_ranks_are_started_again_as_the_next_generation(launches: Launches) -> None:
    done = launches.run(
        f"{CHILD}{GENERATIONS}"
        "if generation < '2' and get_rank() == 1: raise ValueError('generation ' + generation)\n"
        "barrier('end')\n"
        "print('done in', generation)\n",
        "--max-restarts", "3", n=2,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.out.count("done in 2") == 2
    said = [line for line in done.report if line.startswith("syncprims run:")]
    assert said == [
        "syncprims run: rank 1 failed first (exit code 1): ValueError: generation 0",
        "syncprims run: restart 1 of 3",
        "syncprims run: rank 1 failed first (exit code 1): ValueError: generation 1",
        "syncprims run: restart 2 of 3 in 1 s",
    ]


def test_the_last_generation_decides(launches: Launches) -> None:
    done = launches.run(f"{GENERATIONS}sys.exit(5 + int(generation))\n", "--max-restarts", "1", n=2)
    assert done.code == 6
    assert (
        done.report[-1] == "syncprims run: ranks 0-1 failed together (exit code 6): SystemExit: 6"
    )
    assert "syncprims run: restart 1 of 1" in done.report


def test_only_restarts_within_the_window_count(launches: Launches) -> None:
    source = "sys.exit(int(os.environ['SYNCPRIMS_RESTART']) < 2)\n"
    window = ("--max-restarts", "1", "--restart-window")
    done = launches.run(source, *window, "0.001", n=1)
    assert done.code == 0, done.err
    assert done.report.count("syncprims run: restart 1 of 1") == 2  # both at once
    assert launches.run(source, *window, "600", n=1).code == 1


def test_rank_0_reads_from_the_terminal(launches: Launches) -> None:
    launches.write("print('hello', input('name?') if is_main() else '')\nbarrier()\n")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command("-n", "2", str(launches.script)), launches.environ)
    try:
        shown = ""
        while "name?" not in shown:
            shown += os.read(terminal, 4096).decode()
        os.write(terminal, b"Ada\n")
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(terminal, 4096):
                shown += part.decode()
    finally:
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
    assert status == 0, shown
    assert "hello Ada" in shown


def test_the_output_of_each_rank_is_in_a_file_too(launches: Launches, tmp_path: Path) -> None:
    """What a run adds stands below that of the run before; a restart goes on in the same file."""
    source = """
        print("out of", get_rank())
        if get_rank() == 1:
            print("to stderr", file=sys.stderr)
            raise SystemExit(3)
        """
    logs = tmp_path / "a" / "logs"
    done = launches.run(source, "--log-dir", str(logs), "--max-restarts", "1", n=2)
    assert done.code == 3
    assert done.report[-1] == f"  all that the ranks have printed is in {logs}/rank-N.log"
    assert "[rank 0] out of 0" in done.out
    assert (logs / "rank-0.log").read_text() == "out of 0\n" * 2
    once = ["out of 1", "to stderr"]
    assert sorted((logs / "rank-1.log").read_text().splitlines()) == sorted(2 * once)
    (tmp_path / "file").touch()
    refused = launches.run(source, "--log-dir", str(tmp_path / "file"), n=2)
    assert "name a directory in which this user may write" in refused.err
    assert refused.out == ""
