"""Failures on all ranks leave them in step; other failures break the group for good."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_every_rank, several
from support.rank_worlds import Kind, Ranks, Signs

import syncprims as sp
from syncprims.testing import run_world

pairs = several(2)

HERE = r"tests/protocol/test_shared_failures\.py"


NO_RESULT: list[tuple[Any, Any, type[Exception]]] = [
    (1j, "max", TypeError),
    (10**400, "mean", OverflowError),
    (np.array([1, None], object), "sum", TypeError),
    (np.array(["2026-01-01"], "M8[D]"), "sum", TypeError),
    (np.full(50_000, "2026-01-01", "M8[D]"), "sum", TypeError),
    (np.full(50_000, 3, "m8[s]"), "prod", TypeError),
    (torch.ones(50_000, dtype=torch.complex64), "min", TypeError),
    (torch.ones(3).to_sparse(), "max", TypeError),
    (np.array(["a"]), "sum", TypeError),
    (np.ma.masked_less(np.arange(3), 1), "sum", TypeError),
]


@pairs
@pytest.mark.filterwarnings("ignore")
@on_every_rank
def test_values_without_a_result_leave_all_in_step() -> None:
    seen: list[Any] = []
    for number, (value, op, error) in enumerate(NO_RESULT):
        with pytest.raises(error):
            sp.all_reduce(value, op)
        seen.append(sp.all_gather((number, sp.get_rank())))
    assert seen == [[(n, 0), (n, 1)] for n in range(len(NO_RESULT))]


@pairs
@on_every_rank
def test_values_without_a_common_result_leave_all_in_step() -> None:
    """Keys that are not found again, and a number that is too large for the other's type."""
    with pytest.raises(LookupError, match=rf"all_reduce \({HERE}:\d+\): "):
        sp.all_reduce({math.nan: sp.get_rank()})
    mine: Any = 10**400 if sp.is_main() else 0.5
    with pytest.raises(ArithmeticError, match=rf"all_reduce \({HERE}:\d+\): "):
        sp.all_reduce(mine)
    assert sp.all_gather(sp.get_rank()) == [0, 1]


def test_a_call_after_a_failed_start_takes_nobodys_place(meeting_place: Path, signs: Signs) -> None:
    """Rank 0 calls twice. Else its second barrier would meet the first one of rank 1."""

    def program() -> list[str]:
        place = sp.get_rank()
        if place:
            signs.wait("0 has waited in vain")
        said: list[str] = []
        for _ in range(2):
            with pytest.raises(sp.SyncError) as caught:
                sp.barrier("x", timeout=0.4)
            said.append(type(caught.value).__name__)
            signs.give("0 has waited in vain")
        return said

    first, _ = Ranks(Kind("file", 2), meeting_place).run_alone(program)
    assert first == ["SyncTimeout"] * 2


def test_after_a_start_that_failed_init_may_try_again(meeting_place: Path, signs: Signs) -> None:
    def program() -> Any:
        if sp.get_rank():
            signs.wait("0 has waited in vain")
        else:
            with pytest.raises(sp.SyncTimeout):
                sp.barrier(timeout=0.3)
            with pytest.raises(sp.SyncTimeout):
                sp.all_gather(1)
            signs.give("0 has waited in vain")
        with sp.init():
            return sp.all_gather(sp.get_rank())

    assert Ranks(Kind("file", 2), meeting_place).run_alone(program) == [[0, 1]] * 2


@several(4)
def test_decorators_share_within_the_group_that_is_entered(world: Ranks) -> None:
    def program() -> Any:
        here = sp.get_rank()
        low, high = sp.group([0, 1]), sp.group([2, 3])
        with low if here < 2 else high:
            value = sp.on_rank(1 if here < 2 else 3, share=True)(lambda: f"of {here}")()
            if here >= 2:
                with pytest.raises(ValueError, match=r"runs on rank 0, for ranks \[0, 1, 2, 3\]"):
                    sp.on_main(share=True)(lambda: "never")()
        return value, sp.on_main(share=True)(lambda: "all")()

    assert world.run(program) == [("of 1", "all")] * 2 + [("of 3", "all")] * 2


