"""Accelerate scripts: configuration objects, trackers, and data that one rank reads."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import on_every_rank
from support.rank_worlds import Ranks
from support.training_models import (
    Sized,
    alone,
    everywhere,
    feed,
    gradient,
    in_pairs,
    new_job,
    numbers,
    unit_model,
)
from torch.utils.data import DataLoader, IterableDataset

import syncprims
from syncprims.accelerate import Accelerator
from syncprims.accelerate.state import AcceleratorState, GradientState, PartialState
from syncprims.accelerate.tracking import GeneralTracker, on_main_process
from syncprims.accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from syncprims.training import prepare_data_loader


class FP8RecipeKwargs(KwargsHandler): ...


class Autocast(torch.nn.Module):
    """Returns 1 if autocast is on, and 0 otherwise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.is_autocast_enabled("cpu")


@alone
@on_every_rank
def test_configuration_objects_are_understood(tmp_path: Path) -> None:
    job = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        dataloader_config=DataLoaderConfiguration(
            split_batches=True, dispatch_batches=True, even_batches=False, data_seed=3
        ),
        gradient_accumulation_plugin=GradientAccumulationPlugin(4),
        project_config=ProjectConfiguration(str(tmp_path), total_limit=1),
        kwargs_handlers=[
            GradScalerKwargs(init_scale=4.0),
            DistributedDataParallelKwargs(find_unused_parameters=True),
            AutocastKwargs(enabled=False),
            InitProcessGroupKwargs(timeout=timedelta(seconds=77)),
        ],
        deepspeed_plugin=None,
    )
    assert syncprims.current().timeout == 77
    with job.autocast():
        assert not torch.is_autocast_enabled("cpu")
    with job.autocast(AutocastKwargs()):
        assert torch.is_autocast_enabled("cpu")
    assert job.prepare(Autocast())(torch.ones(1)) == 0
    for number in range(3):
        assert job.project_configuration.iteration == number
        where = job.save_state()
        assert Path(where) == tmp_path / f"checkpoints/checkpoint_{number}"
    assert job.scaler is not None
    assert [
        (job.split_batches, job.dispatch_batches, job.even_batches),
        job.preparation.loader_options()["seed"],
        job.gradient_accumulation_steps,
        job.scaler.get_scale(),
        job.preparation.ddp_options,
        [path.name for path in (tmp_path / "checkpoints").iterdir()],
        (job.logging_dir, job.project_dir, job.distributed_type),
    ] == [
        (True, True, False),
        3,
        4,
        4.0,
        {"find_unused_parameters": True},
        ["checkpoint_2"],
        (str(tmp_path), str(tmp_path), "NO"),
    ]


@alone
def test_what_has_no_equivalent_is_told(world: Ranks) -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"fsdp_plugin": object()}, TypeError, "fully_shard"),
        ({"dynamo_backend": "inductor"}, TypeError, "torch.compile"),
        ({"dynamo_plugin": TorchDynamoPlugin("inductor")}, TypeError, "torch.compile"),
        ({"rng_types": ["torch"]}, TypeError, "synchronize_rng_states"),
        ({"log_with": "nobody"}, ValueError, r"log\(values"),
        ({"surprise": None}, TypeError, "surprise"),
        ({"kwargs_handlers": [FP8RecipeKwargs()]}, TypeError, "FP8RecipeKwargs"),
        ({"project_config": ProjectConfiguration(save_on_each_node=True)}, TypeError, "one"),
        (
            {
                "gradient_accumulation_steps": 2,
                "gradient_accumulation_plugin": GradientAccumulationPlugin(4),
            },
            ValueError,
            "gradient_accumulation_steps=2",
        ),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, ValueError, "two of Autocast"),
    ]

    calls: list[tuple[Callable[[Any], object], str]] = [
        (lambda job: job.prepare(unit_model(), None, device_placement=[True, False]), "move"),
        (lambda job: job.prepare_data_loader([], slice_fn_for_dispatch=id), "collate_fn"),
        (lambda job: job.load_state("x", {"a": 1}), "leave it out"),
        (lambda _: PartialState(init_method="env://"), "launcher"),
        (lambda _: AcceleratorState(mixed_precision="bf16"), "Accelerator"),
        (lambda _: GradientState(GradientAccumulationPlugin(4)), "Accelerator"),  # type: ignore[arg-type]
        (lambda _: InitProcessGroupKwargs("gloo"), "SYNCPRIMS_BACKEND"),
        (lambda _: InitProcessGroupKwargs(init_method="env://"), "launcher"),
        (lambda _: DistributedDataParallelKwargs(comm_hook="fp16"), "register_comm_hook"),
    ]

    def program() -> None:
        for options, kind, said in cases:
            with pytest.raises(kind, match=said):
                Accelerator(cpu=True, **options)
        for call, said in calls:
            with pytest.raises(TypeError, match=f"is not offered; .*{said}"):
                call(Accelerator(cpu=True))

    assert world.run(program) == [None]


