"""Failures: what each other rank raises, on every backend with several ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import in_processes, on_every_rank, several
from support.rank_worlds import Died, Kind, Ranks, Signs

import syncprims as sp
from syncprims._world.runtime import get_world
from syncprims.testing import Delay, run_world


def caught(call: Callable[[], Any]) -> sp.SyncError:
    with pytest.raises(sp.SyncError) as info:
        call()
    return info.value


@several()
def test_different_calls_are_a_mismatch_on_all_ranks_at_once(world: Ranks) -> None:
    def program() -> tuple[str, bool]:
        if sp.get_rank() == 1:
            error = caught(lambda: sp.broadcast({"lr": 1}))
        else:
            error = caught(lambda: sp.barrier("load"))
        assert isinstance(error, sp.CollectiveMismatch)
        again = caught(lambda: sp.any_rank(True))  # torn: never a pass any more
        assert type(again) is type(error)
        return str(error), str(again) == str(error)

    said = world.run(program)
    assert len(set(said)) == 1
    text, same = said[0]
    assert same
    assert "rank 0: barrier 'load' (tests/protocol/test_failures.py:" in text
    assert "rank 1: broadcast from rank 0 (tests/protocol/test_failures.py:" in text


MISMATCHES: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
    (lambda: sp.barrier("a"), lambda: sp.barrier("b")),
    (lambda: sp.barrier("a"), lambda: sp.barrier()),
    (lambda: sp.barrier(""), lambda: sp.barrier()),  # an empty name is a name
    (lambda: sp.broadcast(1, src=0), lambda: sp.broadcast(1, src=1)),
    (lambda: sp.all_reduce(1, "sum"), lambda: sp.all_reduce(1, "max")),
    (lambda: sp.any_rank(True), lambda: sp.all_ranks(True)),
    (lambda: sp.Trigger("x").check(), lambda: sp.barrier("x")),
    (lambda: sp.group([0]), lambda: sp.group([1])),
]


@several(2)
@pytest.mark.parametrize("pair", range(len(MISMATCHES)))
def test_kind_name_src_and_op_are_compared(world: Ranks, pair: int) -> None:
    def program() -> bool:
        return isinstance(caught(MISMATCHES[pair][sp.get_rank()]), sp.CollectiveMismatch)

    assert world.run(program) == [True, True]


@in_processes
@several()
def test_a_rank_that_does_not_come_is_named_everywhere(world: Ranks, signs: Signs) -> None:
    present = [r for r in range(world.ranks) if r != 1]

    def program() -> Any:
        sp.barrier("here")
        begin = time.monotonic()
        if sp.get_rank() == 1:
            signs.wait(*present)  # all were told, and none waits for this one
        error = caught(lambda: sp.barrier("load", timeout=1))
        signs.give(sp.get_rank())
        assert isinstance(error, sp.SyncTimeout)
        assert isinstance(error, TimeoutError)
        assert time.monotonic() - begin > 0.9
        assert error.waited is not None
        assert error.waited >= 1
        assert type(caught(sp.barrier)) is sp.SyncTimeout
        return error.missing, error.arrived, str(error)

    said = world.run(program)
    assert len(set(map(str, said))) == 1
    missing, arrived, text = said[0]
    assert missing == [1]
    assert arrived == present
    assert "barrier 'load' (tests/protocol/test_failures.py:" in text
    assert "rank 1 was last seen at barrier 'here' (tests/protocol/test_failures.py:" in text
    assert "timeout=" in text


@in_processes
@several()
def test_a_killed_rank_is_lost(world: Ranks) -> None:
    def program() -> Any:
        sp.barrier()
        if sp.get_rank() == 1:
            os.kill(os.getpid(), 9)
        error = caught(lambda: sp.barrier("load"))
        assert isinstance(error, sp.PeerLost)
        assert isinstance(error, ConnectionError)
        return error.rank, error.missing, "SIGKILL" in str(error)

    outcomes = world.outcomes(program)
    assert isinstance(outcomes.pop(1), Died)
    knows_signal = world.kind.backend != "mine"
    assert outcomes == [(1, [1], knows_signal)] * (world.ranks - 1)


@several()
def test_a_rank_that_finishes_early_is_lost_to_the_others(world: Ranks) -> None:
    def program() -> Any:
        sp.barrier()
        if sp.get_rank() == 1:
            return None
        error = caught(lambda: sp.barrier("one more"))
        assert isinstance(error, sp.PeerLost)
        return error.rank, "rank 1 finished after round 1" in str(error)

    outcomes = world.run(program)
    assert outcomes.pop(1) is None
    assert outcomes == [(1, True)] * (world.ranks - 1)


@several()
def test_a_rank_that_raises_fails_the_others_with_its_traceback(world: Ranks) -> None:
    def program() -> Any:
        if sp.get_rank() == 1:
            raise LookupError("no such shard")
        error = caught(lambda: sp.barrier("load"))
        assert isinstance(error, sp.PeerFailed)
        failure = error.failures[1]
        return error.rank, failure.type, failure.message, failure.traceback, str(error)

    outcomes = world.outcomes(program)
    assert isinstance(outcomes.pop(1), LookupError)
    for rank, kind, message, trace, text in outcomes:
        assert (rank, kind, message) == (1, "LookupError", "no such shard")
        assert 'raise LookupError("no such shard")' in trace
        assert trace.splitlines()[-1] in text


@several()
def test_an_error_caught_by_nobody_names_the_root_cause_to_late_ranks(world: Ranks) -> None:
    def program() -> Any:
        if sp.get_rank() == 1:
            raise LookupError("the cause")
        if sp.get_rank() == 0:
            sp.barrier()  # PeerFailed, and nobody catches it: a consequence
        time.sleep(0.5)  # most likely both are gone; what is told is the same if not
        return caught(sp.barrier).rank

    outcomes = world.outcomes(program)
    assert isinstance(outcomes[0], sp.PeerFailed)
    assert outcomes[0].rank == 1
    assert outcomes[2:] == [1] * (world.ranks - 2)


@several()
def test_a_shared_failure_leaves_the_group_whole(world: Ranks) -> None:
    def program() -> Any:
        ran = []
        try:
            with sp.main_first(name="prepare"):
                ran.append(sp.get_rank())
                if sp.is_main():
                    raise KeyError("no data")
        except KeyError as error:
            said = ("own", str(error), "", "")
        except sp.PeerFailed as error:
            failure = error.failures[0]
            said = (failure.type, failure.message, failure.traceback, str(error))
        sp.barrier("after")
        return ran, said, sp.all_gather(sp.get_rank())

    everyone = list(range(world.ranks))
    first, *others = world.run(program)
    assert first == ([0], ("own", "'no data'", "", ""), everyone)
    for ran, (kind, message, trace, text), gathered in others:
        assert (ran, kind, message, gathered) == ([], "KeyError", "'no data'", everyone)
        assert 'raise KeyError("no data")' in trace
        assert "main_first 'prepare' (tests/protocol/test_failures.py:" in text


@several(2)
def test_pickle_can_be_forbidden(world: Ranks) -> None:
    def program() -> Any:
        error = caught(lambda: sp.broadcast({1: slice(3)}))
        assert "SYNCPRIMS_PICKLE=0" in str(error)
        return type(error).__name__, sp.broadcast([1, (2,)])

    assert world.run(program, SYNCPRIMS_PICKLE="0") == [
        ("EncodingError", [1, (2,)]),
        ("PeerFailed", [1, (2,)]),
    ]
    assert world.run(lambda: sp.broadcast(slice(3))) == [slice(3)] * 2


@in_processes
@several(2)
@pytest.mark.parametrize("variable", ["SYNCPRIMS_PICKLE", "SYNCPRIMS_STRICT"])
def test_disagreement_about_settings_is_an_error_on_all_ranks(world: Ranks, variable: str) -> None:
    def program() -> Any:
        os.environ[variable] = os.environ["SYNCPRIMS_RANK"]
        error = caught(sp.init)
        return type(error).__name__, str(error)

    for name, text in world.outcomes(program, start=False):
        assert name == "ConfigurationError"
        assert f"disagree about {variable}, at init (" in text
        assert "rank 0: False, rank 1: True" in text


@in_processes
@several()
def test_a_long_wait_says_whom_it_waits_for(world: Ranks, signs: Signs) -> None:
    def program() -> list[str]:
        lines: list[str] = []
        handler = logging.Handler()

        def hear(record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            signs.give(f"{sp.get_rank()} has said it {len(lines)} times")

        handler.emit = hear  # type: ignore[method-assign]
        logging.getLogger("syncprims").addHandler(handler)
        sp.barrier("before")
        if sp.is_last():  # slow, which is what is tried
            signs.wait(*(f"{rank} has said it 3 times" for rank in range(sp.get_rank())))
        sp.barrier("epoch end")
        return lines

    limits = {"SYNCPRIMS_WARN_AFTER": "0.3", "SYNCPRIMS_DUMP_AFTER": "0.4"}
    *waiting, slow = world.run(program, **limits)
    assert slow == []
    last = world.ranks - 1
    for lines in waiting:
        told = f"still waiting for ranks [{last}] at barrier 'epoch"
        first = next(line for line in lines if line.startswith(told))  # others may be late, too
        assert f"rank {last} was last seen at barrier 'before' (tests/protocol/test_fail" in first
        (stacks,) = [
            line for line in lines if re.match(r"all threads of this rank after \d+ s", line)
        ]
        assert "\nthread MainThread:\n" in stacks
        assert 'sp.barrier("epoch end")\n' in stacks


def test_a_long_wait_is_told_with_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    def program() -> None:
        sp.barrier("late", timeout=2000)

    run_world(program, 2, kind="threads", faults=[Delay(1, at="late", seconds=1000)])
    told = [re.search(r"still waiting .* for (\d+) s", text) for text in caplog.messages]
    assert [found[1] for found in told if found] == ["30", "90", "210", "450", "930"]


@in_processes
def test_the_environments_timeout_is_the_default(world: Ranks, tmp_path: Path) -> None:
    late = tmp_path / "late"

    def program() -> Any:
        assert sp.current().timeout == 0.4
        if sp.get_world_size() == 1:
            return None
        while not sp.is_main() and not late.exists():
            time.sleep(0.001)
        name = type(caught(sp.barrier)).__name__
        late.touch()
        return name

    expected = None if world.ranks == 1 else "SyncTimeout"
    assert world.run(program, SYNCPRIMS_TIMEOUT="0.4") == [expected] * world.ranks


@several(2)
def test_main_first_is_exempt_from_the_default_timeout(world: Ranks) -> None:
    def program() -> int:
        with sp.main_first():
            if sp.is_main():
                time.sleep(0.8)
        return sp.get_rank()

    assert world.run(program, SYNCPRIMS_TIMEOUT="0.3") == [0, 1]


def test_every_error_survives_pickle_and_has_a_builtin_parent() -> None:
    failure = sp.Failure(3, "ValueError", "bad", "Traceback ...")
    kinds = [t for t in vars(sp).values() if isinstance(t, type) and issubclass(t, sp.SyncError)]
    assert len(kinds) > 10
    for kind in kinds:
        error = kind("what", rank=1, call="barrier", missing=[2], waited=1.5, failures={3: failure})
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert str(again) == "what"
        assert again.facts() == error.facts()
        assert kind.__module__ == "syncprims"
        assert kind is sp.SyncError or len(kind.__bases__) == 2


def test_two_world_sizes_in_one_run_are_an_error_on_both(meeting_place: Path) -> None:
    world = Ranks(Kind("file", 2), meeting_place)

    def program() -> Any:
        if os.environ["SYNCPRIMS_RANK"] == "1":
            os.environ["SYNCPRIMS_WORLD_SIZE"] = os.environ["SYNCPRIMS_LOCAL_WORLD_SIZE"] = "3"
            os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "3"
        error = caught(sp.init)
        return type(error).__name__, "world_size=2" in str(error), "world_size=3" in str(error)

    expected = [("ConfigurationError", True, True)] * 2
    assert world.outcomes(program, start=False, SYNCPRIMS_JOIN_TIMEOUT="5") == expected


@in_processes
@several(4)
@on_every_rank
def test_a_mismatch_does_not_wait_for_the_last_rank(signs: Signs) -> None:
    sp.barrier()
    if sp.get_rank() == 2:
        signs.wait(0, 1, 3)
    error = caught(lambda: sp.barrier("b" if sp.get_rank() == 1 else "a"))
    signs.give(sp.get_rank())
    assert (type(error).__name__, "rank 2: not here yet" in str(error)) == (
        "CollectiveMismatch",
        True,
    )


TEXTS = [
    '"' * 8000,
    "\\" * 5000,
    "数据错误" * 2000,
    "line\n" * 3000,
    "\0\x1b" * 2000,
    "\ud800" * 900,
]


@several(2)
def test_any_text_of_an_exception_arrives(world: Ranks) -> None:
    """In a note, and as the last that a rank publishes."""

    def program() -> Any:
        def block(text: str) -> None:
            with sp.main_first():
                if sp.is_main():
                    raise ValueError(text)

        found: list[Any] = []
        for text in TEXTS:
            if sp.is_main():
                with contextlib.suppress(ValueError):
                    block(text)
            else:
                found.append(caught(partial(block, text)))
        if sp.is_main():
            raise ValueError(TEXTS[-1])
        found.append(caught(sp.barrier))
        failures = [error.failures[0] for error in found if isinstance(error, sp.PeerFailed)]
        return [(f.type, f.message[:10], "Traceback" in f.traceback) for f in failures]

    _, said = world.outcomes(program)
    assert said == [("ValueError", text[:10], True) for text in (*TEXTS, TEXTS[-1])]


@in_processes
@several(2)
def test_a_call_in_a_signal_handler_breaks_the_group(world: Ranks, tmp_path: Path) -> None:
    """Its error ends the call that it has interrupted, and is not an error of all ranks.

    The handler asks nothing of the board, which it may have interrupted where that holds a lock.
    """
    interrupted = tmp_path / "interrupted"

    def program() -> Any:
        sp.barrier()
        board: Any = get_world().rounds.board

        def handle(*_: object) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(board, "status", lambda _: pytest.fail("the handler asks the board"))
                sp.barrier()

        if sp.is_main():
            signal.signal(signal.SIGALRM, handle)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            said = r"a signal handler calls .* one is in all_gather \("
            with pytest.raises(sp.ConcurrentCall, match=said):
                sp.all_gather(1)
            interrupted.touch()
        while not interrupted.exists():
            time.sleep(0.001)
        errors = [caught(lambda: sp.all_gather(2)) for _ in range(2)]
        return [(type(e).__name__, e.rank, "ConcurrentCall" in str(e)) for e in errors]

    assert world.run(program) == [[("PeerFailed", 0, True)] * 2] * 2


def test_interrupts_at_any_moment_leave_no_call_open(meeting_place: Path) -> None:
    """A signal handler that raises, thousands of times: the next call passes or says why not."""

    class Tick(Exception):
        pass

    def program() -> None:
        def tick(signum: int, frame: object) -> None:
            raise Tick

        ticks = 0
        while ticks < 2000:
            with sp.init():
                try:
                    signal.signal(signal.SIGALRM, tick)
                    signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.00003)
                    while True:
                        sp.barrier("again")
                except (Tick, sp.PeerFailed):
                    ticks += 1
                finally:
                    while True:  # the handler may interrupt even this
                        try:
                            signal.setitimer(signal.ITIMER_REAL, 0)
                            signal.signal(signal.SIGALRM, signal.SIG_IGN)
                            break
                        except Tick:
                            pass
                with contextlib.suppress(sp.PeerFailed):
                    sp.barrier("again")

    Ranks(Kind("single", 1), meeting_place).run_alone(program)


def test_a_caught_deadlock_leaves_healthy_groups(meeting_place: Path, signs: Signs) -> None:
    def program() -> Any:
        three, pair = sp.group([0, 1, 2]), sp.group([0, 1])
        if sp.get_rank() == 0:
            said = type(caught(three.barrier)).__name__
        elif sp.get_rank() == 1:
            said = type(caught(sp.barrier)).__name__
        else:
            signs.wait(0, 1)  # neither finished nor in the way
            return "bystander"
        if sp.get_rank() == 1:
            time.sleep(1.5)  # long enough for the other to look around
        pair.barrier("healthy")
        signs.give(sp.get_rank())
        return said

    outcomes = Ranks(Kind("file", 4), meeting_place).outcomes(program)
    assert outcomes[:2] == ["CollectiveMismatch"] * 2


def test_many_names_while_a_round_is_outstanding(meeting_place: Path) -> None:
    """Of the file backend, which keeps one file per note."""

    def program() -> None:
        lag = sp.Trigger(lag=1)
        for i in range(5000):
            if sp.is_main() and i % 3 == 0:
                lag.set()
            lag.check()
            sp.barrier(f"step {i}")

    Ranks(Kind("file", 2), meeting_place).run(program)


@several(2)
def test_the_longest_name_fits_and_a_longer_one_is_refused(world: Ranks, tmp_path: Path) -> None:
    deep = tmp_path / ("caf\udce9" + "d" * 150) / ("e" * 200)
    deep.mkdir(parents=True)
    (deep / "far_away.py").write_text(
        "import syncprims\ndef call(name): syncprims.barrier(name, timeout=9)\n"
    )

    def program() -> None:
        scope: dict[str, Any] = {}
        path = str(deep / "far_away.py")
        exec(compile((deep / "far_away.py").read_text(), path, "exec"), scope)
        for name in ("😀" * 50, "n" * 200, "\udce9", ""):
            scope["call"](name)
            sp.any_rank(True)
        with pytest.raises(ValueError, match="200 bytes"):
            scope["call"]("😀" * 51)
        sp.barrier("still in step")

    world.run(program)


def test_the_first_calls_own_timeout_bounds_the_join(meeting_place: Path, signs: Signs) -> None:
    def program() -> Any:
        rank = os.environ["SYNCPRIMS_RANK"]
        if rank == "1":
            signs.wait("0 is told", "2 is told")
        else:
            signs.gather(rank, 0, 2)
        error = caught(lambda: sp.barrier("load", timeout=1))
        signs.give(f"{rank} is told")
        return type(error).__name__, error.missing, "rank 1 never joined" in str(error)

    world = Ranks(Kind("file", 3), meeting_place)
    first, _, last = world.outcomes(program, start=False, SYNCPRIMS_JOIN_TIMEOUT="600")
    assert first == last == ("SyncTimeout", [1], True)


@pytest.mark.parametrize("start", ["first thread", "pool"])
def test_a_thread_that_has_not_called_yet_is_no_deadlock(start: str, meeting_place: Path) -> None:
    """It comes late to a group, which the main thread has used, or no thread."""

    def program() -> str:
        pair = sp.group([0, 1])
        if sp.get_rank() < 2 and start != "first thread":
            pair.barrier("by the main thread")
        if sp.get_rank() == 0:

            def later() -> None:
                time.sleep(2.5)  # long enough for the others to look around
                pair.barrier("pair")

            pool = ThreadPoolExecutor(1)
            pool.submit(later) if start == "pool" else threading.Thread(target=later).start()
            sp.barrier("all")
            pool.shutdown()
        else:
            if sp.get_rank() == 1:
                pair.barrier("pair")
            sp.barrier("all")
        return "passed"

    assert Ranks(Kind("file", 3), meeting_place).run(program) == ["passed"] * 3


def test_threads_that_have_nothing_to_do_hide_no_deadlock(meeting_place: Path) -> None:
    def program() -> str:
        pair = sp.group([0, 1])
        pool = ThreadPoolExecutor(2)
        pool.submit(int).result()
        try:
            return type(caught(pair.barrier if sp.is_main() else sp.barrier)).__name__
        finally:
            pool.shutdown()

    assert Ranks(Kind("file", 3), meeting_place).run(program) == ["CollectiveMismatch"] * 3
