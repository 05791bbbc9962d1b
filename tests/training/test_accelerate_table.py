"""Each row of the tables in `docs/training.md` that compare with Accelerate is tested.

`ROWS` names the tests of each row, here or in another file of the tests.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support import ROOT
from support.training_models import (
    alone,
    feed,
    gradient,
    in_pairs,
    numbers,
    ones,
    small_model,
    unit_model,
    without_ddp,
)
from torch.utils.data import IterableDataset

import syncprims
from syncprims.accelerate import Accelerator as DropIn
from syncprims.training import Accelerator, gathering

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.rank_worlds import Ranks

ROWS = {
    # arguments whose defaults differ
    "step_schedule_per_rank": "test_schedules_of_both",
    "divide_by_steps": "test_tails_of_both",
    "order": "test_orders_of_both",
    "resume_loaders": "test_states_of_both",
    "skip_finished": "test_states_of_both",
    "dispatch_streams": "test_streams_of_both",
    "unwrap_for_hooks": "test_hooks_of_both",
    "save_together": "test_main_saves_a_model_alone test_what_needs_all_ranks_names_the_guard "
    "test_a_guarded_save_is_loaded_and_says_what_it_has_not",
    # calls
    "Accelerator(": "test_what_has_no_equivalent_is_told test_the_environment_names_the_precision",
    "dataloader_config": "test_configuration_objects_are_understood",
    "gradient_accumulation_plugin": "test_gradients_may_be_averaged_after_each_micro_batch "
    "test_a_window_may_span_epochs",
    "project_config": "test_the_project_is_read_only test_configuration_objects_are_understood",
    "kwargs_handlers": "test_hooks_compress_what_ddp_sends test_what_has_no_equivalent_is_told",
    "log_with": "test_trackers_are_made_by_their_names test_figures_go_to_trackers_on_rank_0 "
    "test_a_tracker_may_run_on_all_ranks",
    "distributed_type": "test_the_state_has_accelerates_names test_the_state_of_the_window",
    'mixed_precision="fp16"': "test_nothing_falls_back_to_full_precision_in_silence",
    "prepare(": "test_a_model_that_differs_between_ranks_is_told_on_all test_types_survive_prepare "
    "test_prepare_keeps_order_and_hands_on_what_it_does_not_know test_models_start_alike",
    "backward(loss)": "test_tails_of_both",
    ".grad": "test_gradients_between_windows",
    "backward`": "test_a_backward_pass_outside_of_blocks",
    "loss.backward()": "test_a_plain_backward_averages "
    "test_a_plain_backward_in_a_window_averages_when_it_closes",
    "accumulate(model)": "test_two_accumulators_do_not_disturb_each_other "
    "test_an_evaluation_inside_of_training_changes_nothing",
    "prepared `optimizer": "test_gradients_between_windows",
    "prepared `scheduler": "test_schedules_of_both test_schedules_advance_once_per_step",
    "sync_gradients": "test_a_new_number_of_steps test_the_state_of_the_window",
    "clip_grad_norm_": "test_between_windows_clipping_does_nothing",
    "unscale_gradients": "test_gradients_are_unscaled_once",
    "optimizer_step_was_skipped": "test_an_overflow_on_one_rank_skips_the_step_on_all",
    "autocast()": "test_profiles_and_compiled_models "
    "test_prepare_keeps_order_and_hands_on_what_it_does_not_know",
    "no_sync(model)": "test_a_later_backward_pass_synchronizes_earlier_forward_passes "
    "test_backward_without_sync_stays_on_its_rank",
    "save_iteration": "test_calls_that_ask_for_what_is_so_anyway",
    "gather`": "test_tensors_of_all_ranks test_tensors_that_cannot_be_joined_are_told",
    "gather_for_metrics": "test_metrics_are_gathered_without_the_padding "
    "test_objects_gathered_for_metrics",
    "reduce(": "test_tensors_of_all_ranks test_means_of_integers",
    "broadcast(": "test_a_broadcast_into_something_else_is_told_on_all",
    "pad_across_processes": "test_padding_of_unlike_structures_is_a_mismatch",
    "split_between_processes": "test_flags_and_shares test_texts_are_not_split",
    "wait_for_everyone": "test_who_is_missing_is_named",
    "main_process_first": "test_a_body_that_raises_is_told_on_all",
    "on_main_process": "test_the_place_of_a_rank test_decorators_keep_names",
    "print": "test_the_place_of_a_rank",
    "set_trigger": "test_flags_and_shares test_a_reason_for_a_trigger",
    "skip_first_batches": "test_what_is_left_of_a_loader_can_be_prepared",
    "save(": "test_saving_writes_on_main_only "
    "test_saving_follows_links_and_leaves_what_is_no_file",
    "save_model": "test_main_saves_a_model_alone test_the_newest_model_loads_whatever_was_there",
    "save_state`": "test_calls_that_ask_for_what_is_so_anyway "
    "test_steps_are_kept_found_and_continued test_a_directory_that_is_given_is_used "
    "test_the_models_of_a_state_are_read_by_themselves",
    "register_for_checkpointing": "test_names_must_be_those_that_were_saved "
    "test_registered_objects_have_names",
    "register_save_state_pre_hook": "test_a_model_that_hooks_save_and_load_is_theirs "
    "test_ranks_whose_hooks_leave_different_models_are_told",
    "load_checkpoint_in_model": "test_what_accelerates_function_takes_is_taken_or_told",
    "free_memory": "test_prepare_keeps_order_and_hands_on_what_it_does_not_know",
    "IterableDataset": "test_streams_of_both test_a_stream_that_knows_its_length_tells_it",
    "join_uneven_inputs": "test_uneven_batches_in_a_block_that_joins "
    "test_ranks_without_batches_join_passes_outside_of_windows",
}  # fmt: skip


def test_each_row_has_tests() -> None:
    page = (ROOT / "docs/training.md").read_text()
    section = page[page.index("## From Accelerate") : page.index("## Figures")]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
    cells = [cell for cell in cells if cell not in ("| argument", "| Accelerate")]
    found = [[name for name in ROWS if name.strip("`") in cell] for cell in cells]
    assert [cell for cell, names in zip(cells, found, strict=True) if not names] == []
    assert set(ROWS) == {name for names in found for name in names}
    folders = [ROOT / "tests/training", ROOT / "tests/accelerate"]
    texts = [path.read_text() for folder in folders for path in folder.rglob("test_*.py")]
    tests = set(re.findall(r"^def (test_\w+)", "\n".join(texts), re.MULTILINE))
    assert {test for named in ROWS.values() for test in named.split()} <= tests


# -- arguments whose defaults differ ------------------------------------------------------------


@in_pairs
def test_schedules_of_both(world: Ranks) -> None:
    def program(kind: type[Any], **options: Any) -> float:
        job = kind(cpu=True, **options)
        plain = unit_model()
        optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 8)
        model, optimizer, schedule = job.prepare(plain, optimizer, schedule)
        job.backward(model(ones()).mean())
        optimizer.step()
        schedule.step()
        return float(schedule.get_last_lr()[0])

    cases: list[tuple[type[Any], dict[str, Any], float]] = [
        (Accelerator, {}, 7 / 8),
        (Accelerator, {"step_schedule_per_rank": True}, 6 / 8),
        (DropIn, {}, 6 / 8),
        (DropIn, {"split_batches": True}, 7 / 8),
        (DropIn, {"step_scheduler_with_optimizer": False}, 7 / 8),
    ]

    def all_cases() -> list[float]:
        return [program(kind, **options) for kind, options, _ in cases]

    for seen in world.run(all_cases):
        assert seen == pytest.approx([wanted for *_, wanted in cases])


@in_pairs
def test_tails_of_both(world: Ranks) -> None:
    """A window of two at the end of three batches holds one."""

    def program(kind: type[Any], **options: Any) -> list[float]:
        job = kind(2, cpu=True, **options) if kind is Accelerator else kind(
            cpu=True, gradient_accumulation_steps=2
        )  # fmt: skip
        model, loader = job.prepare(unit_model(), feed([torch.ones(1)] * 6, batch_size=1))
        seen: list[float] = []
        for batch in loader:
            with job.accumulate(model):
                job.backward(model(batch).mean())
            seen.append(gradient(model))
            if job.sync_gradients:
                model.zero_grad()
        return seen

    def both() -> list[Any]:
        other = program(Accelerator, divide_by_steps=True)
        return [program(Accelerator), program(DropIn), other]

    scaled = [0.5, 1.0, 0.5]
    assert world.run(both) == [[[1.0, 1.0, 1.0], scaled, scaled]] * 2


@alone
def test_orders_of_both(world: Ranks) -> None:
    def order(prepare: Any) -> list[int]:
        torch.manual_seed(3)
        return [int(item) for item in prepare(feed(range(8), batch_size=1, shuffle=True))]

    def program() -> list[list[int]]:
        return [order(way) for way in (iter, DropIn(cpu=True).prepare, Accelerator().prepare)]

    ((plain, theirs, ours),) = world.run(program)
    assert plain == theirs != ours
    assert sorted(ours) == list(range(8))


@in_pairs
def test_states_of_both(world: Ranks, tmp_path: Path) -> None:
    """Saved in an epoch's second batch, and in its last."""

    def program(kind: type[Any]) -> list[list[list[int]]]:
        found = []
        for at in (1, 3):
            job = kind(cpu=True)
            loader = job.prepare(feed(range(8), batch_size=1))
            for number, _ in enumerate(loader):
                if number == at:
                    job.save_state(tmp_path / f"{kind.__name__}-{at}")
            again = kind(cpu=True)
            resumed = again.prepare(feed(range(8), batch_size=1))
            again.load_state(tmp_path / f"{kind.__name__}-{at}")
            found.append([int(item) for item in resumed])
        return found  # type: ignore[return-value]

    for rank, (ours, theirs) in enumerate(
        world.run(lambda: [program(Accelerator), program(DropIn)])
    ):
        whole = list(range(rank, 8, 2))
        assert ours == [whole[2:], []]
        assert theirs == [whole, whole]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter([syncprims.get_rank()] * 4)


