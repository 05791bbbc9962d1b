"""Weights are verified, then loaded into the model's own memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint_worlds import Alone, Kept
from support.file_faults import nothing, watched
from torch import nn
from torch.nn.utils import parametrizations

import syncprims as sp
from syncprims.training import load_checkpoint_in_model, load_state, save_model, save_state


def filled(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, dtype=torch.float64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def values(model: nn.Module) -> set[float]:
    return {float(v) for p in model.parameters() for v in p.detach().reshape(-1)}


def saved(path: Path, alone: Alone, model: nn.Module, **options: Any) -> None:
    alone(lambda: save_model(model, path, **options))


WAYS: dict[str, dict[str, Any]] = {
    "single": {}, "shards": {"max_shard_size": 30}, "bin": {"safe_serialization": False},
}  # fmt: skip


def failures(load: Callable[[], object], code: int) -> list[sp.CheckpointError | None]:
    """Return what a load comes to if a call of it fails, for each of its calls in turn."""
    with watched(nothing) as counted:
        load()
    found: list[sp.CheckpointError | None] = []
    for point in range(counted.count):

        def at(number: int, name: str, args: tuple[Any, ...], point: int = point) -> None:
            if number == point and name != "close":
                raise OSError(code, os.strerror(code))

        with watched(at):
            try:
                load()
            except sp.CheckpointError as error:
                found.append(error)
            else:
                found.append(None)
    return found


def on_meta(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(3, 4, dtype=dtype), nn.Linear(4, 2, dtype=torch.float64))


@pytest.mark.parametrize("new", [False, True], ids=["in use", "on the meta device"])
@pytest.mark.parametrize("way", WAYS)
def test_a_disk_that_fails_in_a_load(way: str, new: bool, tmp_path: Path, alone: Alone) -> None:
    code = errno.ESTALE if way == "shards" else errno.EIO
    path, tried = tmp_path / "m", list[tuple[nn.Module, list[nn.Parameter]]]()
    saved(path, alone, filled(2), **WAYS[way])

    def load() -> None:
        model = on_meta() if new else filled(1)
        tried.append((model, list(model.parameters())))
        load_checkpoint_in_model(model, path)

    errors = failures(load, code)
    untouched = 0
    for (model, before), error in zip(tried[1:], errors, strict=True):
        if error is None:
            assert values(model) == {2}
            continue
        assert os.strerror(code) in str(error)
        assert str(error).startswith(str(path))
        assert error.errno == code
        now = list(model.parameters())
        same = all(one is other for one, other in zip(now, before, strict=True))
        same = same and all(p.is_meta for p in now) if new else values(model) == {1}
        untouched += same
        assert same or (not new and "in part: do not use it" in str(error))
    assert untouched
    assert sum(error is not None for error in errors) > len(errors) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["as stored", "cast"])
@pytest.mark.parametrize("way", ["single", "shards"])
def test_damage_loads_nothing(way: str, dtype: torch.dtype, tmp_path: Path, alone: Alone) -> None:
    path, model = tmp_path / "m", on_meta(dtype)
    saved(path, alone, filled(2), **WAYS[way])
    for file in path.glob("*.safetensors"):
        intact = file.read_bytes()
        file.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
        with pytest.raises(sp.CheckpointError, match=r"damaged data.*still on the meta device"):
            load_checkpoint_in_model(model, path)
        assert all(parameter.is_meta for parameter in model.parameters())
        file.write_bytes(intact)
    load_checkpoint_in_model(model, path)
    assert values(model) == {2}


def test_files_with_nothing_for_the_model_are_checked_too(tmp_path: Path, alone: Alone) -> None:
    path = tmp_path / "m"
    saved(path, alone, filled(2), **WAYS["shards"])
    last = max(path.glob("*.safetensors"))
    intact = last.read_bytes()
    last.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    for one in (nn.Sequential(nn.Linear(3, 4, device="meta")), nn.ReLU()):
        with pytest.raises(sp.CheckpointError, match="damaged data"):
            load_checkpoint_in_model(one, path, strict=False)


def test_a_part_that_refuses_leaves_a_model_without_values(tmp_path: Path, alone: Alone) -> None:
    class Refusing(nn.Linear):
        def load_state_dict(self, *args: Any, **options: Any) -> Any:
            super().load_state_dict(*args, **options)
            raise RuntimeError("no")

    saved(tmp_path / "m", alone, nn.Linear(2, 2))
    model = Refusing(2, 2, device="meta")
    with pytest.raises(sp.CheckpointError, match=r"no The model is still on the meta device"):
        load_checkpoint_in_model(model, tmp_path / "m")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_file_is_read_once_into_a_model_without_values(tmp_path: Path, alone: Alone) -> None:
    path = tmp_path / "m"
    wide = nn.Sequential(*(nn.Linear(1200, 1000) for _ in range(2)))  # chunks end within tensors
    saved(path, alone, wide)
    read: list[tuple[int, int]] = []

    def at(number: int, name: str, args: tuple[Any, ...]) -> None:
        if name == "preadv":
            read.append((args[2], sum(len(buffer) for buffer in args[1])))

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1200, 1000) for _ in range(2)))
    with watched(at):
        load_checkpoint_in_model(model, path)
    assert all(map(torch.equal, model.parameters(), wide.parameters()))
    assert sum(size for _, size in read) == (path / "model.safetensors").stat().st_size
    assert len({begin for begin, _ in read}) == len(read)


def test_a_state_is_given_back_only_once_it_has_been_read(tmp_path: Path, alone: Alone) -> None:
    path = tmp_path / "s"

    def program() -> tuple[set[int | None], set[float], set[Any]]:
        save_state(path, {"model": filled(2), "it": Kept({"tensor": torch.ones(3)})})
        tried: list[tuple[nn.Module, Kept]] = []

        def load() -> None:
            tried.append((filled(1), Kept("before")))
            load_state(path, {"model": tried[-1][0], "it": tried[-1][1]})

        errors = failures(load, errno.EIO)
        refused = [t for t, e in zip(tried[1:], errors, strict=True) if e is not None]
        assert len(refused) > 10
        changed = set().union(*(values(model) for model, _ in refused))
        return {e.errno for e in errors if e}, changed, {it.state for _, it in refused}

    found = alone(program)
    assert found == ({errno.EIO}, {1.0}, {"before"})


def meddle(path: Path, how: Callable[[Path], object]) -> Callable[[int, str, Any], None]:
    """Do something to a file once it has been checked: before something is read once more."""
    seen = set[int]()

    def at(number: int, name: str, args: tuple[Any, ...]) -> None:
        if name == "preadv":
            if args[2] in seen:
                seen.clear()
                how(path)
            seen.add(args[2])

    return at


def test_a_file_that_is_written_while_it_is_read_is_noticed(tmp_path: Path, alone: Alone) -> None:
    path = tmp_path / "m"
    saved(path, alone, filled(2))
    file = path / "model.safetensors"

    def overwrite(file: Path) -> None:
        os.utime(file, ns=(0, 0))

    with (
        watched(meddle(file, overwrite)),
        pytest.raises(sp.CheckpointError, match=r"changed while it was read.*in part"),
    ):
        load_checkpoint_in_model(filled(1), path)
    with (
        watched(meddle(file, lambda file: os.truncate(file, 200))),
        pytest.raises(sp.CheckpointError, match=r"cut off while it was read.*in part"),
    ):
        load_checkpoint_in_model(filled(1), path)


class Fused(nn.Module):
    """Parameters that share memory: a whole, and its halves, which may come in any order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        memory = torch.zeros(6)
        parts = {"w": memory, "a": memory[:3], "b": memory[3:], "s": memory[::2]}
        for name in order:
            setattr(self, name, nn.Parameter(parts[name], requires_grad=False))