@several(4)
def test_groups_that_are_not_the_same_are_told_though_they_exist(world: Ranks) -> None:
    def program() -> str:
        again = [sp.group([0, 1]), sp.group([0, 2])]
        assert sp.group([0, 1]) is again[0]
        with pytest.raises(sp.CollectiveMismatch, match=r"group '\[0, 1\]'") as caught:
            sp.group([0, 1] if sp.get_rank() else [0, 2])
        return str(caught.value)

    assert len(set(world.run(program))) == 1


@pytest.mark.parametrize("step", [1, 2])
def test_large_groups_that_are_not_the_same_are_told(step: int) -> None:
    def program() -> None:
        end = 64 if sp.get_rank() else 62
        with pytest.raises(sp.CollectiveMismatch, match=r"rank 0: group '\[0"):
            sp.group(range(0, end, step))

    run_world(program, 64)


@pytest.mark.parametrize("ends", [True, False])
def test_a_cycle_of_three_groups_is_one_verdict(ends: bool, meeting_place: Path) -> None:
    def program() -> str:
        mine = sp.get_rank()
        groups = [sp.group(two) for two in ([0, 1], [1, 2], [0, 2])]
        with pytest.raises(sp.SyncError) as caught:
            groups[mine].barrier()
        if not ends:
            with pytest.raises(sp.CollectiveMismatch):
                groups[mine].barrier()
        return type(caught.value).__name__

    found = Ranks(Kind("file", 3), meeting_place).run(program)
    assert found == ["CollectiveMismatch"] * 3


def test_a_world_of_one_refuses_what_could_not_travel(meeting_place: Path) -> None:
    def program() -> str:
        calls: list[Callable[[], Any]] = [
            lambda: sp.broadcast(threading.Lock()),
            lambda: sp.all_gather(threading.Lock()),
            sp.on_main(share=True)(threading.Lock),
        ]
        for call in calls:
            with pytest.raises(sp.EncodingError, match=rf"{HERE}:\d+\): ") as caught:
                call()
            assert caught.value.rank == 0
            assert str(caught.value.call) in str(caught.value)
        return sp.broadcast("goes on")

    assert Ranks(Kind("single", 1), meeting_place).run(program) == ["goes on"]


@pairs
def test_a_generator_that_is_closed_inside_has_not_finished_the_block(world: Ranks) -> None:
    def program() -> Any:
        def pieces() -> Any:
            with sp.main_first(name="prepare"):
                yield from range(3)

        outcome = "left early"
        try:
            for _ in pieces():
                break
        except sp.PeerFailed as error:
            outcome = error.failures[0].type
        return outcome, sp.all_gather(sp.get_rank())

    assert world.run(program) == [("left early", [0, 1]), ("GeneratorExit", [0, 1])]


