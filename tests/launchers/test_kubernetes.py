"""The manifests for Kubernetes: their structure, and their commands in pretended pods."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT
from support.network_hosts import network, why_not
from support.pages import blocks

MANIFESTS: dict[str, Any] = {
    manifest["kind"]: manifest
    for block in blocks(ROOT / "docs/how-to/kubernetes.md")
    if block.language == "yaml"
    for manifest in [yaml.safe_load(block.code)]
}
POD_OF: dict[str, Callable[[Any], Any]] = {
    "PyTorchJob": lambda spec: spec["pytorchReplicaSpecs"]["Worker"]["template"],
    "JobSet": lambda spec: spec["replicatedJobs"][0]["template"]["spec"]["template"],
}


def container_of(kind: str) -> dict[str, Any]:
    (container,) = POD_OF[kind](MANIFESTS[kind]["spec"])["spec"]["containers"]
    return dict(container)


@pytest.mark.parametrize("kind", POD_OF)
def test_a_pod_names_what_it_uses(kind: str) -> None:
    manifest = MANIFESTS[kind]
    assert re.fullmatch(r"[a-z0-9.-]+/v1(alpha\d)?", manifest["apiVersion"])
    pod, container = POD_OF[kind](manifest["spec"])["spec"], container_of(kind)
    assert {"name", "image", "command"} <= container.keys()
    mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
    assert mounted == {volume["name"] for volume in pod.get("volumes", [])}
    for variable in container.get("env", []):
        assert len(variable.keys() & {"value", "valueFrom"}) == 1
        assert isinstance(variable.get("value", ""), str), "a number needs quotes"


def test_the_replicas_of_a_pytorch_job_differ_in_number_only() -> None:
    replicas = MANIFESTS["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1, "the operator takes no other number"
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    assert container_of("PyTorchJob")["name"] == "pytorch", "the operator looks for this name"


def test_the_pods_of_a_job_set_find_the_first_one() -> None:
    spec, name = MANIFESTS["JobSet"]["spec"], MANIFESTS["JobSet"]["metadata"]["name"]
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert job["parallelism"] == job["completions"]
    env = {one["name"]: one.get("value") for one in container_of("JobSet")["env"]}
    assert env["PET_NNODES"] == str(job["completions"])
    assert env["PET_MASTER_ADDR"] == f"{name}-{replicated['name']}-0-0.{name}"


_TRAIN = """
import json, logging
from syncprims import *
logging.basicConfig()
with main_first(local=True):
    pass
place = current().topology
seen = all_gather([*place[:6], place.launcher])
if is_local_main():
    print("TOLD", json.dumps(seen), flush=True)
"""
needs_pods = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def run_pods(command: Sequence[str], variables: dict[str, str], folder: Path) -> list[str]:
    """Run the command of a container in two pods, and return what each has written.

    ``{host}`` in a variable is the number of the pod. The first one has the name that it is given.
    """
    first = variables.get("PET_MASTER_ADDR") or variables["MASTER_ADDR"]
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n10.77.0.1 {first}\n")
    everywhere = {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "SYNCPRIMS_JOIN_TIMEOUT": "60",
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    }
    script = 'mount --bind "$0" /etc/hosts && exec env "$@"'
    setting = [f"{name}={value}" for name, value in variables.items()]
    with network(2, 1, folder) as pods:
        for pod in pods.hosts:
            (pod.folder / "train.py").write_text(_TRAIN)
        line = ["sh", "-c", script, str(folder / "hosts"), *setting, *command]
        pods.start(line, **everywhere)
        ended = pods.wait()
    assert [end.code for end in ended] == [0, 0], ended
    return [end.said for end in ended]


def told(text: str) -> Any:
    (line,) = re.findall(r"TOLD (.*)", text)
    return json.loads(line)


def places(ranks: int, launcher: str) -> list[list[Any]]:
    """Return the numbers of all ranks, where each of two pods has so many."""
    return [[r, 2 * ranks, r % ranks, ranks, r // ranks, 2, launcher] for r in range(2 * ranks)]


def pytorch_job(ranks: int) -> dict[str, str]:
    """Return the variables that the operator sets for a job with so many ranks in each pod."""
    address = {"MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456"}
    pods = {"NNODES": "2", "NPROC_PER_NODE": str(ranks), "NODE_RANK": "{host}"}
    elastic = {f"PET_{name}": value for name, value in (address | pods).items()}
    return address | elastic | {"RANK": "{host}", "WORLD_SIZE": str(2 * ranks)}


def job_set(ranks: int) -> dict[str, str]:
    """Return the variables of the manifest, with so many ranks in each pod."""
    env = {one["name"]: one.get("value", "{host}") for one in container_of("JobSet")["env"]}
    return env | {"PET_NPROC_PER_NODE": str(ranks), "JOB_COMPLETION_INDEX": "{host}"}


@pytest.mark.launchers
@needs_pods
@pytest.mark.parametrize("kind", POD_OF)
def test_the_command_of_a_pod_starts_the_ranks(kind: str, tmp_path: Path) -> None:
    variables = pytorch_job(2) if kind == "PyTorchJob" else job_set(2)
    said = run_pods(container_of(kind)["command"], variables, tmp_path)
    assert [told(text) for text in said] == [places(2, "torchrun")] * 2


@pytest.mark.launchers
@needs_pods
def test_a_pytorch_job_without_torchrun(tmp_path: Path) -> None:
    said = run_pods(["python", "train.py"], pytorch_job(1), tmp_path)
    assert [told(text) for text in said] == [places(1, "torchrun")] * 2


@pytest.mark.launchers
@needs_pods
@pytest.mark.parametrize(
    ("variables", "warning"),
    [
        (
            {n: v for n, v in pytorch_job(1).items() if n.startswith("PET_")},  # of a TrainJob
            "PET_NNODES=2 is set, and this process was not started by torchrun",
        ),
        (
            {"MASTER_ADDR": "train-nodes-0-0.train", "JOB_COMPLETION_INDEX": "{host}"},
            "Kubernetes does not say how many ranks there are",
        ),
    ],
    ids=["TrainJob", "an indexed job"],
)
def test_a_lone_pod_says_so(variables: dict[str, str], warning: str, tmp_path: Path) -> None:
    for text in run_pods(["python", "train.py"], variables, tmp_path):
        assert told(text) == [[0, 1, 0, 1, 0, 1, "none"]]
        assert warning in text