@in_pairs
def test_streams_of_both(world: Ranks) -> None:
    """Its items are the rank that reads it."""

    def program() -> list[list[int]]:
        data: Any = Stream()
        jobs = [
            Accelerator(cpu=True),
            DropIn(cpu=True),
            Accelerator(cpu=True, dispatch_streams=True),
        ]
        return [[int(item) for item in job.prepare(feed(data, batch_size=1))] for job in jobs]

    assert world.run(program) == [[[rank] * 2, [0] * 2, [0] * 2] for rank in (0, 1)]


@in_pairs
def test_hooks_of_both(world: Ranks, tmp_path: Path) -> None:
    def program() -> list[bool]:
        seen: list[bool] = []
        for kind in (Accelerator, DropIn):
            job: Any = kind(cpu=True)
            plain = unit_model()
            job.prepare(plain)
            job.register_save_state_pre_hook(lambda models, *_: seen.append(models[0] is plain))  # noqa: B023
            job.save_state(tmp_path / kind.__name__)
        return seen

    wrapped = world.kind.backend == "torch"
    assert world.run(program) == [[not wrapped, True]] * 2


# -- calls ----------------------------------------------------------------------------------------


@alone
def test_the_project_is_read_only(world: Ranks, tmp_path: Path) -> None:
    def program() -> None:
        job: Any = Accelerator(cpu=True, project_dir=tmp_path)
        job.project_configuration.iteration = 0  # it is so anyway
        with pytest.raises(AttributeError, match="leave it out"):
            job.project_configuration.iteration = 7
        with pytest.raises(AttributeError, match="project_config="):
            job.project_configuration.total_limit = 7
        job.project_configuration.set_directories(tmp_path / "other")
        assert job.project_dir == tmp_path / "other"

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
def test_models_start_alike(world: Ranks) -> None:
    def program() -> list[float]:
        return numbers(Accelerator(cpu=True).prepare(small_model(syncprims.get_rank())))

    assert world.run(program) == [numbers(small_model(0))] * 2


