"""`explore(strategy="all")`: each order that can differ, and none twice."""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

import syncprims as sp
from syncprims.testing import (
    Delay,
    Kill,
    UncontrolledError,
    access,
    every_point,
    explore,
    run_world,
    sleep,
)  # fmt: skip
from syncprims.testing.orders import find_orders
from syncprims.testing.outcomes import WorldRun
from syncprims.testing.world_spec import WorldSpec
from syncprims.testing.worlds import run_once

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


class Search:
    """A search through all orders that does not know which of them can differ."""

    exact = True

    def __init__(self) -> None:
        self.steps: list[tuple[int, Sequence[int]]] = []
        self.prefix: list[int] = []

    def pick(self, able: Sequence[int], current: int | None) -> int:
        at = len(self.steps)
        rank = self.prefix[at] if at < len(self.prefix) else able[0]
        self.steps.append((rank, able))
        return rank

    def access(self, rank: int, thing: object, mode: str) -> None:
        pass

    def go_on(self) -> bool:
        while self.steps:
            rank, able = self.steps.pop()
            if rank != able[-1]:
                later = able[able.index(rank) + 1]
                self.prefix, self.steps = [*(r for r, _ in self.steps), later], []
                return True
        return False


def ends_of(run: WorldRun) -> Any:
    """Return how the ranks have ended: with which results and errors."""
    return tuple((o.end, repr(o.result), type(o.error).__name__) for o in run.outcomes)


def assert_all_ends_come_up(
    program: Any, ranks: int, faults: Sequence[Delay] = (), most: int = 250
) -> set[Any]:
    spec = WorldSpec(program, ranks, faults=faults, traced=False)
    search, searched = Search(), set[Any]()
    for _ in range(most):
        searched.add(ends_of(run_once(replace(spec, schedule=search))))
        if not search.go_on():
            break
    found: set[Any] = set()
    for schedule in find_orders(ranks):
        found.add(ends_of(run_once(replace(spec, schedule=schedule))))
    assert searched <= found, searched - found
    return found


def late_barrier() -> None:
    if sp.is_main():
        sleep(5)
    sp.barrier(timeout=5)


def late_gather() -> list[int]:
    if sp.is_main():
        sleep(5)
    return sp.all_gather(sp.get_rank(), timeout=5)


def late_end() -> None:
    if sp.is_main():
        sleep(5)
    else:
        sp.barrier(timeout=5)


def late_failure() -> None:
    if sp.is_main():
        sleep(5)
        raise ValueError("bad batch")
    sp.barrier(timeout=5)


def deferred_flag() -> list[bool]:
    stop = sp.Trigger("stop")
    if not sp.is_main():
        sleep(4)
        stop.set()
    seen = [stop.check() for _ in range(2)]
    if sp.is_main():
        sleep(4)
    sp.barrier(timeout=4)
    return seen


def two_groups() -> Any:
    groups = [sp.group([0, 1]), sp.group([0, 2])]
    if sp.is_main():
        sleep(5)
    try:
        for group in groups if sp.is_main() else [groups[sp.get_rank() - 1]]:
            group.barrier(timeout=5)
    except sp.SyncError as error:
        return type(error).__name__
    return "met"


@pytest.mark.parametrize(
    ("program", "ranks", "ends"),
    [
        (late_barrier, 2, 2), (late_gather, 2, 2), (late_end, 2, 2), (late_failure, 2, 2),
        (deferred_flag, 2, 2), (two_groups, 3, 4),
    ],
    ids=lambda of: getattr(of, "__name__", str(of)),
)  # fmt: skip
def test_what_comes_at_the_instant_of_a_deadline_may_come_before_or_after(
    program: Any, ranks: int, ends: int
) -> None:
    assert len(assert_all_ends_come_up(program, ranks)) == ends


def test_a_delay_until_the_deadline_fails_in_one_order_and_one_below_it_has_one() -> None:
    def program() -> None:
        sp.barrier(timeout=3)

    with pytest.raises(sp.SyncTimeout):
        explore(program, 2, strategy="all", faults=[Delay(0, seconds=3)])
    one = explore(program, 3, strategy="all", faults=[Delay(0, seconds=2.5)])
    assert one.schedules == 1


def random_ties(seed: int) -> tuple[Any, list[Delay]]:
    """Return a program of two ranks, and faults, with events and deadlines at few instants."""
    dice = random.Random(seed)
    calls = [
        (dice.choice(["barrier", "all_gather", "any_rank", "main_first", "in_turn"]),
         dice.choice([None, 1, 2, 2]))
        for _ in range(dice.randint(1, 2))
    ]  # fmt: skip
    sleeps = [[dice.choice([0, 0, 1, 2]) for _ in range(len(calls) + 1)] for _ in range(2)]
    ends = [dice.choice([None, None, 0, len(calls)]) for _ in range(2)]  # before this call
    delays = [Delay(dice.randrange(2), 1, dice.choice([1, 2]))] * (dice.random() < 0.3)

    def program() -> Any:
        me, log = sp.get_rank(), list[Any]()
        for number, (kind, timeout) in enumerate([*calls, ("", None)]):
            if sleeps[me][number]:
                sleep(sleeps[me][number])
            if not kind or ends[me] == number:
                return log
            try:
                if kind in ("main_first", "in_turn"):
                    with getattr(sp, kind)(timeout=timeout):
                        sleep(1)
                elif kind == "barrier":
                    sp.barrier(timeout=timeout)
                else:
                    log.append(getattr(sp, kind)(me == 1, timeout=timeout))
            except sp.SyncError as error:
                log.append(type(error).__name__)
        return log

    return program, delays


#: Seeds whose ties a search misses that takes an awaited post to come first before any deadline.
TIES = [21, 24, 30, 47, 65, 80]


@pytest.mark.parametrize("seeds", [TIES, pytest.param(range(400), marks=pytest.mark.soak)])
def test_random_programs_with_ties_agree_with_a_search_through_all_orders(
    seeds: Sequence[int],
) -> None:
    several = 0
    for seed in seeds:
        program, delays = random_ties(seed)
        several += len(assert_all_ends_come_up(program, 2, delays)) > 1
    assert several > len(seeds) / 8


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

    def counted() -> None:
        count(3)
        sp.barrier()

    with pytest.raises(ValueError, match="20 worlds were too few"):  # before the fault strikes
        every_point(counted, Kill(1), 4, strategy="all", most=20)


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

    def receive() -> Any:
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            sleep(5)
            dist.isend(torch.zeros(2), 1).wait()
        else:
            dist.irecv(torch.zeros(2), 0).wait(timedelta(seconds=5))

    torch: Any = importlib.import_module("torch")
    with pytest.raises(sp.SyncTimeout):
        explore(receive, 2, strategy="all", torch=True)
