"""Helpers for tests of checkpoints: worlds, and an object with any state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from support.rank_worlds import Kind

#: What the fixture `alone` returns.
Alone: TypeAlias = Callable[[Callable[[], Any]], Any]

on_some = pytest.mark.parametrize(
    "kind", [Kind("single", 1), Kind("file", 1), Kind("file", 2), Kind("file", 4)], ids=str,
    indirect=True,
)  # fmt: skip


class Kept:
    """An object whose state is the value that it was given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
