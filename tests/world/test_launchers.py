"""Detection of launchers, from tables of the variables that they set."""

from __future__ import annotations

from typing import Any

import pytest
from support.launcher_variables import (
    LSF,
    MPICH,
    OPEN_MPI,
    OURS,
    PALS,
    SHELL,
    SLURM,
    SLURM_JOB,
    TORCHRUN,
)

from syncprims import ConfigurationError
from syncprims._world.launchers import detect, make_rank_variables
from syncprims._world.settings import read_settings

PLACES: list[tuple[str, dict[str, str], tuple[Any, ...]]] = [
    ("nobody", {"PATH": "/bin"}, ("none", 0, 1, 0, 1, 0, 1)),
    ("ours, the short form", OURS, ("syncprims", 1, 2, 1, 2, 0, 1)),
    ("syncprims run", make_rank_variables(3, 4), ("syncprims", 3, 4, 3, 4, 0, 1)),
    ("torchrun", TORCHRUN, ("torchrun", 5, 8, 1, 4, 1, 2)),
    ("RANK and WORLD_SIZE", {"RANK": "1", "WORLD_SIZE": "2"}, ("torchrun", 1, 2, 1, 2, 0, 1)),
    ("srun", SLURM, ("SLURM", 5, 6, 1, 2, 1, 2)),
    (
        "srun, tasks per node repeated",
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3(x2)", "SLURM_LOCALID": "2"},
        ("SLURM", 5, 6, 2, 3, 1, 2),
    ),
    ("sbatch's own script", {**SLURM_JOB, "SLURM_PROCID": "0"}, ("none", 0, 1, 0, 1, 0, 1)),
    ("salloc's shell", {**SHELL, "SLURM_JOB_NAME": "bash"}, ("none", 0, 1, 0, 1, 0, 1)),
    ("interactive", {**SHELL, "SLURM_JOB_NAME": "interactive"}, ("none", 0, 1, 0, 1, 0, 1)),
    ("srun bash -c", {**SLURM, "SLURM_JOB_NAME": "bash"}, ("SLURM", 5, 6, 1, 2, 1, 2)),
    ("mpirun", OPEN_MPI, ("Open MPI", 3, 4, 1, 2, 1, 2)),
    ("mpiexec of MPICH", MPICH, ("MPICH", 1, 2, 1, 2, 0, 1)),
    ("aprun of PALS", PALS, ("PALS", 3, 4, 1, 2, 1, 2)),
    (
        "PALS without MPICH's rank",  # its size is in the variable that MPICH has, too
        {
            "PALS_RANKID": "1",
            "PMI_SIZE": "2",
            "PALS_LOCAL_RANKID": "1",
            "PALS_LOCAL_SIZE": "2",
            "PALS_NODEID": "0",
        },
        ("PALS", 1, 2, 1, 2, 0, 1),
    ),
    ("jsrun", LSF, ("LSF", 2, 4, 0, 2, 1, 2)),
    (
        "torchrun on each node of a SLURM step",
        {
            **TORCHRUN,
            **SLURM,
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_PROCID": "1",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        },
        ("torchrun", 5, 8, 1, 4, 1, 2),
    ),
    (
        "mpirun, whose daemons are a SLURM step",
        {
            **OPEN_MPI,
            **SLURM,
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_PROCID": "1",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        },
        ("Open MPI", 3, 4, 1, 2, 1, 2),
    ),
    (
        "srun with PMI, saying the same",
        {**SLURM, "PMI_RANK": "5", "PMI_SIZE": "6"},
        ("SLURM", 5, 6, 1, 2, 1, 2),
    ),
    (
        "syncprims run inside one SLURM task",
        {
            **make_rank_variables(1, 4),
            **SLURM,
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "0",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1",
        },
        ("syncprims", 1, 4, 1, 4, 0, 1),
    ),
]


@pytest.mark.parametrize(
    ("environ", "expected"), [p[1:] for p in PLACES], ids=[p[0] for p in PLACES]
)
def test_places(environ: dict[str, str], expected: tuple[Any, ...]) -> None:
    place = detect(environ)
    found = (
        place.launcher,
        place.rank,
        place.world_size,
        place.local_rank,
        place.local_world_size,
        place.node_rank,
        place.num_nodes,
    )
    assert found == expected


WRONG: list[tuple[str, dict[str, str], list[str]]] = [
    ("half of torchrun", {"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "without RANK", "unset"]),
    ("the other half", {"RANK": "1", "LOCAL_RANK": "1"}, ["RANK=1", "without WORLD_SIZE"]),
    ("half of ours", {"SYNCPRIMS_RANK": "0"}, ["SYNCPRIMS_RANK=0", "SYNCPRIMS_WORLD_SIZE"]),
    ("half of MPICH", {"PMI_SIZE": "2"}, ["PMI_SIZE=2", "PMI_RANK"]),
    ("half of Open MPI", {"OMPI_COMM_WORLD_RANK": "2"}, ["OMPI_COMM_WORLD_SIZE"]),
    ("no number", {"RANK": "one", "WORLD_SIZE": "2"}, ["RANK='one'", "whole number"]),
    (
        "no such rank",
        {"RANK": "2", "WORLD_SIZE": "2"},
        ["says RANK=2 and WORLD_SIZE=2: RANK must"],
    ),
    ("negative", {"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK=-1", "WORLD_SIZE=2"]),
    ("local rank", {**TORCHRUN, "LOCAL_RANK": "4"}, ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"]),
    ("local size", {**TORCHRUN, "LOCAL_WORLD_SIZE": "16"}, ["LOCAL_WORLD_SIZE=16", "WORLD_SIZE=8"]),
    (
        "a number that no variable gives",
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "5"},
        ["LOCAL_RANK=5 and local_world_size=2"],
    ),
    (
        "no such rank of SLURM",
        {**SLURM, "SLURM_PROCID": "9"},
        ["SLURM_PROCID=9", "SLURM_STEP_NUM_TASKS=6"],
    ),
    ("SLURM's list", {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4x2"}, ["'4x2'", "2(x3),1"]),
    (
        "torchrun against SLURM",
        {**TORCHRUN, **SLURM},
        ["torchrun says RANK=5 WORLD_SIZE=8", "SLURM says SLURM_PROCID=5", "unset"],
    ),
    (
        "ours against torchrun",
        {**OURS, "RANK": "0", "WORLD_SIZE": "2"},
        ["SYNCPRIMS_RANK=1", "RANK=0 WORLD_SIZE=2"],
    ),
    (
        "Open MPI against MPICH",
        {**OPEN_MPI, **MPICH, "PMI_SIZE": "8"},
        ["OMPI_COMM_WORLD_RANK=3", "PMI_RANK=1 PMI_SIZE=8"],
    ),
]


@pytest.mark.parametrize(("environ", "words"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_contradictions_name_what_they_are_about(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        detect(environ)
    for word in words:
        assert word in str(caught.value)


def test_run_ids_tell_runs_and_restarts_apart() -> None:
    def run_id(**more: str) -> str | None:
        return detect({**TORCHRUN, **more}).run_id

    assert run_id() == run_id(RANK="4", LOCAL_RANK="0")
    ids = {
        run_id(),
        run_id(TORCHELASTIC_RESTART_COUNT="1"),
        run_id(MASTER_PORT="29501"),
        run_id(TORCHELASTIC_RUN_ID="mine"),
        run_id(SYNCPRIMS_RUN_ID="mine"),
        run_id(SYNCPRIMS_RUN_ID="mine", TORCHELASTIC_RESTART_COUNT="1"),
        detect(SLURM).run_id,
        detect({**SLURM, "SLURM_STEP_ID": "1"}).run_id,
        detect({**SLURM, "SLURM_RESTART_COUNT": "1"}).run_id,
        detect(OPEN_MPI).run_id,
        detect(PALS).run_id,
        detect(LSF).run_id,
    }
    assert len(ids) == 12
    assert None not in ids
    assert detect(MPICH).run_id is None  # it has none to give
    assert detect({}).run_id is None


def test_settings() -> None:
    settings = read_settings(
        {
            "SYNCPRIMS_TIMEOUT": "12.5",
            "SYNCPRIMS_JOIN_TIMEOUT": "3",
            "SYNCPRIMS_WARN_AFTER": "1",
            "SYNCPRIMS_DIR": "/there",
            "SYNCPRIMS_PICKLE": "0",
            "SYNCPRIMS_TRACE": "there",
            "SYNCPRIMS_TRACE_LIMIT": "3",
        }
    )
    assert (settings.trace, settings.trace_limit) == ("there", 3 << 20)
    assert settings.timeout == 12.5
    assert settings.join_timeout == 3
    assert settings.warn_after == 1
    assert settings.directory == "/there"
    assert not settings.pickle
    assert read_settings({"SYNCPRIMS_TIMEOUT": ""}).timeout is None
    assert read_settings({}).join_timeout == 300


def test_a_port_that_is_none_is_told_where_slurm_implies_the_address() -> None:
    with pytest.raises(ConfigurationError, match="MASTER_PORT='abc' is not a whole number"):
        read_settings({**SLURM, "SLURM_STEP_NODELIST": "node[1-2]", "MASTER_PORT": "abc"})


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
