"""Distributed (DTensor, FSDP2) and replicated (DDP) models on Gloo: save and reshard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint_worlds import Kept
from support.process_groups import with_gloo
from support.rank_worlds import Kind, Ranks
from support.torch_programs import FSDP2_TRAINS_ON_CPUS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

import syncprims as sp
from syncprims.training import load_checkpoint_in_model, load_state, save_model, save_state

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of what is new in it

needs_training = pytest.mark.skipif(
    not FSDP2_TRAINS_ON_CPUS, reason="FSDP2 of this torch does not train on CPUs"
)


def run(ranks: int, folder: Path, program: Callable[[], Any]) -> list[Any]:
    """Run a program on ranks that have a Gloo group, too."""
    meeting = folder / "meet"
    meeting.mkdir(mode=0o700, exist_ok=True)
    return Ranks(Kind("file", ranks), meeting).run(with_gloo(program, folder))


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 5, bias=False))


def spread(ranks: int) -> dict[str, Any]:
    model: Any = plain()
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}


def test_a_sharded_model_is_not_handed_over(tmp_path: Path) -> None:
    """All ranks raise, whether one is behind or not: a lost rank had a part of the model."""

    def program() -> bool:
        parts = spread(2)
        for rounds in ((3, 3), (3, 4)):
            change = sp.Change(0, (0, 2), (1,), (), 2 * sp.get_rank(), 0, rounds)
            with pytest.raises(TypeError, match=r"DTensor is distributed.*checkpoint"):
                sp.hand_over(parts, change)
        return True

    assert run(2, tmp_path, program) == [True] * 2


def train(parts: dict[str, Any], steps: int, seed: int) -> None:
    for step in range(steps):
        torch.manual_seed(100 * seed + step)
        parts["model"](torch.randn(4, 6)).pow(2).mean().backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()


def whole(parts: dict[str, Any]) -> dict[str, list[float]]:
    """Return all numbers of a model and its optimizer; all ranks call it."""
    found = dict(parts["model"].state_dict())
    for number, state in parts["optimizer"].state_dict()["state"].items():
        found |= {f"{number}.{name}": value for name, value in state.items()}
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).reshape(-1).tolist()
        for name, t in found.items()
    }


@needs_training
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 2), (2, 3), (3, 2), (2, 1)])
def test_a_spread_training_goes_on(saved_by: int, loaded_by: int, tmp_path: Path) -> None:
    path = tmp_path / "state"

    def save() -> Any:
        parts = spread(saved_by)
        train(parts, 2, 1)
        save_state(path, parts, step=2, block=False).wait()
        found = whole(parts)
        train(parts, 1, 2)
        return found, whole(parts)

    def load() -> Any:
        parts = spread(loaded_by)
        if saved_by != loaded_by:  # else the optimizer is new, and has no state yet
            train(parts, 1, 9)  # another training, to be forgotten
        load_state(path, parts, any_world_size=True)
        found = whole(parts)
        train(parts, 1, 2)
        return found, whole(parts)

    saved, loaded = run(saved_by, tmp_path, save), run(loaded_by, tmp_path, load)
    wanted, after = saved[0]
    assert all(found == wanted for found, _ in [*saved, *loaded])
    assert saved_by != loaded_by or all(found == after for _, found in [*saved, *loaded])


@needs_training
@pytest.mark.parametrize("most", ["5GB", 100])
def test_a_spread_model_is_saved_as_a_plain_one_and_back(most: Any, tmp_path: Path) -> None:
    def program() -> tuple[Any, Any, bool]:
        parts = spread(2)
        train(parts, 2, 1)
        save_model(parts["model"], tmp_path / "m", max_shard_size=most)
        model, other = plain(), spread(2)
        load_checkpoint_in_model(model, tmp_path / "m")
        load_checkpoint_in_model(other["model"], tmp_path / "m")
        flat = {name: value.reshape(-1).tolist() for name, value in model.state_dict().items()}
        full = whole(parts)
        again = whole(other)
        return flat, {name: full[name] for name in flat}, all(again[n] == full[n] for n in flat)

    for flat, full, same in run(2, tmp_path, program):
        assert flat == full
        assert same


def test_what_is_not_summed_up_yet_is_saved_as_its_sum(tmp_path: Path) -> None:
    def program() -> tuple[str, list[float]]:
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.tensor([1.0 + 8 * sp.get_rank()]), mesh, [Partial()])
        found, model = Kept(), nn.Module()
        save_state(tmp_path / "s", {"mean": Kept(partial)})
        load_state(tmp_path / "s", {"mean": found})
        model.register_buffer("mean", partial)
        save_model(model, tmp_path / "m")
        with pytest.raises(ValueError, match="cannot be loaded"):
            load_checkpoint_in_model(model, tmp_path / "m")
        return type(found.state).__name__, found.state.tolist()

    assert run(2, tmp_path, program) == [("Tensor", [10])] * 2
