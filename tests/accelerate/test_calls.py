"""Calls of Accelerate's that differ, or that only scripts make."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import pytest
import torch
from support.training_models import (
    alone,
    gradient,
    in_pairs,
    new_job,
    ones,
    unit_model,
)

from syncprims.accelerate import Accelerator
from syncprims.accelerate.tracking import (
    GeneralTracker,
    TensorBoardTracker,
    register_tracker_class,
)
from syncprims.accelerate.utils import ProjectConfiguration, send_to_device

if TYPE_CHECKING:
    from pathlib import Path

    from support.rank_worlds import Ranks

# -- calls ----------------------------------------------------------------------------------------


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


class Best:
    def __init__(self, value: int = 1) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@alone
def test_checkpoints_of_a_project_and_elsewhere(world: Ranks, tmp_path: Path) -> None:
    """Numbers go on, registered objects have names, and the project may move."""

    def program() -> None:
        project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
        job, again = Accelerator(cpu=True, project_config=project), Accelerator(cpu=True)
        job.register_for_checkpointing(first=Best(1), second=Best(2))
        job.save_state(tmp_path / "mine")
        assert not (tmp_path / "checkpoints").exists()
        one, two = Best(0), Best(0)
        again.register_for_checkpointing(second=two)
        again.register_for_checkpointing(first=one)
        again.load_state(tmp_path / "mine")
        assert (one.value, two.value) == (1, 2)
        job.project_configuration.iteration = 7
        job.save_state()
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_7"]
        job.project_configuration.set_directories(tmp_path / "other")
        assert (job.project_dir, job.save_iteration) == (tmp_path / "other", 8)
        with pytest.raises(ValueError, match="registered_0: 1, registered_1: 'x'"):
            job.register_for_checkpointing(1, "x")

    world.run(program)


@alone
def test_arguments_that_mean_what_they_mean_there(world: Ranks) -> None:
    """Variables, ignored arguments, blocks with nothing prepared."""

    def program() -> None:
        with pytest.warns(UserWarning, match="split_batches is ignored"):
            job = Accelerator(cpu=True, split_batches=True)
        assert (job.split_batches, job.gradient_accumulation_steps) == (False, 3)
        assert Accelerator(cpu=True, gradient_accumulation_steps=2).gradient_accumulation_steps == 3
        synced: list[bool] = []
        for _ in range(6):
            with job.accumulate():
                synced.append(job.sync_gradients)
        assert synced == [False, False, True] * 2
        optimizer = torch.optim.SGD(job.prepare(torch.nn.Linear(1, 1)).parameters(), momentum=0.9)
        copied = pickle.loads(pickle.dumps(job.prepare(optimizer)))
        assert copied.param_groups[0]["momentum"] == 0.9
        copied.step()

    world.run(program, ACCELERATE_GRADIENT_ACCUMULATION_STEPS="3")


@alone
def test_compiled_programs(world: Ranks) -> None:
    def program() -> None:
        job, model = Accelerator(cpu=True), torch.nn.Linear(1, 1)
        compiled: Any = torch.compile(torch.nn.DataParallel(model), backend="eager")
        assert job.unwrap_model(compiled) is compiled
        assert compiled._orig_mod is model
        assert job.unwrap_model(compiled, keep_torch_compile=False) is model

        def moved(batch: Any) -> Any:
            return send_to_device(batch, "cpu")["x"][0] + 1

        traced: Any = torch.compile(moved, fullgraph=True, backend="eager")
        assert traced({"x": [torch.ones(1)]}) == 2

    world.run(program)


class _Lines(GeneralTracker):
    name = "lines"
    seen: ClassVar[list[Any]] = []

    def __init__(self, run_name: str) -> None:
        super().__init__(run_name)

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self.seen.append((self.run_name, values, step))


@alone
def test_trackers_by_name(world: Ranks, tmp_path: Path) -> None:
    """One of a program's own, and TensorBoard's file of hyperparameters, by a stand-in for it."""

    def program() -> None:
        register_tracker_class(_Lines)
        job = Accelerator(cpu=True, log_with="lines")
        job.init_trackers("run")
        job.log({"loss": 1.0}, step=2)
        assert _Lines.seen == [("run", {"loss": 1.0}, 2)]
        tracker = TensorBoardTracker("run", tmp_path)
        tracker.writer = mock.Mock()
        tracker.store_init_configuration({"lr": 0.5, "name": "x", "path": tmp_path})
        (file,) = tmp_path.glob("run/*/hparams.yml")
        assert json.loads(file.read_text()) == {"lr": 0.5, "name": "x", "path": str(tmp_path)}

    world.run(program)
