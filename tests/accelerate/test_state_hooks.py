"""Hooks before a state is saved or loaded, as in Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.rank_worlds import Signs
from support.training_models import everywhere, in_pairs
from torch import nn

import syncprims as sp
from syncprims.accelerate import Accelerator
from syncprims.training import Checkpoints

if TYPE_CHECKING:
    from support.rank_worlds import Ranks

list_steps = Checkpoints.steps


def job(folder: Path | None = None) -> tuple[Accelerator, nn.Module, nn.Module]:
    """Return a job with two models, of which the optimizer trains the first."""
    torch.manual_seed(1)
    made = Accelerator(cpu=True, project_dir=folder)
    first, second = nn.Linear(2, 2), nn.Linear(2, 3)
    first, second, _ = made.prepare(first, second, torch.optim.AdamW(first.parameters()))
    return made, first, second


def fill(value: float, *models: nn.Module) -> None:
    with torch.no_grad():
        for parameter in [p for model in models for p in model.parameters()]:
            parameter.fill_(value)


def values(*models: nn.Module) -> list[float]:
    return [next(model.parameters()).flatten()[0].item() for model in models]


@everywhere
@pytest.mark.parametrize("named", [True, False])
def test_a_model_that_hooks_save_and_load_is_theirs(
    world: Ranks, named: bool, tmp_path: Path
) -> None:
    """Main saves the second by itself, as pipelines of diffusion models do."""

    def program() -> Any:
        made, first, second = job(tmp_path)
        where = tmp_path / "state" if named else None
        own = "own/second.pt"

        def before_saving(models: list[Any], weights: list[Any], directory: str) -> None:
            assert models == [made.unwrap_model(first), made.unwrap_model(second)]
            if made.is_main_process:
                (Path(directory) / "own").mkdir()
                torch.save(weights.pop(), Path(directory) / own)

        def before_loading(models: list[Any], directory: str) -> None:
            weights = torch.load(Path(directory) / own, weights_only=True)
            made.unwrap_model(models.pop()).load_state_dict(weights)

        made.register_save_state_pre_hook(before_saving)
        made.register_load_state_pre_hook(before_loading)
        fill(3, first, second)
        made.save_state(where)
        made.wait_for_everyone()
        fill(0, first, second)
        made.load_state(where)
        directory = where or tmp_path / "checkpoints" / "checkpoint_0"
        return values(first, second), sorted(p.name for p in directory.glob("*model*"))

    for found, files in world.run(program):
        assert found == [3, 3]
        assert any("model_0" in file for file in files)
        assert not any("model_1" in file for file in files)


@everywhere
def test_what_a_hook_makes_of_the_weights_is_saved(world: Ranks, tmp_path: Path) -> None:
    def program() -> Any:
        made, first, second = job()

        def double(models: list[Any], weights: list[Any], directory: str) -> None:
            weights[0] = {name: 2 * tensor for name, tensor in weights[0].items()}

        hook = made.register_save_state_pre_hook(double)
        fill(3, first, second)
        made.save_state(tmp_path / "doubled")
        hook.remove()
        made.save_state(tmp_path / "as it is")
        made.load_state(tmp_path / "doubled")
        found = values(first, second)
        made.load_state(tmp_path / "as it is")
        return found + values(first, second)

    assert world.run(program) == [[6, 3, 3, 3]] * world.ranks


@everywhere
def test_a_hook_that_raises_on_one_rank_is_told_on_all(world: Ranks, tmp_path: Path) -> None:
    def program() -> Any:
        made, first, second = job(tmp_path)
        fill(3, first, second)
        made.save_state()

        def fail(*offered: Any) -> None:
            if sp.is_last():
                raise LookupError("no room for this")

        saving = made.register_save_state_pre_hook(fail)
        with pytest.raises(sp.CheckpointError, match="LookupError: no room for this") as caught:
            made.save_state()
        saving.remove()
        loading = made.register_load_state_pre_hook(fail)
        with pytest.raises(sp.CheckpointError, match="LookupError: no room for this"):
            made.load_state()
        loading.remove()
        fill(0, first, second)
        made.load_state()  # what was there still is
        return caught.value.rank, values(first, second)

    assert world.run(program) == [(world.ranks - 1, [3, 3])] * world.ranks


@everywhere
def test_a_list_that_says_nothing_clear_is_refused(world: Ranks, tmp_path: Path) -> None:
    def program() -> Any:
        made, _, _ = job()

        def muddle(models: list[Any], weights: list[Any], directory: str) -> None:
            weights[:] = [dict(weights[0])]

        made.register_save_state_pre_hook(muddle)
        with pytest.raises(sp.CheckpointError, match="puts other weights into the list"):
            made.save_state(tmp_path / "state")
        return "told"

    assert world.run(program) == ["told"] * world.ranks


@in_pairs
def test_ranks_whose_hooks_leave_different_models_are_told(world: Ranks, tmp_path: Path) -> None:
    def program() -> Any:
        made, _, _ = job(tmp_path)
        made.save_state()

        def take_on_main(models: list[Any], directory: str) -> None:
            if sp.is_main():
                models.pop()

        made.register_load_state_pre_hook(take_on_main)
        with pytest.raises(sp.CheckpointError, match="objects: expected"):
            made.load_state()
        return "told"

    assert world.run(program) == ["told"] * 2


# -- the number of the next checkpoint ----------------------------------------------------------


@everywhere
@pytest.mark.parametrize("hooked", [True, False])
def test_a_save_behind_the_training_keeps_its_number(
    world: Ranks, hooked: bool, tmp_path: Path
) -> None:
    """The next save, or load, takes its own number when that is done, and not before."""

    def program() -> Any:
        made, first, second = job(tmp_path)
        if hooked:
            made.register_load_state_pre_hook(lambda models, directory: None)
        found: list[str] = []
        for value in (1, 2):
            fill(value, first, second)
            found.append(Path(made.save_state(block=False).path).name)
        fill(0, first, second)
        made.load_state()
        return found, values(first, second)

    assert world.run(program) == [(["checkpoint_0", "checkpoint_1"], [2, 2])] * world.ranks


@in_pairs
def test_all_ranks_save_under_the_number_that_main_finds(world: Ranks, tmp_path: Path) -> None:
    signs, late = Signs(tmp_path), tmp_path / "checkpoints" / "checkpoint_7"

    def program() -> str:
        made, _, _ = job(tmp_path)
        made.save_state()

        def steps(checkpoints: Checkpoints) -> list[int]:
            if not sp.is_main():
                signs.wait("listed")
                late.mkdir(exist_ok=True)
                (late / "checkpoint.json").touch()
            found = list_steps(checkpoints)
            signs.give("listed")
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Checkpoints, "steps", steps)
            return Path(made.save_state().path).name

    assert world.run(program) == ["checkpoint_1"] * 2
