"""The plan of `syncprims run`: flags, files and variables. Nothing is started."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from syncprims import BackendUnavailable, ConfigurationError
from syncprims.cli import parser
from syncprims.cli.options import LaunchPlan, Options, read_file, values_of
from syncprims.cli.run import merge, plan_launch


def flags(*line: str) -> dict[str, Any]:
    return values_of(parser().parse_args(["run", *line]))


def plan(
    *line: str,
    file: dict[str, Any] | None = None,
    gpus: int | None = None,
    environ: dict[str, str] | None = None,
) -> LaunchPlan:
    return plan_launch(merge(flags(*line), file or {}), environ or {}, 8, gpus)


SAME: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("-n", "4"), ("--ranks", "4")),
    (("-n4",), ("--ranks=4",)),
    (("-n", "2", "--mixed_precision", "bf16"), ("-n", "2", "--mixed-precision=bf16")),
    (("-np", "2"), ("-n", "2")),
    (("-n", "2", "--module"), ("-n", "2", "-m")),
    (("-n", "2", "--node_rank", "0"), ("-n", "2", "--node-rank", "0")),
]


@pytest.mark.parametrize(("one", "other"), SAME, ids=[" ".join(one) for one, _ in SAME])
def test_spellings_of_the_same(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert plan(*one, "train.py") == plan(*other, "train.py")


@pytest.mark.parametrize("own", [["-n", "9"], ["--help"], ["--use_fsdp"], ["--", "-x"], []])
@pytest.mark.parametrize("before", [["-n", "2"], ["-n", "2", "-m"], ["-n", "2", "--"]])
def test_what_follows_the_script_is_its_own(before: list[str], own: list[str]) -> None:
    made = plan(*before, "train", *own)
    assert made.ranks == 2
    module = ["-m"] if "-m" in before else []
    assert made.command == [sys.executable, "-u", *module, "train", *own]


WRONG: list[tuple[list[str], dict[str, str], list[str]]] = [
    (["train.py"], {}, ["the number of ranks is missing", "-n 4"]),
    (["train.py", "-n", "2"], {}, ["give -n before the script"]),
    (["-n", "2"], {}, ["nothing to run"]),
    (["--rank", "2", "x"], {}, ["--rank;", "did you mean --ranks?"]),
    (["--bogus", "x"], {}, ["there is no flag --bogus; docs/command-line.md has them all"]),
    (["--num-machines=2", "x"], {}, ["--num-machines: give --nodes N, or --elastic MIN:MAX"]),
    (["--nproc-per-node", "2", "x"], {}, ["--nproc-per-node: give --ranks N, which counts"]),
    (["--fsdp_version", "2", "x"], {}, ["--fsdp_version: apply torch's fully_shard()"]),
    (["-t", "3", "x"], {}, ["there is no flag -t: give --log-dir DIR"]),
    (["-n", "2", "--gpus", "0", "x"], {}, ["2 ranks on 1 CUDA device:"]),
    (["-n", "2", "--cpu", "--gpus", "0,1", "x"], {}, ["--cpu contradicts --gpus"]),
    (["--gpus", "0,3", "x"], {"CUDA_VISIBLE_DEVICES": "0,1"},
     ["--gpus 0,3 contradicts CUDA_VISIBLE_DEVICES=0,1", "not have 3"]),
    (["-n", "2", "--backend", "file", "x"], {"SYNCPRIMS_BACKEND": "torch"},
     ["--backend file contradicts SYNCPRIMS_BACKEND=torch"]),
    (["-n", "2", "--serve-torch", "x"], {"SYNCPRIMS_SERVE_TORCH": "0"},
     ["--serve-torch contradicts SYNCPRIMS_SERVE_TORCH=0"]),
    (["-n", "2", "--backend", "flie", "x"], {}, ["no backend named 'flie'"]),
    (["-n", "2", "--backend", "single", "x"], {}, ["world of one", "world_size=2"]),
    (["-n", "2", "--nodes", "2", "x"], {}, ["--rendezvous HOST:PORT"]),
    (["-n", "2", "--nodes", "2", "--node-rank", "2", "--rendezvous", "a:1", "x"], {},
     ["--node-rank 2", "from 0 to 1"]),
    (["-n", "2", "--nodes", "2", "--rendezvous", "a:1", "--backend", "file", "x"], {},
     ["'file' joins the ranks of one host"]),
    (["-n", "2", "--node-rank", "1", "x"], {}, ["--node-rank", "--nodes"]),
    (["-n", "2", "--rendezvous", "a:1", "x"], {}, ["--rendezvous", "--nodes"]),
    (["--elastic", "2:4", "-n", "2", "x"], {}, ["--ranks 2 contradicts --elastic 2:4;"]),
    (["--elastic", "2:4", "--nodes", "2", "x"], {}, ["works on one machine"]),
]  # fmt: skip


@pytest.mark.parametrize(("line", "environ", "words"), WRONG, ids=[" ".join(w[0]) for w in WRONG])
def test_wrong_lines_say_why(line: list[str], environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises((ConfigurationError, BackendUnavailable)) as caught:
        plan(*line, environ=environ)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["-n", "0"], "'0' is not a number of ranks from 1 up"),
        (["--gpus", "0,0"], "names a device twice"),
        (["--gpus", "all,1"], "neither 'all' nor ids"),
        (["--mixed_precision", "fp8"], "'fp8' is not one of no, bf16, fp16"),
        (["--rendezvous", "node0"], "is not host:port"),
        (["--elastic", "3:2"], "'3:2' is not MIN:MAX"),
        (["--cpu=yes"], "--cpu: ignored explicit argument 'yes'"),
    ],
)
def test_bad_values(line: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        flags(*line, "train.py")
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.startswith("syncprims run: ")


def test_devices_backend_and_threads_follow_from_each_other() -> None:
    def variables(*line: str, gpus: int | None = None, **environ: str) -> dict[str, str]:
        return plan(*line, "x", gpus=gpus, environ=environ).variables

    assert variables("-n", "4") == {"SYNCPRIMS_BACKEND": "file", "OMP_NUM_THREADS": "2"}
    assert variables("-n", "1") == {"SYNCPRIMS_BACKEND": "file"}  # it may have all processors
    assert variables("-n", "40")["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in variables("-n", "4", OMP_NUM_THREADS="7")
    told = variables("-n", "4", "--threads", "3", OMP_NUM_THREADS="7")
    assert told["OMP_NUM_THREADS"] == "3"
    assert variables("-n", "2", "--cpu")["CUDA_VISIBLE_DEVICES"] == ""
    chosen = variables("--gpus", "1,3", CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert chosen["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert chosen["SYNCPRIMS_BACKEND"] == "nccl"  # which takes nothing else in silence
    assert variables("--gpus", "0", "--backend", "torch")["SYNCPRIMS_BACKEND"] == "torch"
    assert plan("--gpus", "1,3", "x").ranks == 2
    everything = variables("-n", "2", "--gpus", "all", gpus=4)
    assert everything["SYNCPRIMS_BACKEND"] == "nccl"
    assert "CUDA_VISIBLE_DEVICES" not in everything
    with pytest.raises(ConfigurationError, match="8 ranks on 4 CUDA devices"):
        variables("-n", "8", "--gpus", "all", gpus=4)
    assert variables("-n", "2", SYNCPRIMS_BACKEND="torch")["SYNCPRIMS_BACKEND"] == "torch"
    passed = variables("-n", "2", "--mixed_precision", "bf16", "--timeout", "60", "--trace", "t")
    assert passed["SYNCPRIMS_MIXED_PRECISION"] == "bf16"
    assert passed["SYNCPRIMS_TIMEOUT"] == "60"
    assert passed["SYNCPRIMS_TRACE"] == "t"


def test_without_torch_it_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncprims.cli.run.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match=r"backend 'nccl' needs torch.*--backend file"):
        plan("--gpus", "0,1", "x")
    with pytest.raises(BackendUnavailable, match="several nodes need torchrun"):
        plan("-n", "2", "--nodes", "2", "--rendezvous", "a:1", "x")
    assert plan("-n", "2", "x").variables["SYNCPRIMS_BACKEND"] == "file"


def test_several_nodes_are_handed_over_to_torchrun() -> None:
    made = plan("-n", "4", "--nodes", "2", "--node-rank", "1", "--rendezvous", "node0:29500",
                "--mixed_precision", "bf16", "-m", "train", "--lr", "1")  # fmt: skip
    assert made.torchrun == [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "4",
        "--node-rank", "1", "--master-addr", "node0", "--master-port", "29500",
        "-m", "train", "--lr", "1",
    ]  # fmt: skip
    assert made.variables["SYNCPRIMS_BACKEND"] == "torch"
    assert made.variables["SYNCPRIMS_MIXED_PRECISION"] == "bf16"
    uncounted = plan("-n", "4", "--nodes", "2", "--rendezvous", "[::1]:9", "--max_restarts", "3",
                     "x", environ={"SYNCPRIMS_RUN_ID": "mine"}).torchrun  # fmt: skip
    assert uncounted[7:] == [
        "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "[::1]:9",
        "--rdzv-id", "mine", "x",
    ]  # fmt: skip
    outer = {"RANK": "3", "WORLD_SIZE": "4", "SYNCPRIMS_RUN_ID": "mine", "HOME": "/home/me"}
    given = made.environment(outer)
    assert given == {"SYNCPRIMS_RUN_ID": "mine", "HOME": "/home/me", **made.variables}


EVERYTHING = r"""
ranks = 4
backend = "torch"
timeout = 60
gpus = "0,1"
threads = 2
mixed_precision = "no"
trace = "a \"quoted\" na\u00efve/dir"
nodes = 2
node-rank = 1
rendezvous = "[::1]:29500"
elastic = "2:4"
module = true
script = "train"
args = ["--lr", 0.1, "it's: #1"]
"""


def test_a_file_has_the_keys_of_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(EVERYTHING, encoding="utf-8")
    assert read_file(str(path)) == {
        "ranks": 4, "backend": "torch", "timeout": 60.0, "gpus": ("0", "1"), "threads": 2,
        "mixed_precision": "no", "trace": "a \"quoted\" na\u00efve/dir", "nodes": 2, "node_rank": 1,
        "rendezvous": ("::1", 29500), "elastic": (2, 4), "module": True, "script": "train",
        "args": ("--lr", "0.1", "it's: #1"),
    }  # fmt: skip


def test_flags_override_the_file() -> None:
    file: dict[str, Any] = {
        "ranks": 4, "threads": 2, "script": "a.py", "args": ("-x",), "module": True, "gpus": ("0",),
    }  # fmt: skip
    assert merge({}, file) == Options(**file)
    assert merge({"ranks": 2}, file).ranks == 2
    other = merge({"script": "b.py", "args": ()}, file)
    assert (other.module, other.script, other.args) == (False, "b.py", ())
    assert merge({"cpu": True}, file).gpus is None


BAD_FILES = [
    ("run.yaml", "rank: 4", ["run.yaml: there is no key 'rank'", "did you mean ranks?"]),
    ("run.toml", "ranks = 'many'", ["run.toml: ranks: 'many' is not a number of ranks"]),
    ("run.yaml", "ranks: true", ["ranks: True is not"]),
    ("run.yaml", "module: 1", ["module: 1 is neither true nor false"]),
    ("run.yaml", "args: -x", ["args: '-x' is not a list"]),
    ("run.yaml", "args: [{a: 1}]", ["args: {'a': 1} in it is not a word"]),
    ("run.yaml", "args: [--shuffle, no]", ["args: False in it is not a word; put quotes"]),
    ("run.yaml", "- ranks", ["keys with values"]),
    ("run.yaml", "a: [", ["run.yaml is not valid yaml"]),
    ("run.json", "{", ["run.json is not valid json"]),
    ("run.ini", "", ["*.yaml, *.toml or *.json"]),
    ("default.yaml", "compute_environment: LOCAL_MACHINE\nuse-cpu: true\nranks: 2\nfsdp_config: {}",
     ["this one is accelerate's", "\n", "no key 'use_cpu': give gpus IDS or cpu",
      "default.yaml: there is no key 'fsdp_config': apply torch's fully_shard()"]),
]  # fmt: skip


OURS = {field.name for field in fields(Options)}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.run", "get_args_parser"),
        ("accelerate.commands.launch", "launch_command_parser"),
    ],
)
@pytest.mark.filterwarnings("default")
def test_a_flag_of_another_launcher_is_ours_or_says_what_to_do(module: str, name: str) -> None:
    actions = getattr(pytest.importorskip(module), name)()._actions
    for flag in [flag for action in actions for flag in action.option_strings]:
        if flag.lstrip("-").replace("-", "_") not in {*OURS, "h", "help", "m"}:
            with pytest.raises(ConfigurationError, match=f"there is no flag {flag}: .+"):
                flags(flag, "train.py")


def test_a_key_of_accelerate_config_is_ours_or_says_what_to_do(tmp_path: Path) -> None:
    theirs = pytest.importorskip("accelerate.commands.config.config_args")
    kinds = (theirs.ClusterConfig, theirs.SageMakerConfig)
    keys = {field.name for kind in kinds for field in fields(kind)} - OURS
    path = tmp_path / "default.json"
    path.write_text(json.dumps(dict.fromkeys(keys)))
    with pytest.raises(ConfigurationError) as caught:
        read_file(str(path))
    lines = str(caught.value).splitlines()
    assert len(lines) == len(keys) > 30
    for key in keys:
        assert any(line.startswith(f"{path}: there is no key '{key}': ") for line in lines)


@pytest.mark.parametrize(("name", "text", "words"), BAD_FILES, ids=[b[1] for b in BAD_FILES])
def test_bad_files_name_the_cure(tmp_path: Path, name: str, text: str, words: list[str]) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read_file(str(path))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("suffix", "text"), [("yaml", "ranks: 4\r\n"), ("toml", "ranks = 4\r\n"),
                                              ("json", '{"ranks": 4}\r\n')])  # fmt: skip
def test_files_of_windows_are_read(tmp_path: Path, suffix: str, text: str) -> None:
    path = tmp_path / f"run.{suffix}"
    path.write_text(text, encoding="utf-8-sig", newline="")
    assert read_file(str(path)) == {"ranks": 4}


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"cannot be read: .*No such file.*docs/command-line"
    ):
        read_file(str(tmp_path / "run.yaml"))
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_file(str(tmp_path / "run.toml"))


def test_yaml_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "run.yaml").write_text("ranks: 4")
    with pytest.raises(ConfigurationError, match=r"pip install '\.\[config\]'"):
        read_file(str(tmp_path / "run.yaml"))
    (tmp_path / "run.toml").write_text("ranks = 4")
    assert read_file(str(tmp_path / "run.toml")) == {"ranks": 4}


@pytest.mark.parametrize("words", [["--gpus", "all"], ["-n", "2", "--gpus", "all"]])
def test_a_machine_without_devices_is_told_once(words: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="no CUDA device is visible on this machine"):
        plan(*words, "x", gpus=0)
