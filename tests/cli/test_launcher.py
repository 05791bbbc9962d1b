"""`syncprims run`: starts ranks without torch, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from support.rank_environment import clean_environ
from support.rank_worlds import CLOSING, CROWDED, skip_unless_crowded


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def clean() -> dict[str, str]:
    return clean_environ()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "job.py"


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "syncprims", "run", *words]


def run(script: Path, source: str, *words: str, env: dict[str, str], n: int = 3) -> Done:
    script.write_text(
        "import os, signal, sys, time\nfrom syncprims import *\n" + textwrap.dedent(source)
    )
    done = subprocess.run(
        command("-n", str(n), str(script), *words),
        env=env,
        cwd=script.parent,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
        check=False,
    )
    assert not left_over(script), "a rank outlived its launcher"
    return Done(done.returncode, done.stdout, done.stderr)


def left_over(script: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(script) in text:
            found.append(text)
    return found


def test_ranks_meet_and_their_lines_are_prefixed(script: Path, clean: dict[str, str]) -> None:
    done = run(
        script,
        """
        assert all_gather(get_rank()) == [0, 1, 2]
        print("hello from", current().backend_name, sys.argv[1:])
        print("to stderr", file=sys.stderr, end="")
        """,
        "--backend", "-n", "5", env=clean,
    )  # fmt: skip
    said = "hello from file ['--backend', '-n', '5']"
    assert done.code == 0
    assert sorted(done.out.splitlines()) == [f"[rank {r}] {said}" for r in range(3)]
    assert sorted(done.err.splitlines()) == [f"[rank {r}] to stderr" for r in range(3)]


def test_descriptors_may_have_any_number(script: Path, clean: dict[str, str]) -> None:
    skip_unless_crowded()
    script.write_text("import os; print('hello from', os.environ['RANK'])\n")
    words = ["run", "-n", "2", str(script)]
    source = f"{CROWDED}from syncprims.cli import main\nsys.exit(main({words!r}))\n"
    done = subprocess.run(
        [sys.executable, "-c", source], env=clean, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {r}] hello from {r}" for r in range(2)]


def test_variables_are_set_in_both_dialects(script: Path, clean: dict[str, str]) -> None:
    done = run(
        script,
        """
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            assert os.environ[name] == os.environ["SYNCPRIMS_" + name], name
        assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"]) > 0
        assert "SLURM_PROCID" not in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
        barrier()
        """,
        env={**clean, "SLURM_PROCID": "7", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0",
             "TORCHELASTIC_RUN_ID": "outer", "RANK": "1", "WORLD_SIZE": "2"},
    )  # fmt: skip
    assert done.code == 0, done.err


def test_modules_backends_and_help(tmp_path: Path, clean: dict[str, str]) -> None:
    (tmp_path / "job.py").write_text(
        "import sys, syncprims\n"
        "if __name__ == '__main__': print(syncprims.current().backend_name, sys.argv[1:])\n"
    )

    def go(*words: str, **more: str) -> Done:
        done = subprocess.run(
            command(*words), env={**clean, **more}, cwd=tmp_path, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        return Done(done.returncode, done.stdout, done.stderr)

    assert go("-n", "1", "-m", "job", "-m", "x").out == "[rank 0] file ['-m', 'x']\n"
    assert go("-n", "1", "--backend", "single", "job.py").out == "[rank 0] single []\n"
    assert go("-n", "1", "job.py", SYNCPRIMS_BACKEND="single").out == "[rank 0] single []\n"
    contradiction = go("-n", "1", "--backend", "file", "job.py", SYNCPRIMS_BACKEND="single")
    assert contradiction.code == 2
    assert "--backend file contradicts SYNCPRIMS_BACKEND=single" in contradiction.err
    assert go("-n", "0", "job.py").code == 2
    assert "number of ranks" in go("-n", "none", "job.py").err
    assert "Everything after the script belongs to the script" in go("--help").out


def test_the_root_cause_is_shown_last_and_its_code_returned(
    script: Path, clean: dict[str, str]
) -> None:
    done = run(
        script,
        """
        init()
        if get_rank() == 1:
            raise ValueError("bad shard")
        barrier("load")
        """,
        env=clean,
    )
    assert done.code == 1
    report = done.err[done.err.index("syncprims run:") :].splitlines()
    assert report[0] == "syncprims run: rank 1 failed first (exit code 1): ValueError: bad shard"
    assert any("raise ValueError" in line for line in report)
    assert "\nranks 0, 2: PeerFailed because of rank 1\n" in done.err
    assert "[rank 0]" in done.err
    assert "PeerFailed: rank 1 failed" in done.err


@pytest.mark.parametrize(
    ("ending", "code", "how"),
    [
        ("sys.exit(7)", 7, "exit code 7"),
        ("raise SystemExit('no config')", 1, "no config"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
        ("os._exit(9)", 9, "exit code 9"),
    ],
)
def test_every_ending_has_its_code(
    script: Path, clean: dict[str, str], ending: str, code: int, how: str
) -> None:
    source = f"init()\nif get_rank() == 2:\n    {ending}\nbarrier()\n"
    done = run(script, source, env=clean)
    assert done.code == code
    report = done.err[done.err.index("syncprims run:") :]
    assert report.startswith("syncprims run: rank 2 failed first (")
    assert how in report.split("then rank")[0]


def test_a_rank_that_fails_before_it_joins_ends_the_others(
    script: Path, clean: dict[str, str]
) -> None:
    begin = time.monotonic()
    done = run(script, "if get_rank() == 1:\n    import no_such_module\nbarrier()\n", env=clean)
    assert time.monotonic() - begin < 30
    assert done.code == 1
    report = done.err[done.err.index("syncprims run:") :]
    assert "rank 1 failed first" in report
    assert "No module named 'no_such_module'" in report
    assert "\nranks 0, 2: PeerLost because of rank 1\n" in done.err


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_reach_the_ranks_and_leave_no_process(
    script: Path, clean: dict[str, str], signum: int, code: int
) -> None:
    script.write_text(
        "import subprocess, sys, time, syncprims\n"
        "syncprims.init()\n"
        "sleep = 'import time; time.sleep(99)'\n"
        "child = subprocess.Popen([sys.executable, '-c', sleep, __file__])\n"
        "print('ready')\n"
        "syncprims.barrier() if syncprims.is_main() else time.sleep(99)\n"
    )
    launcher = subprocess.Popen(
        command("-n", "3", str(script)), env=clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert launcher.stdout is not None
    assert sorted(launcher.stdout.readline() for _ in range(3)) == [
        f"[rank {r}] ready\n" for r in range(3)
    ]
    launcher.send_signal(signum)
    launcher.communicate(timeout=30)
    assert launcher.returncode == code
    assert not left_over(script)


def test_nothing_is_left_even_of_a_run_that_was_killed(script: Path, clean: dict[str, str]) -> None:
    source = """
    import pathlib
    init()
    pathlib.Path(__file__).with_name("where").write_text(os.environ["SYNCPRIMS_DIR"])
    barrier()
    os.kill(os.getpid(), 9)
    """
    assert run(script, source, env=clean).code == 137
    assert not Path(script.with_name("where").read_text()).parent.exists()


def test_ranks_of_torchrun_meet_by_file(script: Path, clean: dict[str, str]) -> None:
    pytest.importorskip("torch")
    script.write_text("import syncprims, sys\nprint(syncprims.all_gather(syncprims.get_rank()))\n")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(script)],
        env={**clean, "SYNCPRIMS_BACKEND": "file", "SYNCPRIMS_DIR": str(script.parent / "meet"),
             "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[0, 1]") == 2
    assert not any((script.parent / "meet").iterdir())


def test_the_reason_of_an_earlier_world_is_not_shown(script: Path, clean: dict[str, str]) -> None:
    done = run(
        script,
        """
        try:
            with init():
                if get_rank() == 0:
                    raise ValueError("handled")
                barrier()
        except (ValueError, PeerFailed):
            pass
        with init():
            barrier()
        init()
        if get_rank() == 1:
            raise RuntimeError("the real cause")
        barrier()
        """,
        env=clean,
    )
    report = done.err[done.err.index("syncprims run:") :]
    assert report.startswith("syncprims run: rank 1 failed first (exit code 1): RuntimeError: the")
    assert "handled" not in report


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_full_disk_behind_the_launcher_stops_nobody_and_is_told(
    stream: str, script: Path, clean: dict[str, str]
) -> None:
    script.write_text(
        f"import sys\nprint('x' * 1_000_000, file=sys.{stream})\n"
        "open(sys.argv[1], 'a').write('.')\n"
    )
    done = script.with_name("done")
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            command("-n", "2", str(script), str(done)), env=clean, timeout=60, check=False,
            stdout=full if stream == "stdout" else subprocess.PIPE,
            stderr=full if stream == "stderr" else subprocess.PIPE,
        )  # fmt: skip
    assert (ended.returncode, done.read_text()) == (1, "..")
    if stream == "stdout":
        told = "all ranks succeeded, but their output is lost: No space left on device"
        assert ended.stderr.decode() == f"syncprims: [Errno 28] {told}\n"


def test_a_pipe_that_nobody_reads_stops_nobody(script: Path, clean: dict[str, str]) -> None:
    script.write_text("import sys\nprint('x')\nopen(sys.argv[1], 'a').write('.')\n")
    done = script.with_name("done")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            command("-n", "2", str(script), str(done)), env=clean, timeout=60, check=False,
            stdout=writer, stderr=subprocess.PIPE,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr, done.read_text()) == (141, b"", "..")


@pytest.mark.parametrize("closed", [[1], [2], [0, 1, 2]], ids=str)
def test_closed_streams_stop_nobody(closed: list[int], script: Path, clean: dict[str, str]) -> None:
    script.write_text(
        "import sys, syncprims\n"
        "for stream in (sys.stdout, sys.stderr):\n"
        "    print('x' * 1_000_000, file=stream, flush=True)\n"  # more than a pipe holds
        "syncprims.barrier()\n"
    )
    words = [sys.executable, "-c", CLOSING, str(closed), *command("-n", "2", str(script))]
    done = subprocess.run(words, env=clean, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (len(done.stdout) > 2_000_000) == (1 not in closed)
    assert (len(done.stderr) > 2_000_000) == (2 not in closed)


def test_output_of_any_shape_arrives(script: Path, clean: dict[str, str]) -> None:
    done = run(
        script,
        r"""
        raw = sys.stdout.buffer
        raw.write(b"bar 1\rbar 2\r"); raw.flush()
        raw.write(b"one\r"); raw.flush(); time.sleep(0.3); raw.write(b"\ntwo\n\nlatin \xe9\n")
        raw.write(b"y" * 3_000_000 + b"\nend")
        """,
        env=clean,
        n=1,
    )
    lines = done.out.split("\n")
    said = [line.removeprefix("[rank 0] ") for line in lines[:6]]
    assert said == ["bar 1", "bar 2", "one", "two", "", "latin \ufffd"]
    assert sum(line.count("y") for line in lines) == 3_000_000
    assert lines[-2:] == ["[rank 0] end", ""]


def test_a_grandchild_that_keeps_the_pipe_delays_little(
    script: Path, clean: dict[str, str]
) -> None:
    begin = time.monotonic()
    done = run(
        script,
        """
        import subprocess
        subprocess.Popen(["sleep", "20"], start_new_session=True) if get_rank() == 0 else None
        """,
        env=clean,
    )
    assert done.code == 0
    assert time.monotonic() - begin < 18


def test_a_graceful_stop_may_take_longer_than_a_failure(
    script: Path, clean: dict[str, str]
) -> None:
    script.write_text(
        "import time, syncprims\n"
        "stop = syncprims.Trigger()\n"
        "stop.set_on_signal()\n"
        "print('ready')\n"
        "while not stop.check(): time.sleep(0.01)\n"
        "time.sleep(6)\n"  # longer than what the others get after a failure
        "print('saved')\n"
    )
    launcher = subprocess.Popen(
        command("-n", "2", str(script)), env=clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert launcher.stdout is not None
    for _ in range(2):  # both ranks have their handlers
        assert launcher.stdout.readline().endswith("ready\n")
    launcher.send_signal(signal.SIGTERM)
    out, _ = launcher.communicate(timeout=40)
    assert out.count("saved") == 2
    assert launcher.returncode == 143


def test_an_unknown_backend_is_told_once(script: Path, clean: dict[str, str]) -> None:
    done = run(script, "barrier()", env={**clean, "SYNCPRIMS_BACKEND": "flie"})
    assert done.code == 2
    assert done.err.count("no backend named 'flie'") == 1
