"""What a type checker sees of the primitives; mypy checks this file."""

from __future__ import annotations

import asyncio
from typing import assert_type

import numpy as np

import syncprims as sp
from syncprims.testing import run_world


def test_types_are_as_they_are_declared() -> None:
    def now() -> str:
        return "main"

    def same(number: int) -> int:
        return number

    async def later() -> str:
        return "main"

    async def run_all() -> list[object]:
        exclusive = await sp.on_local_main(later)()
        shared = await sp.on_local_rank(0, share=True)(later)()
        return [assert_type(exclusive, str | None), assert_type(shared, str)]

    def program() -> list[object]:
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
            assert_type(sp.on_main(now)(), str | None),
            assert_type(sp.on_rank(0, default=0)(now)(), str | int),
            assert_type(sp.on_last()(same)(3), int | None),
            assert_type(sp.on_main(share=True)(now)(), str),
            *asyncio.run(run_all()),
        ]

    assert run_world(program, 2) == [
        ["main", "main", None, "main", "main", "main"],
        [None, 0, 3, "main", None, "main"],
    ]
