"""Random programs with random faults keep every promise, and the checker finds violations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support import random_programs
from support.histories import Event, History, Step, show, violations, waits_for
from support.rank_worlds import Kind, Ranks, served_store

import syncprims as sp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHUNK = 25

STEPS = [
    Step("init"),
    Step("barrier", "load"),
    Step("broadcast", src=1),
    Step("all_reduce", op="sum"),
    Step("all_gather"),
    Step("any_rank"),
    Step("all_ranks"),
    Step("check", "stop"),
    Step("check", "stop"),
    Step("barrier"),
]
SENT: list[list[Any]] = [
    [None] * 3,
    [None] * 3,
    [None, ["bytes 3000", 17], None],
    [1, 2, 3],
    ["a", "b", "c"],
    [False, True, False],
    [True, True, False],
    [False, False, True],
    [False] * 3,
    [None] * 3,
]
GOT: list[Any] = [
    *(None, None, ["bytes 3000", 17], 6, ["a", "b", "c"]),
    *(True, False, [False, []], [True, [2]], None),
]
LOST = ["PeerLost", 2, [2]]


def whole() -> History:
    """Return a history of three ranks without any harm, 10 ns per step."""
    events = [
        [
            event
            for step in range(len(STEPS))
            for event in (
                Event(step, "enter", step * 10 + rank, SENT[step][rank]),
                Event(step, "exit", step * 10 + 5 + rank, GOT[step]),
            )
        ]
        + [Event(len(STEPS) - 1, "end", 1000)]
        for rank in range(3)
    ]
    return History(0, STEPS, events, [0, 0, 0], {})


def torn(at: int = 4) -> History:
    """Return a history whose rank 2 is killed before step `at`."""
    history = whole()
    for events in history.events[:2]:
        cut(events, at)
        events += [
            Event(at, "verdict", at * 10 + 5, LOST),
            Event(at, "again", at * 10 + 6, LOST),
            Event(len(STEPS) - 1, "end", 1000),
        ]
    history.events[2][:] = [event for event in history.events[2] if event.step < at]
    return history._replace(codes=[0, 0, -9], kills={2: at * 10 + 1})


def cut(events: list[Event], at: int) -> None:
    """Leave of a rank's events those up to its entry into step `at`."""
    events[:] = [e for e in events if e.step < at or (e.step == at and e.what == "enter")]


def put(history: History, rank: int, at_step: int, what: str, **changes: Any) -> None:
    events = history.events[rank]
    for index, event in enumerate(events):
        if (event.step, event.what) == (at_step, what):
            events[index] = event._replace(**changes)


def drop(history: History, rank: int, *whats: str, step: int | None = None) -> None:
    events = history.events[rank]
    events[:] = [
        event for event in events if event.what not in whats or step not in (None, event.step)
    ]


def test_a_history_without_harm_and_one_that_was_torn_well_are_fine() -> None:
    assert violations(whole()) == []
    for at in range(1, 7):
        assert violations(torn(at)) == []


def test_a_lagging_check_waits_for_the_one_before() -> None:
    steps = [Step("init"), Step("check", "a"), Step("check", "b"), Step("check", "a")]
    assert waits_for([*steps, Step("barrier"), Step("check", "b")]) == [0, 0, 0, 1, 4, 4]


def early(history: History) -> None:
    put(history, 1, 3, "exit", at=31)  # rank 2 enters at 32


def without_the_last(history: History) -> None:
    drop(history, 2, "enter", "exit", step=1)


def another_value(history: History) -> None:
    put(history, 0, 2, "exit", fact=["bytes 3000", 18])


def flag_of_another(history: History) -> None:
    put(history, 1, 8, "exit", fact=[True, [1]])


def lost_though_nobody_died(history: History) -> None:
    for rank in (0, 1):
        cut(history.events[rank], 9)
        history.events[rank] += [
            Event(9, "verdict", 95, LOST),
            Event(9, "end", 99),
        ]
    drop(history, 2, "enter", "exit", step=9)