VARIABLES = {
    "USE_FSDP": ("true", "fully_shard"),
    "USE_DEEPSPEED": ("true", "by DeepSpeed itself"),
    "USE_MEGATRON_LM": ("true", "Megatron-LM itself"),
    "USE_PARALLELISM_CONFIG": ("true", "torch's own means"),
    "DYNAMO_BACKEND": ("INDUCTOR", "torch.compile"),
    "DEBUG_MODE": ("1", "always compare shapes"),
    "DOWNCAST_BF16": ("true", "TPUs"),
    "CPU_AFFINITY": ("1", "sched_setaffinity"),
}


@alone
@on_every_rank
def test_a_variable_of_accelerate_launch_is_not_ignored() -> None:
    for ending, (value, said) in VARIABLES.items():
        name = f"ACCELERATE_{ending}"
        refused = pytest.raises(TypeError, match=f"{name}={value} is not offered; .*{said}")
        with mock.patch.dict(os.environ, {name: value}), refused:
            Accelerator(cpu=True)
        for nothing in ("NO", "false", "0"):
            with mock.patch.dict(os.environ, {name: nothing}):
                Accelerator(cpu=True)


@pytest.mark.parametrize(
    "handler",
    [
        AutocastKwargs,
        DistributedDataParallelKwargs,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        TorchDynamoPlugin,
    ],
)
def test_options_have_accelerates_names_only(handler: Any) -> None:
    """Their positions and defaults are compared in `test_surface.py`."""
    assert handler().to_kwargs() == {}
    with pytest.raises(TypeError, match="find_unused_parameter'"):
        handler(find_unused_parameter=True)
    assert GradScalerKwargs(4.0, growth_factor=2.0).to_kwargs() == {"init_scale": 4.0}


class Own(Accelerator):
    limit = 1


@alone
@on_every_rank
def test_an_attribute_without_an_effect_cannot_be_set() -> None:
    job: Any = Accelerator(cpu=True)
    own: Any = Own(cpu=True)
    for name, value, said in (
        ("native_amp", True, "mixed_precision="),
        ("mixed_precision", "bf16", "mixed_precision="),
        ("fp8_enabled", True, "bf16"),
        ("fsdp_plugin", object(), "fully_shard"),
        ("parallelism_config", object(), "torch's own means"),
        ("split_batches", True, "make it with this value"),
        ("gradient_acumulation_steps", 4, "your own data elsewhere"),
    ):
        with pytest.raises(AttributeError, match=f"'{name}' of an Accelerator to .*; .*{said}"):
            setattr(job, name, value)
    with pytest.raises(AttributeError, match="mixed_precision="):
        own.native_amp = True
    own.limit, own.more = 2, 3  # a subclass has attributes of its own
    job.native_amp, job.scaler, job.deepspeed_plugin = False, None, None  # as they are
    job.gather_for_metrics = list  # as trainers of other packages do
    job.trackers, job.step = [], 1
    assert (own.limit, own.more, job.gather_for_metrics("ab"), job.step) == (2, 3, ["a", "b"], 1)


