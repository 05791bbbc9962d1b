"""Run test suites of other projects by their own launchers and in worlds, and compare.

    python bench/suites.py FOLDER [--only NAME,NAME] [--kinds own,processes]
    SYNCPRIMS_SUITES=FOLDER python bench/measure.py --only suites     # make the section from these

FOLDER has a checkout of each suite, ``FOLDER/ignite`` and so on; the figures are stored there, too.
Install what the suites need first. The suites are not changed, and a missing one is left out.
In worlds, the tests run that have ended by their own launcher.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from scale import Scale

HERE = Path(__file__).resolve().parent
KINDS = ("own", "processes")
_LIMIT = 300.0  # seconds of a suite by one launcher
_TESTS = 30  # of a suite, at most


class Suite(NamedTuple):
    """Tests of a checkout that start several ranks on processors."""

    name: str  # owner/repository
    files: str  # in the folder that stands before them
    chosen: str = ""  # for -k
    variables: str = ""  # of the environment
    ranks: int = 0  # of torchrun, if it starts the suite

    @property
    def place(self) -> str:
        """The folder of its checkout."""
        return self.name.partition("/")[2]


_DTENSOR = (
    "test_api.py test_dtensor.py test_redistribute.py test_pointwise_ops.py test_matrix_ops.py"
)
SUITES = (
    # A class of the installed TestDistBackend and DistributedTest, with Gloo and 3 ranks.
    Suite("torch/DistributedTest", ". test_distributed_spawn.py"),
    Suite("Ascend/pytorch", f". {_DTENSOR}"),  # its copy of torch's tests of DTensor
    Suite("facebookresearch/fairscale", ". tests/optim/test_oss.py tests/nn/model_parallel"),
    Suite(
        "pytorch/torchsnapshot",
        "tests test_ddp.py test_async_take.py test_dist_store.py test_partitioner.py",
    ),
    Suite("allenai/OLMo-core", "src test/distributed", "not gpu and not s3 and not gcs"),
    Suite(
        "pytorch/ignite",
        "tests/ignite/distributed comp_models/test_native.py utils/test_native.py",
        "spawn",
    ),
    Suite(
        "Lightning-AI/torchmetrics",
        "tests unittests/bases/test_ddp.py",
        variables="USE_PYTEST_POOL=1",
    ),
    Suite("pytorch/torcheval", "tests/metrics test_toolkit.py test_synclib.py"),
    Suite("huggingface/accelerate", "tests test_cpu.py test_grad_sync.py test_metrics.py"),
    Suite(
        "Lightning-AI/pytorch-lightning",
        "tests/tests_fabric strategies/test_ddp_integration.py utilities/test_spike.py "
        "plugins/collectives/test_torch_collective.py",
    ),
    Suite("pytorch/tnt", "tests utils/test_distributed.py"),
    Suite(
        "deepspeedai/DeepSpeed",
        "tests/unit comm runtime/utils/test_partition.py runtime/test_data.py "
        "runtime/test_lr_schedulers.py runtime/pipe/test_topology.py runtime/comm",
        "not InitWithModel and not DistributedFixture",  # these hang, and need an old pytest
        variables="LOCAL_SIZE=4 DS_ACCELERATOR=cpu",
    ),
    Suite(
        "mosaicml/composer",
        "tests utils/test_dist.py trainer/test_ddp_sync_strategy.py test_events.py",
        variables="WORLD_SIZE=2",  # by which it chooses its tests
        ranks=2,
    ),
    Suite(
        "pytorch/torchrec",
        "torchrec/distributed/tests collective_utils_test.py test_comm.py test_utils.py "
        "test_pt2_multiprocess.py test_dist_data.py test_model_parallel_gloo.py",
    ),
    Suite("open-mmlab/mmengine", "tests test_dist"),
    Suite("mosaicml/streaming", "tests test_distributed.py"),
    Suite("pytorch/tensordict", "test distributed/test_distributed.py"),
    Suite(
        "Project-MONAI/MONAI",
        "tests test_call_dist.py metrics/test_cumulative_average_dist.py data/test_sampler_dist.py "
        "utils/test_evenly_divisible_all_gather_dist.py handlers",
        "_dist.py",
    ),
)
_WORDS = [
    f"Up to {_TESTS} tests of each suite, evenly chosen: processor and wall time of pytest with",
    "its processes and imports. *Times less* is of processor time, in processes; `>` where the",
    "launcher reached the limit of time, so that only tests that had ended are compared.",
    "`bench/suites.py` says which files. Own launchers ran alone. Worlds ran later, beside other",
    "work of the machine: their wall times are too long, and no comparison by the clock holds.",
    "They ran before worlds refused what Gloo refuses. Five suites of an earlier comparison are",
    "left out: MONAI's ranks start workers of loaders, which are new interpreters now (over the",
    "limit of 300 s, 17 s before); DeepSpeed (0.31 before) reached the limit; streaming, OLMo-",
    "core and torchrec did not run.",
]


if "SUITES_NAMES" in os.environ:  # else a suite would import our modules
    sys.path.remove(str(HERE))


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep the tests that ended by their own launcher, else some, evenly chosen."""
    names = json.loads(os.environ.get("SUITES_NAMES", "[]"))
    step = -(-len(items) // _TESTS) or 1
    items[:] = [one for one in items if one.nodeid in names] or items[::step]


def pytest_runtest_logreport(report: Any) -> None:
    """Write the outcome of a test; this module is a plugin of pytest in the suites."""
    if report.when == "call" or report.outcome != "passed":
        why = str(report.longrepr)[-600:] if report.outcome != "passed" else ""
        with Path(os.environ["SUITES_OUTCOMES"]).open("a") as file:
            file.write(json.dumps([report.nodeid, report.outcome, why]) + "\n")


def run(suite: Suite, folder: Path, kind: str, names: list[str]) -> dict[str, Any]:
    """Run a suite in a process of its own; return its outcomes and times in seconds."""
    checkout, (below, *files) = folder / suite.place, suite.files.split()
    command = [sys.executable, "-m", "pytest", "-q", *files, "-k", suite.chosen]
    command += ["-p", "suites", "-p", "no:randomly", "-p", "no:cacheprovider", "-n", "0"]
    if not suite.ranks:
        command += ["--syncprims-worlds"] if kind != "own" else []
    elif kind == "own":
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command[1:1] = [*torchrun, str(suite.ranks)]
    else:
        command += [f"--syncprims-worlds-ranks={suite.ranks}"]
    with tempfile.NamedTemporaryFile() as outcomes, tempfile.TemporaryFile() as output:
        variables = {
            "PYTHONPATH": os.pathsep.join(map(str, (HERE, checkout / "src", checkout))),
            "SUITES_OUTCOMES": outcomes.name,
            "SUITES_NAMES": json.dumps(names),
            **dict(pair.split("=") for pair in suite.variables.split()),
        }
        begin = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=checkout / below,
            env={**os.environ, **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        limit = threading.Timer(_LIMIT, os.killpg, (process.pid, signal.SIGKILL))
        limit.start()
        _, status, used = os.wait4(process.pid, 0)
        limit.cancel()
        found: dict[str, Any] = {
            "processor": round(used.ru_utime + used.ru_stime, 1),
            "wall": round(time.monotonic() - begin, 1),
            "hung": os.WIFSIGNALED(status),
            "outcomes": {},
        }
        for name, outcome, why in map(json.loads, Path(outcomes.name).read_text().splitlines()):
            if found["outcomes"].get(name, ("passed",))[0] == "passed":  # or that of a fixture
                found["outcomes"][name] = (outcome, why)
        output.seek(0)
        found["end"] = text = output.read().decode(errors="replace")[-3000:]
    counts = r"^\d+ (?:process groups in|left to).*$"
    found["launches"] = re.findall(counts, text, re.M)
    if suite.ranks and kind != "own":
        found["launches"] = [f"{len(found['outcomes'])} tests on {suite.ranks} ranks"]
    git = ["git", "-C", str(checkout), "log", "-1", "--format=%h"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {**found, "commit": commit or version("torch")}


def main() -> None:
    (parser := argparse.ArgumentParser()).add_argument("folder", type=Path)
    parser.add_argument("--only", default=",".join(suite.place for suite in SUITES))
    parser.add_argument("--kinds", default=",".join(KINDS))
    options = parser.parse_args()
    suites = {suite.place: suite for suite in SUITES}
    for name in options.only.split(","):
        for kind in options.kinds.split(",") if (options.folder / name).is_dir() else ():
            own = options.folder / f"{name}.own.json"
            again = kind != "own" and own.exists()
            names = [*json.loads(own.read_text())["outcomes"]] if again else []
            found = run(suites[name], options.folder.resolve(), kind, names)
            (options.folder / f"{name}.{kind}.json").write_text(json.dumps(found))
            print(name, kind, found["processor"], *found["launches"], flush=True)


def measure(_: Scale) -> dict[str, Any]:
    """Return what is stored in the folder of the variable SYNCPRIMS_SUITES; nothing without it."""
    folder, suites = os.environ.get("SYNCPRIMS_SUITES"), dict[str, Any]()
    for suite in SUITES if folder else ():
        files = {kind: Path(str(folder), f"{suite.place}.{kind}.json") for kind in KINDS}
        found = {kind: json.loads(one.read_text()) for kind, one in files.items() if one.exists()}
        launches = found.get("processes", {}).get("launches") or ["0"]
        served = not launches[0].startswith("0")
        if "own" in found and served and "passed" in str(found["own"]["outcomes"]):
            suites[suite.name] = {kind: _compared(one, found["own"]) for kind, one in found.items()}
    return {"suites": suites, "failed": []} if suites else {"failed": []}


def _compared(one: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the times, and the tests whose outcome differs from that by their own launcher."""
    before, after = own["outcomes"], one["outcomes"]
    differ = [
        [name.partition("::")[2], outcome, after.get(name, ["not ended"])[0]]
        for name, (outcome, _) in before.items()
        if after.get(name, [""])[0] != outcome
    ]
    kept = {what: one[what] for what in ("processor", "wall", "hung", "launches", "commit")}
    return {**kept, "counts": Counter(outcome for outcome, _ in before.values()), "differ": differ}


def lines(data: dict[str, Any]) -> list[str]:
    """Return the table, its sums, and the tests whose outcomes differ."""
    from table import head, row, short  # not in a suite, where this module is a plugin of pytest

    table, notes, ratios, walls = list[str](), list[str](), list[float](), list[float]()
    all_ = same = skipped = 0
    for name, kinds in data["suites"].items():
        own = kinds["own"]
        tests = sum(own["counts"].values())
        differ = kinds["processes"]["differ"]
        all_ += tests
        same += tests - len(differ)
        notes += [f"- {name}: `{test}` {a}, then {b}" for test, a, b in differ]
        skipped += own["counts"].get("skipped", 0)
        ratios.append(own["processor"] / kinds["processes"]["processor"])
        walls.append(own["wall"] / kinds["processes"]["wall"])
        cells = [f"{name}@{own['commit']}", ", ".join(f"{n} {o}" for o, n in own["counts"].items())]
        cells += [str(tests - len(differ))]
        for what in ("processor", "wall"):
            cells += [" / ".join(f"{kinds[k][what]:.0f}" for k in KINDS)]
        table.append(row(*cells, "> " * own["hung"] + short(ratios[-1])))
    found = ["", "## Suites of other projects", "", *_WORDS]
    found += head("suite", "own", "same in worlds", "processor, s", "wall, s", "times less")
    spans = [
        f"{short(min(of))} to {short(max(of))}, median {short(statistics.median(of))}"
        for of in (ratios, walls)
    ]
    sums = f"The same outcomes: {same} of {all_}; {skipped} are skipped tests."
    less = f"Times less: {spans[0]}; by the clock {spans[1]}."
    return [*found, *table, "", sums, less, "", *notes]


if __name__ == "__main__":
    main()
