"""`Accelerator`: the names and results that users of Accelerate know."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from conftest import on_every_rank
from safetensors.torch import load, load_file
from support.checkpoint_worlds import Kept
from support.rank_worlds import Kind, Ranks
from support.training_models import (
    alone,
    everywhere,
    gradient,
    in_pairs,
    new_job,
    numbers,
    ones,
    rows,
    small_model,
    unit_model,
)
from torch.utils.data import DataLoader, TensorDataset

import syncprims
from syncprims.accelerate import Accelerator
from syncprims.accelerate.tracking import GeneralTracker, TensorBoardTracker, register_tracker_class
from syncprims.accelerate.utils import ProjectConfiguration, send_to_device
from syncprims.training import CheckpointError, PreparedOptimizer, rank_device


@everywhere
@pytest.mark.parametrize("together", [True, False], ids=["with the optimizer", "on its own"])
def test_a_job_goes_on_where_it_was_saved(world: Ranks, together: bool, tmp_path: Path) -> None:
    def job(stop_at: int | None, start: bool) -> list[Any]:
        a = new_job(2, step_scheduler=together)
        torch.manual_seed(0 if not start else 77)
        model = torch.nn.Sequential(small_model(), torch.nn.Dropout(0.5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        loader = DataLoader(rows(40), batch_size=8 // a.num_processes, shuffle=True)
        model, optimizer, schedule, loader = a.prepare(model, optimizer, schedule, loader)
        if start:
            a.load_state(tmp_path / "state")
        step = 4 if start else 0
        for _ in range(1 if start else 2):
            for x, y in loader:
                with a.accumulate(model):
                    a.backward(((model(x) - y) ** 2).mean())
                    optimizer.step()
                    if together or step:  # else it would come before the optimizer
                        schedule.step()
                    optimizer.zero_grad()
                step += 1
                if step == 7 and stop_at is not None:
                    a.save_state(tmp_path / "state")
        return [*numbers(model), *schedule.get_last_lr()]

    whole = world.run(lambda: job(7, False))
    assert world.run(lambda: job(None, True)) == whole


@everywhere
@on_every_rank
def test_a_schedule_that_takes_a_metric_counts_each_call_once() -> None:
    job = new_job()
    plain = torch.optim.SGD(small_model().parameters(), lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(plain, patience=2)
    optimizer, schedule = job.prepare(plain, plateau)
    rates = []
    for _ in range(4):
        optimizer.step()
        schedule.step(1.0)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 1.0, 1.0, 0.1]
    schedule.step(metrics=0.5)
    assert (plateau.best, plateau.num_bad_epochs, plateau.last_epoch) == (0.5, 0, 5)


@alone
@on_every_rank
def test_prepare_keeps_order_and_hands_on_what_it_does_not_know() -> None:
    a = Accelerator()
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters())
    nothing, one, two, word = a.prepare(None, optimizer, model, "word")
    assert (nothing, word) == (None, "word")
    assert isinstance(one, PreparedOptimizer)
    assert a.prepare(two) is two
    assert a.unwrap_model(two) is model
    batch = next(iter(a.prepare(DataLoader(TensorDataset(torch.ones(2, 1)), batch_size=2))))
    assert batch[0].device == a.device
    kept = a.free_memory(one, two)
    assert kept == [None, None]


class Outer(torch.nn.Module):
    """A model with a part that has the name."""

    def __init__(self) -> None:
        super().__init__()
        self.module = unit_model()


@everywhere
@on_every_rank
def test_a_model_of_several_ranks_has_a_module_that_is_the_model() -> None:
    """Programs write it, because DDP has one. On one rank there is none, as in Accelerate."""
    job = Accelerator(cpu=True)
    plain: Any = small_model()
    names, modules = list(plain.state_dict()), [name for name, _ in plain.named_modules()]
    shown = repr(plain)
    model, outer = job.prepare(plain, Outer())
    assert list(outer.module.state_dict()) == ["weight"]
    assert hasattr(model, "module") == job.use_distributed
    for one in [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]:
        if job.use_distributed:
            inner = one.module
            assert isinstance(inner, type(one))
            assert inner.__class__ is type(one)
            assert inner[0].weight is one[0].weight
            assert list(inner.state_dict()) == names
            assert not hasattr(inner, "module"), "or loops that unwrap would not end"
            assert isinstance(copy.deepcopy(inner), torch.nn.Sequential)
        assert list(one.state_dict()) == names
        assert [name for name, _ in one.named_modules()] == modules
        assert len(list(one.parameters())) == len(names)
        assert repr(one.apply(lambda module: module.eval())) == shown
        assert not one.training
    if job.use_distributed:
        model.module.eval().note = 3
        assert (model.training, model.note) == (False, 3), "they have the same attributes"
    assert numbers(job.unwrap_model(model)) == numbers(small_model())


@pytest.mark.parametrize(
    ("current", "devices", "used"),
    [(0, 4, [0, 1]), (3, 4, [3, 3]), (0, 1, [0, 0])],
    ids=["one for each", "chosen by the program", "shared"],
)
def test_current_device(current: int, devices: int, used: list[int], meeting_place: Path) -> None:
    """The first device is current by default: then each local rank takes its own."""

    def program() -> list[int | None]:
        cuda: Any = torch.cuda
        accelerator: Any = torch.accelerator
        now = [torch.device("cuda", current)]
        cuda.is_available = accelerator.is_available = lambda: True
        cuda.device_count = lambda: devices
        cuda.current_device = lambda: now[0].index
        cuda.set_device = lambda device: now.insert(0, torch.device(device))
        accelerator.current_accelerator = lambda: torch.device("cuda")
        with syncprims.init():
            first = rank_device().index
            return [first, now[0].index, rank_device().index]

    assert Ranks(Kind("file", 2), meeting_place).run_alone(program) == [[one] * 3 for one in used]


def test_on_the_cpu_no_accelerator_is_initialized(meeting_place: Path) -> None:
    """Neither if the job asks for the CPU, nor if the machine has nothing else."""

    def program() -> list[Any]:
        cuda: Any = torch.cuda
        accelerator: Any = torch.accelerator
        asked: list[str] = []
        for name in ("current_device", "set_device", "init"):
            setattr(cuda, name, lambda *_, name=name: asked.append(name))
        with syncprims.init():
            devices = [rank_device().type]
            cuda.is_available = accelerator.is_available = lambda: True
            accelerator.current_accelerator = lambda: torch.device("cuda")
            devices += [rank_device(cpu=True).type, Accelerator(cpu=True).device.type]
            return [*devices, cuda.is_initialized(), asked]

    expected = [*["cpu"] * 3, False, []]
    assert Ranks(Kind("file", 2), meeting_place).run_alone(program) == [expected] * 2


@everywhere
@on_every_rank
def test_tensors_of_all_ranks() -> None:
    """What Accelerate's own script of operations does not try."""
    a, rank, ranks = Accelerator(), syncprims.get_rank(), syncprims.get_world_size()
    ragged = a.gather({"x": [torch.full((rank + 1, 2), rank)]})["x"][0]
    assert ragged[:, 0].tolist() == [r for r in range(ranks) for _ in range(r + 1)]
    mean = sum(range(ranks)) / ranks
    assert a.reduce([torch.tensor(rank)], "mean", scale=2.0)[0] == 2 * mean
    assert a.reduce(torch.tensor(rank), "none") == rank
    with pytest.raises(ValueError, match="minimum"):
        a.reduce(torch.tensor(rank), "minimum")  # type: ignore[arg-type]
    padded = a.pad_across_processes(torch.ones(1, rank + 1), dim=1, pad_index=7)
    assert padded.tolist() == [[1.0] * (rank + 1) + [7.0] * (ranks - rank - 1)]
    with pytest.raises(TypeError, match="tensors"):
        a.gather(["text"])
    if ranks > 1:
        for tree in (torch.ones(2, 3 + rank), {f"{rank}": torch.ones(1)}):
            with pytest.raises(syncprims.RankMismatch):
                a.gather(tree)