@alone
@on_every_rank
def test_what_a_program_sets_counts_from_the_next_preparation_on() -> None:
    job: Any = Accelerator(cpu=True, mixed_precision="bf16")
    assert job.prepare(Autocast())(torch.ones(1)) == 1
    job.autocast_handler = AutocastKwargs()
    job.autocast_handler.enabled = False
    job.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    assert job.prepare(Autocast())(torch.ones(1)) == 0
    assert job.preparation.ddp_options == {"find_unused_parameters": True}
    optimizer = torch.optim.SGD(unit_model().parameters(), lr=1.0)
    job.step_scheduler_with_optimizer = False
    _, schedule = job.prepare(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    job.gradient_state.sync_gradients = False
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.5]
    assert [len(job._models), len(job._optimizers), len(job._schedulers)] == [2, 1, 1]
    job._models = job._optimizers = job._schedulers = job._dataloaders = []
    assert job.accumulator.models == job.accumulator.optimizers == job.accumulator.schedules == []


@everywhere
@on_every_rank
def test_calls_that_ask_for_what_is_so_anyway(tmp_path: Path) -> None:
    job = new_job(project_dir=tmp_path, non_blocking=True)
    plain: Any = unit_model()
    sgd: Any = torch.optim.SGD(plain.parameters(), lr=1.0)
    data: Any = feed(range(7), batch_size=1)
    stream: Any = DataLoader(Sized(7), batch_size=1)
    model, optimizer = job.prepare(plain, sgd, device_placement=[True, True])
    assert job.prepare_model(model, None, evaluation_mode=False) is model
    assert job.prepare_optimizer(optimizer, device_placement=True) is optimizer
    loader = job.prepare_data_loader(data, device_placement=None, slice_fn_for_dispatch=None)
    with job.autocast(autocast_handler=None), job.autocast(AutocastKwargs()):
        pass
    before = job.save_iteration
    job.save_state(safe_serialization=True)
    job.save_state(tmp_path / "own", True)
    job.load_state(tmp_path / "own", load_kwargs=None)
    assert job.should_save_model == job.is_local_main_process
    wanted = [(0, 1, 0), True, (7, 7)]
    assert [
        (before, job.save_iteration, Accelerator(cpu=True).save_iteration),
        job.non_blocking,
        (loader.total_dataset_length, job.prepare(stream).total_dataset_length),
    ] == wanted


@everywhere
def test_a_window_may_span_epochs(world: Ranks) -> None:
    def program() -> tuple[list[int], list[float]]:
        plugin = GradientAccumulationPlugin(4, sync_with_dataloader=False)
        job = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        model: Any = unit_model()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        loader: Any = feed([torch.ones(1)] * (3 * world.ranks), batch_size=1)
        model, optimizer, loader = job.prepare(model, optimizer, loader)
        synced = []
        for _ in range(3):
            for batch in loader:
                with job.accumulate(model):
                    job.backward(model(batch).mean())
                    synced.append(job.sync_gradients)
                    optimizer.step()
                    optimizer.zero_grad()
        return [i for i, sync in enumerate(synced) if sync], numbers(model)

    assert world.run(program) == [([3, 7], [-2.0])] * world.ranks


@in_pairs
@on_every_rank
def test_a_later_backward_pass_synchronizes_earlier_forward_passes() -> None:
    job = Accelerator(cpu=True)
    model: Any = job.prepare(unit_model())
    with job.no_sync(model):
        losses = [model(torch.full((1, 1), x + 4.0 * job.process_index)) for x in (1.0, 2.0)]
        losses[0].mean().backward()
        assert gradient(model) == 1.0 + 4.0 * job.process_index
        with job.trigger_sync_in_backward(model):
            job.backward(losses[1].mean())
        after = gradient(model)
        job.backward(model(torch.full((1, 1), float(job.process_index))).mean())
    assert gradient(model) == after + job.process_index
    assert after == 1.0 + 2.0 + 4.0


