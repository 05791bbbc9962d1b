"""`Accelerator`: the names and results that users of Accelerate know."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file
from support.rank_worlds import Kind, Ranks
from support.training_models import (
    alone,
    everywhere,
    feed,
    in_pairs,
    new_job,
    numbers,
    rows,
    small_model,
)
from torch.utils.data import DataLoader, TensorDataset

import syncprims
from syncprims.accelerate import Accelerator
from syncprims.training import CheckpointError, PreparedOptimizer, rank_device


def seeded() -> Accelerator:
    return new_job(2, seed=5, split_batches=True)


def trained(accelerator: Accelerator, batch_size: int) -> list[float]:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    loader = DataLoader(rows(64), batch_size=batch_size, shuffle=True)
    schedule, loader, model, optimizer = accelerator.prepare(schedule, loader, model, optimizer)
    for _ in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(((model(x) - y) ** 2).mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return numbers(accelerator.unwrap_model(model))


@everywhere
def test_the_same_numbers_on_any_number_of_ranks(world: Ranks) -> None:
    def alone_in_the_world() -> list[float]:
        return trained(seeded(), 8)

    def program() -> list[float]:
        return trained(seeded(), 8)

    from support.rank_worlds import Kind
    from support.rank_worlds import Ranks as Worlds

    (reference,) = Worlds(Kind("single", 1), world.directory).run(alone_in_the_world)
    for seen in world.run(program):
        assert seen == pytest.approx(reference, rel=1e-12)


@everywhere
def test_a_job_goes_on_where_it_was_saved(world: Ranks, tmp_path: Path) -> None:
    def job(stop_at: int | None, start: bool) -> list[Any]:
        a = new_job(2)
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
                    schedule.step()
                    optimizer.zero_grad()
                step += 1
                if step == 7 and stop_at is not None:
                    a.save_state(tmp_path / "state")
        return [*numbers(model), *schedule.get_last_lr()]

    whole = world.run(lambda: job(7, False))
    assert world.run(lambda: job(None, True)) == whole


@alone
def test_prepare_keeps_order_and_hands_on_what_it_does_not_know(world: Ranks) -> None:
    def program() -> None:
        a = Accelerator()
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters())
        nothing, one, two, word = a.prepare(None, optimizer, model, "word")
        assert (nothing, word) == (None, "word")
        assert isinstance(one, PreparedOptimizer)
        assert a.prepare(two) is two
        assert a.unwrap_model(two) is model
        compiled: Any = torch.compile(model, backend="eager")
        assert a.unwrap_model(compiled, keep_torch_compile=False) is model
        assert a.unwrap_model(compiled) is compiled  # the default, as there
        batch = next(iter(a.prepare(DataLoader(TensorDataset(torch.ones(2, 1)), batch_size=2))))
        assert batch[0].device == a.device
        kept = a.free_memory(one, two)
        assert kept == [None, None]

    assert world.run(program) == [None]


@in_pairs
def test_transformers_train_and_are_saved(world: Ranks, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def program() -> None:
        a = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
        size = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 20}
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size))
        before = numbers(model)
        ids = torch.arange(96).reshape(16, 6) % 20
        data: Any = [{"input_ids": row, "labels": row} for row in ids]
        loader = feed(data, batch_size=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, loader = a.prepare(model, optimizer, loader)
        for batch in loader:
            with a.accumulate(model):
                assert batch["input_ids"].device == a.device
                output = model(**batch)
                assert output.logits.dtype == torch.float32
                a.backward(output.loss)
                optimizer.step()
                optimizer.zero_grad()
        syncprims.assert_same(numbers(model), "weights")
        assert numbers(model) != before
        a.unwrap_model(model).save_pretrained(
            tmp_path / "gpt", is_main_process=a.is_main_process, save_function=a.save
        )
        a.wait_for_everyone()
        again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "gpt")
        assert numbers(again) == numbers(a.unwrap_model(model))

    assert world.run(program) == [None] * 2


@pytest.mark.parametrize(
    ("current", "devices", "used"),
    [(0, 4, [0, 1]), (3, 4, [3, 3]), (0, 1, [0, 0])],
    ids=["one for each", "chosen by the program", "shared"],
)
def test_a_rank_uses_the_device_that_is_current(
    current: int, devices: int, used: list[int], meeting_place: Path
) -> None:
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
def test_tensors_of_all_ranks(world: Ranks) -> None:
    """What Accelerate's own script of operations does not try."""

    def program() -> None:
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

    world.run(program)


@everywhere
def test_main_saves_objects(world: Ranks, tmp_path: Path) -> None:
    """Links are followed, and what is no file is left alone."""
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
