"""Commands in a shell: files, nodes, pipes and interrupts."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.rank_environment import PATIENCE, clean_environ, free_port, run_python
from support.rank_worlds import CLOSING

from syncprims.cli import COMMANDS, main, parser

TELL = """
import os, sys
names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SYNCPRIMS_MIXED_PRECISION")
print(sys.argv[1:], *[os.environ.get(name) for name in names])
"""


@pytest.fixture
def clean() -> dict[str, str]:
    return clean_environ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def call(
    *words: str, env: dict[str, str], cwd: Path, **more: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "syncprims", *words], env=env, cwd=cwd, capture_output=True,
        text=True, check=False, **more,
    )  # fmt: skip


def test_a_run_that_was_written_down_starts(tmp_path: Path, clean: dict[str, str]) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    (tmp_path / "run.toml").write_text(
        'ranks = 2\nmixed_precision = "bf16"\nthreads = 3\ncpu = true\n'
        'script = "tell.py"\nargs = ["--lr", "0.1"]\n'
    )
    done = call("run", "--config", "run.toml", env=clean, cwd=tmp_path)
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {r}] ['--lr', '0.1'] 3  bf16" for r in range(2)
    ]
    more = ("--threads", "1", "tell.py", "-n", "7")
    done = call("run", "--config", "run.toml", *more, env=clean, cwd=tmp_path)
    assert sorted(done.stdout.splitlines()) == [f"[rank {r}] ['-n', '7'] 1  bf16" for r in range(2)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["gone.py"], "there is no file gone.py in "),
        (["python", "tell.py"], "python is no script: name the script without Python"),
        ([sys.executable, "tell.py"], " is no script: name the script without Python"),
        (["pytest"], "is it a module, -m pytest?"),
        (["/dev/stdin"], "/dev/stdin is the standard input"),
        (["-m", "gone.part"], "there is no module 'gone.part' here, nor in "),
    ],
)
def test_bad_scripts(tmp_path: Path, clean: dict[str, str], line: list[str], words: str) -> None:
    done = call("run", "-n", "3", *line, env=clean, cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert done.stderr.count(words) == 1
    assert done.stderr.count("\n") == 1


def test_a_misspelt_command_is_told_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["rnu", "-n", "2", "train.py"])
    # Since 3.15, Python itself says so.
    assert re.search("did you mean run|maybe you meant 'run'", capsys.readouterr().err)


def test_it_becomes_torchrun_with_what_it_was_told(tmp_path: Path, clean: dict[str, str]) -> None:
    """By a stand-in that tells how it was started."""
    (tmp_path / "train.py").touch()
    stand_in = tmp_path / "site" / "torch" / "distributed"
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").touch()
    (stand_in.parent / "__init__.py").touch()
    (stand_in / "run.py").write_text(
        TELL + "print(os.environ['SYNCPRIMS_BACKEND'], 'RANK' in os.environ, os.getpid())\n"
        "sys.exit(7)\n"
    )
    started = subprocess.Popen(
        [sys.executable, "-m", "syncprims", "run", "-n", "4", "--nodes", "2", "--node-rank", "1",
         "--rendezvous", "node0:1", "--gpus", "0,1,2,3", "-m", "train", "-x"],
        env={**clean, "PYTHONPATH": str(tmp_path / "site"), "RANK": "0", "WORLD_SIZE": "1"},
        cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, _ = started.communicate(timeout=PATIENCE)
    told, also = out.splitlines()
    assert told.startswith(
        "['--nnodes', '2', '--nproc-per-node', '4', '--node-rank', '1', '--master-addr', 'node0', "
        "'--master-port', '1', '-m', 'train', '-x'] "
    )
    assert told.endswith(" 0,1,2,3 None")
    assert also == f"nccl False {started.pid}"  # the same process: signals reach it
    assert started.returncode == 7


def test_two_nodes_meet(tmp_path: Path, clean: dict[str, str]) -> None:
    pytest.importorskip("torch")
    (tmp_path / "job.py").write_text(
        "import syncprims as sp\n"
        "print(sp.all_gather([sp.get_rank(), sp.get_node_rank()]), sp.current().backend_name)\n"
    )
    where = f"127.0.0.1:{free_port()}"
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "syncprims", "run", "-n", "1", "--nodes", "2",
             "--node-rank", str(node), "--rendezvous", where, "job.py"],
            env={**clean, "SYNCPRIMS_DIR": str(tmp_path / f"meet-{node}")}, cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    try:
        for node in nodes:
            out, err = node.communicate(timeout=PATIENCE)
            assert node.returncode == 0, err
            assert out == "[[0, 0], [1, 1]] torch\n"
    finally:
        for node in nodes:
            if node.poll() is None:
                node.terminate()  # torchrun ends its ranks
                node.communicate()


NAMES = [module.__name__.rpartition(".")[2] for module in COMMANDS]


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in NAMES:
        with pytest.raises(SystemExit) as caught:
            parser().parse_args([name, "--help"])
        assert caught.value.code == 0
        said = capsys.readouterr().out
        assert said.startswith(f"usage: syncprims {name}")
        assert "exit code" in said


def test_devices_that_are_not_there_are_told(tmp_path: Path, clean: dict[str, str]) -> None:
    if pytest.importorskip("torch").cuda.is_available():
        pytest.skip("there are devices here")
    (tmp_path / "job.py").write_text("import syncprims\nsyncprims.barrier()\n")
    done = call("run", "--gpus", "0", "job.py", env=clean, cwd=tmp_path)
    assert done.returncode == 1
    assert "backend 'nccl' needs a CUDA device, and rank 0 has none" in done.stderr


#: Lets the system refuse the calls with these numbers, by a filter of seccomp(2).
SECCOMP = """
import ctypes, struct
code = [(32, 0, 0, 0)]  # loads the number of a call
for number in {numbers}: code += [(21, 0, 1, number), (6, 0, 0, 0x50001)]  # compare; EPERM
code = b"".join(struct.pack("HBBI", *one) for one in [*code, (6, 0, 0, 0x7FFF0000)])  # allow
buffer = ctypes.create_string_buffer(code)
libc = ctypes.CDLL(None)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(
    22, 2, struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer)), 0, 0
):
    sys.exit("no seccomp")
