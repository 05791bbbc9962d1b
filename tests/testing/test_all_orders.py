"""`explore(strategy="all")`: each order that can differ, and none twice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

import syncprims as sp
from syncprims.testing import Kill, UncontrolledError, access, every_point, explore, run_world

#: What a rank does, in order: it reads or writes (True) a thing, or comes to a barrier (None).
Program = list[tuple[str, bool] | None]


def random_program(seed: int) -> list[Program]:
    dice = random.Random(seed)
    ranks = dice.choice([2, 2, 3])
    programs: list[Program] = [[] for _ in range(ranks)]
    for part in range(dice.choice([1, 1, 2])):
        for program in programs:
            program += [None] * (part > 0)
            for _ in range(dice.randint(0, 6 - ranks)):
                program.append((dice.choice("ab"), dice.random() < 0.6))
    return programs


def outcomes_of(programs: Sequence[Program]) -> set[Any]:
    """Return what ranks may see, each as a log of the writes before each access: by all orders."""
    outcomes: set[Any] = set()
    seen: set[Any] = set()
    todo: list[Any] = [((0,) * len(programs), (), ((),) * len(programs))]
    while todo:
        at, written, logs = state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        following = [p[n] if n < len(p) else "end" for p, n in zip(programs, at, strict=True)]
        if following == ["end"] * len(programs):
            outcomes.add(logs)
        elif following == [None] * len(programs):
            todo.append((tuple(n + 1 for n in at), written, logs))
        for rank, step in enumerate(following):
            if not isinstance(step, tuple):
                continue
            before = tuple(write for thing, write in written if thing == step[0])
            more = (*written, (step[0], (rank, at[rank]))) if step[1] else written
            log = (*logs[:rank], (*logs[rank], before), *logs[rank + 1 :])
            todo.append(((*at[:rank], at[rank] + 1, *at[rank + 1 :]), more, log))
    return outcomes


@pytest.mark.parametrize("start", range(0, 120, 30))
def test_all_that_ranks_can_see_comes_up(start: int) -> None:
    """Equal to what a search through all orders of a model finds, with next to no order twice."""
    different = needed = 0
    for seed in range(start, start + 30):
        programs = random_program(seed)
        written: dict[str, Any] = {}

        def program(programs: list[Program] = programs, written: Any = written) -> Any:
            if sp.is_main():
                written.update(a=(), b=())
            sp.barrier("begin")
            log = []
            for number, step in enumerate(programs[sp.get_rank()]):
                if step is None:
                    sp.barrier()
                    continue
                access(step[0], write=step[1])
                log.append(written[step[0]])
                if step[1]:
                    written[step[0]] += ((sp.get_rank(), number),)
            return tuple(log)

        found: set[Any] = set()

        def check(results: list[Any], found: set[Any] = found) -> None:
            found.add(tuple(results))

        explored = explore(program, len(programs), strategy="all", check=check)
        assert found == outcomes_of(programs)
        different += explored.schedules
        needed += len(found)
    assert different <= 1.02 * needed


def test_collectives_commute() -> None:
    """So do the library's own protocols: one order proves them."""

    def program() -> None:
        with sp.main_first("prepare"):
            pass
        stop = sp.Trigger("stop")
        if sp.get_rank() == 1:
            stop.set()
        assert stop.check()
        with sp.in_turn():
            pass
        sp.assert_same(sp.all_reduce(sp.broadcast({"x": 1})["x"]), "sum")
        sp.group([0, 1])

    assert explore(program, 3, strategy="all").certificate == (
        "all 1 orders of 3 ranks pass; 1 were different"
    )


def count(times: int = 1) -> int:
    """Count in a variable that ranks share, as each of them would in a file."""
    if sp.is_main():
        shared["count"] = 0
    sp.barrier("begin")
    for _ in range(times):
        access("count", write=False)
        seen = shared["count"]
        access("count")
        shared["count"] = seen + 1
    sp.barrier("end")
    return shared["count"]


shared: dict[str, int] = {}


def check_count(results: list[int]) -> None:
    assert results == [len(results)] * len(results), "an update is lost"


def test_a_lost_update_is_found_and_its_order_is_replayed() -> None:
    with pytest.raises(AssertionError, match="an update is lost") as caught:
        explore(count, 3, strategy="all", check=check_count)
    seed = "\n".join(caught.value.__notes__).split("--world-seed=")[1].split()[0]
    assert seed.startswith("order")
    results = run_world(count, 3, seed=seed)
    assert results != [3, 3, 3]
    assert run_world(count, 3, seed=seed) == results
    with pytest.raises(AssertionError, match="an update is lost"):
        explore(count, 3, strategy="all", check=check_count, seed=seed)


def test_a_program_that_is_too_large_proves_nothing() -> None:
    with pytest.raises(ValueError, match=r"50 orders of 3 ranks pass, and there are more"):
        explore(lambda: count(3), 3, strategy="all", schedules=50)


def test_what_no_order_decides_is_reported() -> None:
    dice = random.SystemRandom()

    def program() -> None:
        for _ in range(6):
            access("x")
            if dice.random() < 0.5:
                sp.barrier("more")
                sp.barrier("and more")

    with pytest.raises((UncontrolledError, sp.SyncError, AssertionError)):
        explore(program, 2, strategy="all")


def test_survivors_of_a_kill_are_one_world_in_every_order() -> None:
    def program() -> Any:
        try:
            for _ in range(2):
                sp.barrier()
        except sp.PeerLost:
            change = sp.reform(min_ranks=2)
            return change.members, sp.all_reduce(1)
        return None

    points = every_point(program, Kill(1), 3, strategy="all")
    assert 2 < len(points) < 100  # each order that can differ, and no other
    assert {str(point.results) for point in points} == {"[((0, 2), 2), None, ((0, 2), 2)]"}
    with pytest.raises(ValueError, match="threads"):
        every_point(program, Kill(1), 3, strategy="all", kind="processes")


def test_calls_of_the_store_come_in_every_order() -> None:
    dist: Any = pytest.importorskip("torch.distributed")

    def program(update: Any) -> int:
        dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
        store.add("count", 0)
        dist.barrier()
        update(store)
        dist.barrier()
        seen = int(store.get("count"))
        dist.destroy_process_group()
        return seen

    def careless(store: Any) -> None:
        store.set("count", str(int(store.get("count")) + 1))

    with pytest.raises(AssertionError, match="an update is lost"):
        explore(lambda: program(careless), 2, strategy="all", torch=True, check=check_count)
    explored = explore(
        lambda: program(lambda store: store.add("count", 1)),
        2, strategy="all", torch=True, check=check_count,
    )  # fmt: skip
    assert "all" in explored.certificate
