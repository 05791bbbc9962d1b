"""Torch's own tests of c10d: under the name of this backend, and served as ``gloo``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support import process_groups as process_groups  # imports torch before ranks fork
from support.rank_worlds import Kind, Ranks
from support.torch_suite import EXCLUDED, EXCLUDED_IF_SERVED, RANKS, SAMPLE, run_tests

_CHUNKS = 12


def all_names(backend: str) -> list[str]:
    """Return the names of all tests that can pass, as the source of torch has them."""
    source = Path(torch.__file__).parent / "testing/_internal/distributed/distributed_test.py"
    found = re.findall(r"^        def (test_\w+)\(self", source.read_text(), re.MULTILINE)
    excluded = {*EXCLUDED} if backend == "syncprims" else {*EXCLUDED, *EXCLUDED_IF_SERVED}
    return sorted({*found} - excluded)


@pytest.mark.parametrize("backend", ["syncprims", "gloo"])
@pytest.mark.parametrize(
    "chunk", [None, *(pytest.param(k, marks=pytest.mark.soak) for k in range(_CHUNKS))]
)
def test_torch_suite(chunk: int | None, backend: str, meeting_place: Path, tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    names = list(SAMPLE) if chunk is None else all_names(backend)[chunk::_CHUNKS]
    world = Ranks(Kind("file", RANKS), meeting_place, patience=600.0)
    skipped = world.run(lambda: run_tests(names, backend, tmp_path))
    world.check_nothing_left()
    assert chunk is not None or backend == "syncprims" or not any(skipped)