@pytest.mark.parametrize("order", ["wab", "abw", "awb", "sw", "ws", "ab"])
def test_of_shared_parameters_the_last_stays(order: str, tmp_path: Path, alone: Alone) -> None:
    model, plain = Fused(order), nn.Module()
    sizes = {"w": 6, "a": 3, "b": 3, "s": 3}
    for number, name in enumerate(order):
        value = torch.full((sizes[name],), 1.0 + number)
        setattr(plain, name, nn.Parameter(value, requires_grad=False))
    saved(tmp_path / "m", alone, plain)
    expected = Fused(order)
    expected.load_state_dict(plain.state_dict())
    load_checkpoint_in_model(model, tmp_path / "m")
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


class Turned(nn.Linear):
    """A layer that turns its weight when it is loaded."""

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, *args)


class Extra(nn.Module):
    """A module with a state that is a tensor, and no parameter."""

    def __init__(self, own: float) -> None:
        super().__init__()
        self.own = torch.full((2,), own)

    def get_extra_state(self) -> torch.Tensor:
        return self.own + 1

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.own = state - 1


def two(device: str = "cpu") -> Any:
    return nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(2))).to(device)


def tied() -> Any:
    model = two()
    model[1].weight = model[0].weight
    return model


def with_a_step(value: float) -> Any:
    """Return a model with parameters of one number, as slices leave them."""
    model: Any = nn.Linear(2, 1)
    model.bias = nn.Parameter(torch.full((3, 5), value)[:1, 1])
    model.gain = nn.Parameter(torch.full((3, 5), value, dtype=torch.bfloat16)[1:2, 4:])
    assert model.bias.stride() == (5,)
    return model


