"""Exceptions at every instruction of every call: later values are right, or calls raise.

One rank of two gets an exception, as from a signal handler, and some get a second one soon after.
Then both go on as a program that catches it and makes the call again.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from support.injection import (
    CALLS,
    ERRORS,
    INTERRUPTIBLE,
    Disturbance,
    Place,
    disturb_processes,
    disturb_threads,
    run_threads,
    with_little_stack,
)
from support.rank_worlds import Kind, Ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_HANDLING = 400  # instructions within which the library has dealt with an exception


def sample(count: int) -> Callable[[list[Place]], list[Disturbance]]:
    """Choose some places at random, half of them with a second exception."""

    def choose(places: list[Place]) -> list[Disturbance]:
        chosen = random.sample(places, min(count, len(places)))
        return [
            Disturbance(
                place, random.randint(1, _HANDLING) if number % 2 else 0, random.choice(ERRORS)
            )
            for number, place in enumerate(chosen)
        ]

    return choose


def every(places: list[Place]) -> list[Disturbance]:
    """Choose all places: once with one exception, and once with a second one soon after."""
    return [
        Disturbance(place, again, random.choice(ERRORS))
        for place in places
        for again in (0, random.randint(1, _HANDLING))
    ]


@pytest.mark.parametrize("call", CALLS)
def test_an_exception_anywhere_is_never_a_wrong_value(call: str) -> None:
    assert disturb_threads(call, sample(12)) == []


@pytest.mark.parametrize("backend", ["file", "torch"])
@pytest.mark.parametrize(
    "call",
    ["barrier", "broadcast array", "all_gather pickle", "all_reduce array"],
)
def test_an_exception_anywhere_in_a_process_is_never_a_wrong_value(
    call: str, backend: str, meeting_place: Path
) -> None:
    assert disturb_processes(Ranks(Kind(backend, 2), meeting_place), call, sample(10)) == []


def test_an_exception_while_a_file_is_written_is_not_changed(meeting_place: Path) -> None:
    """A TimeoutError is an OSError, as a full disk is."""

    def choose(places: list[Place]) -> list[Disturbance]:
        writing = [place for place in places if place.function == "PrivateDirectory.write"]
        assert writing
        return [Disturbance(place, 0, TimeoutError) for place in writing]

    assert disturb_processes(Ranks(Kind("file", 2), meeting_place), "all_gather text", choose) == []


def test_a_signal_handler_that_raises_frees_the_lock_of_the_run(meeting_place: Path) -> None:
    def choose(places: list[Place]) -> list[Disturbance]:
        locking = [place for place in places if place.function in ("_acquire", "_locked")]
        where = [place for place in locking if place.name in INTERRUPTIBLE]
        return [Disturbance(place, 0, error) for place in where for error in ERRORS[:2]]

    assert disturb_processes(Ranks(Kind("file", 2), meeting_place), "group", choose) == []


@pytest.mark.parametrize("call", CALLS)
def test_a_call_without_enough_stack_is_never_a_wrong_value(call: str) -> None:
    for left in random.sample(range(4, 80), 6):
        assert run_threads(call, with_little_stack(left)) == ["", ""], left


@pytest.mark.soak
@pytest.mark.parametrize("call", CALLS)
def test_a_call_with_any_stack_is_never_a_wrong_value(call: str) -> None:
    for left in range(1, 150):
        assert run_threads(call, with_little_stack(left)) == ["", ""], left


@pytest.mark.soak
@pytest.mark.parametrize("call", CALLS)
def test_an_exception_at_every_instruction_of_threads(call: str) -> None:
    assert disturb_threads(call, every) == []


@pytest.mark.soak
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", ["file", "traced file", "torch"])
def test_an_exception_at_every_instruction_of_processes(
    call: str, backend: str, meeting_place: Path, tmp_path: Path
) -> None:
    world = Ranks(Kind(backend.split()[-1], 2), meeting_place, patience=1800)
    variables = {"SYNCPRIMS_TRACE": str(tmp_path / "trace")} if "traced" in backend else {}
    assert disturb_processes(world, call, every, **variables) == []
