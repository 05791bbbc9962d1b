"""`main_first`, `in_turn` and the `on_main` family."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import in_processes, several
from support.rank_worlds import Ranks, Signs

import syncprims as sp


def test_main_goes_first(world: Ranks, tmp_path: Path) -> None:
    def program() -> bool:
        with sp.main_first(name="prepare"):
            there = (tmp_path / "cache").exists()
            if not there:
                time.sleep(0.05)
                (tmp_path / "cache").write_text("ready")
        return there

    assert world.run(program) == [False] + [True] * (world.ranks - 1)


def test_main_first_can_be_local_or_a_groups(world: Ranks) -> None:
    def program() -> list[str]:
        ran = []
        with sp.main_first(local=True):
            ran.append("local")
        last = sp.group([sp.get_world_size() - 1])
        if sp.is_last():
            with last.main_first():  # the group's first rank is its main
                ran.append("group")
        return ran

    n = world.ranks
    assert world.run(program) == [["local"]] * (n - 1) + [["local", "group"]]


@in_processes
def test_main_does_not_wait_for_the_others_bodies(world: Ranks, signs: Signs) -> None:
    def program() -> int:
        with sp.main_first():
            if not sp.is_main():
                signs.wait("main is past it")
        if sp.is_main():
            signs.give("main is past it")
        return sp.get_rank()

    assert world.run(program) == list(range(world.ranks))


def test_ranks_take_turns(world: Ranks, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def program() -> None:
        with sp.in_turn(), log.open("a") as file:
            file.write(f"{sp.get_rank()} in\n")
            file.flush()
            file.write(f"{sp.get_rank()} out\n")

    world.run(program)
    assert log.read_text().split("\n")[:-1] == [
        f"{rank} {way}" for rank in range(world.ranks) for way in ("in", "out")
    ]


@several(4)
def test_a_failing_turn_ends_all_later_ones(world: Ranks) -> None:
    def program() -> Any:
        ran = []
        try:
            with sp.in_turn():
                ran.append(True)
                if sp.get_rank() == 1:
                    raise OSError("disk")
        except OSError as error:
            said = type(error).__name__
        except sp.PeerFailed as error:
            said = error.failures[1].message
        sp.barrier("still in step")
        return ran, said

    assert world.run(program) == [([True], "disk"), ([True], "OSError"), ([], "disk"), ([], "disk")]


def test_decorators_choose_one_rank(world: Ranks) -> None:
    @sp.on_main
    def main() -> str:
        """Say it."""
        return "main"

    @sp.on_last(default="-")
    def last() -> str:
        return "last"

    @sp.on_local_main()
    def local() -> str:
        return "local"

    @sp.on_rank(0, default=0)
    def zero(value: int, *, more: int = 0) -> int:
        return value + more

    @sp.on_local_rank(0)
    def local_zero() -> str:
        return "local 0"

    assert main.__name__ == "main"
    assert main.__doc__ == "Say it."

    def program() -> list[Any]:
        return [main(), last(), local(), zero(1, more=2), local_zero()]

    n = world.ranks
    for r, said in enumerate(world.run(program)):
        first, first_here = r == 0, r % (n // world.kind.hosts) == 0
        assert said == [
            "main" if first else None,
            "last" if r == n - 1 else "-",
            "local" if first_here else None,
            3 if first else 0,
            "local 0" if first_here else None,
        ]


def test_a_rank_that_does_not_exist_is_an_error(world: Ranks) -> None:
    @sp.on_rank(99)
    def nobody() -> None: ...

    def program() -> None:
        with pytest.raises(ValueError, match=r"on_rank\(99\): no such rank; the world has ranks"):
            nobody()
        with pytest.raises(ValueError, match="on_local_rank"):
            sp.on_local_rank(99)(nobody)()
        with pytest.raises(TypeError, match="decorates a function"):
            sp.on_main(3)  # type: ignore[call-overload]

    world.run(program)


def test_shared_results_and_exceptions(world: Ranks) -> None:
    @sp.on_main(share=True)
    def load(path: str) -> dict[str, str]:
        if path == "missing":
            raise FileNotFoundError(path)
        return {"path": path, "by": str(sp.get_rank())}

    @sp.on_last(share=True)
    async def count() -> int:
        await asyncio.sleep(0)
        return sp.get_rank()

    def program() -> Any:
        got = load("data")
        try:
            load("missing")
        except FileNotFoundError:
            said = "own"
        except sp.PeerFailed as error:
            said = error.failures[0].headline
        assert asyncio.run(count()) == sp.get_world_size() - 1
        sp.barrier("still in step")
        return got, said

    expected = {"path": "data", "by": "0"}
    first, *others = world.run(program)
    assert first == (expected, "own")
    assert others == [(expected, "FileNotFoundError: missing")] * (world.ranks - 1)
