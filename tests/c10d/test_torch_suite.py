"""Torch's own tests of c10d: under the name of this backend, and served as ``gloo``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support import process_groups as process_groups  # imports torch before ranks fork
from support.rank_worlds import Kind, Ranks
from support.torch_suite import RANKS, run_tests

if TYPE_CHECKING:
    from pathlib import Path

_CHUNKS = 12


@pytest.mark.parametrize("backend", ["syncprims", "gloo"])
@pytest.mark.parametrize(
    "chunk", [None, *(pytest.param(k, marks=pytest.mark.soak) for k in range(_CHUNKS))]
)
def test_torch_suite(chunk: int | None, backend: str, meeting_place: Path, tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    part = None if chunk is None else slice(chunk, None, _CHUNKS)
    world = Ranks(Kind("file", RANKS), meeting_place, patience=600.0)
    skipped = world.run(lambda: run_tests(part, backend, tmp_path))
    world.check_nothing_left()
    assert chunk is not None or backend == "syncprims" or not any(skipped)
