"""What `syncprims run` shows of its ranks: order, prompts, states of bars, and failures."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
from pathlib import Path
from typing import IO

import pytest
from support.launches import Launches, command

from syncprims.cli.output import Output, Source


@pytest.fixture
def launches(tmp_path: Path) -> Launches:
    return Launches(tmp_path / "job.py")


class Screen:
    """An output stream of the launcher, and the pipes of ranks that are passed on to it."""

    def __init__(self, folder: Path, *, terminal: bool = False) -> None:
        self._folder = folder
        self._master, slave = pty.openpty() if terminal else (-1, -1)
        self._file = os.fdopen(slave, "w") if terminal else (folder / "shown").open("w")
        self._output = Output(self._file, self._file)
        self._pipes: list[IO[bytes]] = []
        self._sources: list[Source] = []

    def pipe(self, rank: int, *, errors: bool = False) -> IO[bytes]:
        """Return the writing end of a stream of `rank`."""
        reader, writer = os.pipe()
        source = Source(rank, os.fdopen(reader, "rb", 0), "stderr" if errors else "stdout")
        self._sources.append(source)
        self._pipes.append(os.fdopen(writer, "wb", 0))
        return self._pipes[-1]

    def start(self) -> None:
        self._output.forward(self._sources)

    def read(self, until: str) -> str:
        """Return what is shown, once `until` is."""
        text = ""
        while until not in text:
            if self._master >= 0:
                text += os.read(self._master, 65536).decode()
            else:
                text = (self._folder / "shown").read_text()
        return text

    def end(self) -> str:
        """Return all that was shown (in a file), once all pipes are closed."""
        for pipe in self._pipes:
            pipe.close()
        self._output.finish()
        self._file.close()
        if self._master >= 0:
            os.close(self._master)
            return ""
        return (self._folder / "shown").read_text()


def test_what_one_rank_wrote_because_of_another_comes_after_it(tmp_path: Path) -> None:
    """The pipes are full when they are read first, as on a machine that is busy."""
    screen = Screen(tmp_path)
    pipes = [screen.pipe(rank) for rank in range(8)]
    for pipe in pipes:
        pipe.write(b"one\n")
    screen.start()
    shown = screen.end()
    assert shown == "".join(f"[rank {rank}] one\n" for rank in range(8))


def test_lines_come_in_the_order_of_the_ranks_turns(launches: Launches) -> None:
    done = launches.run("for step in range(30):\n    with in_turn(): print(step)\n", n=4)
    assert done.code == 0, done.err
    shown = done.out.splitlines()
    assert sorted(shown) == sorted(f"[rank {r}] {s}" for s in range(30) for r in range(4))
    for step in range(30):
        ranks = [line for line in shown if line.endswith(f"] {step}")]
        assert ranks == [f"[rank {rank}] {step}" for rank in range(4)], step


def test_a_line_that_begins_with_its_rank_has_no_second_prefix(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    screen.pipe(3).write(b"[rank 3] as of get_logger\n[rank 1] of another\n")
    screen.start()
    assert screen.end() == "[rank 3] as of get_logger\n[rank 3] [rank 1] of another\n"


def test_a_line_is_shown_before_the_next_one_comes(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    out, err = screen.pipe(1), screen.pipe(1, errors=True)
    screen.start()
    for number in range(5):
        out.write(b"out %d\n" % number)
        screen.read(f"out {number}\n")
        err.write(b"err %d\n" % number)
        screen.read(f"err {number}\n")
    lines = [f"[rank 1] {what} {number}\n" for number in range(5) for what in ("out", "err")]
    assert screen.end() == "".join(lines)


def test_a_stream_that_is_non_blocking_gets_all_output(launches: Launches) -> None:
    launches.write("print('x' * 200_000)\n")
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with subprocess.Popen(
        command("-n", "2", str(launches.script)), env=launches.environ, stdout=writer
    ) as launcher:
        os.close(writer)
        with os.fdopen(reader, "rb") as shown:
            assert shown.read().count(b"x") == 400_000
    assert launcher.returncode == 0


def test_a_prompt_of_rank_0_is_shown(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    first, second = screen.pipe(0), screen.pipe(1)
    screen.start()
    first.write(b"name? ")
    screen.read("[rank 0] name? ")
    first.write(b"hello ")
    screen.read("name? hello ")
    first.write(b"you\n")
    screen.read("you\n")
    first.write(b"more? ")
    screen.read("more? ")
    second.write(b"other\n")
    screen.read("other\n")
    first.write(b"yes\n")
    first.write(b"end")
    screen.read("end")
    second.write(b"last\n")
    screen.read("last\n")
    assert screen.end() == (
        "[rank 0] name? hello you\n[rank 0] more? \n[rank 1] other\n[rank 0] yes\n"
        "[rank 0] end\n[rank 1] last\n"
    )


def test_some_states_of_a_progress_bar_are_lines(tmp_path: Path) -> None:
    screen = Screen(tmp_path, terminal=True)
    first, second = screen.pipe(0, errors=True), screen.pipe(1)
    first.write(b"\r  0%\r 10%\r 20%\r 30%")
    screen.start()
    shown = screen.read(" 30%")  # what it shows now is not over
    second.write(b"a line\r")
    second.write(b"\n")
    shown += screen.read("a line\r\n")
    first.write(b"\r100%\n")
    shown += screen.read("100%\r\n")
    assert shown == ("[rank 0]  20%\r\n[rank 0]  30%\r\n[rank 1] a line\r\n[rank 0] 100%\r\n")
    screen.end()


def test_the_cause_comes_last(launches: Launches) -> None:
    done = launches.run("init()\nif get_rank() == 5: raise ValueError('bad')\nbarrier()\n", n=8)
    lines = done.err.splitlines()
    assert lines[-1] == "  | ValueError: bad"
    assert "ranks 0-4, 6-7: PeerFailed because of rank 5" in lines
    assert sum("Traceback" in line for line in lines if line.startswith("  | ")) == 1


def test_no_rank_is_first_in_a_mismatch(launches: Launches) -> None:
    done = launches.run("barrier('a' if is_main() else 'b')\n", n=3)
    assert done.code == 1
    assert "first" not in done.err
    report = done.report
    assert report[0].startswith(
        "syncprims run: ranks 0-2 failed together (exit code 1): Collective"
    )
    assert [line for line in report if "| " in line][1:4] == report[2:5]
    assert report[1].startswith("  |   rank 0: barrier 'a' (job.py:3)")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("barrier()\nraise ValueError('all of us')", "0-3 failed together (exit code 1): ValueErr"),
        ("assert_same(get_rank(), 'seed')", "0-3 failed together (exit code 1): RankMismatch"),
        ("barrier()\nis_main() and barrier()\nsys.exit(4)", "1-3 failed together (exit"),
    ],
)
def test_ranks_with_one_error_share_a_line(launches: Launches, source: str, said: str) -> None:
    done = launches.run(f"{source}\n", n=4)
    assert done.code in (1, 4)
    assert sum(line.startswith(f"syncprims run: ranks {said}") for line in done.report) == 1
    assert "failed, too" not in done.err
    assert sum(line.startswith("  | Traceback (most") for line in done.report) <= 1


@pytest.mark.parametrize(
    "cleanup", ["finally: barrier('cleanup')", "except ValueError: barrier('emergency'); raise"]
)
def test_the_cause_is_known_if_the_cleanup_makes_a_call(launches: Launches, cleanup: str) -> None:
    source = """
    init()
    try:
        if get_rank() == 1: raise ValueError("bad shard 7")
        barrier("epoch")
    {}
    """
    done = launches.run(source.format(cleanup), n=3)
    others, *said = done.report
    assert others == "ranks 0, 2: CollectiveMismatch because of rank 1"
    assert said[0].startswith("syncprims run: rank 1 failed first (exit code 1): CollectiveMismat")
    assert said[0].endswith(", while it handled ValueError: bad shard 7")
    assert "  | ValueError: bad shard 7" in said


def test_what_a_rank_handles_is_no_cause_beside_one(launches: Launches) -> None:
    source = """
    init()
    if get_rank() == 1: raise ValueError("bad shard 7")
    try: {}["cache"]
    except KeyError: barrier()
    """
    assert "rank 1 failed first (exit code 1): ValueError: bad shard 7" in launches.run(source).err


@pytest.mark.parametrize("alone", [False, True])
def test_a_rank_that_gloo_has_lost_is_the_cause(alone: bool, launches: Launches) -> None:
    source = """
