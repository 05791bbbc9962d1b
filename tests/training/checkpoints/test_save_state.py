"""`save_state`: exact, by name, resumed bit for bit in a new process, without pickle."""

from __future__ import annotations

import collections
import contextlib
import importlib
import importlib.util
import math
import pickle
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_every_rank, several
from support.checkpoint_worlds import Alone, Kept, on_some
from support.file_faults import watched
from support.rank_environment import PATIENCE, record_warnings
from support.rank_worlds import Kind, Ranks, environment
from torch import nn

import syncprims as sp
from syncprims.training import Checkpoints, load_state, save_state


class Order:
    """The order of data: a shuffle per epoch, and how far it has come."""

    def __init__(self) -> None:
        self.epoch = self.at = 0

    def batches(self, epochs: int) -> Generator[torch.Tensor]:
        while self.epoch < epochs:
            order = torch.randperm(8, generator=torch.Generator().manual_seed(self.epoch))
            while self.at < 8:
                batch = order[self.at : self.at + 2]
                self.at += 2
                yield batch
            self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


def training() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    return {
        "model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler,
        "order": Order(),
    }  # fmt: skip


def seed_rank() -> None:
    rank = sp.get_rank()
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)


def train(parts: dict[str, Any], stop_at: int | None, path: Path | None) -> list[float]:
    """Train on; save after `stop_at` steps and stop there. Return the losses."""
    losses: list[float] = []
    model, optimizer = parts["model"], parts["optimizer"]
    for batch in parts["order"].batches(2):
        noise = torch.randn(2, 3) + random.random() + np.random.rand()
        loss = (model(batch[:, None] * 0.1 + noise) - 1).pow(2).mean()
        optimizer.zero_grad()
        parts["scaler"].scale(loss).backward()
        for parameter in model.parameters():
            parameter.grad.copy_(sp.all_reduce(parameter.grad, "mean"))
        for buffer in model.buffers():  # as DDP does: main's, on all
            buffer.copy_(sp.broadcast(buffer))
        parts["scaler"].step(optimizer)
        parts["scaler"].update()
        parts["schedule"].step()
        losses.append(float(loss.detach()))
        if len(losses) == stop_at:
            assert path is not None
            save_state(path, parts, rank_objects={"own": Kept(sp.get_rank())}, step=stop_at)
            break
    return losses


def plain(value: Any) -> Any:
    """Return what is equal only for states that are the same bits."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), raw
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def ending(parts: dict[str, Any], losses: list[float]) -> Any:
    states = {name: plain(part.state_dict()) for name, part in parts.items()}
    return losses, states, random.random(), float(np.random.rand()), float(torch.rand(()))


@on_some
@pytest.mark.parametrize("stop_at", [3, 4, 5], ids=["mid-epoch", "boundary", "next-epoch"])
def test_resumed_it_has_the_bits_of_one_run(world: Ranks, stop_at: int, tmp_path: Path) -> None:
    path = tmp_path / "state"

    def whole() -> Any:
        parts = training()
        seed_rank()
        return ending(parts, train(parts, None, None))

    def first() -> list[float]:
        parts = training()
        seed_rank()
        return train(parts, stop_at, path)

    def rest() -> Any:
        parts, own = training(), Kept()
        loaded = load_state(path, parts, rank_objects={"own": own})
        assert (loaded.step, loaded.world_size, own.state) == (stop_at, world.ranks, sp.get_rank())
        return ending(parts, train(parts, None, None))

    expected, begun = world.run(whole), world.run(first)
    for (losses, *end), start, (more, *found) in zip(expected, begun, world.run(rest), strict=True):
        assert start + more == losses
        assert found == end


TEXTS = ("", "a", "a\0b\0\0", "\0")
EXOTIC: dict[str, Any] = {
    "none": None, "bools": [True, False], "ints": [0, -1, 2**63, -(2**70), 10**5000],
    "floats": [0.1, -0.0, math.inf, -math.inf, 1e-320], "text": "a\0b\"\\é\U0001f600",
    "keys": {3: "a", (2, "b"): [3], None: 4, 1.5: 5, True: 6}, "$": {"$": "tensor"},
    "tuple": (1, (2, [3])), "set": {1, 2}, "frozen": frozenset("ab"), "bytes": b"\0\xff",
    "complex": 1 - 2j, "ordered": collections.OrderedDict(b=1, a=2),
    "counter": collections.Counter("hello"), "deque": collections.deque([1, 2], maxlen=3),
    "path": Path("a/b"),
    "dtype": torch.bfloat16, "device": torch.device("cpu"), "size": torch.Size([1, 2]),
    "scalar": np.float32(1.5), "array": np.arange(6, dtype=">i2").reshape(2, 3)[:, ::2],
    "strings": np.array(["a", "bcd"]), "when": np.array(["2020-01-01"], "datetime64[D]"),
    "tensors": [torch.arange(3), torch.tensor(2.5), torch.empty(0, 2), torch.ones(2, 2).t()],
    "__metadata__": torch.ones(1), "": {"": torch.zeros(1)}, "a.b": torch.ones(1),
    "a": {"b": torch.zeros(1)}, "parameter": nn.Parameter(torch.ones(2)),
    "frozen parameter": nn.Parameter(torch.arange(2), requires_grad=False),
    "no UTF-8": ["a\udcffb", Path("x\udc80"), {"\udcfe": 1}],
    "numpy's texts": [np.str_(text) for text in TEXTS] + [np.bytes_(t.encode()) for t in TEXTS],
}  # fmt: skip


def equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, nn.Parameter) and one.requires_grad != other.requires_grad:
        return False
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (np.str_, np.bytes_)):  # numpy takes some of them for equal
        return list(one) == list(other)
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def test_a_state_of_all_kinds_comes_back_in_type_and_value(tmp_path: Path, alone: Alone) -> None:
    def program() -> list[str]:
        other = Kept()
        save_state(tmp_path / "s", {"it": Kept(EXOTIC)})
        load_state(tmp_path / "s", {"it": other})
        assert list(other.state) == list(EXOTIC)
        assert math.copysign(1, other.state["floats"][1]) == -1
        assert other.state["deque"].maxlen == 3
        return [name for name, value in EXOTIC.items() if not equal(value, other.state[name])]

    assert alone(program) == []


_places = (f"numpy.{core}._rational_tests" for core in ("_core", "core"))  # by its version
rational: Any = importlib.import_module(next(filter(importlib.util.find_spec, _places))).rational


class Percent(np.float64):
    """A number of a user's own kind."""


