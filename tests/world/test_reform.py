"""`reform`: the ranks that are left decide, once, who goes on, and nothing of the world before."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WorldKind, both_kinds, seeds
from support.checkpoint_worlds import Kept
from support.random_programs import Kind as StepKind
from support.random_programs import Step, draw_step, make_call, value
from support.rank_worlds import Died, Kind, Ranks, Signs, served_store

import syncprims as sp

# Only the launcher sets these variables.
from syncprims._world.launchers import make_rank_variables
from syncprims.testing import DeadlockError, Fault, FaultMissed, Join, Kill, every_point, run_world

LOST = (sp.PeerLost, sp.PeerFailed)


KINDS: list[StepKind] = [
    *("barrier", "main_first", "broadcast", "all_reduce", "all_reduce", "all_gather", "group"),
    *("check", "check"),
]


def draw_program(seed: int, steps: int) -> list[Step]:
    dice = random.Random(seed)
    return [*(draw_step(dice, 4, KINDS) for _ in range(steps)), Step("barrier", "end")]


def survive(seed: int, steps: int = 8) -> Any:
    """Make random calls, go on after each loss, and return what was seen, and the changes."""
    program = draw_program(seed, steps)
    triggers = {"stop": sp.Trigger("stop"), "save": sp.Trigger("save", lag=1)}
    seen: list[Any] = []
    changes: list[Any] = []
    change = sp.current().change  # of a run that this rank has joined
    while len(seen) < len(program):
        try:
            if change is not None:
                seen, changes = sp.hand_over((seen, changes), change)
                change = None
            number, size = len(seen), sp.get_world_size()
            step = program[number]
            step = step._replace(src=None if step.src is None else step.src % size)
            sent = value(seed, step, number, sp.get_rank())
            result = make_call(step, sent, triggers)
            seen = [*seen, (size, result)]
            if triggers["stop"].joiners:
                triggers["stop"].joiners = False
                change = sp.reform()
        except LOST:
            change = sp.reform()
        if change is not None:
            changes.append(tuple(change._replace(rank_before=None)))
    return sp.get_rank(), sp.get_world_size(), seen, changes


def judge(results: list[Any], count: int) -> None:
    """Check what :func:`survive` has returned on the ranks that are left."""
    assert results
    # Of two that join, the one that was started later may have come first.
    assert sorted(rank for rank, *_ in results) == list(range(len(results)))
    for _, size, seen, changes in results:
        assert seen == results[0][2]
        assert changes == results[0][3]
        left = changes[-1][1] if changes else range(count)
        # The last call may have been over for all of them when another rank was lost.
        assert len(results) <= size == len(left)


def run_with_kills(seed: int, kind: WorldKind = "threads", last: int = 20) -> None:
    choose = random.Random(seed)
    victims = choose.sample(range(4), choose.randint(1, 3))
    faults: list[Fault] = [Kill(rank=rank, at=choose.randint(1, last)) for rank in victims]
    if kind == "threads":
        faults += [Join(choose.randrange(4), at=choose.randint(1, last)) for _ in range(seed % 3)]
    try:
        of_ranks = run_world(
            lambda: survive(seed),
            4,
            faults=faults,
            kind=kind,
            seed=seed if kind == "threads" else None,
        )
    except FaultMissed:  # the program was over before: let them all come earlier
        run_with_kills(seed, kind, last - 3)
        return
    results = [result for result in of_ranks if result is not None]
    judge(results, 4)
    seen = results[0][2]
    fresh = {
        size: run_world(lambda: survive(seed), size)[0][2] for size in {size for size, _ in seen}
    }
    for number, step in enumerate(draw_program(seed, 8)):
        if step.kind != "check":  # which depends on what ranks that are lost have set
            assert seen[number] == fresh[seen[number][0]][number]


@seeds([range(100)], range(1_000, 11_000, 500))
def test_random_programs_go_on_after_random_losses(seeds: range) -> None:
    for seed in seeds:
        run_with_kills(seed)


@seeds([range(12)], range(100, 1_100, 50))
def test_random_programs_go_on_in_processes(seeds: range) -> None:
    for seed in seeds:
        run_with_kills(seed, "processes")


@pytest.mark.parametrize("victim", range(3))
def test_a_rank_may_die_at_any_point_of_a_reform_of_others(victim: int) -> None:
    """Also in the middle of it: between its call, the decision, and the first round."""

    def program() -> Any:
        return None if sp.get_rank() == 3 else survive(1, 12)  # that one ends before the others

    def check(point: Any) -> None:
        assert point.error is None, point
        judge([result for result in point.results if result is not None], 4)

    points = every_point(program, Kill(rank=victim), 4, seed=victim, check=check)
    labels = {str(point.fault) for point in points}
    assert len(labels) > 15


def program_killed_at_any_instant(seed: int) -> Callable[[], Any]:
    def program() -> Any:
        choose = random.Random(seed * 10 + sp.get_rank())
        if sp.get_rank() != seed % 4:  # one lives
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, choose.uniform(0.001, 0.06))
        return survive(seed, 400)

    return program


@pytest.mark.parametrize("kind", [Kind("file", 4), Kind("torch", 4), Kind("torch", 4, 2)], ids=str)
@seeds([range(4)], range(100, 1_100, 100))
def test_ranks_may_be_killed_anywhere(kind: Kind, seeds: range, meeting_place: Path) -> None:
    with served_store() as store:
        variables = {**store.variables, "SYNCPRIMS_HEARTBEAT": "2"} if kind.hosts > 1 else {}
        for seed in seeds:
            ranks = Ranks(kind, meeting_place)
            outcomes = ranks.outcomes(program_killed_at_any_instant(seed), start=True, **variables)
            living = [outcome for outcome in outcomes if not isinstance(outcome, Died)]
            for outcome in living:
                assert not isinstance(outcome, BaseException), (seed, outcome)
            judge(living, 4)


@both_kinds
def test_survivors_have_new_numbers_and_the_same_change(kind: WorldKind) -> None:
    def program() -> Any:
        world = sp.current()
        old = sp.group([0, 1, 2, 3])
        pair = sp.group([2, 3])
        try:
            sp.barrier("last")
            raise AssertionError
        except sp.PeerLost:
            change = sp.reform(min_ranks=2)
        assert sp.current() is world
        assert world.change is change
        if kind == "processes":
            variables = make_rank_variables(sp.get_rank(), 3)
            assert {name: os.environ[name] for name in variables} == variables
        for group in (old, pair):
            if sp.get_rank() > 0 or group is old:
                with pytest.raises(sp.WorldClosed, match="reform"):
                    group.barrier()
        assert sp.hand_over(state := {"a": 1}, change) is state
        return change, sp.get_rank(), world.world_size, sp.all_gather(sp.get_rank())

    results = run_world(program, 4, kind=kind, faults=[Kill(rank=1, at="last")])
    assert results.pop(1) is None
    for rank, (change, *numbers) in enumerate(results):
        before = (0, 2, 3)
        rounds = change.rounds
        assert change == (1, before, (1,), (), before[rank], 0, rounds)
        assert len(set(rounds)) == 1
        assert numbers == [rank, 3, [0, 1, 2]]


@both_kinds
def test_a_rank_that_waits_in_a_group_learns_that_another_left(kind: WorldKind) -> None:
    def program() -> Any:
        pair = sp.group([0, 1])
        if sp.get_rank() == 1:
            with pytest.raises(sp.PeerLost, match=r"rank 0 has left this world.*reform"):
                pair.barrier("never met")
        else:
            with pytest.raises(sp.PeerLost):
                sp.barrier("last")
        return sp.reform().members

    results = run_world(program, 3, kind=kind, faults=[Kill(rank=2, at="last")])
    assert results[:2] == [(0, 1)] * 2


@both_kinds
def test_too_few_survivors_all_raise(kind: WorldKind) -> None:
    def program() -> Any:
        with pytest.raises(sp.PeerLost):
            sp.barrier("last")
        with pytest.raises(sp.PeerLost, match=r"needs 4 ranks, and 3 are left.*\[2\]") as raised:
            sp.reform(min_ranks=4 if sp.get_rank() == 0 else 1)
        assert raised.value.missing == [2]
        return sp.reform().epoch, sp.all_reduce(1)

    results = run_world(program, 4, kind=kind, faults=[Kill(rank=2, at="last")])
    assert [result for result in results if result] == [(2, 3)] * 3


def test_under_torchrun_the_error_says_that_its_agent_ends_all_ranks(meeting_place: Path) -> None:
    def program() -> bool:
        if sp.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(sp.PeerLost):
            sp.barrier()
        with pytest.raises(sp.PeerLost, match=r"agent now ends all ranks.*syncprims run"):
            sp.reform()
        return True

    with served_store() as store:
        variables = {**store.variables, "SYNCPRIMS_LAUNCHER": "torchrun"}
        results = Ranks(Kind("torch", 3), meeting_place).outcomes(program, start=True, **variables)
    assert isinstance(results.pop(1), Died)
    assert results == [True, True]


def test_a_living_rank_is_waited_for_and_named(signs: Signs) -> None:
    """No epoch is made without it, and it takes part in the next one."""

    def program() -> Any:
        sp.barrier("start")
        if sp.get_rank() == 1:
            signs.wait("0 has given up", "2 has given up")
            with pytest.raises(sp.PeerLost, match="has called reform"):
                sp.barrier("late")
        else:
            error = None
            while error is None or error.missing != [1]:  # the other one may come too late
                with pytest.raises(sp.SyncTimeout, match="live and have not called") as raised:
                    sp.reform(timeout=0.2)
                error = raised.value
            assert error.arrived == [0, 2]
            assert "rank 1 was last seen in barrier 'start'" in str(error)
            signs.give(f"{sp.get_rank()} has given up")
        return sp.reform().members, sp.all_reduce(1)

    assert run_world(program, 3, kind="processes") == [((0, 1, 2), 3)] * 3


def test_a_rank_in_a_reform_is_a_part_of_a_deadlock() -> None:
    def program() -> Any:
        if sp.get_rank() == 0:
            threading.Event().wait()
        sp.reform()

    with pytest.raises(DeadlockError, match="reform") as raised:
        run_world(program, 2)
    assert "rank 1" in str(raised.value)


@both_kinds
def test_a_flag_survives(kind: WorldKind) -> None:
    """Set and not seen, or seen by some: all ranks of the new world see it."""

    def program() -> Any:
        seen, unseen, lagged = sp.Trigger("a"), sp.Trigger("b"), sp.Trigger("c", lag=1)
        if sp.get_rank() == 0:
            for trigger in (seen, unseen, lagged):
                trigger.set("by 0")
        assert seen.check()
        lagged.check()
        with pytest.raises(sp.PeerLost):
            sp.barrier("last")
        sp.reform()
        lagged.check()
        return [(t.check(), t.reason) for t in (seen, unseen, lagged)]

    results = run_world(program, 3, kind=kind, faults=[Kill(rank=2, at="last")])
    assert results[:2] == [[(True, "by 0")] * 3] * 2


@both_kinds
def test_those_behind_take_the_state_over(kind: WorldKind) -> None:
    def program() -> Any:
        holder, rank = Kept(sp.get_rank()), sp.get_rank()
        with pytest.raises(sp.PeerLost):
            sp.barrier("last")
        change = sp.reform()
        ahead = change._replace(furthest=1, rounds=(3, 4, 2))  # as if this had been so
        tree = sp.hand_over({"holder": holder, "at": [rank, (rank,)]}, ahead)
        assert tree["holder"] is holder
        with pytest.raises(ValueError, match="epoch"):
            sp.hand_over({}, change._replace(epoch=7))
        return holder.state, tree["at"]

    results = run_world(program, 4, kind=kind, faults=[Kill(rank=3, at="last")])
    assert results[:3] == [(1, [1, (1,)])] * 3


def test_the_next_epoch_needs_no_more_memory(meeting_place: Path) -> None:
    """Files and maps of a world that has ended are gone."""

    def program() -> Any:
        counts: list[tuple[int, int]] = []
        for _ in range(4):
            sp.group([0, 1]).all_reduce(np.ones(3000)) if sp.get_rank() < 2 else sp.group([0, 1])
            sp.all_reduce(np.ones(3000))
            sp.reform()
            sp.barrier()
            maps = Path("/proc/self/maps").read_text().count("/board-")
            files = [path for path in meeting_place.rglob("board-*") if path.exists()]
            counts.append((maps, len(files)))
            sp.barrier()
        return counts

    for counts in Ranks(Kind("file", 3), meeting_place).run(program):
        assert len(set(counts)) == 1, counts


def go_on_until_joined(victims: list[int], signs: Signs) -> Any:
    """Some ranks die at step 5; return what each rank has seen once as many have joined."""
    world = sp.init()
    first = int(os.environ["SYNCPRIMS_RANK"]) if world.change is None else -1
    state: dict[str, Any] = {"step": 0, "sum": 0}
    stop, changes, change = sp.Trigger("stop"), list[Any](), world.change
    while not (world.epoch >= 2 and sp.get_world_size() == 4 and state["step"] >= 60):
        try:
            if change is not None:
                changes.append(change._replace(rank_before=None))
                state, change = sp.hand_over(state, change), None
                signs.give("they go on")
            if first in victims and state["step"] == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            added = sp.all_reduce(1)
            state = {"step": state["step"] + 1, "sum": state["sum"] + added}
            if stop.check():
                break
            if stop.joiners:
                state["step"] = 50
                change = sp.reform()
        except LOST:
            change = sp.reform()
    own = [first, sp.get_rank(), sp.get_world_size(), sp.get_node_rank(), sp.get_local_rank()]
    return own, state, changes


@pytest.mark.parametrize(
    ("hosts", "victims", "nodes"),
    [
        ("", [1], [0, 0, 0, 0]),  # one host, without a store
        pytest.param("0000 0", [1], [0, 0, 0, 0], marks=pytest.mark.soak),
        ("0011 0", [1], [0, 1, 1, 0]),  # where others of its host live
        ("0122 1", [1], [0, 1, 1, 2]),  # where nobody lives any more
        # On a host that the run did not have.
        pytest.param("0011 2", [1], [0, 1, 1, 2], marks=pytest.mark.soak),
        ("0011 22", [2, 3], [0, 0, 1, 1]),  # two at once, in place of a whole host
    ],
)
def test_a_process_joins_in_place_of_a_lost_rank(
    hosts: str, victims: list[int], nodes: list[int], meeting_place: Path, signs: Signs
) -> None:
    """It enters in a `reform` that the others make when a check says that it waits."""
    count = 4 + len(victims)

    def started() -> Any:
        rank = int(os.environ["SYNCPRIMS_RANK"])
        if rank >= 4:  # in this test, a second process of a lost rank
            signs.wait("they go on")
        own = [0, 1, 2, 3, *victims][rank]
        os.environ.update(make_rank_variables(own, 4, 2 if hosts else 1))
        if hosts:
            place = meeting_place / f"host-{hosts.replace(' ', '')[rank]}"
            place.mkdir(mode=0o700, exist_ok=True)
            os.environ["SYNCPRIMS_DIR"] = str(place)
        return go_on_until_joined(victims, signs)

    ranks = Ranks(Kind("torch" if hosts else "file", count), meeting_place)
    with served_store() as store:
        variables = {**store.variables, "SYNCPRIMS_HEARTBEAT": "3"} if hosts else {}
        results = ranks.outcomes(started, start=False, SYNCPRIMS_ELASTIC="1", **variables)
    assert all(isinstance(results.pop(rank), Died) for rank in reversed(victims)), results
    results.sort(key=lambda result: result[0][1])
    assert [result[1] for result in results] == [results[0][1]] * 4, results
    numbers = [own for own, *_ in results]
    local = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    survivors = [rank for rank in range(4) if rank not in victims]
    firsts = [*survivors, *[-1] * len(victims)]
    assert numbers == [[f, r, 4, nodes[r], local[r]] for r, f in enumerate(firsts)]
    changes = results[0][2]
    assert sum(len(change.lost) for change in changes) == len(victims)
    assert [rank for change in changes for rank in change.joined] == [*range(len(survivors), 4)]
    assert all(seen == changes[-len(seen) :] for _, _, seen in results)
    if len(victims) == 1:
        left, joined = changes
        assert left[1:4] == (tuple(survivors), (1,), ())
        assert joined[1:4] == ((0, 1, 2, None), (), (3,))


def test_an_elastic_run_that_has_ended_can_begin_again(meeting_place: Path) -> None:
    """Its ranks meet at the same store, which knows the run that has ended."""
    ranks = Ranks(Kind("torch", 2, 2), meeting_place)
    with served_store() as store:
        more: Any = {**store.variables, "SYNCPRIMS_ELASTIC": "1", "SYNCPRIMS_RUN_ID": "again"}
        for _ in range(2):
            assert ranks.outcomes(lambda: sp.all_reduce(1), **more) == [2, 2]


def test_backends_that_cannot_say_so(meeting_place: Path) -> None:
    def program() -> None:
        with pytest.raises(sp.BackendUnavailable, match=r"reform.*backend.*max-restarts"):
            sp.reform()
        sp.barrier()  # nothing has happened
        with pytest.raises(ValueError, match="min_ranks"):
            sp.reform(min_ranks=0)

    Ranks(Kind("single", 1), meeting_place).run(program)