def without_an_end(history: History) -> None:
    drop(history, 1, "end")


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (early, "rank 1 left step 3 before rank 2 came to 3"),
        (without_the_last, "rank 0 left step 1, and rank 2 never came to 1"),
        (another_value, "rank 0 got ['bytes 3000', 18] from step 2"),
        (flag_of_another, "rank 1 got [True, [1]] from step 8"),
        (lost_though_nobody_died, "rank 0 got PeerLost about rank 2, and no such failure"),
        (without_an_end, "rank 1 ended by itself, with exit code 0"),
    ],
)
def test_the_judge_sees_what_is_wrong(plant: Callable[[History], None], said: str) -> None:
    history = whole()
    plant(history)
    found = violations(history)
    assert any(said in one for one in found), found
    assert "rank 2, exit code 0" in show(history)


def another_verdict(history: History) -> None:
    put(history, 1, 4, "verdict", fact=["PeerFailed", 2, [2]])


def passed(history: History) -> None:
    history.events[0].append(Event(4, "exit", 48, GOT[4]))


def passed_the_next(history: History) -> None:
    put(history, 1, 4, "again", fact="passed")


def reported(history: History, again: object) -> None:
    """Make rank 2 raise in a call; it is killed afterwards."""
    history.events[2].append(Event(4, "raise", 43, None))
    for rank in range(2):
        put(history, rank, 4, "verdict", fact=["PeerFailed", 2, []])
        put(history, rank, 4, "again", fact=again)


def before_the_kill(history: History) -> None:
    history.kills[2] = 49


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (another_verdict, "verdicts differ"),
        (passed, "rank 0 passed step 4, where others got a verdict"),
        (passed_the_next, "rank 1 asked again and got passed"),
        (before_the_kill, "rank 0 got PeerLost about rank 2 before it happened"),
    ],
)
def test_the_judge_sees_a_wrong_verdict(plant: Callable[[History], None], said: str) -> None:
    history = torn()
    plant(history)
    found = violations(history)
    assert any(said in one for one in found), found


def test_a_reported_exception_breaks_nothing_and_its_rank_may_die_later() -> None:
    for again in (["PeerFailed", 2, [2]], ["PeerLost", 2, [2]]):
        history = torn()
        reported(history, again)
        assert violations(history) == []


def test_the_judge_sees_who_hangs_or_dies_by_itself() -> None:
    assert violations(whole()._replace(hung=[1])) == ["rank 1 never ended"]
    assert violations(whole()._replace(codes=[0, 1, 0])) == [
        "rank 1 ended by itself, with exit code 1"
    ]
    assert "rank 2 ended by itself, with exit code -9" in violations(torn()._replace(kills={}))


def test_a_seed_is_one_plan() -> None:
    assert random_programs.plan(7) == random_programs.plan(7)
    assert random_programs.plan(7) != random_programs.plan(8)


def judge(first: int, count: int, meeting_place: Path, logs: Path) -> None:
    random_programs.check(range(first, first + count), meeting_place, logs)
    Ranks(Kind("file", 2), meeting_place).run(lambda: sp.barrier())
    assert not any(meeting_place.iterdir())  # the last run clears what the killed have left


@pytest.mark.parametrize("first", range(0, 250, CHUNK))
def test_random_programs_keep_every_promise(
    first: int, meeting_place: Path, tmp_path: Path
) -> None:
    judge(first, CHUNK, meeting_place, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1_000, 11_000, 250))
def test_ten_thousand_random_programs(first: int, meeting_place: Path, tmp_path: Path) -> None:
    judge(first, 250, meeting_place, tmp_path)


@pytest.mark.parametrize(
    "seeds",
    [
        *(range(first, first + 2) for first in (0, 15, 30, 45)),
        *(
            pytest.param(range(first, first + 100), marks=pytest.mark.soak)
            for first in range(20_000, 22_000, 100)
        ),
    ],
    ids=str,
)
def test_random_programs_on_several_hosts_keep_every_promise(
    seeds: range, meeting_place: Path, tmp_path: Path
) -> None:
    with served_store() as store:
        random_programs.check(seeds, meeting_place, tmp_path, store)