@pytest.mark.parametrize(
    "value",
    [
        object(), print, collections.defaultdict(list), Kept, Percent(3), np.void(b""),
        np.ndarray(3, "U0"), np.array([None]), np.zeros(2, [("a", int)]),
        rational(1, 2), np.array([rational(1, 2)]),
    ],
)  # fmt: skip
def test_what_needs_a_pickle_is_refused(value: Any, tmp_path: Path, alone: Alone) -> None:
    def program() -> None:
        with pytest.raises(sp.CheckpointError, match=r"state a\.1 is a .*needs a pickle"):
            save_state(tmp_path / "s", {"it": Kept({"a": [1, value]})})

    assert alone(program) is None
    assert not (tmp_path / "s").exists()


@pytest.fixture
def no_pickle() -> Callable[[], None]:
    """Return what arms a hook that ends a program in which anything is unpickled."""

    def arm() -> None:
        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event == "pickle.find_class":
                raise AssertionError(f"a pickle: {args}")

        sys.addaudithook(hook)
        with pytest.raises(AssertionError, match="a pickle"):
            pickle.loads(pickle.dumps(Kept()))

    return arm


@on_some
def test_nothing_is_pickled(world: Ranks, no_pickle: Callable[[], None], tmp_path: Path) -> None:
    from syncprims.training import load_checkpoint_in_model, save_model

    def program() -> list[int]:
        no_pickle()
        parts = training()
        train(parts, 3, tmp_path / "s")
        load_state(tmp_path / "s", training(), rank_objects={"own": Kept()})
        save_state(tmp_path / "s", parts, block=False).wait()
        load_state(tmp_path / "s", parts)
        save_model(parts["model"], tmp_path / "m", max_shard_size=100)
        load_checkpoint_in_model(parts["model"], tmp_path / "m")
        steps = Checkpoints(tmp_path / "steps", keep_last=1)
        for step in (1, 2):
            steps.save(step, parts)
        return steps.steps()

    assert world.run(program, SYNCPRIMS_PICKLE="0") == [[2]] * world.ranks


def save_simple(path: Path) -> None:
    save_state(path, {"model": nn.Linear(2, 2), "it": Kept(1)}, rank_objects={"own": Kept(2)})


