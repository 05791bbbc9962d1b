"""A world of one rank, for tests of checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.rank_worlds import Kind, Ranks

if TYPE_CHECKING:
    from pathlib import Path

    from support.checkpoint_worlds import Alone


@pytest.fixture
def alone(meeting_place: Path) -> Alone:
    """Return a function that runs a program on the only rank of a new process."""
    return lambda program: Ranks(Kind("single", 1), meeting_place).run(program)[0]
