"""Training programs that a machine has written give the numbers of one process."""

from __future__ import annotations

import accelerate  # noqa: F401 - imported once, before ranks fork, because it takes seconds
import pytest
from conftest import seeds

from syncprims.training import averager

from .programs import draw
from .runs import find_fault, shrink
from .text import replay


@seeds(daily=[range(n, n + 12) for n in range(0, 300, 12)], soak=range(300, 6300, 100))
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch and of Accelerate
def test_ranks_give_the_numbers_of_one_process(seeds: range) -> None:
    for seed in seeds:
        program = draw(seed)
        if fault := find_fault(program):
            pytest.fail(replay(*shrink(program, fault)), pytrace=False)


def test_a_fault_is_found_and_made_simple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averager, "average_all", lambda _: None)
    seed, fault = next((n, found) for n in range(20) if (found := find_fault(draw(n))))
    simple, fault = shrink(draw(seed), fault)
    assert fault.startswith("ranks differ in values")
    assert len(replay(simple, fault).splitlines()) < 45
    monkeypatch.undo()
    assert not find_fault(simple)