@several(2)
def test_a_damaged_random_state_is_an_error_on_all_ranks(world: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "s"

    def load() -> str:
        own = {"own": Kept()}
        with pytest.raises(sp.CheckpointError) as caught:
            load_state(path, {"model": nn.Linear(2, 2), "it": Kept()}, rank_objects=own)
        return str(caught.value)

    world.run(lambda: save_simple(path))
    file = path / "rank-00001.state.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    first = world.run(load)
    assert len(set(first)) == 1
    assert "rank-00001.state.safetensors: damaged data: expected" in first[0]
    file.unlink()
    second = world.run(load)
    assert len(set(second)) == 1
    assert "rank-00001.state.safetensors: missing" in second[0]


def test_another_world_size_is_refused(tmp_path: Path, alone: Alone, meeting_place: Path) -> None:
    path = tmp_path / "s"

    def load() -> tuple[bool, Any]:
        model, own = nn.Linear(2, 2), Kept()
        objects: dict[str, Any] = {"model": model, "it": Kept()}
        with pytest.raises(sp.CheckpointError, match="saved by 2 ranks, and here are 1"):
            load_state(path, objects, rank_objects={"own": own})
        before = torch.get_rng_state()
        loaded = load_state(path, objects, rank_objects={"own": own}, any_world_size=True)
        return torch.equal(before, torch.get_rng_state()), (loaded.world_size, own.state)

    Ranks(Kind("file", 2), meeting_place).run(lambda: save_simple(path))
    assert alone(load) == (True, (2, None))


def test_what_does_not_fit_the_objects_is_refused(tmp_path: Path, alone: Alone) -> None:
    path = tmp_path / "s"

    def program() -> Any:
        save_simple(path)
        save_state(tmp_path / "other", {"it": Kept({1: 2, "a": torch.ones(1), None: 3})})
        model, it, own = nn.Linear(2, 2), Kept(), {"own": Kept()}
        with pytest.raises(sp.CheckpointError, match=r"expected \['it', 'other'\].*found"):
            load_state(path, {"it": it, "other": model}, rank_objects=own)
        load_state(path, {"it": it}, strict=False)
        less: dict[str, Any] = {"model": nn.Linear(2, 2, bias=False), "it": it}
        with pytest.raises(sp.CheckpointError, match="another model: 'bias': expected nothing"):
            load_state(path, less, rank_objects=own)
        other: dict[str, Any] = {"model": nn.Linear(3, 2), "it": it}
        with pytest.raises(
            sp.CheckpointError, match=r"'weight': expected \(2, 3\).*found \(2, 2\)"
        ):
            load_state(path, other, rank_objects=own)
        with pytest.raises(sp.CheckpointError, match="of another model") as caught:
            load_state(tmp_path / "other", {"it": model})
        assert isinstance(caught.value.__cause__, sp.CheckpointError)
        empty: dict[str, Any] = {"model": nn.Linear(2, 2, device="meta"), "it": it}
        with pytest.raises(sp.CheckpointError, match=r"'weight' is on the meta device.*to_empty"):
            load_state(path, empty, rank_objects=own)
        load_state(path, {**empty, "model": empty["model"].to_empty(device="cpu")}, strict=False)
        return it.state

    assert alone(program) == 1


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "rank-00001", "x" * 101])
def test_a_name_that_is_none_for_a_file_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot name an object"):
        save_state(tmp_path / "s", {name: Kept()})
    with pytest.raises(TypeError, match="objects are saved under names, and 1 is a int"):
        save_state(tmp_path / "s", {1: Kept()})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="has no state_dict"):
        save_state(tmp_path / "s", {"it": object()})  # type: ignore[dict-item]


@several(2)
def test_who_waits_at_a_save_says_so_and_where(world: Ranks, tmp_path: Path) -> None:
    def program() -> str:
        if sp.get_rank():
            return ""
        with pytest.raises(sp.PeerLost) as caught:
            save_state(tmp_path / "s", {"it": Kept(1)})
        return str(caught.value)

    said = world.run(program)[0]
    assert re.search(r"wait in save_state \(\S*test_save_state\.py:\d+\)", said)
    assert "all_gather" not in said


def test_another_bit_generator_of_numpy_goes_on(tmp_path: Path, alone: Alone) -> None:
    def program() -> list[float]:
        random_numbers: Any = np.random
        random_numbers.set_bit_generator(np.random.PCG64(3))
        save_state(tmp_path / "s", {})
        first = float(np.random.rand())
        load_state(tmp_path / "s", {})
        return [first, float(np.random.rand())]

    first, again = alone(program)
    assert first == again


