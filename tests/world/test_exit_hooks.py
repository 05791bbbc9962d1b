"""How a rank ends, and what the others raise: separate Python processes without `try`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from support.rank_environment import run_python
from support.rank_worlds import PATIENCE, Kind, Ranks, Scripts

import syncprims as sp

WAIT = """
try:
    barrier("load")
except SyncError as error:
    print(type(error).__name__, error.rank, error.missing)
    print(error)
"""


def others(scripts: Scripts, ending: str) -> list[str]:
    """Make rank 1 end in some way while the others wait; return what these say."""
    source = "init()\nif rank == 1:\n" + ending + WAIT
    ended = scripts.run(source)
    assert not any(scripts.directory.iterdir())  # the last one out clears it
    assert "PeerFailed" not in ended[1].err  # the rank has its own traceback only
    for rank in (0, 2):
        assert ended[rank].code == 0, ended[rank].err
    assert ended[0].out.split("\n")[0] == ended[2].out.split("\n")[0]
    return [ended[0].out, ended[2].out]


#: How rank 1 ends, the error of the others, and what it says.
ENDINGS = {
    "an exception": (
        "raise ValueError('bad shard')",
        "PeerFailed",
        ["ValueError: bad shard", "raise ValueError('bad shard')", "in barrier 'load' (script.py:"],
    ),
    "another excepthook": (
        "sys.excepthook = lambda *what: print('its own report')\n    raise ValueError('bad shard')",
        "PeerFailed",
        ["ValueError: bad shard", "raise ValueError('bad shard')"],
    ),
    "an exit code": ("sys.exit(3)", "PeerFailed", ["SystemExit: 3"]),
    "an exit message": ("sys.exit('no config')", "PeerFailed", ["SystemExit: no config"]),
    "an interrupt": ("raise KeyboardInterrupt", "PeerFailed", ["KeyboardInterrupt"]),
    "an exception whose own code fails": (
        (
            "class Hostile(Exception):\n"
            "        __class__ = __cause__ = property(lambda self: 1 / 0)\n"
            "        with_traceback = add_note = __str__ = lambda *_: 1 / 0\n"
            "    raise Hostile"
        ),
        "PeerFailed",
        ["Hostile: <no text: its __str__ raised ZeroDivisionError>"],
    ),
    "an exit with an object that equals 0": (
        "sys.exit(type('Zero', (), {'__eq__': lambda *_: True, '__hash__': id})())",
        "PeerFailed",
        ["SystemExit: <__main__.Zero object"],
    ),
    "exit code 0": ("sys.exit(0)", "PeerLost", ["rank 1 finished without a call"]),
    "exit without a code": ("raise SystemExit", "PeerLost", ["rank 1 finished without a call"]),
    "an old exception": (
        (
            "import code, contextlib, io\n"
            "    with contextlib.redirect_stderr(io.StringIO()):\n"
            "        code.InteractiveInterpreter().runsource('1/0')\n"
            "    sys.exit(0)"
        ),
        "PeerLost",
        ["finished without a call"],
    ),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "PeerLost", ["killed by SIGKILL"]),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", "PeerLost", ["killed by SIGTERM"]),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", "PeerLost", ["killed by SIGSEGV"]),
    "a signal after its end": (
        "shutdown(); os.kill(os.getpid(), signal.SIGSEGV)",
        "PeerLost",
        ["killed by SIGSEGV"],
    ),
    "no hook runs": ("os._exit(7)", "PeerLost", ["exit code 7"]),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_how_a_rank_ends_reaches_the_others(scripts: Scripts, how: str) -> None:
    ending, error, words = ENDINGS[how]
    for out in others(scripts, f"    {ending}\n"):
        assert out.startswith(f"{error} 1 [1]")
        for word in words:
            assert word in out


def test_a_nonzero_exit_is_named_where_seats_and_ranks_differ(meeting_place: Path) -> None:
    def program() -> str:
        if sp.get_rank() == 2:  # the first of its host
            sp.shutdown()
            os._exit(3)
        with pytest.raises(sp.PeerFailed) as caught:
            sp.barrier("load")
        assert caught.value.failures[2].rank == caught.value.rank == 2
        return caught.value.failures[2].headline

    outcomes = Ranks(Kind("torch", 4, hosts=2), meeting_place).outcomes(program)
    assert [outcomes[rank] for rank in (0, 1, 3)] == ["SystemExit: 3"] * 3


#: How a script ends while something that keeps the process waits for the file that rank 0 makes.
BESIDE_A_THREAD = {
    "an exception": ("raise ValueError('bad shard')", "PeerFailed", "ValueError: bad shard"),
    "an exit code": ("sys.exit(3)", "PeerFailed", "SystemExit: 3"),
    "an exit code beside an executor": ("sys.exit(3)", "PeerFailed", "SystemExit: 3"),
    "an exit code beside a process": ("sys.exit(3)", "PeerFailed", "SystemExit: 3"),
    "an exit code before an atexit function": ("sys.exit(3)", "PeerFailed", "SystemExit: 3"),
    "an exit message": ("sys.exit('no config')", "PeerFailed", "SystemExit: no config"),
    "past a finally": ("try: sys.exit(3)\n    finally: print()", "PeerFailed", "SystemExit: 3"),
    "a caught exit": ("with contextlib.suppress(SystemExit): sys.exit(3)", "", "together"),
    "exit code 0": ("sys.exit(0)", "", "together"),
}


@pytest.mark.parametrize("how", BESIDE_A_THREAD)
def test_a_failure_is_told_before_the_process_ends(scripts: Scripts, how: str) -> None:
    """The thread makes the call in place of the main thread where that has not failed."""
    ending, error, words = BESIDE_A_THREAD[how]
    start = "threading.Thread(target=work).start()"
    if "executor" in how:
        start = "concurrent.futures.ThreadPoolExecutor().submit(work)"
    elif "process" in how:
        start = "multiprocessing.get_context('fork').Process(target=work).start()"
    elif "atexit" in how:
        start = "atexit.register(work)"
    ended = scripts.run(
        f"""