import torch.distributed as dist
dist.init_process_group("gloo")
try:
    if dist.get_rank() == 2: raise ValueError("bad shard 7")
    dist.barrier()
finally:
    dist.destroy_process_group()
"""
    if alone:  # without this library
        source = f"os.execv(sys.executable, [sys.executable, '-c', {source!r}])"
    *others, first = [line for line in launches.run(source, n=3).report if "  | " not in line]
    kind = "failed" if alone else "RuntimeError"
    assert others == [f"ranks 0-1: {kind} because of rank 2"]
    assert first == "syncprims run: rank 2 failed first (exit code 1): ValueError: bad shard 7"


@pytest.mark.parametrize("recorded", [False, True])
def test_a_cause_is_told_after_shutdown_and_to_torchrun(
    launches: Launches, tmp_path: Path, recorded: bool
) -> None:
    source = """
    os.environ["TORCHELASTIC_ERROR_FILE"] = sys.argv[1] + os.environ["RANK"]
    init()
    try:
        if not is_main(): raise ValueError("bad shard 7")
        barrier("epoch")
    finally:
        shutdown()
    """
    files = [tmp_path / f"error-{rank}" for rank in range(2)]
    if recorded:
        files[1].write_text("the program's own")
    done = launches.run(source, args=[str(tmp_path / "error-")], n=2)
    assert "SystemExit" not in done.err
    assert "[rank 0] syncprims.PeerFailed: rank 1 failed, while others wait in" in done.err
    victim = json.loads(files[0].read_text())["message"]
    assert "bad shard 7" in victim["message"]
    if recorded:
        assert files[1].read_text() == "the program's own"
        return
    cause = json.loads(files[1].read_text())["message"]
    assert cause["message"] == "ValueError: bad shard 7"
    assert 'raise ValueError("bad shard 7")' in cause["extraInfo"]["py_callstack"]
    assert int(cause["extraInfo"]["timestamp"]) < int(victim["extraInfo"]["timestamp"])


def test_lines_as_json_have_rank_host_restart_and_stream(launches: Launches) -> None:
    source = """
    print("out\\xe9")
    if int(os.environ["SYNCPRIMS_RESTART"]) == 0:
        raise SystemExit("no config")
    """
    done = launches.run(source, "--json", "--max-restarts", "1", n=2)
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in (done.out + done.err).splitlines()]
    assert all(
        line.keys() == {"time", "rank", "host", "restart", "stream", "line"} for line in lines
    )
    assert {line["host"] for line in lines} == {socket.gethostname()}
    said = sorted((line["rank"], line["restart"]) for line in lines if line["stream"] == "stdout")
    assert said == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {line["line"] for line in lines if line["stream"] == "stdout"} == {"out\xe9"}
    own = [line["line"] for line in lines if line["rank"] is None]
    assert "syncprims run: restart 1 of 1" in own


def test_an_interrupt_shows_the_users_lines_only(launches: Launches) -> None:
    source = "init()\nif is_main(): os.kill(os.getpid(), signal.SIGINT)\nbarrier('end')\n"
    done = launches.run(source, n=2)
    assert done.code == 130 or done.code == 1
    text = "\n".join(line for line in done.err.splitlines() if line.startswith("[rank 0]"))
    assert "KeyboardInterrupt" in text
    assert f"{os.sep}syncprims{os.sep}_" not in text


@pytest.mark.parametrize("ended", ["try: {}\nfinally: shutdown()\n", "with init(): {}\n"])
def test_the_cause_is_known_of_a_world_that_has_ended(launches: Launches, ended: str) -> None:
    done = launches.run(ended.format("barrier('a' if is_main() else 'b')"), n=2)
    said = [line for line in done.report if line.startswith("syncprims run: ")]
    assert [line.partition(" (")[0] for line in said] == [
        "syncprims run: ranks 0-1 failed together"
    ]
