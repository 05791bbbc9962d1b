"""What every other rank gets when something goes wrong, on every backend with somebody else."""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from conftest import several
from harness import Died, Kind, Ranks

import syncprims as sp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def caught(call: Callable[[], Any]) -> sp.SyncError:
    with pytest.raises(sp.SyncError) as info:
        call()
    return info.value


@several()
def test_different_calls_are_a_mismatch_on_all_ranks_at_once(world: Ranks) -> None:
    def program() -> tuple[str, bool]:
        begin = time.monotonic()
        if sp.get_rank() == 1:
            error = caught(lambda: sp.broadcast({"lr": 1}))
        else:
            error = caught(lambda: sp.barrier("load"))
        assert isinstance(error, sp.CollectiveMismatch)
        assert time.monotonic() - begin < 5
        again = caught(lambda: sp.any_rank(True))  # torn: never a pass any more
        assert type(again) is type(error)
        return str(error), str(again) == str(error)

    said = world.run(program)
    assert len(set(said)) == 1
    text, same = said[0]
    assert same
    assert "rank 0: barrier 'load' (tests/test_failures.py:" in text
    assert "rank 1: broadcast from rank 0 (tests/test_failures.py:" in text


MISMATCHES: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
    (lambda: sp.barrier("a"), lambda: sp.barrier("b")),
    (lambda: sp.barrier("a"), lambda: sp.barrier()),
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


@several()
def test_call_sites_are_not_compared(world: Ranks) -> None:
    def program() -> None:
        if sp.is_main():
            sp.barrier("epoch")
        else:
            sp.barrier("epoch")

    world.run(program)


@several()
def test_a_rank_that_does_not_come_is_named_everywhere(world: Ranks) -> None:
    present = [r for r in range(world.ranks) if r != 1]

    def program() -> Any:
        sp.barrier("here")
        begin = time.monotonic()
        if sp.get_rank() == 1:
            time.sleep(1.5)  # late, which is what is tried
        error = caught(lambda: sp.barrier("load", timeout=1))
        waited = time.monotonic() - begin
        assert isinstance(error, sp.SyncTimeout)
        assert isinstance(error, TimeoutError)
        assert 0.9 < waited < 5
        assert error.waited is not None
        assert error.waited >= 1
        assert type(caught(sp.barrier)) is sp.SyncTimeout
        return error.missing, error.arrived, str(error)

    said = world.run(program)
    assert len(set(map(str, said))) == 1
    missing, arrived, text = said[0]
    assert missing == [1]
    assert arrived == present
    assert "barrier 'load' (tests/test_failures.py:" in text
    assert "rank 1 was last seen at barrier 'here' (tests/test_failures.py:" in text
    assert "timeout=" in text


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
    knows_signal = world.kind.backend == "file"
    assert outcomes == [(1, [1], knows_signal)] * (world.ranks - 1)


@several()
def test_a_rank_that_finishes_early_is_lost_to_the_others(world: Ranks) -> None:
    def program() -> Any:
        sp.barrier()
        if sp.get_rank() == 1:
            return None
        error = caught(lambda: sp.barrier("one more"))
        assert isinstance(error, sp.PeerLost)
        return error.rank, "rank 1 finished after round 2" in str(error)

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
        time.sleep(0.5)  # comes when both are gone
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
        assert "main_first 'prepare' (tests/test_failures.py:" in text


@several()
def test_a_collective_inside_main_first_is_a_mismatch(world: Ranks) -> None:
    def program() -> Any:
        ran = []

        def block() -> None:
            with sp.main_first():
                ran.append(sp.get_rank())
                sp.barrier("inside")

        error = caught(block)
        return type(error) is sp.CollectiveMismatch, ran, "barrier 'inside'" in str(error)

    first, *others = world.run(program)
    assert first == (True, [0], True)
    assert others == [(True, [], True)] * (world.ranks - 1)


@several()
def test_what_cannot_travel_is_a_shared_failure(world: Ranks) -> None:
    def program() -> Any:
        types = []
        for value in (lambda: None, {"deep": [threading.Lock()]}):
            error = caught(lambda value=value: sp.broadcast(value))  # type: ignore[misc]
            types.append(type(error).__name__)
            assert "pickle" in str(error)
        sp.barrier("still in step")
        return types

    first, *others = world.run(program)
    assert first == ["EncodingError"] * 2
    assert others == [["PeerFailed"] * 2] * (world.ranks - 1)


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


