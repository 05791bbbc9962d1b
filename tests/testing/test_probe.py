"""What the probe does not change, it delegates: the whole contract, whatever is added to it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

import syncprims as sp
from syncprims._world.registry import load_backend
from syncprims.interface import Backend, Board, Settings, Topology
from syncprims.testing import run_world
from syncprims.testing.outcomes import RankOutcome
from syncprims.testing.probe import Observer, Probe, ProbedBackend, ProbedBoard

OWN: dict[type, set[str]] = {
    ProbedBackend: {"board", "close", "close_board", "wait_any"},
    ProbedBoard: {
        "abort",
        "collect",
        "post",
        "posts_alone",
        "publish_wait",
        "status",
        "verdict",
    },
}


def members_of(contract: type, *arguments: Any) -> set[str]:
    """Return the public names of a contract, also those that its constructor sets."""
    made = SimpleNamespace()
    vars(contract)["__init__"](made, *arguments)
    names = {*vars(contract), *inspect.get_annotations(contract), *vars(made)}
    return {name for name in names if not name.startswith("_")}


BACKEND = members_of(Backend, Topology(), Settings())
BOARD = members_of(Board, [0])


@pytest.mark.parametrize(
    ("probed", "members"),
    [(ProbedBackend, BACKEND), (ProbedBoard, BOARD)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_member_of_the_contract_is_defined_or_delegated(
    probed: type, members: set[str]
) -> None:
    assert len(members) >= 10
    assert members <= vars(probed).keys()  # none is inherited: a default would hide the real one
    delegated = {name for name in members if isinstance(vars(probed)[name], property)}
    assert members - delegated == OWN[probed]


def test_what_is_delegated_is_that_of_the_wrapped_object() -> None:
    probe = Probe(RankOutcome(0), [], Observer())
    inner: Any = SimpleNamespace(**{name: object() for name in BACKEND | BOARD})
    backend: Backend = ProbedBackend(inner, probe)
    board: Board = ProbedBoard(inner, probe)
    for probed, members in ((backend, BACKEND), (board, BOARD)):
        for name in members - OWN[type(probed)]:
            assert getattr(probed, name) is getattr(inner, name), name


def test_a_backend_keeps_its_abilities_in_a_world() -> None:
    """The probe stands in front of a backend that a third party could have written."""

    def program() -> Any:
        backend = sp.current()._backend
        assert isinstance(backend, ProbedBackend)
        made = load_backend("file")
        return backend.name == made.name, backend.spans_hosts == made.spans_hosts

    assert run_world(program, 2, kind="processes") == [(True, True)] * 2


def test_the_process_group_of_gloo_opens_in_a_world() -> None:
    pytest.importorskip("torch")

    def program() -> Any:
        opened = sp.current().open_process_group()
        import torch.distributed

        return opened, torch.distributed.get_world_size()

    assert run_world(program, 2, kind="processes", backend="gloo") == [(True, 2)] * 2


def test_the_probe_overrides_with_equal_signatures() -> None:
    for probed, contract in ((ProbedBackend, Backend), (ProbedBoard, Board)):
        for name in OWN[probed] & {
            "board",
            "close",
            "close_board",
            "wait_any",
            "post",
            "collect",
            "status",
            "abort",
        }:
            if inspect.isfunction(vars(contract).get(name)):
                mine = inspect.signature(vars(probed)[name])
                assert mine == inspect.signature(vars(contract)[name]), name
