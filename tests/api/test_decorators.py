"""`main_first`, `in_turn` and the `on_main` family."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import in_processes, several
from support.rank_worlds import Ranks, Signs

import syncprims as sp
from syncprims.testing import DeadlockError, run_world


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


NESTINGS = [(False, True), (True, False), (False, False), (True, True)]  # what is local


def nest(body: Callable[[], object]) -> list[list[Any]]:
    """Return what each nesting of two blocks has raised on this rank, and how many go on."""
    found = []
    for outer, inner in NESTINGS:
        raised: list[object] = []
        try:
            with sp.main_first(local=outer):
                with sp.main_first(local=inner):
                    body()
                with sp.main_first(local=outer), sp.main_first("third", local=inner):
                    pass
        except Exception as error:
            raised += [type(error).__name__, "no data" in str(error)]
        found.append([*raised, len(sp.all_gather(0))])
    return found


def nest_caught(body: Callable[[], object]) -> list[str]:
    """Return what the inner block of each nesting has raised on this rank."""
    found = []
    for outer, inner in NESTINGS:
        with sp.main_first(local=outer):
            try:
                with sp.main_first(local=inner):
                    body()
            except Exception as error:
                found.append(type(error).__name__)
        sp.barrier()
    return found


def fail_on_main() -> None:
    if sp.is_main():
        raise KeyError("no data")


def check_nested_failures() -> None:
    """Check on this rank what it raises if main fails in the inner block."""
    n, local = sp.get_world_size(), sp.current().node_rank == 0  # the last one is local
    expected: list[list[Any]] = [["KeyError" if sp.is_main() else "PeerFailed", True, n]] * 4
    caught_inside = [expected[0][0]] * (4 if local else 2)  # whose inner block is not local
    assert nest(fail_on_main) == [*expected[:3], expected[3] if local else [n]]
    assert nest_caught(fail_on_main) == caught_inside


def test_blocks_may_be_nested(world: Ranks, tmp_path: Path) -> None:
    def program() -> list[bool]:
        late: list[bool] = []
        node = sp.current().node_rank

        def body() -> None:
            number = len(late)
            sign = tmp_path / (f"{number}-of-{node}" if number == 3 else f"{number}")
            late.append(sign.exists())
            sign.touch()

        nest(body)
        check_nested_failures()
        return late

    first, *others = world.run(program)
    assert (first, [late[:3] for late in others]) == ([False] * 4, [[True] * 3] * len(others))
    assert [late[3] for late in others].count(False) <= len(others) // 2


@pytest.mark.soak  # the same in threads runs daily
def test_blocks_may_be_nested_on_several_hosts() -> None:
    order: list[int] = []
    for seed in range(20):
        order.clear()
        run_world(lambda: nest(lambda: order.append(sp.get_rank())), 6, nodes=3, seed=seed)
        world_local, local_world, whole, local = (order[i : i + 6].index for i in (0, 6, 12, 18))
        for place in (world_local, local_world, local):
            assert all(place(first) < place(first + 1) for first in (0, 2, 4))
        assert world_local(0) == local_world(0) == whole(0) == 0
        run_world(check_nested_failures, 6, nodes=3, seed=seed)
        with pytest.raises((sp.CollectiveMismatch, DeadlockError)):
            run_world(lambda: nest(sp.barrier), 4, nodes=2, seed=seed)


def test_main_first_at_a_directory_prepares_once_on_one_host(world: Ranks, tmp_path: Path) -> None:
    def program() -> bool:
        with sp.main_first("prepare", at=tmp_path):
            there = (tmp_path / "cache").exists()
            (tmp_path / "cache").touch()
        return there

    assert world.run(program) == [False] + [True] * (world.ranks - 1)


@pytest.mark.parametrize("places", ["aaa", "abc", "abb"])
def test_main_first_at_a_directory_prepares_once_in_each(places: str, tmp_path: Path) -> None:
    """Three nodes share it, or none does, or only two that are without rank 0."""
    for place in places:
        (tmp_path / place).mkdir(exist_ok=True)
    ran: dict[str, list[int]] = {}

    def program() -> None:
        place = places[sp.get_node_rank()]
        with sp.main_first(at=tmp_path / place):
            ran.setdefault(place, []).append(sp.get_rank())
        for local in (True, False):
            with sp.main_first(at=tmp_path / place), sp.main_first(local=local):
                pass
            with sp.main_first(local=local), sp.main_first(at=tmp_path / place):
                pass
        sp.barrier()

    for seed in range(5):
        ran.clear()
        run_world(program, 6, nodes=3, seed=seed)
        firsts = {place: 2 * places.index(place) for place in places}
        assert {place: ranks[0] for place, ranks in ran.items()} == firsts
        assert sum(map(len, ran.values())) == 6
    assert not [*tmp_path.rglob(".*")]


def test_main_first_at_a_directory_that_one_host_lacks(tmp_path: Path) -> None:
    def program(inside: bool) -> str:
        path = tmp_path if inside or sp.get_node_rank() == 0 else tmp_path / "absent"
        try:
            outer = sp.main_first() if inside else contextlib.nullcontext()
            with outer, sp.main_first("prepare", at=path):
                pass
        except sp.SyncError as error:
            return f"{type(error).__name__}: {error} {len(sp.all_gather(0))}"
        return "passed"

    first, _, third, _ = run_world(lambda: program(False), 4, nodes=2)
    assert third.startswith(f"ConfigurationError: main_first(at='{tmp_path}/absent'): rank 2 on ")
    assert first.startswith("PeerFailed: rank 2 failed in main_first(at) 'prepare' (tests/")
    assert not [*tmp_path.iterdir()]
    first, second, *_ = run_world(lambda: program(True), 4, nodes=2)
    assert "enter one with this path before" in first
    assert second.startswith("PeerFailed: rank 0 failed in main_first")


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
