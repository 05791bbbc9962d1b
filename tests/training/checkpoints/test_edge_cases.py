"""Edge cases of saves and loads that could fail silently."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conftest import several
from safetensors import safe_open
from support.checkpoint_worlds import Alone, Kept, on_some
from support.file_faults import watched
from support.rank_worlds import Kind, Ranks
from torch import nn

import syncprims as sp
from syncprims.training import (
    Checkpoints,
    load_checkpoint_in_model,
    load_state,
    save_model,
    save_state,
)
from syncprims.training.checkpoints import async_save
from syncprims.training.checkpoints.states import read_manifest

if TYPE_CHECKING:
    from collections.abc import Callable


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


def test_the_file_is_one_that_others_read_and_tied_tensors_may_have_any_name(
    tmp_path: Path, alone: Alone
) -> None:
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


# -- places -------------------------------------------------------------------------------------


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


# -- the directory ------------------------------------------------------------------------------

SAVES: dict[str, Callable[[Any], object]] = {
    "save_model": lambda where: save_model(nn.Linear(2, 2), where),
    "save_state": lambda where: save_state(where, {"it": Kept(1)}),
    "Checkpoints": lambda where: Checkpoints(where).save(1, {"it": Kept(1)}),
}


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


def test_an_interrupt_right_after_a_save_behind_has_begun_takes_nothing_from_it(
    meeting_place: Path, tmp_path: Path
) -> None:
    """The thread goes on, and so do those of the other ranks: they need what is there."""

    def program() -> int | None:
        def start_and_be_interrupted(self: Any, lock: Any) -> None:
            start(self, lock)
            raise KeyboardInterrupt

        start, path = async_save.Saving._start, tmp_path / "state"
        model = nn.Linear(100, 100)
        if sp.is_main():
            async_save.Saving._start = start_and_be_interrupted  # type: ignore[method-assign]
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
def test_directories_that_somebody_makes_or_that_cannot_be_synced_are_used(
    tmp_path: Path, alone: Alone
) -> None:
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
