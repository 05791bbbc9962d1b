"""Two pretended nodes of a cluster, with SLURM and Open MPI on them.

The nodes are those of :mod:`support.network_hosts`. Each has a munged and a slurmd of its own, and
the first one the slurmctld. Only root may create them, and what they run has to be installed:
``make launchers`` does.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, NamedTuple

from .network_hosts import Network, why_not
from .rank_environment import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

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
