"""Calls that are alike: names and call sites distinguish them, on every backend."""

from __future__ import annotations

import enum
import os
import re
import runpy
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import on_every_rank, several
from support.rank_worlds import Ranks

import syncprims as sp

# Its limit takes more call sites than a program has.
from syncprims._protocol.call_site import NoteCache
from syncprims.testing import DeadlockError, run_world

#: Every call that carries a value or a flag, with a name.
CALLS: dict[str, Callable[[str], object]] = {
    "barrier": lambda name: sp.barrier(name),
    "broadcast": lambda name: sp.broadcast(name, name=name),
    "all_gather": lambda name: sp.all_gather(name, name=name),
    "all_reduce": lambda name: sp.all_reduce(1, name=name),
    "any_rank": lambda name: sp.any_rank(False, name=name),
    "all_ranks": lambda name: sp.all_ranks(True, name=name),
    "assert_same": lambda name: sp.assert_same(1, name),
    "main_first": lambda name: enter(sp.main_first(name)),
    "in_turn": lambda name: enter(sp.in_turn(name)),
    "trigger": lambda name: sp.Trigger(name).check(),
    "on_main": lambda name: sp.on_main(share=True, name=name)(str)(),
    "on_last": lambda name: sp.on_last(share=True, name=name)(str)(),
    "on_rank": lambda name: sp.on_rank(0, share=True, name=name)(str)(),
    "on_local_main": lambda name: sp.on_local_main(share=True, name=name)(str)(),
    "on_local_rank": lambda name: sp.on_local_rank(0, share=True, name=name)(str)(),
}


def enter(block: Any) -> None:
    with block:
        pass


@pytest.mark.parametrize("call", CALLS)
@several(2)
def test_calls_of_different_names_never_meet(world: Ranks, call: str) -> None:
    if call.startswith("on_local") and world.kind.hosts > 1:
        pytest.skip("a host has one rank to run")

    def program() -> str:
        CALLS[call]("the same")
        with pytest.raises(sp.CollectiveMismatch) as caught:
            CALLS[call]("loss" if sp.is_main() else "accuracy")
        return str(caught.value)

    for said in world.run(program):
        assert f"rank 0: {call} 'loss'" in said
        assert f"rank 1: {call} 'accuracy'" in said


class Word(str, enum.Enum):  # noqa: UP042 - the formatted text of a StrEnum is its value
    """Words that are members of an enum on one rank."""

    NAME = "name"
    MAX = "max"


@several(2)
@on_every_rank
def test_a_member_of_an_enum_is_the_text_that_it_equals() -> None:
    for call in CALLS.values():
        call(Word.NAME if sp.is_main() else "name")
    largest: Any = sp.all_reduce(sp.get_rank(), op=Word.MAX if sp.is_main() else "max")  # type: ignore[call-overload]
    assert (largest, sp.all_gather(sp.get_rank())) == (1, [0, 1])


def reversed_order() -> list[Any]:
    if sp.is_main():
        loss = sp.all_reduce(1.0)
        accuracy = sp.all_reduce(10.0)
    else:
        accuracy = sp.all_reduce(20.0)
        loss = sp.all_reduce(2.0)
    return [loss, accuracy]


@several()
def test_strict_ranks_make_a_call_from_one_line(world: Ranks) -> None:
    in_processes = world.kind.backend != "threads"

    def program() -> str:
        sp.all_reduce(1)
        if in_processes:  # the same file has two relative paths
            os.chdir(Path(__file__).parents[sp.get_rank() % 2])
        sp.all_reduce(1)
        with pytest.raises(sp.CollectiveMismatch) as caught:
            reversed_order()
        with pytest.raises(sp.CollectiveMismatch):
            sp.barrier("the group is torn")
        return str(caught.value)

    first = reversed_order.__code__.co_firstlineno
    for said in world.run(program, SYNCPRIMS_STRICT="1"):
        assert re.search(rf"rank 0: all_reduce \(.*test_call_names.py:{first + 2}\)", said)
        assert re.search(rf"rank 1: all_reduce \(.*test_call_names.py:{first + 5}\)", said)
        assert "SYNCPRIMS_STRICT=1 refuses" in said


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_test_world_warns_of_values_from_different_lines(kind: Any) -> None:
    with pytest.warns(sp.UnequalCallSites, match="on different lines") as caught:
        found = run_world(reversed_order, 2, kind=kind)
    assert found == [[21.0, 12.0], [12.0, 21.0]]  # the values are mixed up
    assert {one.filename for one in caught} == {__file__}
    line = reversed_order.__code__.co_firstlineno + 5
    said = str(caught[0].message)
    assert f"rank 1: all_reduce (tests/protocol/test_call_names.py:{line})" in said


def save() -> None:
    sp.barrier()


def save_on_main(epochs: int) -> None:
    for _ in range(epochs):
        if sp.is_main():
            save()
        save()


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_barrier_that_meets_another_one_is_found_by_the_lines_that_lead_to_it(kind: Any) -> None:
    """Both are in one helper: their own lines are the same."""
    with (
        pytest.warns(sp.UnequalCallSites) as caught,
        pytest.raises(DeadlockError) as deadlock,
    ):
        run_world(lambda: save_on_main(3), 3, kind=kind)
    here, first = "tests/protocol/test_call_names.py", save_on_main.__code__.co_firstlineno
    helper = f"barrier ({here}:{save.__code__.co_firstlineno + 1}) in save(), called at {here}"
    assert len(caught) == 1  # once for the two lines, and not in each epoch
    said = str(caught[0].message)
    assert f"(round 1):\n  rank 0: {helper}:{first + 3}\n" in said
    assert f"ranks [1, 2]: {helper}:{first + 4}\n" in said
    assert "`if is_main(): ...; barrier()` and `else: barrier()`" in said
    assert (
        f"first difference of lines: round 1: rank 0 came from {helper}:{first + 3}, "
        f"ranks [1, 2] came from {helper}:{first + 4}"
    ) in str(deadlock.value)


def test_calls_in_threads_of_a_rank_have_no_lines_to_compare() -> None:
    def program() -> None:
        if sp.is_main():
            thread = threading.Thread(target=sp.barrier)
            thread.start()
            thread.join()
        else:
            sp.barrier()

    run_world(program, 2)  # a warning would be an error


def test_the_warning_can_be_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", sp.SyncWarning)
        with pytest.raises(sp.UnequalCallSites, match="Give each call a name="):
            run_world(reversed_order, 2)


def test_names_and_blocks_on_different_lines_are_no_reason_to_warn() -> None:
    def program() -> list[Any]:
        if sp.is_main():
            sp.barrier("both")
            found = [sp.all_reduce(1, name="loss"), sp.broadcast(1, name="one")]
            with sp.main_first():
                pass
        else:
            sp.barrier("both")
            found = [sp.all_reduce(1, name="loss"), sp.broadcast(0, name="one")]
            with sp.main_first():
                pass
        sp.all_reduce(1 if sp.is_main() else 2)
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_world(program, 2) == [[2, 1]] * 2


def test_a_program_that_a_library_has_is_the_users(tmp_path: Path) -> None:
    """As in `python -m library.program`: no frame further out is anybody's line."""
    program = tmp_path / "program.py"
    program.write_text("def call():\n    return note('barrier')\n\n\nlabel = call().label\n")
    note = NoteCache((str(tmp_path),)).note
    found = runpy.run_path(str(program), {"note": note}, "__main__")
    assert str(found["label"]) == "barrier (program.py:5)"