@in_pairs
def test_gradients_between_windows(world: Ranks) -> None:
    """A sum that is scaled at the end; what a call before the backward pass clears is nothing."""

    def program() -> list[float]:
        job = Accelerator(2, cpu=True)
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

    assert world.run(program) == [[1.0, 0.0, 2.0, -2.0]] * 2


@in_pairs
def test_a_backward_pass_outside_of_blocks(world: Ranks) -> None:
    def program() -> list[float]:
        found = []
        for job in (Accelerator(4, cpu=True), DropIn(cpu=True, gradient_accumulation_steps=4)):
            model: Any = job.prepare(unit_model())
            job.backward(model(torch.full((1, 1), 2.0 + 4.0 * job.process_index)).mean())
            found.append(gradient(model))
        return found

    assert world.run(program) == [[1.0, 1.0]] * 2


@alone
def test_a_new_number_of_steps(world: Ranks) -> None:
    def program() -> list[bool]:
        job: Any = Accelerator(2, cpu=True)
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
        job = Accelerator(cpu=True, mixed_precision="fp16", scaler={"init_scale": 4.0})
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


@alone
def test_profiles_and_compiled_models(world: Ranks, tmp_path: Path) -> None:
    def program() -> None:
        job = DropIn(cpu=True)
        compiled: Any = job.prepare(torch.compile(unit_model(), backend="eager"))
        assert not hasattr(job.unwrap_model(compiled), "_orig_mod")
        assert hasattr(job.unwrap_model(compiled, keep_torch_compile=True), "_orig_mod")
        from syncprims.accelerate import ProfileKwargs

        options = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "traces"))
        with job.profile(options) as profiler:
            torch.ones(3).sum()
        assert isinstance(profiler, torch.profiler.profile)
        raw = {"activities": ["cpu"], "schedule_option": {"wait": 0, "warmup": 1, "active": 1}}
        theirs: Any = type("ProfileKwargs", (), {"to_kwargs": lambda _: dict(raw)})()
        with Accelerator(cpu=True, kwargs_handlers=[theirs]).profile() as profiler:
            torch.ones(3).sum()
        assert profiler.activities == {torch.profiler.ProfilerActivity.CPU}
        assert (tmp_path / "traces/profile_0.json").exists()

    world.run(program)


