"""What a type checker sees of the primitives; mypy checks this file."""

from __future__ import annotations

import asyncio
from typing import assert_type

import numpy as np

import syncprims as sp
from syncprims.testing import run_world


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


def test_types_are_as_they_are_declared() -> None:
    async def run_all() -> list[object]:
        exclusive, shared_later = await not_at_once(), await shared_not_at_once()
        return [assert_type(exclusive, str | None), assert_type(shared_later, str)]

    def program() -> list[object]:
        main, default = on_main_only(), with_a_default()
        last, everywhere = with_parentheses(3), shared()
        assert_type(sp.all_reduce(1, "mean"), float)
        assert_type(sp.all_reduce(True), int)
        assert_type(sp.all_reduce(2), int)
        assert_type(sp.all_reduce(0.5, "max"), float)
        assert_type(sp.all_reduce({"loss": 0.5}, "min"), dict[str, float])
        assert_type(sp.current().group.all_reduce(1, "mean"), float)
        assert_type(sp.split(["a", "b"]), list[str])
        assert_type(sp.split(range(4)), range)
        assert_type(sp.split(range(3), pad=True), range | list[int])
        assert_type(sp.split((1, 2)), tuple[int, ...])
        assert_type(sp.split({"x": [1, 2]}), dict[str, list[int]])
        assert isinstance(sp.split(np.zeros(4)), np.ndarray)
        assert_type(sp.current().group.split(["a"]), list[str])
        return [
            assert_type(main, str | None),
            assert_type(default, str | int),
            assert_type(last, int | None),
            assert_type(everywhere, str),
            *asyncio.run(run_all()),
        ]

    assert run_world(program, 2) == [
        ["main", "main", None, "main", "main", "main"],
        [None, 0, 3, "main", None, "main"],
    ]
