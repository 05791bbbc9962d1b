"""A script in the manner of transformers' examples: the same results under both libraries.

Only their import lines differ. Accelerate runs them on two ranks of its own.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ROOT
from support.accelerate_scripts import installed, port
from support.rank_environment import free_port, is_installed, run_python
from support.rank_worlds import Kind, Ranks
from support.training_models import TRAINED

from syncprims.accelerate import Accelerator
from syncprims.training import CheckpointError

pytestmark = [
    pytest.mark.skipif(installed() is None, reason="needs accelerate"),
    pytest.mark.skipif(not is_installed("transformers"), reason="needs transformers"),
    pytest.mark.filterwarnings("default"),
]
kinds = pytest.mark.parametrize(
    "kind", [k for k in TRAINED if str(k) in ("file-2", "torch-2")], ids=str, indirect=True
)
on_files = pytest.mark.parametrize(
    "kind", [k for k in TRAINED if str(k) == "file-2"], ids=str, indirect=True
)


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    """Import once, and not in every rank, what the scripts import."""
    import accelerate
    from transformers import BertForSequenceClassification, get_scheduler

    del accelerate, BertForSequenceClassification, get_scheduler


def run(ported: bool, folder: Path, **options: Any) -> dict[str, Any]:
    """Run the script on this rank, and return its results."""
    path = ROOT / "examples" / "classify_text.py"
    source = path.read_text().replace("syncprims.accelerate", "accelerate")
    module = types.ModuleType("script")
    sys.modules[module.__name__] = module
    exec(compile(port(source) if ported else source, str(path), "exec"), vars(module))
    done: dict[str, Any] = module.main(str(folder / "out"), **options)
    return done


def files(folder: Path) -> list[str]:
    """Return the files and folders that a script has left, without what is in checkpoints."""
    return sorted(path.name for path in (folder / "out").iterdir())


def theirs(world: Ranks, program: Callable[[], Any]) -> list[Any]:
    """Return the results of ranks that Accelerate starts."""
    others = type(world)(Kind("torch", world.ranks), world.directory)

    def alone() -> Any:
        found = program()
        import torch.distributed

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return found

    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    found: list[Any] = others.run_alone(alone, ACCELERATE_USE_CPU="yes", **place)
    return found


def check_equal(ours: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for mine, other in zip(ours, wanted, strict=True):
        for name in ("losses", "rates", "right", "weights"):
            assert mine[name] == pytest.approx(other[name], rel=1e-5, abs=1e-7), name


@kinds
def test_only_the_import_lines_differ(world: Ranks, tmp_path: Path) -> None:
    wanted = theirs(world, lambda: run(False, tmp_path / "theirs"))
    ours = world.run(lambda: run(True, tmp_path / "ours"), ACCELERATE_USE_CPU="yes")
    check_equal(ours, wanted)
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")


@on_files
def test_resumed_as_with_accelerate(world: Ranks, tmp_path: Path) -> None:
    def program(ported: bool, folder: str, **options: Any) -> Callable[[], Any]:
        return lambda: run(ported, tmp_path / folder, **options)

    theirs(world, program(False, "theirs"))
    world.run(program(True, "ours"), ACCELERATE_USE_CPU="yes")
    saved = {name: str(tmp_path / name / "out/step_3") for name in ("theirs", "ours")}
    wanted = theirs(world, program(False, "theirs", resume_from_checkpoint=saved["theirs"]))
    assert len(wanted[0]["losses"]) > 2
    resumed = program(True, "ours", resume_from_checkpoint=saved["ours"])
    check_equal(world.run(resumed, ACCELERATE_USE_CPU="yes"), wanted)

    def load() -> None:
        with pytest.raises(CheckpointError, match="load the weights by load_checkpoint_in_model"):
            Accelerator(cpu=True).load_state(saved["theirs"])

    world.run(load)


TRAINER = """
import sys
if sys.argv[1] == "ours":
    import syncprims.accelerate, syncprims.accelerate.logging
    for name in [name for name in sys.modules if name.startswith("syncprims.accelerate")]:
        sys.modules[name.removeprefix("syncprims.")] = sys.modules[name]
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, i):
        words = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": words, "labels": int(words.sum() % 2)}

torch.manual_seed(0)
torch.set_num_threads(1)
sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = BertForSequenceClassification(BertConfig(**sizes, intermediate_size=32))
options = TrainingArguments(
    sys.argv[2], per_device_train_batch_size=4, num_train_epochs=2, gradient_accumulation_steps=2,
    report_to=[], use_cpu=True, logging_steps=1, save_steps=2, eval_strategy="epoch",
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=options, train_dataset=Texts(), eval_dataset=Texts())
trainer.train()
losses = [record.get("loss", record.get("eval_loss")) for record in trainer.state.log_history]
again = Trainer(model=model, args=options, eval_dataset=Texts())  # that does not train
losses.append(again.evaluate()["eval_loss"])
weights = sum(p.double().sum() for p in model.parameters())
library = type(trainer.accelerator).__module__.split('.')[0]
sys.stdout.write(f"done {library} {losses} {float(weights)}\\n")  # at once: ranks share the pipe
"""


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_transformers_trainer_runs(ranks: int, tmp_path: Path) -> None:
    """Its losses and weights have the bits that Accelerate gives; on two ranks without Gloo."""
    script = tmp_path / "train.py"
    script.write_text(TRAINER)

    def lines(library: str, *start: str) -> list[str]:
        done = run_python(*start, script, library, tmp_path / library)
        assert done.returncode == 0, done.stderr[-4000:]
        return [line.partition("done ")[2] for line in done.stdout.splitlines() if "done" in line]

    port = f"--master-port={free_port()}"
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", port]
    wanted = lines("accelerate", *torchrun * (ranks > 1))
    ours = lines("ours", *["-m", "syncprims", "run", "-n", str(ranks)] * (ranks > 1))
    assert len(ours) == ranks
    assert ours == [line.replace("accelerate", "syncprims", 1) for line in wanted]
