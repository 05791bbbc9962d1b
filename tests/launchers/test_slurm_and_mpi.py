"""Real jobs under SLURM and Open MPI, on pretended nodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import ROOT
from support.network_hosts import Network, why_not
from support.pages import blocks
from support.rank_environment import PATIENCE

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "mpirun")
_CONF = """
ClusterName=pretended
SlurmctldHost=host0(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
RequeueExit=99
{nodes}
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=30
PartitionName=high Nodes=ALL State=UP PriorityTier=10
"""
_NODE = """
mount -t tmpfs none /run && mkdir -p /run/munge /run/slurmd /run/slurmctld /run/sshd
cp {folder}/hosts /run/hosts && mount --bind /run/hosts /etc/hosts
cp {folder}/munge.key /run/munge.key && chmod 400 /run/munge.key
munged --force --key-file=/run/munge.key --socket=/run/munge/munge.socket.2 \
    --pid-file=/run/munge/munged.pid --log-file=/run/munge/munged.log --seed-file=/run/munge/seed
export SLURM_CONF={folder}/slurm.conf
[ $(hostname) != host0 ] || slurmctld
slurmd -N $(hostname)
"""


class Done(NamedTuple):
    """The end of a command on a node."""

    code: int
    out: str


class Cluster:
    """Nodes that SLURM manages."""

    def __init__(self, nodes: int, folder: Path) -> None:
        self.folder = folder
        self._network = Network(nodes, 1, folder)
        self.hosts = self._network.hosts
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        lines = [f"{host.address} host{host.number}" for host in self.hosts]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        own = [
            f"NodeName=host{host.number} NodeAddr={host.address} CPUs=4 State=UNKNOWN"
            for host in self.hosts
        ]
        (folder / "slurm.conf").write_text(_CONF.format(folder=folder, nodes="\n".join(own)))
        self._network.start(["sleep", "infinity"])
        for host in reversed(self.hosts):
            started = self.on(host.number, _NODE.format(folder=folder))
            assert started.code == 0, started.out
        self.await_that(lambda: self._count_idle() == nodes, "slurmd does not come up")

    def _count_idle(self) -> int:
        done = self.on(0, "sinfo -h -N -p low -o %T")
        return done.out.split().count("idle")

    def on(self, node: int, command: str, **variables: str) -> Done:
        """Run a shell command on a node, and wait for it."""
        clean = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG")}
        clean |= {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMP_NUM_THREADS": "1",
            "SYNCPRIMS_JOIN_TIMEOUT": "60",
            **variables,
        }
        pid = str(self.hosts[node].pid)
        enter = ["nsenter", "-t", pid, "-m", "-u", "-n", "-p", f"--wd={self.folder}"]
        done = subprocess.run(
            [*enter, "bash", "-c", command],
            env=clean,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        return Done(done.returncode, done.stdout)

    def submit(self, script: str, *options: str, environ: str = "") -> str:
        """Submit a batch script, and return the number of the job. It writes ``out-<number>``."""
        number = len(list(self.folder.glob("batch-*")))
        path = self.folder / f"batch-{number}"
        path.write_text("#!/bin/bash\n" + script)
        out = self.folder / "out-%j"
        line = f"{environ} sbatch --parsable -o {out} {' '.join(options)} {path}"
        done = self.on(0, line)
        assert done.code == 0, done.out
        return done.out.split()[-1]

    def state_of(self, job: str) -> str:
        """Return the state of a job, as SLURM calls it."""
        found = self.on(0, f"scontrol show job {job} -o").out
        return next((w[9:] for w in found.split() if w.startswith("JobState=")), "UNKNOWN")

    def output_of(self, job: str) -> str:
        """Return what a job has written."""
        return self.read(f"out-{job}")

    def read(self, name: str) -> str:
        """Return the text of a file in the folder of the cluster; empty if it is not there."""
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def await_state(self, job: str, *states: str) -> str:
        """Wait until a job is in one of these states; return what it has written."""
        self.await_that(lambda: self.state_of(job) in states, f"job {job} is not {states}")
        return self.output_of(job)

    def await_output(self, job: str, text: str) -> None:
        """Wait until a job has written `text`."""
        self.await_that(lambda: text in self.output_of(job), f"job {job} does not write {text!r}")

    def await_that(self, condition: object, why: str) -> None:
        """Wait until `condition` returns true."""
        assert callable(condition)
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                logs = [*self.folder.glob("out-*"), *self.folder.glob("*.log")]
                said = [f"{p.name}:\n{p.read_text(errors='replace')[-3000:]}" for p in logs]
                raise AssertionError("\n".join([why, *said]))
            time.sleep(0.1)

    def close(self) -> None:
        """Kill all processes of the nodes."""
        self._network.close()


def why_no_cluster() -> str | None:
    """Return why no cluster can be started here; None if one can."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (make launchers)"
    return why_not()


@contextlib.contextmanager
def cluster(nodes: int, folder: Path) -> Generator[Cluster]:
    """Start a cluster, and remove it at the end."""
    made = Cluster(nodes, folder)
    try:
        yield made
    finally:
        made.close()


pytestmark = [
    pytest.mark.launchers,
    pytest.mark.skipif(why_no_cluster() is not None, reason=str(why_no_cluster())),
]

_TOUR = """
import json, os, sys, time
from syncprims import *
barrier("begin")
with main_first(local=True):
    pass
place = current().topology
numbers = [*place[:6], place.launcher, os.uname().nodename]
seen = all_gather(numbers)
if is_main():
    print("TOLD", json.dumps(seen), flush=True)
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "tour.py").write_text(_TOUR)
    shutil.copytree(ROOT / "examples", folder / "examples")
    with cluster(2, folder) as made:
        yield made


def told(text: str) -> list[list[list[Any]]]:
    """Return what the main rank of each world has told."""
    found = re.findall(r"TOLD (.*)", text)
    assert found, text
    return [json.loads(line) for line in found]


def places(launcher: str, *hosts: int, ranks: list[int] | None = None) -> list[list[Any]]:
    """Return the numbers of all ranks, where host k has ``hosts[k]`` of them."""
    found: dict[int, list[Any]] = {}
    order = iter(ranks or range(sum(hosts)))
    for host, count in enumerate(hosts):
        for local in range(count):
            rank = next(order)
            numbers = [rank, sum(hosts), local, count, host, len(hosts)]
            found[rank] = [*numbers, launcher, f"host{host}"]
    return [found[rank] for rank in sorted(found)]


HYDRA = Path(sys.executable).with_name("mpiexec.hydra")
TOUR = f"{sys.executable} tour.py"
STARTS = [
    ("srun -N2 -n4", [places("SLURM", 2, 2)]),
    ("srun -N2 -n3", [places("SLURM", 2, 1)]),
    ("srun -N2 -n4 -m cyclic", [places("SLURM", 2, 2, ranks=[0, 2, 1, 3])]),
    ("srun -N1 -n3", [places("SLURM", 3)]),
    ("srun -N1 -n3 --export=ALL,SYNCPRIMS_BACKEND=file", [places("SLURM", 3)]),
    ("srun -N1 -n2 --mpi=pmi2", [places("SLURM", 2)]),
    ("mpirun -n 4 --map-by node", [places("Open MPI", 2, 2, ranks=[0, 2, 1, 3])]),
    ("mpirun -n 4 --host host0:3,host1:1", [places("Open MPI", 3, 1)]),
    ("mpirun -n 2", [places("Open MPI", 2)]),
    (f"srun -N1 -n2 {TOUR} : -N1 -n1", [places("SLURM", 2, 1)]),
    pytest.param(
        f"{HYDRA} -n 3 -ppn 2",
        [places("MPICH", 2, 1)],
        marks=pytest.mark.skipif(not HYDRA.exists(), reason="needs hydra: pip install mpich"),
    ),
]


@pytest.mark.parametrize(("line", "expected"), STARTS)
def test_batch_scripts(line: str, expected: list[list[list[Any]]], nodes: Cluster) -> None:
    job = nodes.submit(f"{line} {TOUR}", "-N2", "--ntasks-per-node=4")
    assert told(nodes.await_state(job, "COMPLETED", "FAILED")) == expected


def test_a_batch_script_without_srun_is_a_world_of_one_that_says_so(nodes: Cluster) -> None:
    text = nodes.await_state(nodes.submit(TOUR, "-N1", "-n4", "-whost0"), "COMPLETED", "FAILED")
    assert "SLURM_NTASKS=4 is set, and this process was not started by srun" in text
    assert told(text) == [[[0, 1, 0, 1, 0, 1, "none", "host0"]]]


def test_two_steps_of_one_job_and_two_jobs_at_once(nodes: Cluster) -> None:
    two = f"srun -N2 -n2 --overlap {TOUR} & srun -N2 -n2 --overlap {TOUR} & wait"
    jobs = [nodes.submit(two, "-N2", "-n2") for _ in range(2)]
    for job in jobs:
        assert told(nodes.await_state(job, "COMPLETED", "FAILED")) == [places("SLURM", 1, 1)] * 2


_TRAIN = """
if "--directory" in sys.argv and is_main():
    os.makedirs(sys.argv[2], exist_ok=True)
    if "SLURM_RESTART_COUNT" in os.environ:
        open(os.path.join(sys.argv[2], "finished"), "w").close()
"""
#: Blocks of the page, by a word in them: the size of the job, a change that makes it smaller, and
#: the worlds that it starts.
WRITTEN: dict[str, tuple[str, dict[str, str], list[list[list[Any]]]]] = {
    "train.sbatch": ("--ntasks-per-node=2 --cpus-per-task=1", {}, [places("SLURM", 2, 2)]),
    "--exact": ("-N2 -n4", {"--ntasks=4": "--ntasks=2"}, [places("SLURM", 2)] * 2),
    "scontrol requeue": ("-N1 -n2 --open-mode=append", {}, [places("SLURM", 2)] * 2),
    "--map-by node": (
        "-N2 --ntasks-per-node=2",
        {"mpirun -n 8": f"{shutil.which('mpirun', path='/usr/bin')} -n 4"},
        [places("Open MPI", 2, 2, ranks=[0, 2, 1, 3])],
    ),
}


@pytest.mark.parametrize("word", WRITTEN)
def test_a_block_of_the_page_does_what_it_says(word: str, nodes: Cluster) -> None:
    (nodes.folder / "train.py").write_text(_TOUR + _TRAIN)
    page = [b for b in blocks(ROOT / "docs/how-to/slurm.md") if b.language == "bash"]
    (block,) = (b for b in page if word in b.code or word == b.file)
    size, changes, expected = WRITTEN[word]
    script = block.code
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    environ = f"PATH={Path(sys.executable).parent}:$PATH"
    job = nodes.submit(script.removeprefix("#!/bin/bash\n"), *size.split(), environ=environ)
    nodes.await_that(
        lambda: nodes.output_of(job).count("TOLD") >= len(expected), f"job {job} tells too little"
    )
    # Without the names of hosts: a step may run on any.
    found = [[place[:7] for place in world] for world in told(nodes.output_of(job))]
    assert found == [[place[:7] for place in world] for world in expected]
    nodes.await_state(job, "COMPLETED", "FAILED")
    assert nodes.state_of(job) == "COMPLETED"


def test_an_array_is_a_world_for_each_task(nodes: Cluster) -> None:
    nodes.submit(f"srun {TOUR}", "-N1", "-n2", "--array=0-1", "-o", "array-%a")
    nodes.await_that(
        lambda: all("TOLD" in nodes.read(f"array-{task}") for task in range(2)), "no array"
    )
    for task in range(2):
        ((first, second),) = told(nodes.read(f"array-{task}"))
        assert (first[:4], second[:4]) == ([0, 2, 0, 2], [1, 2, 1, 2])


def test_torchrun_in_a_step(nodes: Cluster) -> None:
    agent = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2"
    one = f"srun -N2 -n2 {agent} --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host0:29400"
    text = nodes.await_state(nodes.submit(f"{one} tour.py", "-N2", "-n2"), "COMPLETED", "FAILED")
    assert told(text) == [places("torchrun", 2, 2)]


def test_a_sweep_of_torchruns_is_a_world_for_each_task(nodes: Cluster) -> None:
    agent = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 --standalone"
    line = f"srun -N1 -n2 {agent} tour.py"
    text = nodes.await_state(nodes.submit(line, "-N1", "-n2"), "COMPLETED", "FAILED")
    assert told(text) == [places("torchrun", 2)] * 2


_KILLED = """
import os, signal
from syncprims import *
barrier("begin")
if is_last():
    os.kill(os.getpid(), signal.SIGKILL)
barrier("end")
"""


@pytest.mark.parametrize("line", ["srun -N2 --ntasks-per-node=2", "mpirun -n 4"])
def test_a_killed_rank_is_named_and_fails_the_job(line: str, nodes: Cluster) -> None:
    (nodes.folder / "killed.py").write_text(_KILLED)
    job = nodes.submit(f"{line} {sys.executable} killed.py", "-N2", "--ntasks-per-node=2")
    text = nodes.await_state(job, "COMPLETED", "FAILED")
    assert nodes.state_of(job) == "FAILED"
    # Open MPI kills the others at once, perhaps before they have said it.
    assert line.startswith("mpirun") or "rank 3 was lost: killed by SIGKILL" in text


_SURVIVES = """
from syncprims import *
try:
    barrier("end")
except PeerLost:
    change = reform()
    print("TOLD", json.dumps([change.members, change.lost, all_reduce(1)]), flush=True)
"""


def test_the_others_go_on_where_slurm_is_told_to_leave_them(nodes: Cluster) -> None:
    options = "--no-kill --kill-on-bad-exit=0"
    assert f"srun {options}" in (ROOT / "docs/how-to/slurm.md").read_text()
    killed = _KILLED.partition('barrier("end")')[0]
    (nodes.folder / "survives.py").write_text("import json" + killed + _SURVIVES)
    job = nodes.submit(f"srun {options} -N2 -n4 {sys.executable} survives.py", "-N2", "-n4")
    assert told(nodes.await_state(job, "COMPLETED", "FAILED")) == [[[0, 1, 2], [3], 3]] * 3


def _submit_example(nodes: Cluster, *options: str, steps: int = 2_000_000) -> str:
    script = (ROOT / "examples" / "slurm.sbatch").read_text()
    # The same lines on smaller nodes. What sbatch is told by options counts more than the script.
    size = ["-N2", "--ntasks-per-node=1", "--cpus-per-task=1"]
    environ = f"PATH={Path(sys.executable).parent}:$PATH STEPS={steps}"
    return nodes.submit(script.removeprefix("#!/bin/bash\n"), *size, *options, environ=environ)


@pytest.mark.parametrize("way", ["two signals", "preemption"])
def test_the_example_saves_is_queued_again_and_goes_on(way: str, nodes: Cluster) -> None:
    job = _submit_example(nodes)
    runs = nodes.folder / f"run-{job}"
    nodes.await_that(lambda: any(runs.glob("*")), "no checkpoint")
    if way == "preemption":
        nodes.submit("sleep 5", "-N2", "-n8", "-p", "high", "-o", "high-%j")
    else:
        signal = f"scancel --signal=TERM {job}"
        assert nodes.on(0, f"{signal}; {signal}").code == 0
    nodes.await_output(job, "saved step ")
    nodes.await_output(job, "continues after step ")
    nodes.on(0, f"scancel {job}")
    nodes.await_state(job, "CANCELLED", "COMPLETED", "FAILED")
