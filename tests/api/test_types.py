"""What a type checker sees of the primitives; mypy checks this file."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, assert_type

import numpy as np
from conftest import several

import syncprims as sp

if TYPE_CHECKING:
    from support.rank_worlds import Ranks


@sp.on_main
def on_main_only() -> str:
    return "main"


@sp.on_main(share=True)
def shared() -> str:
    return "main"


@sp.on_rank(0, default=0)
def with_a_default() -> str:
    return "main"


@sp.on_last()
def with_parentheses(number: int) -> int:
    return number


@sp.on_local_main
async def not_at_once() -> str:
    return "main"


@sp.on_local_rank(0, share=True)
async def shared_not_at_once() -> str:
    return "main"


@several(2)
def test_what_runs_on_one_rank_returns_none_on_the_others(world: Ranks) -> None:
    async def run_all() -> list[object]:
        exclusive, shared_later = await not_at_once(), await shared_not_at_once()
        assert_type(exclusive, str | None)
        assert_type(shared_later, str)
        return [exclusive, shared_later]

    def program() -> list[object]:
        main, default = on_main_only(), with_a_default()
        last, everywhere = with_parentheses(3), shared()
        assert_type(main, str | None)
        assert_type(default, str | int)
        assert_type(last, int | None)
        assert_type(everywhere, str)
        return [main, default, last, everywhere, *asyncio.run(run_all())]

    assert world.run(program) == [
        ["main", "main", None, "main", "main", "main"],
        [None, 0, 3, "main", None, "main"],
    ]


@several(2)
def test_reductions_have_the_type_of_their_result(world: Ranks) -> None:
    def program() -> list[type]:
        mean = sp.all_reduce(1, "mean")
        assert_type(mean, float)
        count = sp.all_reduce(True)
        assert_type(count, int)
        total = sp.all_reduce(2)
        assert_type(total, int)
        loss = sp.all_reduce(0.5, "max")
        assert_type(loss, float)
        both = sp.all_reduce({"loss": 0.5}, "min")
        assert_type(both, dict[str, float])
        of_group = sp.current().group.all_reduce(1, "mean")
        assert_type(of_group, float)
        return [type(value) for value in (mean, count, total, loss, both, of_group)]

    assert world.run(program) == [[float, int, int, float, dict, float]] * 2


@several(2)
def test_shares_have_the_type_of_what_is_split(world: Ranks) -> None:
    def program() -> list[type]:
        words = sp.split(["a", "b"])
        assert_type(words, list[str])
        numbers = sp.split(range(4))
        assert_type(numbers, range)
        padded = sp.split(range(3), pad=True)
        assert_type(padded, range | list[int])
        pair = sp.split((1, 2))
        assert_type(pair, tuple[int, ...])
        columns = sp.split({"x": [1, 2]})
        assert_type(columns, dict[str, list[int]])
        array = sp.split(np.zeros(4))
        assert_type(sp.current().group.split(["a"]), list[str])
        return [type(one) for one in (words, numbers, pair, columns, array)]

    assert world.run(program) == [[list, range, tuple, dict, np.ndarray]] * 2
