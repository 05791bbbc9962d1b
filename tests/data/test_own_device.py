"""One rule says which device of its node is a rank's own, and all that choose a device ask it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

from syncprims._data.arrays import own_device
from syncprims.interface import Settings, Topology, own_device_index
from syncprims.training import preparation as devices

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: The current device, the devices of the node, the local rank, and the rank's own device.
CASES = {
    "the program has chosen one": (1, 4, 0, 1),
    "and it is no device of this local rank": (3, 4, 2, 3),
    "the first is current by default, and not chosen": (0, 4, 2, 2),
    "the first is that of the first local rank": (0, 4, 0, 0),
    "fewer devices than ranks, which share them in turn": (0, 2, 3, 1),
    "one device for all ranks": (0, 1, 5, 0),
    "no device at all": (0, 0, 1, 0),
}


class FakeCuda:
    """A `torch.cuda` of some devices, none of which is there."""

    def __init__(self, current: int, count: int) -> None:
        self.current = current
        self.count = count

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return False

    def current_device(self) -> int:
        return self.current

    def device_count(self) -> int:
        return self.count

    def set_device(self, device: torch.device) -> None:
        self.current = device.index


def of_an_array(local_rank: int, monkeypatch: pytest.MonkeyPatch, directory: Path) -> int:
    """Return the index of the device where an array of another rank arrives."""
    return int(own_device("cuda", local_rank).index)


def of_training(local_rank: int, monkeypatch: pytest.MonkeyPatch, directory: Path) -> int:
    """Return the index of the device that models and batches are moved to."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: cuda)
    monkeypatch.setattr(devices, "get_local_rank", lambda: local_rank)
    index = devices.rank_device().index
    assert torch.cuda.current_device() == index  # it is made the current one
    return int(index)


def of_the_default_group(local_rank: int, monkeypatch: pytest.MonkeyPatch, directory: Path) -> int:
    """Return the index of the device that the torch backend opens NCCL's default group with."""
    found: list[int] = []

    def record(_group: Any, _store: Any, _topology: Topology, device: int) -> None:
        found.append(device)

    module: Any = import_module("syncprims.backends.torch.backend")
    monkeypatch.setattr(module.DefaultGroup, "open", record)
    topology = Topology(local_rank=local_rank)
    backend = module.NcclBackend(topology, Settings(directory=str(directory)))
    try:
        backend.open_process_group()
    finally:
        backend.close()
    return found[0]


@pytest.mark.parametrize(("current", "count", "local_rank", "own"), CASES.values(), ids=CASES)
def test_the_rule(current: int, count: int, local_rank: int, own: int) -> None:
    assert own_device_index(current, count, local_rank) == own


@pytest.mark.parametrize("ask", [of_an_array, of_training, of_the_default_group])
@pytest.mark.parametrize(
    ("current", "count", "local_rank", "own"), list(CASES.values())[:-1], ids=list(CASES)[:-1]
)
def test_all_ask_the_rule(
    ask: Callable[[int, pytest.MonkeyPatch, Path], int],
    current: int,
    count: int,
    local_rank: int,
    own: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(torch, "cuda", FakeCuda(current, count))
    assert ask(local_rank, monkeypatch, tmp_path) == own


def test_a_kind_without_a_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(1, 0)
    monkeypatch.setattr(fake, "is_available", lambda: False)
    monkeypatch.setattr(torch, "cuda", fake)
    assert {own_device(kind, 1) for kind in ("cpu", "cuda", "no_such")} == {torch.device("cpu")}


def test_a_kind_of_one_device_has_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    only = type("Only", (), {"is_available": staticmethod(lambda: True)})
    monkeypatch.setattr(torch, "mps", only)
    assert own_device("mps", 3) == torch.device("mps", 0)