"""
PIPES = {"x86_64": (22, 293), "aarch64": (59,)}


@pytest.mark.parametrize(
    ("before", "code", "told"),
    [
        (
            "sys.executable = '/nowhere/python'",
            2,
            r"No such file.*: '/nowhere/python'; see that it",
        ),
        ("os.chmod('job.py', 0); os.getuid() or os.setuid(65534)", 2, "denied: 'job.py'; let user"),
        ("resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))", 2, r"tried .*too large.*ulimit -f"),
        ("resource.setrlimit(resource.RLIMIT_FSIZE, (999, 999))", 1, r"File too large.*ulimit -f"),
        (
            SECCOMP,
            2,
            r"Operation not permitted: `reader, writer = os.pipe\(\)` in .*launcher.py:\d+; ",
        ),
    ],
    ids=["interpreter", "script", "no files", "small files", "seccomp"],
)
def test_a_start_that_the_system_refuses_says_what_was_tried(
    before: str, code: int, told: str, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text("import syncprims\nsyncprims.barrier()\n")
    if before == SECCOMP:
        if sys.platform != "linux" or platform.machine() not in PIPES:
            pytest.skip("has the numbers of system calls on Linux only")
        before = SECCOMP.replace("{numbers}", str(PIPES[platform.machine()]))
    # What another user could not load is loaded before.
    program = "import os, resource, sys, syncprims.backends.file.backend\n"
    program += f"from syncprims.cli import main, parser\nparser()\n{before}\n"
    program += "sys.exit(main(['run', '-n1', 'job.py']))"
    done = run_python("-c", program, cwd=tmp_path)
    if "no seccomp" in done.stderr:
        pytest.skip("this system has no seccomp")
    assert done.returncode == code, done.stderr
    assert re.search(f"syncprims.*{told}", done.stderr), done.stderr
    assert code == 1 or "Traceback" not in done.stderr


def test_a_frozen_program_says_what_its_builder_lacks(tmp_path: Path) -> None:
    lacking = "sys.frozen, sys.modules['syncprims.backends.file.backend'] = True, None"
    done = run_python(
        "-c", f"import sys, syncprims\n{lacking}\nsyncprims.init('file')", cwd=tmp_path
    )
    assert "pyinstaller --collect-submodules syncprims --copy-metadata syncprims" in done.stderr
    assert "pip install" not in done.stderr


def test_an_unwritable_output_is_no_traceback(tmp_path: Path, clean: dict[str, str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed, Path("/dev/full").open("w") as full:
        for output, ended in (
            (closed, (141, "")),
            (full, (1, "syncprims: [Errno 28] No space left on device\n")),
        ):
            done = subprocess.run(
                [sys.executable, "-m", "syncprims", "env"], env=clean, cwd=tmp_path, stdout=output,
                stderr=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
            assert (done.returncode, done.stderr) == ended


@pytest.mark.parametrize(
    ("words", "closed", "code", "told"),
    [
        (["env"], [1], 0, ""),
        (["--version"], [1], 0, ""),
        (["env", "--json"], [0, 1, 2], 0, ""),
        (["run", "--config", "x.ini"], [0], 2, "*.yaml, *.toml"),
        (["trace", "nowhere"], [2], 2, ""),
    ],
    ids=str,
)
def test_closed_streams_are_no_traceback(
    words: list[str], closed: list[int], code: int, told: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "syncprims", *words]
    done = run_python("-c", CLOSING, closed, *command, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert "Traceback" not in done.stderr
    assert told in done.stderr


def test_what_an_output_cannot_spell_is_escaped(tmp_path: Path, clean: dict[str, str]) -> None:
    place = {"SYNCPRIMS_RUN_ID": "jos\u00e9", "PYTHONIOENCODING": "ascii"}
    done = call("env", env={**clean, **place}, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "SYNCPRIMS_RUN_ID" in done.stdout
    assert r"jos\xe9" in done.stdout


def test_an_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(environ: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("syncprims.cli.env.preview", interrupt)
    assert main(["env"]) == 130
    assert capsys.readouterr().err == "syncprims: interrupted\n"
