"""Calls of Accelerate's that differ, or that only scripts make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from support.training_models import (
    alone,
    gradient,
    in_pairs,
    new_job,
    numbers,
    ones,
    unit_model,
)

from syncprims.accelerate import Accelerator

if TYPE_CHECKING:
    from pathlib import Path

    from support.rank_worlds import Ranks

# -- calls ----------------------------------------------------------------------------------------


@alone
def test_the_project_can_be_changed(world: Ranks, tmp_path: Path) -> None:
    def program() -> None:
        job = Accelerator(cpu=True, project_dir=tmp_path)
        job.project_configuration.iteration = 7
        job.save_state()
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_7"]
        assert job.save_iteration == 8
        job.project_configuration.set_directories(tmp_path / "other")
        assert (job.project_dir, job.save_iteration) == (tmp_path / "other", 8)

    world.run(program)


@in_pairs
def test_a_tracker_may_run_on_all_ranks(world: Ranks) -> None:
    class Everywhere:
        name = "everywhere"
        main_process_only = False

        def __init__(self) -> None:
            self.seen: list[Any] = []

        def log(self, values: dict[str, Any], step: int | None = None) -> None:
            self.seen.append((values, step))

    def program() -> list[Any]:
        tracker = Everywhere()
        job = Accelerator(cpu=True, log_with=tracker)
        job.init_trackers("run")
        job.log({"rank": job.process_index}, step=1)
        job.end_training()
        return tracker.seen

    assert world.run(program) == [[({"rank": rank}, 1)] for rank in (0, 1)]


@in_pairs
def test_gradients_between_windows(world: Ranks) -> None:
    """Each loss is divided at once; a call before the backward pass clears nothing."""

    def program() -> list[float]:
        job = Accelerator(gradient_accumulation_steps=2, cpu=True)
        plain: Any = unit_model()
        model, optimizer = job.prepare(plain, torch.optim.SGD(plain.parameters(), lr=1.0))
        seen = []
        for number in (1.0, 3.0):
            with job.accumulate(model):
                optimizer.zero_grad()
                job.backward(model(torch.full((1, 1), number)).mean())
                seen.append(gradient(model))
                optimizer.step()
                seen.append(numbers(model)[0])
        return seen

    assert world.run(program) == [[0.5, 0.0, 2.0, -2.0]] * 2


@in_pairs
def test_a_backward_pass_outside_of_blocks(world: Ranks) -> None:
    def program() -> float:
        job = Accelerator(cpu=True, gradient_accumulation_steps=4)
        model: Any = job.prepare(unit_model())
        job.backward(model(torch.full((1, 1), 2.0 + 4.0 * job.process_index)).mean())
        return gradient(model)

    assert world.run(program) == [1.0, 1.0]


@alone
def test_a_new_number_of_steps(world: Ranks) -> None:
    def program() -> list[bool]:
        job: Any = Accelerator(gradient_accumulation_steps=2, cpu=True)
        model = job.prepare(unit_model())
        seen = []
        for number in range(7):
            if number == 3:  # in the middle of a window
                job.gradient_accumulation_steps = 3
            with job.accumulate(model):
                job.backward(model(ones()).mean())
            seen.append(job.sync_gradients)
        assert job.gradient_accumulation_steps == 3
        return seen

    assert world.run(program) == [[False, True, False, False, True, False, False]]


@alone
def test_gradients_are_unscaled_once(world: Ranks) -> None:
    def program() -> list[float]:
        job = new_job(mixed_precision="fp16", scaler={"init_scale": 4.0})
        made = []
        for _ in range(2):
            plain: Any = unit_model()
            made.append(job.prepare(plain, torch.optim.SGD(plain.parameters(), lr=1.0)))
        for model, _ in made:
            job.backward(model(ones()).mean())
        (first, optimizer), (second, _) = made
        job.unscale_gradients(optimizer)
        job.unscale_gradients(optimizer)
        before = gradient(second)
        job.unscale_gradients()
        return [gradient(first), before, gradient(second)]

    assert world.run(program) == [[1.0, 4.0, 1.0]]


@in_pairs
def test_objects_gathered_for_metrics(world: Ranks) -> None:
    def program() -> list[Any]:
        job = Accelerator(cpu=True)
        rank = job.process_index
        given: list[Any] = [f"rank {rank}", {"rank": rank}, [rank, "x"], (rank, "x")]
        return [job.gather_for_metrics(one) for one in given]

    listed = [0, "x", 1, "x"]
    wanted = [["rank 0", "rank 1"], [{"rank": 0}, {"rank": 1}], listed, listed]
    assert world.run(program) == [wanted] * 2


@alone
def test_a_directory_that_is_given_is_used(world: Ranks, tmp_path: Path) -> None:
    def program() -> None:
        from syncprims.accelerate.utils import ProjectConfiguration

        project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
        job = Accelerator(cpu=True, project_config=project)
        job.prepare(unit_model())
        job.save_state(tmp_path / "mine")
        assert not (tmp_path / "checkpoints").exists()
        job.save_state()
        job.load_state(tmp_path / "mine")
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_0"]

    world.run(program)


@alone
def test_registered_objects_have_names(world: Ranks, tmp_path: Path) -> None:
    class Best:
        value = 1

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    def program() -> None:
        job, again = Accelerator(cpu=True), Accelerator(cpu=True)
        first, second = Best(), Best()
        second.value = 2
        job.register_for_checkpointing(first=first, second=second)
        job.save_state(tmp_path / "state")
        one, two = Best(), Best()
        again.register_for_checkpointing(second=two)
        again.register_for_checkpointing(first=one)
        again.load_state(tmp_path / "state")
        assert (one.value, two.value) == (1, 2)

    world.run(program)
