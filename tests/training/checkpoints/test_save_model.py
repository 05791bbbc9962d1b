"""`save_model` and `load_checkpoint_in_model`: exact, complete, and always the newest."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import in_processes, on_every_rank, several
from safetensors import safe_open
from support.checkpoint_worlds import Alone, Kept, on_some
from support.file_faults import watched
from support.rank_worlds import Kind, Ranks
from torch import nn

import syncprims as sp
from syncprims import accelerate
from syncprims.training import (
    Checkpoints,
    load_checkpoint_in_model,
    load_state,
    save_model,
    save_state,
)
from syncprims.training.checkpoints import async_save
from syncprims.training.checkpoints.states import read_manifest

ODD = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.complex64, torch.int8, torch.int64, torch.uint8,
    torch.uint16, torch.uint64, torch.bool,
]  # fmt: skip


class Odd(nn.Module):
    """A model with all that a state may hold."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        for dtype in ODD:
            raw = torch.randint(0, 100, (3, 5), generator=made)
            self.register_buffer(f"of_{str(dtype)[6:]}", raw.to(dtype))
        self.turned = nn.Parameter(torch.randn(6, 4, generator=made).t())
        self.strided = nn.Parameter(torch.randn(8, 8, generator=made)[::2, 1::3])
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(float(seed)))
        self.register_buffer("one", torch.tensor(seed))
        self.register_buffer(
            "conjugate", torch.randn(4, dtype=torch.complex64, generator=made).conj()
        )
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, generator=made)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("passing", torch.ones(2), persistent=False)


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(
        mine[name].dtype == theirs[name].dtype
        and mine[name].shape == theirs[name].shape
        and raw(mine[name]) == raw(theirs[name])
        for name in mine
    )


def raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "shards": {"max_shard_size": 200},
    "few": {"max_shard_size": 600},
    "bin": {"safe_serialization": False},
    "bin-shards": {"safe_serialization": False, "max_shard_size": 300},
}


@on_some
@pytest.mark.parametrize("layout", LAYOUTS)
@on_every_rank
def test_all_kinds_of_tensors_come_back(layout: str, tmp_path: Path) -> None:
    model, other = Odd(1), Odd(2)
    save_model(model, tmp_path / "m", **LAYOUTS[layout])
    load_checkpoint_in_model(other, tmp_path / "m")  # at once: a save has its barrier inside
    assert (same(model, other), other.head.weight is other.embed.weight) == (True, True)


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("second", LAYOUTS)
def test_the_newest_model_loads_whatever_was_there(
    first: str, second: str, tmp_path: Path, alone: Alone, meeting_place: Path
) -> None:
    def program() -> bool:
        tmp_path.joinpath("config.json").write_text("{}")
        tmp_path.joinpath("notes.safetensors").write_text("mine")
        new, loaded = Odd(2), Odd(3)
        for model, layout in ((Odd(1), first), (new, second), (Odd(4), second), (new, first)):
            save_model(model, tmp_path, **LAYOUTS[layout])
        load_checkpoint_in_model(loaded, tmp_path)
        return same(new, loaded)

    assert alone(program)
    found = {path.name for path in tmp_path.iterdir() if path != meeting_place}
    assert {"config.json", "notes.safetensors"} <= found
    weights = {name for name in found if name.startswith(("model", "pytorch_model", "."))}
    if "shards" not in LAYOUTS[first] and "max_shard_size" not in LAYOUTS[first]:
        assert len(weights) == 1
    else:
        [index] = [name for name in weights if name.endswith(".index.json")]
        placed = json.loads((tmp_path / index).read_text())["weight_map"]
        assert weights == {index, *placed.values()}


def test_files_have_the_mode_that_the_umask_says(tmp_path: Path, alone: Alone) -> None:
    def program() -> set[int]:
        os.umask(0o027)
        save_model(nn.Linear(2, 2), tmp_path / "m", max_shard_size=8)
        return {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "m").iterdir()}

    assert alone(program) == {0o640}


