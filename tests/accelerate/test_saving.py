"""A save that each rank makes without the others, as scripts do under `if is_main_process`."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import on_every_rank
from support.rank_environment import record_warnings
from support.rank_worlds import Ranks, Signs
from support.training_models import alone, everywhere, in_pairs, numbers, small_model
from torch import nn

import syncprims as sp
from syncprims import CollectiveMismatch, PeerLost
from syncprims.accelerate import Accelerator, load_checkpoint_in_model
from syncprims.training import CheckpointError, Checkpoints


def job_of(seed: int) -> tuple[Any, Any, Any]:
    job = Accelerator(cpu=True)
    plain = small_model(seed)
    model, optimizer = job.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))
    return job, model, optimizer


def step(job: Any, model: Any, optimizer: Any) -> None:
    job.backward(model(torch.ones(1, 3).double()).sum())
    optimizer.step()
    optimizer.zero_grad()


@everywhere
@pytest.mark.parametrize("guarded", [True, False])
def test_a_guarded_save_says_what_it_has_not(world: Ranks, guarded: bool, tmp_path: Path) -> None:
    def program() -> Any:
        job, model, optimizer = job_of(1)
        step(job, model, optimizer)
        torch.manual_seed(10 + job.process_index)
        if job.is_main_process or not guarded:
            job.save_state(tmp_path / "saved")
        wanted, drawn = numbers(model), random.random()
        step(job, model, optimizer)
        random.seed(5)
        other, again, its = job_of(2)
        said = record_warnings()
        other.load_state(tmp_path / "saved")
        assert numbers(again) == wanted
        assert its.state_dict()["state"][0]["step"] == 1
        same = torch.initial_seed() == 10 + job.process_index and random.random() == drawn
        return same, said

    found = world.run(program)
    absent = list(range(1, world.ranks)) if guarded else []
    for rank, (same, said) in enumerate(found):
        assert same == (rank not in absent)
        assert any(f"ranks {absent}" in text for text in said) == bool(absent and rank == 0)


@in_pairs
def test_parts_of_an_older_save_are_not_mixed_in(world: Ranks, tmp_path: Path) -> None:
    def program() -> bool:
        job, model, optimizer = job_of(1)
        job.save_state(tmp_path / "saved")  # all ranks
        job.wait_for_everyone()
        step(job, model, optimizer)
        if job.is_main_process:
            job.save_state(tmp_path / "saved")
        torch.manual_seed(99)
        job.load_state(tmp_path / "saved")
        return torch.initial_seed() == 99

    assert world.run(program) == [False, True]  # rank 1 goes on with its own


@alone
@on_every_rank
def test_pending_gradients_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = job.prepare(small_model())
    for at, warned in enumerate((True, False)):
        with job.accumulate(model):
            job.backward(model(torch.ones(1, 3).double()).sum())
        caplog.clear()
        job.save_state(tmp_path / f"{at}")
        assert ("save where sync_gradients is true" in caplog.text) == warned
    job.load_state(tmp_path / "0")
    assert all(p.grad is None for p in model.parameters())


@in_pairs
@on_every_rank
def test_a_model_takes_weights_that_it_has_parameters_for(tmp_path: Path) -> None:
    job = Accelerator(project_dir=tmp_path)
    saved = job.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    job.save_state()
    taken: list[bool] = []
    for directory in (None, tmp_path / "checkpoints" / "checkpoint_0"):
        other = Accelerator(project_dir=tmp_path)
        parts = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Module())
        parts.more = torch.nn.Linear(1, 1)
        model = other.prepare(parts)
        with pytest.raises(CheckpointError, match=r"more\.weight"):
            other.load_state(directory)
        other.load_state(directory, strict=False)
        mine: Any = other.unwrap_model(model)
        its: Any = job.unwrap_model(saved)
        taken.append(torch.equal(mine[0].weight, its[0].weight))
    assert taken == [True, True]


@in_pairs
@on_every_rank
def test_a_damaged_save_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    job, *_ = job_of(1)
    job.save_state(tmp_path / "saved", safe_serialization=False)
    job.wait_for_everyone()
    if job.is_main_process:
        state = torch.load(tmp_path / "saved" / "pytorch_model.bin", weights_only=True)
        assert state.keys() == small_model().state_dict().keys()
        (tmp_path / "saved" / "model_0.state.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="model_0"):
        job.load_state(tmp_path / "saved")


GUARDS: dict[str, Callable[[Any, Callable[[], Any]], Any]] = {
    "if": lambda job, call: call() if job.is_main_process else None,
    "decorator": lambda job, call: job.on_main_process(call)(),
    "first": lambda job, call: main_first(job, call),
    "last": lambda job, call: call() if job.is_last_process else None,
    "none": lambda _, call: call(),
}


def main_first(job: Any, call: Callable[[], Any]) -> None:
    with job.main_process_first():
        call()


@in_pairs
@pytest.mark.parametrize("guard", ["if", "first", "last"])
def test_what_needs_all_ranks_names_the_guard(world: Ranks, guard: str, tmp_path: Path) -> None:
    """Whether the others go on to another call, or end."""

    def program(call: str, ends: bool) -> Callable[[], Any]:
        def body() -> Any:
            job = Accelerator(cpu=True, project_dir=tmp_path)
            job.prepare(small_model())
            GUARDS[guard](job, getattr(job, call))
            if not ends:
                job.wait_for_everyone()

        return body

    for call, ends in (("save_state", False), ("save_state", True), ("load_state", False)):
        found = world.outcomes(program(call, ends))
        caller = found[guard == "last"]
        assert isinstance(caller, CollectiveMismatch | PeerLost)
        assert f"All ranks call {call}()" in str(caller)
        assert "is_main_process" in str(caller)
    assert not list(tmp_path.glob("checkpoints/*"))


@in_pairs
@pytest.mark.parametrize("guard", ["decorator", "none"])
def test_main_saves_a_model_alone(world: Ranks, guard: str, tmp_path: Path) -> None:
    def program() -> Any:
        job, model, _ = job_of(1)
        GUARDS[guard](job, lambda: job.save_model(model, tmp_path / "model", max_shard_size="100B"))
        job.wait_for_everyone()
        again = small_model(2)
        load_checkpoint_in_model(again, tmp_path / "model")
        return numbers(again) == numbers(model)

    assert world.run(program) == [True, True]


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
@on_every_rank
def test_a_model_that_hooks_save_is_theirs(named: bool, tmp_path: Path) -> None:
    """Main saves the second by itself, as pipelines of diffusion models do."""
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
    found, files = values(first, second), sorted(p.name for p in directory.glob("*model*"))
    assert found == [3, 3]
    assert any("model_0" in file for file in files)
    assert not any("model_1" in file for file in files)


@everywhere
@on_every_rank
def test_what_a_hook_makes_of_the_weights_is_saved(tmp_path: Path) -> None:
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
    assert found + values(first, second) == [6, 3, 3, 3]


@everywhere
@on_every_rank
def test_a_hook_that_raises_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
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
    assert (caught.value.rank, values(first, second)) == (sp.get_world_size() - 1, [3, 3])


@everywhere
@pytest.mark.parametrize("hooked", [True, False])
@on_every_rank
def test_a_save_behind_keeps_its_number(hooked: bool, tmp_path: Path) -> None:
    """The next save, or load, takes its own number when that is done, and not before."""
    made, first, second = job(tmp_path)
    if hooked:
        made.register_load_state_pre_hook(lambda models, directory: None)
    found: list[str] = []
    for value in (1, 2):
        fill(value, first, second)
        found.append(Path(made.save_state(block=False).path).name)
    fill(0, first, second)
    made.load_state()
    assert (found, values(first, second)) == (["checkpoint_0", "checkpoint_1"], [2, 2])


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