import contextlib, threading
init()
def work():
    while not os.path.exists("go"):
        time.sleep(0.001)
    if not {error!r}:
        barrier("load")
if rank == 1:
    import atexit, concurrent.futures, multiprocessing
    {start}
    {ending}
else:
    if not {error!r}:
        open("go", "w").close()
    try:
        barrier("load", timeout={PATIENCE})
        print("together")
    except SyncError as error:
        print(type(error).__name__, error)
    open("go", "w").close()
"""
    )
    for rank in (0, 2):
        assert ended[rank].out.startswith(error or "together"), ended[rank].err
        assert words in ended[rank].out


def test_a_thread_that_has_failed_is_named(scripts: Scripts) -> None:
    """While its rank does not come, and where its rank then fails."""
    ended = scripts.run(
        """
        import logging, threading
        init()
        class Handler(logging.Handler):
            def emit(self, record):
                if "ranks [1] " in record.getMessage():
                    print(record.getMessage(), flush=True)
                    open("go", "w").close()
        logging.getLogger("syncprims").addHandler(Handler())
        def load():
            raise ValueError("bad shard")
        if rank == 1:
            for quiet in load, sys.exit:  # the second one ends well
                thread = threading.Thread(target=quiet, name="loader")
                thread.start()
                thread.join()
            while not os.path.exists("go"):
                time.sleep(0.001)
            sys.exit(3)
        barrier("load")
        """,
        SYNCPRIMS_WARN_AFTER="0.1",
    )
    said = ended[0].out + ended[2].out
    assert "thread 'loader' has failed: ValueError: bad shard" in said
    assert ended[1].code == 3
    assert "| SystemExit: 3" in ended[0].err
    assert "| thread 'loader' has failed: ValueError: bad shard" in ended[0].err


#: What keeps a rank whose script has ended, until the others make a file, and how it is named.
KEEPERS = {
    "a thread": ("threading.Thread(target=work, name='uploader').start()", "thread 'uploader'"),
    "a process": ("context.Process(target=work).start()", "process "),
    "a pool": ("futures.ProcessPoolExecutor(1, context).submit(work)", "thread "),
    "a queue": (
        (
            "queue = context.Queue(); queue.put(bytes(1 << 22)); "
            "threading.Thread(target=lambda: (work(), queue.get()), daemon=True).start()"
        ),
        "it waits until its Queue has been read",
    ),
    "an atexit function": ("atexit.register(work)", "it is in atexit work (script.py:"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("keeper", KEEPERS)
def test_what_keeps_a_rank_whose_script_has_ended_is_named(scripts: Scripts, keeper: str) -> None:
    start, words = KEEPERS[keeper]
    if sys.version_info[:2] == (3, 12) and "it " in words:  # no thread can look any more
        words = "it waits, or is in an atexit function"
    ended = scripts.run(
        f"""
        import atexit, logging, multiprocessing, threading, syncprims.who
        import concurrent.futures as futures
        context = multiprocessing.get_context("fork")
        init()
        class Handler(logging.Handler):
            def emit(self, record):
                text = record.getMessage()
                if {words!r} in text and text.startswith("still waiting for ranks [1] "):
                    print(text, flush=True)
                    report = syncprims.who.who(os.environ["SYNCPRIMS_RUN_ID"], stuck_after=0)[0]
                    print("who:", *report.finding.text.splitlines())
                    open("go", "w").close()
        logging.getLogger("syncprims").addHandler(Handler())
        def work():
            while not os.path.exists("go"):
                time.sleep(0.001)
            if {keeper!r} == "a thread":
                barrier("load")
        if rank == 1:
            {start}
            raise SystemExit(0)
        try:
            barrier("load")
        except PeerLost:
            assert {keeper!r} != "a thread"
        """,
        SYNCPRIMS_WARN_AFTER="0.1",
    )
    assert [one.code for one in ended] == [0, 0, 0], [one.err for one in ended]
    told = (ended[0].out + ended[2].out).splitlines()
    told = [line for line in told if "its script has ended; it" in line and words in line]
    assert any(line.startswith("still waiting for ranks [1]") for line in told)
    assert any(line.startswith("who: ") for line in told), ended


def test_waiting_can_be_interrupted(scripts: Scripts) -> None:
    processes = scripts.start(
        """
        init()
        if rank == 0:
            print("waiting", flush=True)
            barrier()
        time.sleep(60)
        """
    )
    assert processes[0].stdout is not None
    assert processes[0].stdout.readline() == "waiting\n"
    time.sleep(0.2)  # into the long wait
    processes[0].send_signal(signal.SIGINT)
    processes[0].wait(PATIENCE)
    for process in processes[1:]:
        process.kill()
    ended = scripts.wait(processes)
    assert "KeyboardInterrupt" in ended[0].err


def test_two_threads_at_once_are_told_apart(scripts: Scripts) -> None:
    ended = scripts.run(
        """
        import threading
        init()
        def late():
            try:
                barrier("second")
            except ConcurrentCall as error:
                print(error)
        if rank == 0:
            waiting = threading.Thread(target=barrier, args=("first",), name="loader")
            waiting.start()
            while "first" not in str(current().rounds.board.status(get_rank()).label):
                time.sleep(0.001)
            late()
            waiting_for = open("go", "w").close()
            waiting.join()
        else:
            while not os.path.exists("go"):
                time.sleep(0.001)
            barrier("first")
        barrier("in step")
        """
    )
    assert [one.code for one in ended] == [0, 0, 0], [one.err for one in ended]
    assert "two threads" in ended[0].out
    assert "barrier 'first' (" in ended[0].out
    assert "barrier 'second' (script.py:" in ended[0].out


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("raise RuntimeError('left the block')", "PeerFailed rank 1 failed"),
        ("sys.exit(0)", "PeerLost rank 1 finished"),
    ],
)
def test_what_leaves_the_block_is_told(scripts: Scripts, ending: str, told: str) -> None:
    ended = scripts.run(
        f"""
        try:
            with init():
                if rank == 1:
                    {ending}
                barrier()
        except (RuntimeError, SyncError) as error:
            print(type(error).__name__, error.args[0].split("\\n")[0])
        """
    )
    assert ended[1].out == ("RuntimeError left the block\n" if "raise" in ending else "")
    assert ended[0].out == ended[2].out
    assert ended[0].out.startswith(told)
    assert ("RuntimeError: left the block" in ended[0].out) == ("raise" in ending)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_ranks_started_by_multiprocessing(tmp_path: Path, method: str) -> None:
    """Its children skip atexit and the excepthook, and the others are notified all the same.

    Where they are forked, their parent has had a world.
    """
    source = f"""