@several(2, 4)
@in_processes
def test_ranks_write_different_shards(world: Ranks, tmp_path: Path) -> None:
    def program() -> set[str]:
        made: set[str] = set()

        def at(number: int, name: str, args: tuple[Any, ...]) -> None:
            if name == "open" and args[1] & os.O_CREAT:
                made.add(Path(args[0]).name)

        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
        with watched(at):
            save_model(model, tmp_path / "m", max_shard_size=1024)
        return {name for name in made if ".index." not in name}

    written = world.run(program)
    assert all(len(some) == 8 // world.ranks for some in written)
    assert len(set().union(*written)) == 8


@several(2)
@on_every_rank
def test_what_differs_between_ranks_is_mains(tmp_path: Path) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(7)
        model[1].running_mean.fill_(sp.get_rank())
    save_model(model, tmp_path / "m", max_shard_size=32)
    load_checkpoint_in_model(model, tmp_path / "m")
    assert sorted({float(v) for t in model.state_dict().values() for v in t.reshape(-1)}) == [
        0.0,
        7.0,
    ]


@several(2)
def test_ranks_with_other_models_are_told_so(world: Ranks, tmp_path: Path) -> None:
    def program() -> str:
        different = pytest.raises(sp.CheckpointError, match=r"ranks \[1\] have different models")
        with different as caught:
            save_model(nn.Linear(2, 2 + sp.get_rank()), tmp_path / "m")
        return str(caught.value)

    assert len(set(world.run(program))) == 1
    assert not (tmp_path / "m").exists()


@pytest.fixture
def saved(tmp_path: Path, alone: Alone) -> tuple[nn.Module, Path]:
    model = two_layers()
    alone(lambda: save_model(model, tmp_path / "m"))
    return model, tmp_path / "m"


def test_misfits_are_named(saved: tuple[nn.Module, Path], caplog: pytest.LogCaptureFixture) -> None:
    model, path = saved
    other: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(sp.CheckpointError, match=r"1\.bias.*expected \(3,\).*found \(2,\)"):
        load_checkpoint_in_model(other, path)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    with pytest.raises(sp.CheckpointError, match=r"not in the model: 1\.bias, 1\.weight"):
        load_checkpoint_in_model(nn.Sequential(nn.Linear(3, 4)), path)
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 1))
    kept, own = other[2].weight.clone(), [id(p) for p in other.parameters()]
    with pytest.raises(sp.CheckpointError, match=r"missing: 2\.weight, 2\.bias"):
        load_checkpoint_in_model(other, path)
    load_checkpoint_in_model(other, path, dtype="float64", strict=False)
    assert torch.equal(other[0].weight, model.state_dict()["0.weight"].double())
    assert torch.equal(other[2].weight, kept)
    assert [id(p) for p in other.parameters()] == own, "an optimizer has others now"
    assert "missing: 2.weight" in caplog.text


def test_what_accelerates_function_takes_is_taken_or_told(saved: tuple[nn.Module, Path]) -> None:
    model, path = saved
    load_in_model = accelerate.load_checkpoint_in_model
    other = two_layers()
    load_in_model(other, path, None, None, torch.float64, offload_state_dict=False)
    assert {p.dtype for p in other.parameters()} == {torch.float64}
    fresh: Any = two_layers()
    for asked in (
        {"offload_folder": "folder"},
        {"offload_folder": torch.float16},  # by position, as if it were the dtype
        {"offload_state_dict": True},
        {"keep_in_fp32_modules": ["0"], "dtype": torch.float16},
        {"full_state_dict": False},
        {"broadcast_from_rank0": True},
    ):
        with pytest.raises(TypeError, match=r"is not offered; (leave|cast)"):
            load_in_model(fresh, path, **asked)
    with pytest.raises(TypeError, match="unexpected keyword argument 'ofload_folder'"):
        load_in_model(fresh, path, ofload_folder=None)
    assert not same(model, fresh), "it was refused, and loaded all the same"


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_compiled_and_wrapped_models_have_plain_names(tmp_path: Path, alone: Alone) -> None:
    def program() -> list[bool]:
        plain = two_layers()
        layer: Any = torch.compile(nn.Linear(3, 4))
        parts = nn.Sequential(layer, nn.Linear(4, 2))
        parallel = nn.DataParallel(two_layers())
        whole: Any = torch.compile(two_layers())
        fine = []
        for model in (parts, parallel, whole):
            save_model(model, tmp_path / "m")
            load_checkpoint_in_model(plain, tmp_path / "m")
            fine.append(torch.equal(next(plain.parameters()), next(model.parameters())))
            save_model(two_layers(), tmp_path / "m")
            load_checkpoint_in_model(model, tmp_path / "m")
            load_checkpoint_in_model(plain, tmp_path / "m")
            fine.append(torch.equal(next(plain.parameters()), next(model.parameters())))
        return fine

    assert alone(program) == [True] * 6


