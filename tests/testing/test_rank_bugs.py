"""Every classic bug is found under every schedule, with the right ranks and lines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.rank_bugs import ALWAYS, BUGS, BY_ORDER, GOLDEN, RANKS, described, said

from syncprims.testing import explore

EXPECTED: dict[str, str] = json.loads(GOLDEN.read_text())


def test_every_bug_has_a_report() -> None:
    assert sorted(EXPECTED) == ALWAYS


@pytest.mark.parametrize("seeds", [25, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", ALWAYS)
def test_threads_find_it_on_every_seed(name: str, seeds: int) -> None:
    found = {said(BUGS[name], seed=seed) for seed in range(seeds)}
    assert found == {EXPECTED[name]}


@pytest.mark.parametrize("name", ALWAYS)
def test_processes_say_the_same(name: str) -> None:
    # A rank that a loaded machine holds back is reported where it was then, which is as true.
    assert EXPECTED[name] in (said(BUGS[name], kind="processes") for _ in range(10))


@pytest.mark.parametrize("name", ALWAYS)
def test_all_orders_end_in_it(name: str) -> None:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - of many types
        explore(BUGS[name], RANKS, strategy="all")
    assert type(caught.value).__name__ == EXPECTED[name].partition(":")[0]


@pytest.mark.parametrize("strategy", ["random", "pct", "all"])
@pytest.mark.parametrize("name", BY_ORDER)
def test_a_hundred_schedules_find_what_only_some_show(name: str, strategy: Any) -> None:
    program = BUGS[name]
    with pytest.raises(AssertionError) as caught:
        explore(program, RANKS, schedules=100, strategy=strategy, seed=1)
    text = described(program, caught.value)
    assert "AssertionError: " in text
    assert "bug.py:" in text