import multiprocessing as mp, os, sys

def work(rank, ending):
    os.environ.update(SYNCPRIMS_RANK=str(rank), SYNCPRIMS_WORLD_SIZE="3",
                      SYNCPRIMS_BACKEND="file", SYNCPRIMS_RUN_ID=ending)
    import syncprims
    syncprims.init()
    if rank == 1:
        if ending == "raise":
            raise ValueError("bad shard")
        sys.exit(int(ending))
    try:
        syncprims.barrier()
    except syncprims.SyncError as error:
        line = type(error).__name__ + " " + str(error).split(chr(10))[0] + chr(10)
        os.write(1, line.encode())  # in one piece, beside the others'

if __name__ == "__main__":
    if {method!r} == "fork":
        import syncprims
        syncprims.init("single")
        syncprims.shutdown()
    for ending in ("raise", "0", "3"):
        context = mp.get_context({method!r})
        ranks = [context.Process(target=work, args=(r, ending)) for r in range(3)]
        [rank.start() for rank in ranks]
        [rank.join() for rank in ranks]
"""
    script = tmp_path / "main.py"
    script.write_text(source)
    meet = tmp_path / "meet"
    done = run_python(script, SYNCPRIMS_DIR=str(meet))
    said = done.stdout.splitlines()
    assert len(said) == 6, done.stderr
    for line in said[0:2]:
        assert line.startswith("PeerFailed rank 1 failed")
        assert line.endswith("ValueError: bad shard")
    for line in said[2:4]:
        assert line.startswith("PeerLost rank 1 finished")
    for line in said[4:6]:
        assert line.startswith("PeerFailed rank 1 failed")
        assert line.endswith("SystemExit: 3")
    assert not any(meet.iterdir())


def test_hooks_that_wrap_ours_survive_several_worlds(scripts: Scripts) -> None:
    ended = scripts.run(
        """
        def wrap(before):
            def hook(*what):
                print("wrapped")
                before(*what)
            return hook
        for _ in range(3):
            init()
            barrier()
            sys.excepthook = wrap(sys.excepthook)
            shutdown()
        raise ValueError("in the end")
        """
    )
    for one in ended:
        assert one.out == "wrapped\n" * 3
        assert one.err.rstrip().endswith("ValueError: in the end")
        assert "Recursion" not in one.err


def test_two_threads_may_make_the_first_call(scripts: Scripts) -> None:
    ended = scripts.run(
        """
        import threading
        found = []
        threads = [threading.Thread(target=lambda: found.append(current())) for _ in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert found[0] is found[1]
        barrier()
        """
    )
    assert [one.code for one in ended] == [0, 0, 0], [one.err for one in ended]


def test_a_coroutines_call_site_is_the_users(scripts: Scripts) -> None:
    ended = scripts.run(
        """
        import asyncio
        @on_main(share=True)
        async def load():
            return 1
        init()
        try:
            if rank == 1:
                barrier()
            else:
                asyncio.run(load())
        except CollectiveMismatch as error:
            print(error)
        """
    )
    for one in ended:
        assert "asyncio" not in one.out
        assert "events.py" not in one.out
        assert "rank 0: on_main 'load' from rank 0 (script.py:" in one.out