@in_pairs
def test_objects_gathered_for_metrics(world: Ranks) -> None:
    def program() -> list[Any]:
        job = DropIn(cpu=True)
        rank = job.process_index
        given: list[Any] = [f"rank {rank}", {"rank": rank}, [rank, "x"], (rank, "x")]
        return [job.gather_for_metrics(one) for one in given]

    listed = [0, "x", 1, "x"]
    wanted = [["rank 0", "rank 1"], [{"rank": 0}, {"rank": 1}], listed, listed]
    assert world.run(program) == [wanted] * 2


@in_pairs
def test_means_of_integers(world: Ranks) -> None:
    def program() -> tuple[float, int]:
        mine = torch.tensor(1 + syncprims.get_rank())
        mean = Accelerator(cpu=True).reduce(mine, "mean")
        return float(mean), int(gathering.reduce(mine, "prod"))

    assert world.run(program) == [(1.5, 2)] * 2


@alone
def test_texts_are_not_split(world: Ranks) -> None:
    def program() -> None:
        job = Accelerator(cpu=True)
        with pytest.raises(TypeError, match="str"), job.split_between_processes("text"):
            pass
        with job.split_between_processes(range(3)) as part:
            assert part == range(3)

    world.run(program)


@without_ddp
def test_who_is_missing_is_named(world: Ranks) -> None:
    if world.ranks == 1:
        return

    def program() -> None:
        job = Accelerator(cpu=True)
        if not job.is_last_process:
            job.wait_for_everyone()

    last = world.ranks - 1
    for found in world.outcomes(program)[:last]:
        assert isinstance(found, syncprims.PeerLost)
        assert f"rank {last} finished" in str(found)


@in_pairs
def test_a_body_that_raises_is_told_on_all(world: Ranks) -> None:
    def program() -> None:
        job = Accelerator(cpu=True)
        with job.main_process_first():
            if job.is_main_process:
                raise OSError("no disk")

    first, second = world.outcomes(program)
    assert isinstance(first, OSError)
    assert isinstance(second, syncprims.PeerFailed)


@alone
def test_decorators_keep_names(world: Ranks) -> None:
    def program() -> None:
        job = Accelerator(cpu=True)

        def task() -> None:
            """Do it."""

        for made in (job.on_main_process(task), job.on_last_process(task)):
            assert (made.__name__, made.__doc__) == ("task", "Do it.")
        with pytest.raises(ValueError, match="5"):
            job.on_process(task, process_index=5)()

    world.run(program)


@in_pairs
def test_a_reason_for_a_trigger(world: Ranks) -> None:
    def program() -> bool:
        job = Accelerator(cpu=True)
        if job.is_last_process:
            job.set_trigger("the loss is not a number")
        return job.check_trigger()

    assert world.run(program) == [True, True]


@alone
def test_a_directory_that_is_given_is_used(world: Ranks, tmp_path: Path) -> None:
    def program() -> None:
        from syncprims.accelerate.utils import ProjectConfiguration

        project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
        job = DropIn(cpu=True, project_config=project)
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