def are_equal(one: Any, other: Any) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


@pytest.mark.parametrize(
    ("model", "other", "is_loaded"),
    [
        (tied, two, are_equal),  # one tensor of the file, and two of the model
        (tied, lambda: two("meta"), are_equal),
        (lambda: with_a_step(3.0), lambda: with_a_step(0.0), are_equal),
        (lambda: Extra(4), lambda: Extra(0), are_equal),
        (
            lambda: nn.Linear(3, 3),
            lambda: Turned(3, 3),
            lambda a, b: torch.equal(a.weight.t(), b.weight),
        ),
    ],
    ids=["two of one", "two of one, on meta", "any step", "extra state", "turned"],
)
def test_a_model_that_is_not_plain_gets_what_is_in_the_file(
    model: Any, other: Any, is_loaded: Any, tmp_path: Path, alone: Alone
) -> None:
    one, two = model(), other()
    saved(tmp_path / "m", alone, one)
    load_checkpoint_in_model(two, tmp_path / "m")
    assert is_loaded(one, two)
    assert len({id(p) for p in two.parameters()}) == len(list(other().parameters()))


def normed() -> nn.Module:
    """Return two layers, of which the first can be loaded by older names, too."""
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 3))


@pytest.mark.parametrize("model", [normed, lambda: nn.Sequential(Turned(3, 3), nn.Linear(3, 3))])
def test_missing_parts(model: Callable[[], nn.Module], tmp_path: Path, alone: Alone) -> None:
    saved(tmp_path / "m", alone, model()[:1])  # type: ignore[index]
    with pytest.raises(sp.CheckpointError, match=r"1\.weight.*1\.bias.*is loaded in part"):
        load_checkpoint_in_model(model(), tmp_path / "m")
    load_checkpoint_in_model(model(), tmp_path / "m", strict=False)


def test_what_a_part_renames_is_not_missing(tmp_path: Path, alone: Alone) -> None:
    model, other = normed(), normed()
    older: Any = nn.Sequential(nn.Module(), model[1])  # type: ignore[index]
    names = {"bias": "bias", "original0": "weight_g", "original1": "weight_v"}
    for name, tensor in model[0].named_parameters():  # type: ignore[index]
        older[0].register_parameter(names[name.rpartition(".")[2]], tensor)
    saved(tmp_path / "m", alone, older)
    load_checkpoint_in_model(other, tmp_path / "m")
    assert are_equal(model, other)


def test_a_backward_pass_under_way_notices_a_load(tmp_path: Path, alone: Alone) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    saved(tmp_path / "m", alone, model)
    loss = model(torch.ones(1, 3)).sum()
    load_checkpoint_in_model(model, tmp_path / "m")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_large_file(tmp_path: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = nn.Linear(1000, 6001), tmp_path / "m"  # more than four pieces, and odd
    saved(path, alone, model)
    for cpus, device in ((4, "cpu"), (4, "meta"), (1, "cpu"), (1, "meta")):
        monkeypatch.setattr(os, "cpu_count", lambda cpus=cpus: cpus)
        other = nn.Linear(1000, 6001, device=device)
        load_checkpoint_in_model(other, path)
        assert are_equal(model, other)
    monkeypatch.undo()
    read: list[int] = []

    def at(number: int, name: str, args: tuple[Any, ...]) -> None:
        if name == "preadv":
            read.append(args[2])
            if len(read) > 4:
                raise OSError(errno.EIO, "worn out")

    with watched(at), pytest.raises(sp.CheckpointError, match="worn out"):
        load_checkpoint_in_model(other, path)
    assert len(read) < 20  # of 24
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(sp.CheckpointError, match="damaged data"):
        load_checkpoint_in_model(other, path)
    assert are_equal(model, other)
