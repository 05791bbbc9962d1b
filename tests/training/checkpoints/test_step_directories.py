"""Background saves, and directories of steps."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import several
from support.checkpoint_worlds import Alone, Kept, on_some
from support.file_faults import watched
from support.rank_environment import PATIENCE
from support.rank_worlds import Ranks, environment
from torch import nn

import syncprims as sp
from syncprims.training import Checkpoints, load_state, save_state

# -- behind the training ------------------------------------------------------------------------


@on_some
def test_a_save_behind_the_training_has_the_values_of_its_start(
    world: Ranks, tmp_path: Path
) -> None:
    def program() -> tuple[float, bool, list[str]]:
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
        return float(other.weight.detach().max()), same and saving.done, left

    assert world.run(program) == [(1.0, True, [])] * world.ranks


@on_some
def test_a_failure_behind_the_training_is_logged_and_surfaces_at_the_next_save(
    world: Ranks, tmp_path: Path
) -> None:
    last = world.ranks - 1

    def program() -> tuple[str, int, list[str]]:
        steps, it, said = Checkpoints(tmp_path / "steps"), Kept(1), list[str]()
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("syncprims").addHandler(handler)
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


# -- a directory of steps -----------------------------------------------------------------------


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
