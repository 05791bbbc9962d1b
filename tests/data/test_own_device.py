"""One rule says which device of its node is a rank's own, and all that choose a device ask it."""

from __future__ import annotations

import pytest
import torch

# Devices that the machine of a test lacks.
from syncprims._data.arrays import own_device
from syncprims.interface import own_device_index

#: The current device, the devices of the node, the local rank, and the rank's own device.
CASES = {
    "the program has chosen one": (1, 4, 0, 1),
    "and it is not a device of this local rank": (3, 4, 2, 3),
    "the first is current by default, and not chosen": (0, 4, 2, 2),
    "the first is that of the first local rank": (0, 4, 0, 0),
    "fewer devices than ranks, which share them in turn": (0, 2, 3, 1),
    "one device for all ranks": (0, 1, 5, 0),
    "no device at all": (0, 0, 1, 0),
}


@pytest.mark.parametrize(("current", "count", "local_rank", "own"), CASES.values(), ids=CASES)
def test_rule(current: int, count: int, local_rank: int, own: int) -> None:
    assert own_device_index(current, count, local_rank) == own


def test_a_kind_without_a_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert {own_device(kind, 1) for kind in ("cpu", "cuda", "no_such")} == {torch.device("cpu")}


def test_a_kind_of_one_device_has_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    only = type("Only", (), {"is_available": staticmethod(lambda: True)})
    monkeypatch.setattr(torch, "mps", only)
    assert own_device("mps", 3) == torch.device("mps", 0)
