"""Injected faults strike at the given place, and a fault that does not strike is an error."""

from __future__ import annotations

import contextvars
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import WorldKind, both_kinds

import syncprims as sp
from syncprims.testing import (
    Delay,
    Fault,
    FaultMissed,
    Kill,
    Raise,
    Stop,
    every_point,
    explore,
    run_world,
)


@both_kinds
@pytest.mark.parametrize("error", [ValueError("x"), OSError(28, "x"), ConnectionError])
def test_a_call_that_raises_is_of_the_round_it_was_made_in(kind: WorldKind, error: Any) -> None:
    def program() -> None:
        sp.barrier("a")
        sp.barrier("b")

    with pytest.raises(error if isinstance(error, type) else type(error)) as caught:
        run_world(program, 2, kind=kind, faults=[Raise(1, at=2, error=error)])
    assert " at its round 2, barrier 'b'" in caught.value.__notes__[0]


@both_kinds
@pytest.mark.parametrize("fault", [Kill(1, at="never"), Delay(1, at=3), Raise(0, at="barier")])
def test_a_fault_that_never_strikes_is_an_error(kind: WorldKind, fault: Fault) -> None:
    def program() -> None:
        sp.barrier("a")
        sp.barrier("b")

    with pytest.raises(FaultMissed, match=r"came to 2 rounds: barrier 'a' ") as caught:
        run_world(program, 2, kind=kind, faults=[fault])
    assert str(fault) in str(caught.value)
    assert caught.value.rank == fault.rank


def test_a_fault_may_miss_a_world_that_has_ended_early() -> None:
    def program() -> str:
        try:
            sp.barrier()
        except sp.PeerLost:
            return "lost"
        sp.barrier("second")
        return "both"

    assert run_world(program, 2, faults=[Kill(1), Delay(0, at="second")]) == ["lost", None]
    with pytest.raises(ZeroDivisionError):
        run_world(lambda: 1 // 0, 2, faults=[Kill(1)])


@both_kinds
def test_faults_strike_every_call_of_a_world_of_one(kind: WorldKind) -> None:
    struck: list[str] = []

    def program() -> None:
        sp.barrier()
        struck.append("passed")
        with sp.group([0]) as alone:
            alone.barrier()
        sp.all_gather(1)

    assert run_world(program, 1, kind=kind, faults=[Kill(0, at="barrier")]) == [None]
    assert struck == []
    with pytest.raises(OSError, match="full"):
        run_world(program, 1, kind=kind, faults=[Raise(0, at=2, error=OSError("full"))])
    with pytest.raises(FaultMissed, match="rank 0 came to 4 rounds"):
        run_world(program, 1, kind=kind, faults=[Kill(0, at=5)])


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Kill, {"rank": 1, "at": 1.5}), (Kill, {"rank": "1"}), (Stop, {"rank": 0, "at": True}),
        (Delay, {"rank": 0, "seconds": "1"}), (Raise, {"rank": 0, "error": "boo"}),
        (Raise, {"rank": 0, "error": int}),
    ],
)  # fmt: skip
def test_faults_of_other_types_are_refused(kind: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        kind(**wrong)


def test_what_no_fault_can_be_is_refused() -> None:
    with pytest.raises(ValueError, match="seconds are 0 or more"):
        Delay(0, seconds=-1)
    with pytest.raises(ValueError, match="from 1"):
        Kill(0, at=0)
    with pytest.raises(TypeError, match=r"a fault is a Kill.* or Stop, and 2 is a int"):
        every_point(lambda: sp.barrier(), 2)  # type: ignore[arg-type]
    for run in (run_world, explore):
        with pytest.raises(TypeError, match="ranks is the number of ranks, and True is a bool"):
            run(lambda: sp.barrier(), True)


async def _never_awaited() -> None:
    sp.barrier()


class _Async:
    async def __call__(self) -> None:
        sp.barrier()


@pytest.mark.parametrize("fn", [_never_awaited, functools.partial(_never_awaited), _Async()])
def test_async_functions_are_refused(fn: Any) -> None:
    runs: list[Any] = [run_world, explore, functools.partial(every_point, fault=Kill(1))]
    for run in runs:
        with pytest.raises(TypeError, match="is async"):
            run(fn, ranks=2)


def test_a_thread_that_is_no_rank_is_refused() -> None:
    asked = (sp.get_rank, sp.get_world_size, sp.is_main)

    def answers() -> list[Any]:
        return [ask() for ask in asked]

    def program() -> list[Any]:
        with ThreadPoolExecutor(1) as pool:  # a task belongs to the rank that submits it
            outside = contextvars.Context()
            for ask in asked:
                with pytest.raises(sp.ConfigurationError, match="this thread belongs to no rank"):
                    pool.submit(outside.run, ask).result()
            return pool.submit(answers).result()

    assert run_world(program, 3) == [[rank, 3, rank == 0] for rank in range(3)]
    assert answers() == [0, 1, True]


def test_a_fault_that_no_schedule_meets_is_an_error() -> None:
    with pytest.raises(FaultMissed, match=r"Kill\(rank=0, at='never'\) never happened"):
        explore(lambda: sp.barrier(), 2, schedules=3, faults=[Delay(1), Kill(0, at="never")])