def test_links_are_refused_unless_allowed(saved: tuple[nn.Module, Path], tmp_path: Path) -> None:
    model, path = saved
    cache = tmp_path / "snapshot"
    cache.mkdir()
    (cache / "model.safetensors").symlink_to(path / "model.safetensors")
    other = two_layers()
    with pytest.raises(sp.CheckpointError, match="symbolic link"):
        load_checkpoint_in_model(other, cache)
    load_checkpoint_in_model(other, cache, allow_links=True)
    assert same(model, other)


def test_above_a_link(tmp_path: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other" / "inner").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to("../other/inner")
    monkeypatch.chdir(tmp_path / "here")
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)

    def program() -> bool:
        save_model(model, "link/../out")
        load_checkpoint_in_model(other, "link/../out")
        save_state("link/../state", {"model": model})
        load_state("link/../state", {"model": other})
        accelerate.Accelerator().save(model.state_dict(), "link/../one.bin")
        torch.load("link/../one.bin", weights_only=True)
        return torch.equal(model.weight, other.weight)

    assert alone(program)
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["link"]
    found = {path.name for path in (tmp_path / "other").iterdir()}
    assert found == {"inner", "one.bin", "out", "state"}


def test_a_pickle_in_a_weights_file_is_refused_and_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "run"),)

    torch.save({"weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(sp.CheckpointError, match=r"pytorch_model\.bin.*no code"):
        load_checkpoint_in_model(nn.Linear(2, 2), tmp_path)
    assert not (tmp_path / "run").exists()


def test_nothing_to_load_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(sp.CheckpointError, match=r"model\.safetensors"):
        load_checkpoint_in_model(nn.Linear(2, 2), tmp_path)
    with pytest.raises(sp.CheckpointError, match="missing"):
        load_checkpoint_in_model(nn.Linear(2, 2), tmp_path / "nowhere.safetensors")
    in_bytes: Any = os.fsencode(tmp_path)
    with pytest.raises(TypeError, match="it takes a str or a path"):
        load_checkpoint_in_model(nn.Linear(2, 2), in_bytes)


@pytest.mark.parametrize("size", ["5 apples", 0, -1, "", None])
def test_a_size_that_is_none_is_refused(size: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_shard_size"):
        save_model(nn.Linear(2, 2), tmp_path, max_shard_size=size)


def test_a_device_map_and_a_dtype_place_a_model(saved: tuple[nn.Module, Path]) -> None:
    model, path = saved
    other: Any = two_layers().to("meta")
    for lacking in ({"0": "cpu", "one": "cpu"}, {"0": "cpu", "1.weight": "cpu"}, {}):
        with pytest.raises(ValueError, match=r"no device for .*1\.bias; .* by ''"):
            load_checkpoint_in_model(other, path, lacking)
    with pytest.raises(ValueError, match="nothing is offloaded"):
        load_checkpoint_in_model(other, path, device_map={"": "disk"})
    with pytest.raises(ValueError, match="no such type"):
        load_checkpoint_in_model(other, path, dtype="float33")
    assert all(p.is_meta for p in other.parameters()), "some came to be all the same"
    load_checkpoint_in_model(other, path, device_map={"": "cpu", "1": "cpu"}, dtype=torch.bfloat16)
    assert {p.dtype for p in other.parameters()} == {torch.bfloat16}
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in other.parameters())
    assert torch.equal(other[1].weight, model.state_dict()["1.weight"].bfloat16())


def test_tied_parameters_and_empty_buffers(
    tmp_path: Path, alone: Alone, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = Odd(1), Odd(2)
    alone(lambda: save_model(model, tmp_path / "m"))
    parts = {name.split(".")[0]: "cpu" for name in model.state_dict()}
    for left_out in ("head", "embed"):  # a map has one of their names
        covering = {name: device for name, device in parts.items() if name != left_out}
        load_checkpoint_in_model(other, tmp_path / "m", covering)
    assert same(model, other)
    assert not caplog.text
    load_checkpoint_in_model(empty := Odd(2).to("meta"), tmp_path / "m")
    assert "no checkpoint holds the buffers passing: " in caplog.text
    assert empty.passing.is_meta


class Large(nn.Module):
    """Tensors of more than one piece that do not lie in memory as they are read."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        self.turned = nn.Parameter(torch.randn(1500, 1001, generator=made).t())
        self.pictures = nn.Parameter(
            torch.randn(70, 3, 100, 61, generator=made).to(memory_format=torch.channels_last)
        )
        self.register_buffer(
            "conjugate", torch.randn(9, 70_001, dtype=torch.complex64, generator=made).conj()
        )
        self.register_buffer("wide", torch.tensor([[3.0], [4.0]]).expand(2, 700_000))
        self.register_buffer("same", torch.tensor([2.5]).expand(1_500_000))


def test_large_tensors_that_are_not_contiguous_come_back(tmp_path: Path, alone: Alone) -> None:
    model, other = Large(1), Large(2)
    other.same, other.wide = torch.zeros(1_500_000), torch.zeros(2, 700_000)
    alone(lambda: save_model(model, tmp_path / "m"))
    load_checkpoint_in_model(other, tmp_path / "m")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_others_read_the_file_and_ties_may_have_any_name(tmp_path: Path, alone: Alone) -> None:
    def tied(seed: int) -> nn.Module:
        model = nn.Module()
        torch.manual_seed(seed)
        for name in "ac":
            model.register_parameter(name, nn.Parameter(torch.randn(3)))
        for name in ("format", "b"):
            model.register_parameter(name, model.get_parameter("a"))
        return model

    one, other = tied(1), tied(2)
    alone(lambda: save_model(one, tmp_path / "m"))
    load_checkpoint_in_model(other, tmp_path / "m")
    with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found.keys() == {"a", "c"}
    for name in "ac":
        assert torch.equal(one.get_parameter(name), other.get_parameter(name))
        assert torch.equal(one.get_parameter(name), found[name])


@on_some
def test_an_empty_directory_that_is_there_stays_the_one_it_is(world: Ranks, tmp_path: Path) -> None:
    real, link = tmp_path / "disk", tmp_path / "link"
    real.mkdir(mode=0o750)
    link.symlink_to(real)
    before = real.stat()

    def program() -> Any:
        it = Kept()
        save_state(link, {"it": Kept(torch.ones(3))})
        load_state(link, {"it": it})
        return it.state.tolist()

    assert world.run(program) == [[1, 1, 1]] * world.ranks
    after = real.stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert link.is_symlink()


SAVES: dict[str, Callable[[Any], object]] = {
    "save_model": lambda where: save_model(nn.Linear(2, 2), where),
    "save_state": lambda where: save_state(where, {"it": Kept(1)}),
    "Checkpoints": lambda where: Checkpoints(where).save(1, {"it": Kept(1)}),
}


@several(2)
@pytest.mark.parametrize("save", SAVES)
def test_a_link_to_nothing_is_an_error_at_once(world: Ranks, tmp_path: Path, save: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "unmounted")

    def program() -> str:
        with pytest.raises(sp.CheckpointError) as caught:
            SAVES[save](link)
        return str(caught.value)

    for text in world.run(program):
        assert f"this exists, and is not a directory: {str(link)!r}" in text
    assert not (tmp_path / "unmounted").exists()


@several(2)
def test_ranks_that_save_to_other_directories_are_told_so(world: Ranks, tmp_path: Path) -> None:
    """As where each takes the time of its own clock for a name."""
    folder = tmp_path / "runs"

    def program() -> list[str]:
        said: list[str] = []
        for save in SAVES.values():
            with pytest.raises(sp.CheckpointError, match=r": rank 1 saves to .*/at-1") as caught:
                save(folder / f"at-{sp.get_rank()}")
            said.append(str(caught.value))
        save_model(nn.Linear(2, 2), folder / "at")
        return said

    one, other = world.run(program)
    assert one == other
    assert [path.name for path in folder.iterdir()] == ["at"]


@pytest.mark.parametrize("call", SAVES)
def test_a_directory_has_a_name(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong: list[Any] = ["", b"model"]
    for name, error in zip(wrong, (ValueError, TypeError), strict=True):
        with pytest.raises(error, match="directory="):
            SAVES[call](name)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_takes_nothing_from_a_save_behind(meeting_place: Path, tmp_path: Path) -> None:
    """The thread goes on, and so do those of the other ranks: they need what is there."""

    def program() -> int | None:
        def start_and_be_interrupted(self: Any, lock: Any) -> None:
            start(self, lock)
            raise KeyboardInterrupt

        start, path = async_save.BackgroundSave.start, tmp_path / "state"
        model = nn.Linear(100, 100)
        if sp.is_main():
            async_save.BackgroundSave.start = start_and_be_interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                save_state(path, {"model": model}, step=7, block=False)
        else:
            save_state(path, {"model": model}, step=7, block=False)
        for thread in threading.enumerate():
            if thread.name == "syncprims-save":
                thread.join()
        return read_manifest(str(path)).step if sp.is_main() else None

    assert Ranks(Kind("file", 2), meeting_place, patience=20).run(program) == [7, None]
    assert not [one for one in tmp_path.iterdir() if ".tmp-" in one.name]


def test_what_is_empty_or_has_the_headers_own_name(tmp_path: Path, alone: Alone) -> None:
    model = nn.Module()
    model.register_buffer("__metadata__", torch.ones(2))

    def program() -> list[str]:
        with pytest.raises(sp.CheckpointError, match=r"__metadata__.*still stands"):
            save_model(model, tmp_path / "m")
        assert not (tmp_path / "m").exists()
        save_model(nn.ReLU(), tmp_path / "m")
        save_state(tmp_path / "s", {"model": nn.ReLU()}, rng=False)
        load_state(tmp_path / "s", {"model": nn.ReLU()}, rng=False)
        return sorted(path.name for path in (tmp_path / "s").iterdir())

    assert alone(program) == ["checkpoint.json"]
    load_checkpoint_in_model(nn.ReLU(), tmp_path / "m")
    with pytest.raises(sp.CheckpointError, match="missing: weight"):
        load_checkpoint_in_model(nn.Linear(1, 1, bias=False), tmp_path / "m")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks for directories in /proc")
def test_directories_that_cannot_be_synced_are_used(tmp_path: Path, alone: Alone) -> None:
    where = tmp_path / "run" / "more" / "s"

    def program() -> tuple[float, bool]:
        folders = set[int]()

        def at(number: int, name: str, args: tuple[Any, ...]) -> None:
            if name == "mkdir" and Path(args[0]).name in ("run", "more"):
                Path(args[0]).mkdir()
            if name == "fsync" and os.path.isdir(f"/proc/self/fd/{args[0]}"):  # noqa: PTH112
                folders.add(args[0])
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        it = Kept()
        with watched(at):
            save_state(where, {"it": Kept(1.5)})
        load_state(where, {"it": it})
        return float(it.state), bool(folders)

    assert alone(program) == (1.5, True)