@everywhere
def test_main_saves_objects(world: Ranks, tmp_path: Path) -> None:
    """Links are followed, and what is not a file is left alone."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "old").write_bytes(b"old")
    for name in ("old", "new"):
        (tmp_path / name).symlink_to(f"there/{name}")
    os.mkfifo(tmp_path / "there" / "fifo")

    def program() -> None:
        a = Accelerator()
        a.save({"rank": torch.tensor(a.process_index)}, tmp_path / "old")
        a.save({"rank": torch.ones(2)}, tmp_path / "new", safe_serialization=True)
        stream = io.BytesIO()
        a.save({"rank": torch.ones(2)}, stream, safe_serialization=True)
        assert bool(stream.getvalue()) == a.is_main_process
        if not a.is_main_process:
            return
        assert load(stream.getvalue())["rank"].tolist() == [1, 1]
        for obj, said in (({"a": 1}, "'a' is of type int"), ([1], "a dict of tensors")):
            with pytest.raises(CheckpointError, match=said):
                a.save(obj, tmp_path / "x", safe_serialization=True)
        with pytest.raises(CheckpointError, match=r"none/y\.bin: rank 0: FileNotFound"):
            a.save(1, tmp_path / "none" / "y.bin")
        with pytest.raises(TypeError, match="a str, a path or an opened file"):
            a.save(1, os.fsencode(tmp_path / "y.bin"))
        for name in ("there/fifo", "there"):
            with pytest.raises(CheckpointError, match=f"only a regular file .*{name}'.*still"):
                a.save({"x": torch.ones(2)}, tmp_path / name)

    world.run(program)
    assert load_file(tmp_path / "new")["rank"].tolist() == [1, 1]
    assert torch.load(tmp_path / "old", weights_only=True) == {"rank": torch.tensor(0)}
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_symlink()) == ["new", "old"]
    assert sorted(p.name for p in (tmp_path / "there").iterdir()) == ["fifo", "new", "old"]


@in_pairs
def test_a_backward_pass_outside_of_blocks(world: Ranks) -> None:
    def program() -> float:
        job = Accelerator(cpu=True, gradient_accumulation_steps=4)
        model: Any = job.prepare(unit_model())
        job.backward(model(torch.full((1, 1), 2.0 + 4.0 * job.process_index)).mean())
        return gradient(model)

    assert world.run(program) == [1.0, 1.0]


@alone
@on_every_rank
def test_a_new_number_of_steps() -> None:
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
    assert seen == [False, True, False, False, True, False, False]


@alone
@on_every_rank
def test_gradients_are_unscaled_once() -> None:
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
    assert [gradient(first), before, gradient(second)] == [1.0, 4.0, 1.0]


@in_pairs
@on_every_rank
def test_objects_gathered_for_metrics() -> None:
    job = Accelerator(cpu=True)
    rank = job.process_index
    given: list[Any] = [f"rank {rank}", {"rank": rank}, [rank, "x"], (rank, "x")]
    listed = [0, "x", 1, "x"]
    wanted = [["rank 0", "rank 1"], [{"rank": 0}, {"rank": 1}], listed, listed]
    assert [job.gather_for_metrics(one) for one in given] == wanted


@alone
@on_every_rank
def test_checkpoints_of_a_project_and_elsewhere(tmp_path: Path) -> None:
    """Numbers go on, registered objects have names, and the project may move."""
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    job, again = Accelerator(cpu=True, project_config=project), Accelerator(cpu=True)
    job.register_for_checkpointing(first=Kept(1), second=Kept(2))
    job.save_state(tmp_path / "mine")
    assert not (tmp_path / "checkpoints").exists()
    one, two = Kept(0), Kept(0)
    again.register_for_checkpointing(second=two)
    again.register_for_checkpointing(first=one)
    again.load_state(tmp_path / "mine")
    assert (one.state, two.state) == (1, 2)
    job.project_configuration.iteration = 7
    job.save_state()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_7"]
    job.project_configuration.set_directories(tmp_path / "other")
    assert (job.project_dir, job.save_iteration) == (tmp_path / "other", 8)
    with pytest.raises(TypeError, match="'registered_0' is a int: it has no state_dict"):
        job.register_for_checkpointing(1, "x")  # type: ignore[arg-type]


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
@on_every_rank
def test_compiled_programs() -> None:
    job, model = Accelerator(cpu=True), torch.nn.Linear(1, 1)
    compiled: Any = torch.compile(torch.nn.DataParallel(model), backend="eager")
    assert job.unwrap_model(compiled) is compiled  # the default, as there
    assert compiled._orig_mod is model
    assert job.unwrap_model(compiled, keep_torch_compile=False) is model

    def moved(batch: Any) -> Any:
        return send_to_device(batch, "cpu")["x"][0] + 1

    traced: Any = torch.compile(moved, fullgraph=True, backend="eager")
    assert traced({"x": [torch.ones(1)]}) == 2


class _Lines(GeneralTracker):
    name = "lines"
    seen: ClassVar[list[Any]] = []

    def __init__(self, run_name: str) -> None:
        super().__init__(run_name)

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self.seen.append((self.run_name, values, step))


@alone
@on_every_rank
def test_trackers_by_name(tmp_path: Path) -> None:
    """One of a program's own, and TensorBoard's file of hyperparameters, by a stand-in for it."""
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
