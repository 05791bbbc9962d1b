"""Patches that ranks make in worlds of threads: none stays in the process of the test."""

from __future__ import annotations

import logging
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import syncprims as sp
from syncprims.testing import run_world

with_torch = pytest.mark.parametrize(
    "torch",
    [False, pytest.param(True, marks=pytest.mark.skipif(not find_spec("torch"), reason="torch"))],
)


class Thing:
    """Something to patch."""

    value: Any = 0
    table = {"a": 1}  # noqa: RUF012

    @staticmethod
    def plain() -> int:
        return 1


def state() -> list[Any]:
    return [{**vars(Thing)}, {**Thing.table}, [*mock._patch._active_patches]]  # type: ignore[attr-defined]


def patched(monkeypatch: pytest.MonkeyPatch, rank: int) -> list[Any]:
    """Patch in each way, and return what is there when other ranks have done it, too."""
    monkeypatch.setattr(Thing, "plain", lambda: rank)
    monkeypatch.setattr(Thing, "new", rank, raising=False)
    monkeypatch.setitem(Thing.table, "b", rank)
    sp.barrier()
    return [Thing.value, Thing.plain(), Thing.new, {**Thing.table}]  # type: ignore[attr-defined]


@with_torch
def test_patches_end_with_the_world_at_the_latest(torch: bool) -> None:
    def body() -> list[Any]:
        rank = sp.get_rank()
        with pytest.MonkeyPatch.context() as monkeypatch:
            with mock.patch.object(Thing, "value", rank), mock.patch.dict(Thing.table, {"a": rank}):
                seen = patched(monkeypatch, rank)
            sp.barrier()
        mock.patch.object(Thing, "value", "started").start()
        mock.patch.dict(Thing.table, clear=True).start()
        sp.barrier()
        return seen

    before = state()
    for seed in range(5):
        found = run_world(body, 3, torch=torch, seed=seed)
        assert state() == before
        if torch:
            assert found == [[rank, rank, rank, {"a": rank, "b": rank}] for rank in range(3)]


def test_a_patch_of_the_test_holds_in_its_ranks_and_after_them() -> None:
    pytest.importorskip("torch")

    def body() -> Any:
        with mock.patch.object(Thing, "value", "inner"):
            sp.barrier()
        sp.barrier()
        return Thing.value

    with mock.patch.object(Thing, "value", "outer"):
        assert run_world(body, 2, torch=True) == ["outer"] * 2
        assert Thing.value == "outer"
    assert Thing.value == 0


@with_torch
def test_patches_of_a_failed_world_end(torch: bool) -> None:
    def body() -> None:
        with mock.patch.object(Thing, "value", 1):
            sp.barrier()
            if sp.get_rank():
                sp.barrier()

    with pytest.raises(sp.SyncError):
        run_world(body, 3, torch=torch)
    assert Thing.value == 0


def test_what_ranks_change_in_the_process_is_put_back() -> None:
    torch: Any = pytest.importorskip("torch")

    def state() -> list[Any]:
        return [
            Path.cwd(), [*sys.path], [*sys.argv], logging.getLogRecordFactory(),
            [*logging.root.handlers], logging.root.level, torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic,
        ]  # fmt: skip

    def body() -> None:
        os.chdir("/")
        sys.path.insert(0, f"/rank/{sp.get_rank()}")
        sys.argv.append("--of-a-rank")
        logging.setLogRecordFactory(lambda *args, **named: logging.makeLogRecord({}))
        logging.root.handlers = []
        logging.root.setLevel(5)
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        sp.barrier()
        assert sys.path[0] == f"/rank/{sp.get_rank()}"

    before = state()
    run_world(body, 2, torch=True)
    assert state() == before


def test_a_patch_of_a_rank_stays_for_its_turns() -> None:
    pytest.importorskip("torch")

    def body() -> list[str]:
        with mock.patch.object(sys, "argv", [f"of {sp.get_rank()}"]):
            sp.barrier()
            return [*sys.argv]

    before = [*sys.argv]
    assert run_world(body, 2, torch=True) == [["of 0"], ["of 1"]]
    assert sys.argv == before


@with_torch
def test_what_is_added_to_a_dictionary_after_a_patch_of_it_stays(torch: bool) -> None:
    def body() -> None:
        with mock.patch.dict(Thing.table, {"a": 2}):
            pass
        Thing.table["imported"] = 3
        sp.barrier()
        assert Thing.table == {"a": 1, "imported": 3}

    try:
        run_world(body, 2, torch=torch)
        assert Thing.table == {"a": 1, "imported": 3}
    finally:
        Thing.table.pop("imported", None)


@with_torch
def test_variables_that_ranks_patch_end_with_the_world(torch: bool) -> None:
    def body() -> None:
        mock.patch.dict(os.environ, {"OF_A_RANK": "1"}).start()
        sp.barrier()

    run_world(body, 2, torch=torch)
    assert "OF_A_RANK" not in os.environ


def test_a_directory_that_a_rank_removes_hides_no_error(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    here = Path.cwd()

    def body() -> None:
        if sp.get_rank() == 0:
            (tmp_path / "gone").mkdir()
            os.chdir(tmp_path / "gone")
            (tmp_path / "gone").rmdir()
            raise ValueError("the cause")
        sp.barrier()

    with pytest.raises(ValueError, match="the cause"):
        run_world(body, 2, torch=True)
    assert Path.cwd() == here