class Once(IterableDataset[Any]):
    """A stream that only rank 0 may read: elsewhere it is another one."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at

    def __iter__(self) -> Iterator[Any]:
        assert syncprims.is_main(), "another rank reads"
        for i in range(7):
            if i == self.fails_at:
                raise OSError("the stream broke")
            yield {"x": torch.tensor([i]), "word": f"w{i}"}


@in_pairs
def test_a_stream_that_breaks_is_told_on_all_ranks(world: Ranks) -> None:
    """And until then all ranks get their tensors, with the texts that belong to them."""

    def program() -> None:
        for split in (True, False):
            whole: Any = DataLoader(Once(), batch_size=2)
            seen = list(prepare_data_loader(whole, split_batches=split))
            for batch in seen:
                assert batch["word"] == [f"w{i}" for i in batch["x"].flatten().tolist()]
            whole_and_padded = [4, 4] if split else [4, 3]
            assert sum(len(batch["x"]) for batch in seen) == whole_and_padded[syncprims.get_rank()]
        broken: Any = DataLoader(Once(fails_at=5), batch_size=2)
        list(prepare_data_loader(broken))

    first, second = world.outcomes(program)
    assert isinstance(first, OSError)
    assert isinstance(second, syncprims.PeerFailed)
    assert "the stream broke" in str(second)


@in_pairs
def test_a_tracker_of_a_library_gets_its_calls(world: Ranks) -> None:
    """With a stand-in for the library: what it is called with."""

    def program() -> list[str]:
        wandb = sys.modules["wandb"] = mock.MagicMock()
        wandb.__spec__, wandb.Image = "it is installed", str.upper
        job = Accelerator(cpu=True, log_with="wandb")
        job.init_trackers("project", {"lr": 1}, {"wandb": {"name": "run"}})
        job.log({"loss": 1.0}, step=2, log_kwargs={"wandb": {"commit": True}})
        job.get_tracker("wandb").log_images({"samples": ["a"]}, step=3)
        job.end_training()
        return [str(call) for call in wandb.mock_calls]

    assert world.run(program) == [
        [
            "call.init(project='project', name='run')",
            "call.config.update({'lr': 1}, allow_val_change=True)",
            "call.init().log({'loss': 1.0}, step=2, commit=True)",
            "call.init().log({'samples': ['A']}, step=3)",
            "call.init().finish()",
        ],
        [],
    ]


@in_pairs
def test_an_accelerator_on_the_device_that_the_environment_names(world: Ranks) -> None:
    def program() -> str:
        return str(Accelerator().device)

    assert world.run(program, ACCELERATE_TORCH_DEVICE="meta") == ["meta", "meta"]


class Tracker:
    def __init__(self, name: str, *, main_process_only: bool = True) -> None:
        self.name, self.main_process_only = name, main_process_only
        self.seen: list[Any] = []

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.seen.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self.seen.append((values, step, options))

    def finish(self) -> None:
        self.seen.append("finished")


class OfAccelerate(GeneralTracker):
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        values["seen"] = step


@in_pairs
def test_figures_go_to_trackers_on_main_or_on_all_ranks(world: Ranks) -> None:
    def program() -> list[Any]:
        mine, of_all = Tracker("mine"), Tracker("all ranks", main_process_only=False)
        job = Accelerator(cpu=True, log_with=[mine, of_all, "wandb"])  # this is not installed
        job.init_trackers("project", {"lr": 1})
        job.log({"loss": 2.0}, step=3, log_kwargs={"mine": {"commit": True}})
        job.get_tracker("wandb", unwrap=True).anything.at_all()
        job.end_training()
        assert job.get_tracker("mine") is mine
        with pytest.raises(ValueError, match="no tracker"):
            job.get_tracker("other")
        Accelerator(cpu=True).get_tracker("other").log({"loss": 2.0})  # there are none at all
        given: dict[str, Any] = {}
        OfAccelerate().log(given, step=1)
        assert bool(given) == job.is_main_process
        return [mine.seen, of_all.seen]

    first = [{"lr": 1}, ({"loss": 2.0}, 3, {"commit": True}), "finished"]
    second = [{"lr": 1}, ({"loss": 2.0}, 3, {}), "finished"]
    assert world.run(program) == [[first, second], [[], second]]
