"""Detection of launchers, from tables of the variables that they set."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.launcher_variables import MPICH, OPEN_MPI, OURS, SHELL, SLURM, SLURM_JOB, TORCHRUN, env
from support.rank_environment import clean_environ

from syncprims import ConfigurationError

# A case is a table of variables: a process for each would take minutes.
from syncprims._world.launchers import detect, find_half_world, find_spread, make_rank_variables

# Pure functions of the environment, without a process for each case.
from syncprims._world.settings import derive_store, read_settings
from syncprims.interface import UNKNOWN, Topology

#: What the first of two daemons, one on each node, has of SLURM.
DAEMON = env(
    "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=2 "
    "SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=1(x2)"
)
#: The only rank of its node.
OPEN_MPI_ALONE = env(
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=5 OMPI_COMM_WORLD_LOCAL_RANK=0 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=1"
)
#: What a SLURM step of one task adds to :data:`SLURM`.
ONE_TASK = env(
    "SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 "
    "SLURM_STEP_NUM_NODES=1 SLURM_STEP_TASKS_PER_NODE=1"
)
#: The same of two tasks on one node.
TWO_TASKS = ONE_TASK | env("SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2")
PLACES: list[tuple[str, dict[str, str], tuple[Any, ...]]] = [
    ("nobody", env("PATH=/bin"), ("none", 0, 1, 0, 1, 0, 1)),
    ("ours, the short form", OURS, ("syncprims", 1, 2, *[UNKNOWN] * 4)),
    ("syncprims run", make_rank_variables(3, 4), ("syncprims", 3, 4, 3, 4, 0, 1)),
    ("torchrun", TORCHRUN, ("torchrun", 5, 8, 1, 4, 1, 2)),
    ("RANK and WORLD_SIZE", env("RANK=1 WORLD_SIZE=2"), ("torchrun", 1, 2, *[UNKNOWN] * 4)),
    ("srun", SLURM, ("SLURM", 5, 6, 1, 2, 1, 2)),
    ("srun, tasks per node repeated",
     SLURM | env("SLURM_STEP_TASKS_PER_NODE=3(x2) SLURM_LOCALID=2"), ("SLURM", 5, 6, 2, 3, 1, 2)),
    ("sbatch's own script", SLURM_JOB | env("SLURM_PROCID=0"), ("none", 0, 1, 0, 1, 0, 1)),
    ("salloc's shell", SHELL | env("SLURM_JOB_NAME=bash"), ("none", 0, 1, 0, 1, 0, 1)),
    ("interactive", SHELL | env("SLURM_JOB_NAME=interactive"), ("none", 0, 1, 0, 1, 0, 1)),
    ("srun bash -c", SLURM | env("SLURM_JOB_NAME=bash"), ("SLURM", 5, 6, 1, 2, 1, 2)),
    ("mpirun", OPEN_MPI, ("Open MPI", 3, 4, 1, 2, UNKNOWN, UNKNOWN)),
    ("mpiexec of MPICH", MPICH, ("MPICH", 1, 2, 1, 2, 0, 1)),
    ("several agents of torchrun on one node of SLURM",
     TORCHRUN | SLURM | TWO_TASKS | env("SLURM_PROCID=1 SLURM_LOCALID=1"),
     ("torchrun", 5, 8, 1, 4, 1, 2)),
    ("torchrun on each node of a SLURM step",
     TORCHRUN | SLURM | DAEMON | env("SLURM_PROCID=1 SLURM_NODEID=1"),
     ("torchrun", 5, 8, 1, 4, 1, 2)),
    ("mpirun, whose daemons are a SLURM step",
     OPEN_MPI | SLURM | DAEMON | env("SLURM_PROCID=1 SLURM_NODEID=1"),
     ("Open MPI", 3, 4, 1, 2, UNKNOWN, UNKNOWN)),
    ("mpirun in a batch script of two nodes, whose daemon is a step of one",
     OPEN_MPI | SLURM | ONE_TASK, ("Open MPI", 3, 4, 1, 2, UNKNOWN, UNKNOWN)),
    ("mpirun with as many ranks as daemons, one of which is on its own node",
     OPEN_MPI_ALONE | SLURM | DAEMON | env("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2"),
     ("Open MPI", 1, 2, 0, 1, UNKNOWN, UNKNOWN)),
    ("mpirun, whose daemons are a SLURM step with PMI",
     OPEN_MPI | SLURM | DAEMON | env("PMI_RANK=0 PMI_SIZE=2"),
     ("Open MPI", 3, 4, 1, 2, UNKNOWN, UNKNOWN)),
    ("srun in a shell of SLURM with PMI", SLURM | env("PMI_RANK=0 PMI_SIZE=1"),
     ("SLURM", 5, 6, 1, 2, 1, 2)),
    ("each task of a SLURM step starts a run of torchrun",
     SLURM | TWO_TASKS | TORCHRUN
     | env("RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 GROUP_WORLD_SIZE=1"),
     ("torchrun", 1, 2, 1, 2, 0, 1)),
    ("each task of a SLURM step starts torchrun with one rank",
     SLURM | TWO_TASKS | TORCHRUN | env("RANK=0 LOCAL_RANK=0 GROUP_RANK=0")
     | env("WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 GROUP_WORLD_SIZE=1"),
     ("torchrun", 0, 1, 0, 1, 0, 1)),
    ("workers of Ray on three of SLURM's four nodes",
     env("RANK=2 WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 NODE_RANK=2") | SLURM
     | env("SLURM_PROCID=3 SLURM_LOCALID=0 SLURM_NODEID=3 SLURM_STEP_NUM_TASKS=4")
     | env("SLURM_STEP_NUM_NODES=4 SLURM_STEP_TASKS_PER_NODE=1(x4)"),
     ("torchrun", 2, 3, 0, 1, UNKNOWN, UNKNOWN)),
    ("ranks that a task of SLURM starts by hand", env("RANK=1 WORLD_SIZE=2") | SLURM | ONE_TASK,
     ("torchrun", 1, 2, *[UNKNOWN] * 4)),
    ("SLURM by choice", TORCHRUN | SLURM | env("SYNCPRIMS_LAUNCHER=slurm"),
     ("SLURM", 5, 6, 1, 2, 1, 2)),
    ("Open MPI by choice", {**OPEN_MPI, **MPICH, "SYNCPRIMS_LAUNCHER": "Open MPI"},
     ("Open MPI", 3, 4, 1, 2, UNKNOWN, UNKNOWN)),
    ("none by choice", TORCHRUN | SLURM | env("SYNCPRIMS_LAUNCHER=none"),
     ("none", 0, 1, 0, 1, 0, 1)),
    ("srun with PMI, saying the same", SLURM | env("PMI_RANK=5 PMI_SIZE=6"),
     ("SLURM", 5, 6, 1, 2, 1, 2)),
    ("syncprims run inside one SLURM task", make_rank_variables(1, 4) | SLURM | ONE_TASK,
     ("syncprims", 1, 4, 1, 4, 0, 1)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "expected"), [p[1:] for p in PLACES], ids=[p[0] for p in PLACES]
)
def test_places(environ: dict[str, str], expected: tuple[Any, ...]) -> None:
    place = detect(environ)
    assert (place.launcher, *place[:6]) == expected


WRONG: list[tuple[str, dict[str, str], list[str]]] = [
    ("half of torchrun", env("WORLD_SIZE=2"), ["WORLD_SIZE=2", "without RANK", "unset"]),
    ("half of ours", env("SYNCPRIMS_RANK=0"), ["SYNCPRIMS_RANK=0", "SYNCPRIMS_WORLD_SIZE"]),
    ("a pod of several ranks without torchrun",
     env("RANK=1 WORLD_SIZE=8 PET_NNODES=2 PET_NPROC_PER_NODE=4"),
     ["PET_NPROC_PER_NODE=4", "WORLD_SIZE=8", "torchrun"]),
    ("no number", env("RANK=one WORLD_SIZE=2"), ["RANK='one'", "whole number"]),
    ("no such rank", env("RANK=2 WORLD_SIZE=2"), ["says RANK=2 and WORLD_SIZE=2: the first must"]),
    ("local rank", TORCHRUN | env("LOCAL_RANK=4"), ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"]),
    ("local size", TORCHRUN | env("LOCAL_WORLD_SIZE=16"), ["LOCAL_WORLD_SIZE=16", "WORLD_SIZE=8"]),
    ("a number that no variable gives", env("RANK=0 WORLD_SIZE=2 LOCAL_RANK=5"),
     ["LOCAL_RANK=5 and WORLD_SIZE=2"]),
    ("SLURM's list", SLURM | env("SLURM_STEP_TASKS_PER_NODE=4x2"), ["'4x2'", "2(x3),1"]),
    ("torchrun against SLURM", TORCHRUN | SLURM,
     ["torchrun says RANK=5 WORLD_SIZE=8", "SLURM says SLURM_PROCID=5", "unset"]),
    ("ours against torchrun", OURS | env("RANK=0 WORLD_SIZE=2"),
     ["SYNCPRIMS_RANK=1", "RANK=0 WORLD_SIZE=2"]),
    ("Open MPI against MPICH", OPEN_MPI | MPICH | env("PMI_SIZE=8"),
     ["OMPI_COMM_WORLD_RANK=3", "PMI_RANK=1 PMI_SIZE=8"]),
    ("mpirun of one rank in a step, or a step in mpirun of one rank",
     OPEN_MPI_ALONE | SLURM | env("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1"),
     ["SLURM says SLURM_PROCID=5", "OMPI_COMM_WORLD_SIZE=1", "SYNCPRIMS_LAUNCHER=slurm or"]),
    ("more agents of torchrun than nodes of its run",
     TORCHRUN | SLURM | env("SLURM_PROCID=4 SLURM_STEP_NUM_TASKS=8")
     | env("SLURM_STEP_TASKS_PER_NODE=4(x2)"),
     ["torchrun says RANK=5 WORLD_SIZE=8", "SLURM_STEP_NUM_TASKS=8", "SYNCPRIMS_LAUNCHER"]),
    ("Lightning's starter before it has initialized the group",
     env("LOCAL_RANK=1 NODE_RANK=0 WORLD_SIZE=2 MASTER_PORT=1234"),
     ["WORLD_SIZE=2, LOCAL_RANK=1 without RANK", "initialize torch.distributed"]),
    ("a launcher that nobody knows", TORCHRUN | env("SYNCPRIMS_LAUNCHER=pbs"),
     ["SYNCPRIMS_LAUNCHER='pbs'", "torchrun, slurm, openmpi, mpich, none", "entry point"]),
    ("a launcher that is named and not there", TORCHRUN | env("SYNCPRIMS_LAUNCHER=slurm"),
     ["SYNCPRIMS_LAUNCHER=slurm", "SLURM_PROCID", "not set"]),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "words"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_contradictions_name_what_they_are_about(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        detect(environ)
    for word in words:
        assert word in str(caught.value)


def read_by_hand(environ: Mapping[str, str]) -> Any:
    """A launcher of a package of its own."""
    if "MINE_RANK" not in environ:
        return None
    rank = int(environ["MINE_RANK"])
    return Topology(rank, 2, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, run_id="job-7")


def test_a_package_brings_a_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "mine-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    named = f"[syncprims.launchers]\nmine = {__name__}:read_by_hand\n"
    (package / "entry_points.txt").write_text(named)
    monkeypatch.syspath_prepend(str(tmp_path))
    environ = env("SYNCPRIMS_LAUNCHER=mine MINE_RANK=1")
    place = detect(environ)
    assert (place.launcher, place.rank, place.world_size, place.run_id) == ("mine", 1, 2, "job-7")
    assert detect(environ | env("SYNCPRIMS_RUN_ID=own")).run_id == "own"
    assert detect(env("MINE_RANK=1")).launcher == "none"  # it does not count by itself
    for wrong in ({}, env("MINE_RANK=2")):
        with pytest.raises(ConfigurationError, match="must return a syncprims"):
            detect(env("SYNCPRIMS_LAUNCHER=mine") | wrong)


RESTARTED = env("TORCHELASTIC_RESTART_COUNT=1")
ONE_AGENT = TORCHRUN | env("LOCAL_WORLD_SIZE=8 GROUP_RANK=0 GROUP_WORLD_SIZE=1")


@pytest.mark.parametrize("own", [{}, env("SYNCPRIMS_RUN_ID=mine")])
def test_agents_that_count_their_own_restarts_have_one_run_id(own: dict[str, str]) -> None:
    first = detect(TORCHRUN | own | RESTARTED)
    second = TORCHRUN | own | env("RANK=0 MASTER_ADDR=localhost")
    assert first.run_id == detect(second).run_id


@pytest.mark.parametrize("own", [{}, env("SYNCPRIMS_RUN_ID=mine")])
@pytest.mark.parametrize(
    ("started", "restarted"),
    [(ONE_AGENT, RESTARTED), (OURS, RESTARTED), (SLURM, env("SLURM_RESTART_COUNT=1"))],
)
def test_each_start_has_a_run_id_of_its_own_where_all_ranks_know_its_number(
    started: dict[str, str], restarted: dict[str, str], own: dict[str, str]
) -> None:
    named = env("SYNCPRIMS_RUN_ID=ours") | own if started is OURS else own
    first = detect(started | named).run_id
    assert first is not None
    assert detect(started | named | restarted).run_id == f"{first}-restart1"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, ""),
        (env("SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 PET_NNODES=1"), ""),
        (env("RANK=0 WORLD_SIZE=1 PET_NNODES=1"), ""),
        (SLURM_JOB, "SLURM_NTASKS=6 is set, and this process was not started by srun"),
        (SLURM_JOB | env("SYNCPRIMS_LAUNCHER=none"), ""),
        (env("PET_NNODES=2 PET_NODE_RANK=1"), "PET_NNODES=2 is set, .* torchrun"),
        (env("JOB_COMPLETION_INDEX=1"), "JOB_COMPLETION_INDEX=1 .* RANK, WORLD_SIZE"),
        (env("OMPI_UNIVERSE_SIZE=8"), "OMPI_UNIVERSE_SIZE=8 .* mpirun; a container"),
    ],
)
def test_a_world_of_one_says_what_speaks_of_more(environ: dict[str, str], words: str) -> None:
    said = find_half_world(environ, detect(environ))
    assert re.match(words or "$", said), said


def test_pods_are_several_hosts() -> None:
    pod = env("RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-master-0 MASTER_PORT=23456")
    in_cluster = pod | env("KUBERNETES_SERVICE_HOST=10.0.0.1")
    assert "MASTER_ADDR=job-master-0" in find_spread(in_cluster, detect(in_cluster))
    assert "PET_NNODES=2" in find_spread(pod | env("PET_NNODES=2"), detect(pod))
    assert find_spread(pod, detect(pod)) == ""
    spawned = in_cluster | env("MASTER_ADDR=localhost")
    assert find_spread(spawned, detect(spawned)) == ""


def test_run_ids_tell_runs_apart() -> None:
    def run_id(**more: str) -> str | None:
        return detect(TORCHRUN | more).run_id

    assert run_id() == run_id(RANK="4", LOCAL_RANK="0")
    ids = {
        run_id(),
        run_id(MASTER_PORT="29501"),
        run_id(TORCHELASTIC_RUN_ID="mine"),
        run_id(SYNCPRIMS_RUN_ID="mine"),
        detect(SLURM).run_id,
        detect(SLURM | env("SLURM_STEP_ID=1")).run_id,
        detect(SLURM | env("SLURM_RESTART_COUNT=1")).run_id,
        detect(OPEN_MPI).run_id,
    }
    assert len(ids) == 8
    assert None not in ids
    assert detect(MPICH | env("MPI_LOCALNRANKS=1 MPI_LOCALRANKID=0")).run_id is None
    assert detect({}).run_id is None


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_run_of_mpich_on_one_host_is_what_its_starter_has_begun() -> None:
    """Also where a script stands between the starter and a rank."""
    show = "import os; from syncprims._world.launchers import detect; print(detect(os.environ))"
    script = """
        export PMI_SIZE=2 MPI_LOCALNRANKS=2
        PMI_RANK=0 MPI_LOCALRANKID=0 "$0" -c "$1"
        PMI_RANK=1 MPI_LOCALRANKID=1 sh -c '"$0" -c "$1"; true' "$0" "$1"
        """
    command = ["sh", "-c", script, sys.executable, show]
    texts = [
        subprocess.run(command, env=clean_environ(), capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    runs = [re.findall("run_id='(MPICH-[0-9-]+)'", done.stdout) for done in texts]
    assert [len(ids) for ids in runs] == [2, 2]
    assert [len({*ids}) for ids in runs] == [1, 1]
    assert runs[0] != runs[1]


def test_settings() -> None:
    settings = read_settings(
        env(
            "SYNCPRIMS_TIMEOUT=12.5 SYNCPRIMS_JOIN_TIMEOUT=3 SYNCPRIMS_WARN_AFTER=1 "
            "SYNCPRIMS_DIR=/there SYNCPRIMS_PICKLE=0 SYNCPRIMS_TRACE=there "
            "SYNCPRIMS_TRACE_LIMIT=3"
        )
    )
    assert (settings.trace, settings.trace_limit) == ("there", 3 << 20)
    assert settings.timeout == 12.5
    assert settings.join_timeout == 3
    assert settings.warn_after == 1
    assert settings.directory == "/there"
    assert not settings.pickle
    assert read_settings(env("SYNCPRIMS_TIMEOUT=")).timeout is None
    assert read_settings({}).join_timeout == 300


ON_NODES = SLURM | env("SLURM_STEP_NODELIST=node[1-2] SLURM_JOB_NODELIST=node[1-4]")


def meeting(environ: dict[str, str]) -> tuple[str, int] | None:
    return derive_store(environ, detect(environ))


def test_steps_of_one_slurm_job_meet_at_different_ports() -> None:
    first, second = meeting(ON_NODES), meeting(ON_NODES | env("SLURM_STEP_ID=1"))
    assert first is not None
    assert second is not None
    assert first[0] == second[0] == "node1"
    assert first[1] != second[1]
    assert meeting(ON_NODES | env("SLURM_PROCID=0 SLURM_LOCALID=0")) == first
    assert meeting(ON_NODES | env("MASTER_ADDR=10.0.0.1")) == ("10.0.0.1", first[1])
    assert meeting(ON_NODES | env("MASTER_PORT=4000")) == ("node1", 4000)


def test_a_step_on_one_node_needs_no_store() -> None:
    one_node = env("SLURM_STEP_NUM_NODES=1 SLURM_STEP_TASKS_PER_NODE=6 SLURM_NODEID=0")
    assert meeting(ON_NODES | one_node) is None
    assert meeting(TORCHRUN) is None
    assert meeting({}) is None


def test_all_ranks_of_mpirun_in_a_slurm_job_meet_on_its_first_node() -> None:
    job = SLURM_JOB | env("SLURM_JOB_NODELIST=node[1-2]")
    here = OPEN_MPI | job | env("OMPI_COMM_WORLD_RANK=0 SLURMD_NODENAME=node1")
    there = OPEN_MPI | ON_NODES | job | ONE_TASK | env("SLURMD_NODENAME=node2")
    there["SLURM_STEP_NODELIST"] = "node2"
    assert meeting(here) == meeting(there)
    assert meeting(here) is not None
    with pytest.raises(ConfigurationError, match=r"rank 0 is on node node2.*MASTER_ADDR=node2"):
        meeting(there | env("OMPI_COMM_WORLD_RANK=0"))


def test_a_port_that_is_none_is_told_where_slurm_implies_the_address() -> None:
    with pytest.raises(ConfigurationError, match="MASTER_PORT='abc' is not a whole number"):
        read_settings(SLURM | env("SLURM_STEP_NODELIST=node[1-2] MASTER_PORT=abc"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SYNCPRIMS_TIMEOUT", "soon"),
        ("SYNCPRIMS_TIMEOUT", "-1"),
        ("SYNCPRIMS_JOIN_TIMEOUT", "0"),
        ("SYNCPRIMS_WARN_AFTER", "nan"),
        ("SYNCPRIMS_PICKLE", "yes"),
        ("SYNCPRIMS_TRACE_LIMIT", "0"),
        ("SYNCPRIMS_TRACE_LIMIT", "1.5"),
    ],
)
def test_bad_settings_name_variable_and_value(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}='{value}'"):
        read_settings({name: value})