@several(2)
def test_disagreement_about_settings_is_an_error_on_all_ranks(world: Ranks) -> None:
    def program() -> Any:
        os.environ["SYNCPRIMS_PICKLE"] = os.environ["SYNCPRIMS_RANK"]
        error = caught(sp.init)
        return type(error).__name__, str(error)

    for name, text in world.outcomes(program, start=False):
        assert name == "ConfigurationError"
        assert "disagree about SYNCPRIMS_PICKLE, at init (" in text
        assert "rank 0: False, rank 1: True" in text


@several(4)
def test_a_deadlock_across_groups_is_found(world: Ranks) -> None:
    if world.kind.backend != "file":
        pytest.skip("this backend publishes no words, as the contract allows")

    def program() -> Any:
        low = sp.group([0, 1])
        error = caught(lambda: low.barrier("low") if sp.is_main() else sp.barrier("all"))
        return type(error).__name__, str(error)

    said = world.run(program)
    for name, text in said:
        assert name == "CollectiveMismatch"
        assert "rank 0: barrier 'low' (tests/test_failures.py:" in text
        assert "rank 1: barrier 'all' (tests/test_failures.py:" in text


@several()
def test_a_long_wait_says_whom_it_waits_for(world: Ranks) -> None:
    def program() -> list[str]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("syncprims").addHandler(handler)
        sp.barrier("before")
        if sp.is_last():
            time.sleep(1.2)  # slow, which is what is tried
        sp.barrier("epoch end")
        return lines

    *waiting, slow = world.run(program, SYNCPRIMS_WARN_AFTER="0.3")
    assert slow == []
    for lines in waiting:
        assert 1 <= len(lines) <= 2  # the pauses grow
        assert lines[0].startswith(f"still waiting for ranks [{world.ranks - 1}] at barrier 'epoch")
        assert (
            f"rank {world.ranks - 1} was last seen at barrier 'before' (tests/test_fail" in lines[0]
        )


@several(2)
def test_a_stopped_rank_is_not_dead(world: Ranks) -> None:
    if world.kind.backend != "file":
        pytest.skip("a stopped rank may hold this backend's one lock")

    def program() -> Any:
        pid = sp.all_gather(os.getpid())[1]
        if sp.get_rank() == 1:
            return sp.all_gather("awake")
        os.kill(pid, 19)
        time.sleep(0.3)  # long enough for a verdict, were there one
        os.kill(pid, 18)
        return sp.all_gather("awake")

    assert world.run(program) == [["awake", "awake"]] * 2


def test_the_environments_timeout_is_the_default(world: Ranks) -> None:
    def program() -> Any:
        assert sp.current().timeout == 0.4
        if sp.get_world_size() == 1:
            return None
        if not sp.is_main():
            time.sleep(0.8)
        return type(caught(sp.barrier)).__name__

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
    for kind in (
        sp.SyncError,
        sp.ConfigurationError,
        sp.BackendUnavailable,
        sp.CollectiveMismatch,
        sp.RankMismatch,
        sp.SyncTimeout,
        sp.PeerLost,
        sp.PeerFailed,
        sp.CheckpointError,
        sp.EncodingError,
        sp.WorldClosed,
        sp.ForkedProcess,
        sp.ConcurrentCall,
    ):
        error = kind("what", rank=1, call="barrier", missing=[2], waited=1.5, failures={3: failure})
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert str(again) == "what"
        assert again.facts() == error.facts()
        assert kind.__module__ == "syncprims"
        assert kind is sp.SyncError or len(kind.__bases__) == 2


def test_absent_ranks_are_named_when_the_world_starts(meeting_place: Path) -> None:
    world = Ranks(Kind("file", 3), meeting_place)

    def program() -> Any:
        if os.environ["SYNCPRIMS_RANK"] == "1":
            return None
        error = caught(sp.init)
        return type(error).__name__, error.missing, "rank 1 never joined" in str(error)

    outcomes = world.outcomes(program, start=False, SYNCPRIMS_JOIN_TIMEOUT="0.7")
    assert outcomes == [("SyncTimeout", [1], True), None, ("SyncTimeout", [1], True)]


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
