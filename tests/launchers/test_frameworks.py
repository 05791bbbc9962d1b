"""Ray Train, Dask and Lightning start the ranks, where they are installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import ROOT
from support.pages import blocks
from support.rank_environment import environ_of_ranks

pytestmark = pytest.mark.launchers

PAGE = ROOT / "docs/how-to/inside-other-launchers.md"
#: What the page lets Ray call.
(TRAIN,) = (b.code for b in blocks(PAGE) if b.code.startswith("def train(config"))

_TELL = """
import json, sys

def tell():
    from syncprims import all_gather, current
    seen = json.dumps(all_gather([*current().topology[:6]]))
    sys.stdout.write(f"TOLD {seen}\\n")
    sys.stdout.flush()
"""
_RAY = f"""
import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

{TRAIN}

def job(config):
    import syncprims
    with syncprims.init():
        train(config)
        tell()

ray.init(num_cpus=2, include_dashboard=False)
config = TorchConfig(backend="gloo")
TorchTrainer(job, torch_config=config, scaling_config=ScalingConfig(num_workers=2)).fit()
"""
_DASK = """
from dask.distributed import Client, LocalCluster
from dask_pytorch_ddp import dispatch

def job():
    import syncprims
    with syncprims.init():
        tell()

if __name__ == "__main__":
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        for _ in range(2):  # on the same workers
            client.gather(dispatch.run(client, job, backend="gloo"))
"""
_LIGHTNING = """
import lightning, torch
from torch.utils.data import DataLoader

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def setup(self, stage):
        tell()

    def training_step(self, batch, index):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())

off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=1, **off)
trainer.fit(Model(), DataLoader(torch.ones(4, 2)))
"""


@pytest.mark.parametrize(
    ("library", "source"),
    [("ray", _RAY), ("dask_pytorch_ddp", _DASK), ("lightning", _LIGHTNING)],
    ids=["ray", "dask", "lightning"],
)
def test_ranks_meet(library: str, source: str, tmp_path: Path, meeting_place: Path) -> None:
    if find_spec(library) is None:
        pytest.skip(f"needs {library}")
    script = tmp_path / "script.py"
    script.write_text(_TELL + source)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environ_of_ranks(meeting_place, PYTHONUNBUFFERED="1"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads(line) for line in re.findall(r"TOLD (\[.*\])", done.stdout + done.stderr)]
    assert told, done.stdout + done.stderr
    assert all(seen == [[0, 2, 0, 2, 0, 1], [1, 2, 1, 2, 0, 1]] for seen in told)