class Rude(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


@pairs
def test_an_exception_whose_text_interrupts_arrives(world: Ranks) -> None:
    def program() -> Any:
        error: type[BaseException] = Rude if sp.is_main() else sp.PeerFailed
        with pytest.raises(error) as caught, sp.main_first():
            raise Rude
        text = "" if sp.is_main() else str(caught.value)
        return "its __str__ raised KeyboardInterrupt" in text, sp.all_gather(sp.get_rank())

    assert world.run(program) == [(False, [0, 1]), (True, [0, 1])]


class Picky:
    """An object that only rank 0 can make."""

    def __init__(self, raises: type[BaseException]) -> None:
        self.raises = raises

    def __reduce__(self) -> Any:
        return _make_picky, (self.raises,)


def _make_picky(raises: type[BaseException]) -> Picky:
    if sp.get_rank():
        raise raises("not here")
    return Picky(raises)


SHARED: dict[str, Callable[[Any], Any]] = {
    "broadcast": sp.broadcast,
    # Nobody waits for pieces that a rank cannot take.
    "broadcast beside an array": lambda value: sp.broadcast([value, np.ones(500_000)]),
    "all_gather": sp.all_gather,
    "all_gather of much": lambda value: sp.all_gather([value, "x" * 100_000]),
    "on_main": lambda value: sp.on_main(share=True)(lambda: value)(),
}


def find_error(call: Callable[[Any], Any], value: Any) -> tuple[str, str]:
    """Return the type and text of the error that a call raises."""
    try:
        call(value)
    except (sp.PeerFailed, sp.EncodingError, KeyboardInterrupt) as error:
        return type(error).__name__, str(error)
    return "", ""


@several(2, 4)
def test_what_one_rank_cannot_make_fails_all(world: Ranks) -> None:
    """In one world, one after another: all ranks stay in step."""
    cases = list(product(SHARED, [ImportError, MemoryError, RecursionError, KeyboardInterrupt]))

    def program() -> list[Any]:
        return [
            (*find_error(SHARED[call], Picky(raises)), sp.all_gather(sp.get_rank()))
            for call, raises in cases
        ]

    everyone = list(range(world.ranks))
    for rank, found in enumerate(world.run(program)):
        for (call, raises), (kind, text, after) in zip(cases, found, strict=True):
            own = "EncodingError" if issubclass(raises, Exception) else "KeyboardInterrupt"
            assert (kind, after) == (own if rank else "PeerFailed", everyone), (call, raises)
            if rank == 0:
                assert re.search(rf"rank \d failed in {call.split()[0]}.*\({HERE}:\d+\)", text)
            elif own == "EncodingError":
                sender = rf"{call.split()[0]}.*\({HERE}:\d+\): what rank \d has sent: "
                assert re.match(sender, text)
                assert f"{raises.__name__}: not here" in text


class Stubborn:
    """An object that cannot be sent."""

    def __init__(self, raises: type[BaseException]) -> None:
        self.raises = raises

    def __reduce__(self) -> Any:
        raise self.raises("never")


SENDING: dict[str, Callable[[Any], Any]] = {
    **SHARED,
    "all_reduce": lambda value: sp.all_reduce({"a": Number(value.raises)}),
}


class Number(int):
    raises: type[BaseException]

    def __new__(cls, raises: type[BaseException]) -> Number:
        made = super().__new__(cls)
        made.raises = raises
        return made

    def __reduce__(self) -> Any:
        raise self.raises("never")


@pairs
def test_whatever_prevents_sending_fails_all(world: Ranks) -> None:
    """In one world, one after another: all ranks stay in step."""
    cases = list(product(SENDING, [ValueError, MemoryError, RecursionError, KeyboardInterrupt]))

    def program() -> list[Any]:
        return [
            (
                find_error(SENDING[call], Stubborn(raises if sp.is_main() else ValueError))[0],
                sp.all_gather(sp.get_rank()),
            )
            for call, raises in cases
        ]

    first, second = world.run(program)
    for case, mine, other in zip(cases, first, second, strict=True):
        own = "EncodingError" if issubclass(case[1], Exception) else "KeyboardInterrupt"
        assert mine == (own, [0, 1]), case
        assert other in [("PeerFailed", [0, 1]), ("EncodingError", [0, 1])], case


@pairs
@on_every_rank
def test_no_stack_left_for_a_value_fails_all() -> None:
    value: Any = 1.0
    for _ in range(100_000):
        value = [value]
    for call in (sp.all_reduce, sp.broadcast, sp.all_gather):
        error: Any = (RecursionError, sp.EncodingError) if sp.is_main() else sp.PeerFailed
        with pytest.raises(error):
            call(value if sp.is_main() else 1.0)
    while isinstance(value, list):
        value = value[0]
    assert sp.all_gather(sp.get_rank()) == [0, 1]
