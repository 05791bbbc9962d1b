"""What the probe does not change, it delegates: the whole contract, whatever is added to it.

No public call shows what a third party's backend may be asked for.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from syncprims.interface import Backend, Board, Settings, Slots, Topology
from syncprims.testing import run_world
from syncprims.testing.outcomes import RankOutcome
from syncprims.testing.probe import Probe, ProbedBackend, ProbedBoard, ProbedSlots


@pytest.mark.parametrize(
    ("probed", "contract", "arguments"),
    [
        (ProbedBackend, Backend, [Topology(), Settings()]),
        (ProbedBoard, Board, [[0]]),
        (ProbedSlots, Slots, []),
    ],
)
def test_every_member_of_the_contract_is_its_own_or_that_of_the_wrapped_object(
    probed: Any, contract: Any, arguments: list[Any]
) -> None:
    made: Any = SimpleNamespace()
    if arguments:
        contract.__init__(made, *arguments)
    names = {*vars(contract), *inspect.get_annotations(contract), *vars(made)}
    members = {name for name in names if not name.startswith("_")} - {"slots"}  # probed as well
    assert len(members) >= 10
    assert members <= vars(probed).keys()  # none is inherited: a default would hide the real one
    inner: Any = SimpleNamespace(**{name: object() for name in members}, slots=None)
    wrapped = probed(inner, Probe(RankOutcome(0), []))
    for name in members:
        if isinstance(vars(probed)[name], property):
            assert getattr(wrapped, name) is getattr(inner, name)
            setattr(wrapped, name, None)
            assert getattr(inner, name) is None
        elif inspect.isfunction(vars(contract)[name]):
            assert inspect.signature(getattr(probed, name)) == inspect.signature(
                getattr(contract, name)
            ).replace(return_annotation=inspect.signature(getattr(probed, name)).return_annotation)


def test_the_process_group_of_gloo_opens_in_a_world() -> None:
    pytest.importorskip("torch")

    def program() -> Any:
        import syncprims

        opened = syncprims.current().open_process_group()
        import torch.distributed

        return opened, torch.distributed.get_world_size()

    assert run_world(program, 2, kind="processes", backend="gloo") == [(True, 2)] * 2
