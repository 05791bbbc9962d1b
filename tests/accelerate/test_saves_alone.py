"""A save that each rank makes without the others, as scripts do under `if is_main_process`."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.training_models import everywhere, in_pairs, numbers, small_model

from syncprims.accelerate import Accelerator
from syncprims.training import Accelerator as PlainAccelerator
from syncprims.training import CheckpointError

if TYPE_CHECKING:
    from support.rank_worlds import Ranks


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
def test_a_guarded_save_is_loaded_and_says_what_it_has_not(
    world: Ranks, guarded: bool, tmp_path: Path
) -> None:
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
        with_log: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: with_log.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("syncprims").addHandler(handler)
        other.load_state(tmp_path / "saved")
        logging.getLogger("syncprims").removeHandler(handler)
        assert numbers(again) == wanted
        assert its.state_dict()["state"][0]["step"] == 1
        same = torch.initial_seed() == 10 + job.process_index and random.random() == drawn
        return same, with_log

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
        job.wait_for_everyone()
        return (tmp_path / "saved" / "rank-00001").exists()

    assert world.run(program) == [False, False]


@in_pairs
def test_a_damaged_save_is_an_error_on_all_ranks(world: Ranks, tmp_path: Path) -> None:
    def program() -> None:
        job, *_ = job_of(1)
        job.save_state(tmp_path / "saved", safe_serialization=False)
        job.wait_for_everyone()
        if job.is_main_process:
            state = torch.load(tmp_path / "saved" / "pytorch_model.bin", weights_only=True)
            assert state.keys() == small_model().state_dict().keys()
            (tmp_path / "saved" / "model_0.safetensors").write_bytes(b"x")
        with pytest.raises(CheckpointError, match="model_0"):
            job.load_state(tmp_path / "saved")
        plain = PlainAccelerator(cpu=True)
        with pytest.raises(CheckpointError):
            plain.load_state(tmp_path / "saved")

    world.run(program)