@on_some
@on_every_rank
def test_a_save_behind_training_has_the_values_of_its_start(tmp_path: Path) -> None:
    model, other = nn.Linear(300, 300), nn.Linear(300, 300)
    kept = Kept({"list": [1], "array": np.ones(3)})
    with torch.no_grad():
        model.weight.fill_(1)
    saving = save_state(tmp_path / "s", {"model": model, "it": kept}, block=False)
    with torch.no_grad():
        model.weight.fill_(2)
    kept.state["list"].append(2)
    kept.state["array"][:] = 2
    saving.wait()
    saving.wait()
    load_state(tmp_path / "s", {"model": other, "it": kept})
    left = [t.name for t in threading.enumerate() if t.name == "syncprims-save"]
    same = kept.state["list"] == [1] and bool((kept.state["array"] == 1).all())
    assert (float(other.weight.detach().max()), same and saving.done, left) == (1.0, True, [])


@on_some
def test_a_failure_behind_training_surfaces_at_the_next_save(world: Ranks, tmp_path: Path) -> None:
    last = world.ranks - 1

    def program() -> tuple[str, int, list[str]]:
        steps, it, said = Checkpoints(tmp_path / "steps"), Kept(1), record_warnings()
        steps.save(1, {"it": it})

        def full(number: int, name: str, args: tuple[Any, ...]) -> None:
            if name == "fsync" and threading.current_thread().name == "syncprims-save":
                raise OSError(28, "No space left on device")

        it.state = torch.ones(5)
        with watched(full) if sp.get_rank() == last else contextlib.nullcontext():
            saving = steps.save(2, {"it": it}, block=False)
            while sp.get_rank() == last and not saving.done:
                pass
        early = list(said)
        with pytest.raises(sp.CheckpointError) as caught:
            steps.save(3, {"it": it})
        assert caught.value.errno == 28
        steps.save(4, {"it": it})
        return str(caught.value), len(list((tmp_path / "steps").iterdir())), early

    outcomes = world.run(program)
    assert len({said for said, *_ in outcomes}) == 1
    assert outcomes[0][1] == 2
    assert f"rank {last}" in outcomes[0][0]
    [early] = outcomes[last][2]
    assert "No space left" in early
    assert f"save_state to {tmp_path}/steps/step-2" in early


@several(2)
def test_a_program_that_ends_lets_its_last_save_be_finished(tmp_path: Path, world: Ranks) -> None:
    source = (
        "import sys, torch\nfrom syncprims.training import save_state\n"
        "save_state(sys.argv[1], {'model': torch.nn.Linear(200, 200)}, block=False)\n"
    )
    path = tmp_path / "s"
    command = [sys.executable, "-c", source, str(path)]
    started = [
        subprocess.Popen(command, env=environment(world.kind, rank, world.directory, "ends"))
        for rank in range(world.ranks)
    ] if world.kind.backend == "file" else []  # fmt: skip
    assert [process.wait(PATIENCE) for process in started] == [0] * len(started)
    assert (path / "checkpoint.json").exists() == bool(started)


@on_some
def test_steps_are_kept_found_and_continued(world: Ranks, tmp_path: Path) -> None:
    base = tmp_path / "run"
    base.mkdir()
    for stray in ("notes.txt", "step-x", "step-", "step-007", "other-3"):
        (base / stray).write_text("")
    (base / "step-99").mkdir()  # without a manifest: no checkpoint

    def program() -> Any:
        steps, it = Checkpoints(base, keep_last=2), Kept()
        assert steps.latest() is None
        with pytest.raises(sp.CheckpointError, match="no complete checkpoint"):
            steps.load({"it": it})
        for step in (1, 2, 10):
            it.state = step
            steps.save(step, {"it": it}, block=step != 2)
        again = Checkpoints(base, keep_last=2)  # a new run
        loaded = again.load({"it": it})
        assert (it.state, loaded.step) == (10, 10)
        again.save(11, {"it": it})
        again.save(np.int64(11), {"it": it})  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            again.save(1.5, {"it": it})  # type: ignore[arg-type]
        first = again.load({"it": it}, step=10).step
        sp.barrier()
        return again.steps(), first

    assert world.run(program) == [([10, 11], 10)] * world.ranks
    left = {path.name for path in base.iterdir()}
    assert left == {"notes.txt", "step-x", "step-", "step-007", "other-3", "step-99", "step-10",
                    "step-11"}  # fmt: skip


def test_a_damaged_step_names_an_older_one(tmp_path: Path, alone: Alone) -> None:
    def program() -> str:
        steps, it = Checkpoints(tmp_path / "run"), Kept(torch.ones(3))
        for step in (1, 2, 3):
            steps.save(step, {"it": it})
        (tmp_path / "run" / "step-3" / "it.state.safetensors").write_bytes(b"")
        with pytest.raises(sp.CheckpointError) as caught:
            steps.load({"it": it})
        return str(caught.value)

    said = alone(program)
    assert "step-3/it.state.safetensors" in said
    assert said.endswith("step-2.")
