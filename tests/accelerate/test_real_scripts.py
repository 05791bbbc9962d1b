"""Scripts in the manner of transformers' and diffusers': the same results under both libraries.

Only their import lines differ. Accelerate runs them on two ranks of its own.
"""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import ROOT
from support.accelerate_scripts import installed, port
from support.rank_worlds import Kind
from support.training_models import TRAINED

from syncprims._system.host import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.rank_worlds import Ranks

pytestmark = [
    pytest.mark.skipif(installed() is None, reason="needs accelerate"),
    pytest.mark.filterwarnings("default"),
]
SCRIPTS = Path(__file__).parent / "scripts"
kinds = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(k, marks=[pytest.mark.soak] if k.ranks == 1 else [])
        for k in TRAINED
        if str(k) in ("single-1", "file-2", "torch-2")
    ],
    ids=str,
    indirect=True,
)


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    """Import once, and not in every rank, what the scripts import."""
    import accelerate
    from transformers import (
        BertForSequenceClassification,
        GPT2LMHeadModel,
        default_data_collator,
        get_scheduler,
    )

    del accelerate, BertForSequenceClassification, GPT2LMHeadModel
    del default_data_collator, get_scheduler


def run(name: str, ported: bool, folder: Path, **options: Any) -> dict[str, Any]:
    """Run a script on this rank, and return its results."""
    path = (ROOT / "examples" if name == "classify_text" else SCRIPTS) / f"{name}.py"
    source = path.read_text().replace("syncprims.accelerate", "accelerate")
    module = types.ModuleType(f"script_{name}")
    sys.modules[module.__name__] = module
    exec(compile(port(source) if ported else source, str(path), "exec"), vars(module))
    done: dict[str, Any] = module.main(str(folder / "out"), **options)
    return done


def files(folder: Path) -> list[str]:
    """Return the files and folders that a script has left, without what is in checkpoints."""
    return sorted(path.name for path in (folder / "out").iterdir())


def theirs(world: Ranks, program: Callable[[], Any]) -> list[Any]:
    """Return the results of ranks that Accelerate starts."""
    kind = Kind("torch", world.ranks) if world.ranks > 1 else Kind("single", 1)
    others = type(world)(kind, world.directory)
    variables = {"ACCELERATE_USE_CPU": "yes"}
    if world.ranks > 1:
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def alone() -> Any:
        found = program()
        import torch.distributed

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return found

    found: list[Any] = others.run_alone(alone, **variables)
    return found


def check_equal(ours: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for mine, other in zip(ours, wanted, strict=True):
        for name in ("losses", "rates", "right", "weights"):
            assert mine[name] == pytest.approx(other[name], rel=1e-5, abs=1e-7), name


@kinds
@pytest.mark.parametrize("name", ["classify_text", "unconditional"])
def test_only_the_import_lines_differ(world: Ranks, name: str, tmp_path: Path) -> None:
    wanted = theirs(world, lambda: run(name, False, tmp_path / "theirs"))
    ours = world.run(lambda: run(name, True, tmp_path / "ours"), ACCELERATE_USE_CPU="yes")
    check_equal(ours, wanted)
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")


@pytest.mark.parametrize("kind", [k for k in TRAINED if str(k) == "file-2"], ids=str, indirect=True)
@pytest.mark.parametrize(
    ("name", "checkpoint", "first"),
    [("classify_text", "step_3", {}), ("unconditional", "checkpoint-4", {"limit": 4})],
)
def test_resumed_from_ones_own_checkpoint_and_from_accelerates(
    world: Ranks, name: str, checkpoint: str, first: dict[str, Any], tmp_path: Path
) -> None:
    def program(ported: bool, folder: str, **options: Any) -> Callable[[], Any]:
        return lambda: run(name, ported, tmp_path / folder, **options)

    theirs(world, program(False, "theirs", **first))
    world.run(program(True, "ours", **first), ACCELERATE_USE_CPU="yes")
    shutil.copytree(tmp_path / "theirs", tmp_path / "moved")
    saved = {
        name: str(tmp_path / name / "out" / checkpoint) for name in ("theirs", "ours", "moved")
    }
    wanted = theirs(world, program(False, "theirs", resume_from_checkpoint=saved["theirs"]))
    assert len(wanted[0]["losses"]) > 2
    for folder in ("ours", "moved"):
        resumed = program(True, folder, resume_from_checkpoint=saved[folder])
        check_equal(world.run(resumed, ACCELERATE_USE_CPU="yes"), wanted)
