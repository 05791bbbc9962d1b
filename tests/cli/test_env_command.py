"""`syncprims env`: which world would start, and why."""

from __future__ import annotations

import io
import json
import re
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.launcher_variables import OPEN_MPI, SHELL, SLURM, TORCHRUN
from support.rank_environment import run_python

# All variables at once, without a process for each.
from syncprims._world.settings import find_misspelt
from syncprims.cli import env
from syncprims.cli.console import Style


def shown(environ: dict[str, str]) -> str:
    return "\n".join(env.report(env.preview(environ), environ, Style(io.StringIO(), environ)))


STARTS: list[tuple[str, dict[str, str], tuple[Any, ...], list[str]]] = [
    ("nothing", {}, ("single", 0, 1),
     ["A world of one would start: backend single", "SYNCPRIMS_BACKEND   not set: auto",
      "local rank  0 of 1  a world of one", "RANK, WORLD_SIZE not set",
      "SLURM_PROCID, SLURM_STEP_NUM_TASKS not set", "the default"]),
    ("torchrun", TORCHRUN, ("torch", 5, 8),
     ["Rank 5 of 8 would start: backend torch, started by torchrun", "RANK=5", "WORLD_SIZE=8",
      "torchrun says RANK=5 WORLD_SIZE=8", "takes 'torch' for world_size=8", "1 of 2"]),
    ("gloo under torchrun", {**TORCHRUN, "SYNCPRIMS_BACKEND": "gloo"}, ("gloo", 5, 8),
     ["SYNCPRIMS_BACKEND   = gloo", "chosen by SYNCPRIMS_BACKEND=gloo"]),
    ("file on one host",
     {"RANK": "1", "WORLD_SIZE": "2", "SYNCPRIMS_RUN_ID": "a", "SYNCPRIMS_BACKEND": "file",
      "SYNCPRIMS_TIMEOUT": "60"}, ("file", 1, 2),
     ["run id      a", "SYNCPRIMS_TIMEOUT          = 60",
      "SYNCPRIMS_WARN_AFTER       not set: 30 s"]),
    ("a shell of SLURM", {**SHELL, "SLURM_JOB_NAME": "bash"}, ("single", 0, 1),
     ["SLURM      is no step", "no launcher's variables",
                                                           "But SLURM_NTASKS=6 is set"]),
    ("two that agree",
     {**SLURM, "SLURM_STEP_NODELIST": "node[1-2]", "PMI_RANK": "5", "PMI_SIZE": "6"},
     ("torch", 5, 6), ["SLURM      decides", "MPICH      says the same",
                       "store       node1:",
                       "SLURM's first node and the run id; rank 0 serves it"]),
    ("one inside the other",
     {**TORCHRUN, **SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
      "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, ("torch", 5, 8),
     ["SLURM      started torchrun, which started this process",
      "store       10.0.0.1:29500", "MASTER_ADDR and MASTER_PORT", "1 of 4", "1 of 2"]),
    ("a choice", {**TORCHRUN, **SLURM, "SYNCPRIMS_LAUNCHER": "torchrun"}, ("torch", 5, 8),
     ["SYNCPRIMS_LAUNCHER  = torchrun", "torchrun   SYNCPRIMS_LAUNCHER=torchrun decides",
      "SLURM      does not count"]),
    ("hosts that nobody knows yet", {**OPEN_MPI, "MASTER_ADDR": "a", "MASTER_PORT": "1"},
     ("torch", 3, 4), ["1 of 2", "not known", "known once the ranks have met"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "expected", "words"), [s[1:] for s in STARTS], ids=[s[0] for s in STARTS]
)
def test_decisions(environ: dict[str, str], expected: tuple[Any, ...], words: list[str]) -> None:
    world = env.preview(environ)
    assert world["error"] is None
    place = world["topology"]
    assert (world["backend"], place["rank"], place["world_size"]) == expected
    text = shown(environ)
    for word in words:
        assert word in text


ERRORS: list[tuple[str, dict[str, str], list[str]]] = [
    ("half a set", {"WORLD_SIZE": "2"}, ["WORLD_SIZE=2 without RANK"]),
    ("two launchers", {**TORCHRUN, **OPEN_MPI},
     ["two launchers contradict each other", "torchrun says", "Open MPI says"]),
    ("no such backend", {"SYNCPRIMS_BACKEND": "flie"}, ["named 'flie'"]),
    ("two nodes on files", {**TORCHRUN, "SYNCPRIMS_BACKEND": "file"}, ["'file'", "2 nodes"]),
    ("no name for the run", {"RANK": "0", "WORLD_SIZE": "2", "SYNCPRIMS_BACKEND": "file"},
     ["set SYNCPRIMS_RUN_ID"]),
    ("several nodes, nowhere to meet", OPEN_MPI, ["several nodes", "MASTER_ADDR"]),
    ("a bad setting", {"SYNCPRIMS_TIMEOUT": "soon"}, ["'soon'"]),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "words"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_contradictions_are_shown(environ: dict[str, str], words: list[str]) -> None:
    text = shown(environ)
    assert text.startswith("No world would start: ConfigurationError")
    for word in words:
        assert word in text
    assert "SYNCPRIMS_BACKEND" in text
    told = env.preview(environ)
    assert told["error"]["type"] == "ConfigurationError"
    assert json.loads(json.dumps(told))["error"] == told["error"]


def test_the_command_itself() -> None:
    call = partial(run_python, "-m", "syncprims", "env")
    alone = call()
    assert alone.returncode == 0
    assert alone.stdout.startswith("A world of one would start")
    assert "\033" not in alone.stdout
    assert json.loads(call("--json").stdout)["variables"]["WORLD_SIZE"] is None
    assert call("--json", WORLD_SIZE="2").returncode == 2


def test_infinite_seconds_are_valid_json() -> None:
    environ = {"SYNCPRIMS_WARN_AFTER": "inf", "SYNCPRIMS_STRICT": "1"}
    found = env.preview(environ)
    assert found["settings"]["warn_after"] == "inf"
    assert json.loads(json.dumps(found, allow_nan=False))["variables"]["SYNCPRIMS_STRICT"] == "1"


def test_a_private_name_that_is_gone_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "missing" not in shown({})
    monkeypatch.delattr("multiprocessing.process._children")
    line = "has no multiprocessing.process._children, by which syncprims._world names the process"
    assert re.search(
        rf"Private names that are missing\n  Python [\d.]+ {line}.*not named", shown({})
    )


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    assert Style(stream, {})("red", "no") == "no"
    monkeypatch.setattr(stream, "isatty", lambda: True)
    coloured = "\033[31mno\033[0m"
    for environ, text in (
        ({}, coloured), ({"NO_COLOR": ""}, coloured), ({"NO_COLOR": "1"}, "no"),
        ({"TERM": "dumb"}, "no"),
    ):  # fmt: skip
        assert Style(stream, environ)("red", "no") == text


def test_what_is_called_like_ours_and_read_by_nobody_is_shown() -> None:
    environ = {"SYNCPRIMS_TIMOUT": "60", "SYNCPRIMS_FOO": "1", "SYNCPRIMS_RUN_ID": "a"}
    text = shown(environ)
    assert "SYNCPRIMS_TIMOUT  did you mean SYNCPRIMS_TIMEOUT?" in text
    assert "Set, but never read\n  SYNCPRIMS_FOO\n" in text
    found = env.preview(environ)["misspelt"]
    assert found == {"SYNCPRIMS_TIMOUT": "SYNCPRIMS_TIMEOUT", "SYNCPRIMS_FOO": None}


def test_every_variable_that_the_code_names_is_known() -> None:
    folders = [import_module(name).__path__[0] for name in ("syncprims", "syncprims.backends")]
    files = [file for folder in folders for file in Path(folder).rglob("*.py")]
    found = {name for file in files for name in re.findall(r"SYNCPRIMS_[A-Z_]+", file.read_text())}
    assert "SYNCPRIMS_TIMEOUT" in found
    assert find_misspelt(dict.fromkeys(found, "1")) == {}
