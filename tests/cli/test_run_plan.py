"""The plan of `syncprims run`: flags, files and variables. Nothing is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from syncprims import BackendUnavailable, ConfigurationError
from syncprims.cli import accelerate_config, config, parser
from syncprims.cli.options import OPTIONS, Options, values_of
from syncprims.cli.plan import LaunchPlan, launch_environment, merge, plan_launch


def flags(*line: str) -> dict[str, Any]:
    return values_of(parser().parse_args(["run", *line]))


def plan(
    *line: str,
    file: dict[str, Any] | None = None,
    gpus: int | None = None,
    environ: dict[str, str] | None = None,
) -> LaunchPlan:
    return plan_launch(merge(flags(*line), file or {}), environ or {}, 8, gpus)


# -- the line ----------------------------------------------------------------------------------

SAME: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("-n", "4"), ("--ranks", "4")),
    (("-n4",), ("--ranks=4",)),
    (("--num_processes", "4"), ("--num-processes=4",)),
    (("--num_processes", "4", "--num_machines", "1"), ("--nodes", "1", "--num-processes", "4")),
    (("-n", "2", "--gpu_ids", "0,1"), ("-n", "2", "--gpus", "0,1")),
    (("-n", "2", "--num_cpu_threads_per_process=3"), ("-n", "2", "--threads", "3")),
    (("-n", "2", "--mixed_precision", "bf16"), ("-n", "2", "--mixed-precision=bf16")),
    (("-np", "2"), ("-n", "2")),
    (("-n", "2", "--module"), ("-n", "2", "-m")),
    (("-n", "2", "--machine_rank", "0"), ("-n", "2", "--node-rank", "0")),
]


@pytest.mark.parametrize(("one", "other"), SAME, ids=[" ".join(one) for one, _ in SAME])
def test_spellings_of_the_same(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert plan(*one, "train.py") == plan(*other, "train.py")


@pytest.mark.parametrize(
    "own", [["-n", "9"], ["--num_processes", "9"], ["--help"], ["--use_fsdp"], ["--", "-x"], []]
)
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
    (["--bogus", "x"], {}, ["there is no flag --bogus; `syncprims run --help`"]),
    (["--mulit_gpu", "x"], {}, ["--mulit_gpu", "--multi-gpu"]),
    (["-n", "2", "--use_deepspeed", "x"], {}, ["--use_deepspeed", "shards no model"]),
    (["--zero_stage", "3", "x"], {}, ["--zero_stage", "DeepSpeed"]),
    (["--fsdp-version=2", "x"], {}, ["--fsdp-version", "FSDP"]),
    (["--gradient_accumulation_steps", "4", "x"], {}, ["Accelerator(gradient_accumulation"]),
    (["--dynamo_use_dynamic", "x"], {}, ["torch.compile"]),
    (["--tpu", "x"], {}, ["TPU"]),
    (["-t", "3", "x"], {}, ["-t has no equivalent", "torchrun"]),
    (["-n", "2", "--gpus", "0", "x"], {}, ["2 ranks on 1 CUDA device:"]),
    (["-n", "2", "--cpu", "--gpus", "0,1", "x"], {}, ["--cpu contradicts --gpus"]),
    (["--gpus", "0,3", "x"], {"CUDA_VISIBLE_DEVICES": "0,1"},
     ["--gpus 0,3 contradicts CUDA_VISIBLE_DEVICES=0,1", "not have 3"]),
    (["-n", "2", "--backend", "file", "x"], {"SYNCPRIMS_BACKEND": "torch"},
     ["--backend file contradicts SYNCPRIMS_BACKEND=torch"]),
    (["-n", "2", "--mixed_precision", "bf16", "x"], {"SYNCPRIMS_MIXED_PRECISION": "fp16"},
     ["--mixed-precision bf16 contradicts SYNCPRIMS_MIXED_PRECISION=fp16"]),
    (["-n", "2", "--serve-torch", "x"], {"SYNCPRIMS_SERVE_TORCH": "0"},
     ["--serve-torch contradicts SYNCPRIMS_SERVE_TORCH=0"]),
    (["-n", "2", "--timeout", "5", "x"], {"SYNCPRIMS_TIMEOUT": "6"}, ["--timeout 5 contradicts"]),
    (["-n", "2", "--backend", "flie", "x"], {}, ["no backend named 'flie'"]),
    (["-n", "2", "--backend", "single", "x"], {}, ["world of one", "world_size=2"]),
    (["-n", "2", "--backend", "threads", "x"], {}, ["'threads' is for tests", "run_world"]),
    (["-n", "2", "--num_processes", "4", "x"], {}, ["--ranks 2", "--num_processes 4"]),
    (["-n", "2", "--nodes", "2", "x"], {}, ["--rendezvous HOST:PORT"]),
    (["--num_processes", "5", "--nodes", "2", "x"], {}, ["5", "evenly to 2"]),
    (["-n", "2", "--nodes", "2", "--node-rank", "2", "--rendezvous", "a:1", "x"], {},
     ["--node-rank 2", "from 0 to 1"]),
    (["-n", "2", "--nodes", "2", "--rendezvous", "a:1", "--backend", "file", "x"], {},
     ["'file' joins the ranks of one host"]),
    (["-n", "2", "--nodes", "2", "--rendezvous", "a:1", "--main_process_ip", "b", "x"], {},
     ["--rendezvous a:1 contradicts --main_process_ip b"]),
    (["-n", "2", "--node-rank", "1", "x"], {}, ["--node-rank 1", "--nodes"]),
]  # fmt: skip


@pytest.mark.parametrize(("line", "environ", "words"), WRONG, ids=[" ".join(w[0]) for w in WRONG])
def test_what_cannot_be_started_says_why(
    line: list[str], environ: dict[str, str], words: list[str]
) -> None:
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
        (["--timeout", "-1"], "is not a number of seconds"),
        (["--dynamo_backend", "inductor"], "write `model = torch.compile(model)` in the script"),
        (["--cpu=yes"], "--cpu: ignored explicit argument 'yes'"),
    ],
)
def test_bad_values_are_told(
    line: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        flags(*line, "train.py")
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.startswith("syncprims run: ")


def test_every_flag_of_accelerate_is_understood_or_answered() -> None:
    pytest.importorskip("accelerate")
    probe = (
        "import json; from accelerate.commands.launch import launch_command_parser as p; "
        "print(json.dumps([[a.option_strings, a.nargs == 0] for a in p()._actions]))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    names = [
        (name, is_switch)
        for strings, is_switch in json.loads(done.stdout)
        for name in strings
        if name not in ("-h", "--help")
    ]
    assert len(names) > 100
    values = {"mixed_precision": "no", "rdzv_backend": "static", "dynamo_backend": "no"}
    for name, is_switch in names:
        key = name.lstrip("-").replace("-", "_")
        line = [name, *([] if is_switch else [values.get(key, "1")]), "train.py"]
        if key not in values and accelerate_config.refusal(key):
            with pytest.raises(ConfigurationError, match=f"{name} has no equivalent here: "):
                flags(*line)
        else:
            assert flags(*line)["script"] == "train.py"


# -- what is passed on -------------------------------------------------------------------------


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
    everything = variables("-n", "2", "--multi_gpu", gpus=4)
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
    monkeypatch.setattr("syncprims.cli.plan.find_spec", lambda name: None)
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
    theirs = plan("--num_processes", "8", "--num_machines", "2", "--machine_rank", "1",
                  "--main_process_ip", "node0", "--main_process_port", "29500",
                  "--mixed_precision", "bf16", "-m", "train", "--lr", "1")  # fmt: skip
    assert theirs == made
    uncounted = plan("-n", "4", "--nodes", "2", "--rendezvous", "[::1]:9", "--max_restarts", "3",
                     "x", environ={"SYNCPRIMS_RUN_ID": "mine"}).torchrun  # fmt: skip
    assert uncounted[7:] == [
        "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "[::1]:9",
        "--rdzv-id", "mine", "x",
    ]  # fmt: skip
    outer = {"RANK": "3", "WORLD_SIZE": "4", "SYNCPRIMS_RUN_ID": "mine", "HOME": "/home/me"}
    given = launch_environment(made, outer)
    assert given == {"SYNCPRIMS_RUN_ID": "mine", "HOME": "/home/me", **made.variables}


# -- files -------------------------------------------------------------------------------------

EVERYTHING: dict[str, Any] = {
    "ranks": 4, "backend": "torch", "timeout": 60.0, "gpus": ("0", "1", "2", "3"), "threads": 2,
    "mixed_precision": "no", "trace": "a \"quoted\" naïve/dir", "nodes": 2, "node_rank": 1,
    "rendezvous": ("::1", 29500), "max_restarts": 1, "module": True, "script": "train",
    "args": ("--lr", "0.1", "it's: #1", "\x7f\x85\u2028", "\U0001f600"),
    "num_processes": 8, "debug": True,
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".yaml", ".toml"])
def test_what_is_written_is_read_again(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"run{suffix}"
    path.write_text(config.render(EVERYTHING, suffix), encoding="utf-8")
    assert config.read(str(path)) == EVERYTHING
    path.write_text(config.render({}, suffix), encoding="utf-8")
    assert config.read(str(path)) == {}
    # And every line that stands there as a comment is a valid one.
    lines = config.render({}, suffix).splitlines()
    settings = [line[1:] for line in lines if line.startswith("#") and line[1] != " "]
    path.write_text("\n".join(settings), encoding="utf-8")
    shown = {option.key for option in OPTIONS if not option.section.startswith("known")}
    assert set(config.read(str(path))) == shown


def test_flags_override_the_file() -> None:
    file: dict[str, Any] = {
        "ranks": 4, "threads": 2, "script": "a.py", "args": ("-x",), "module": True, "gpus": ("0",),
    }  # fmt: skip
    assert merge({}, file) == Options(**file)
    assert merge({"ranks": 2}, file).ranks == 2
    assert merge({"num_processes": 2}, file).ranks == 2
    other = merge({"script": "b.py", "args": ()}, file)
    assert (other.module, other.script, other.args) == (False, "b.py", ())
    assert merge({"cpu": True}, file).gpus is None
    other = merge({"main_process_ip": "b"}, {"rendezvous": ("a", 1)})
    assert other.rendezvous == ("b", 29500)


BAD_FILES = [
    ("run.yaml", "rank: 4", ["run.yaml: there is no key 'rank'", "did you mean ranks?"]),
    ("run.yaml", "colour: red", ["there is no key 'colour'", "syncprims config"]),
    ("run.toml", "ranks = 'many'", ["run.toml: ranks: 'many' is not a number of ranks"]),
    ("run.yaml", "ranks: true", ["ranks: True is not"]),
    ("run.yaml", "module: 1", ["module: 1 is neither true nor false"]),
    ("run.yaml", "args: -x", ["args: '-x' is not a list"]),
    ("run.yaml", "args: [{a: 1}]", ["args: {'a': 1} in it is not a word"]),
    ("run.yaml", "args: [--shuffle, no]", ["args: False in it is not a word; put quotes"]),
    ("run.yaml", "args: [2026-01-31]", ["in it is not a word; put quotes"]),
    ("run.yaml", "- ranks", ["keys with values"]),
    ("run.yaml", "a: [", ["run.yaml is not valid yaml"]),
    ("run.toml", "ranks 4", ["run.toml is not valid toml"]),
    ("run.json", "{", ["run.json is not valid json"]),
    ("run.ini", "", ["*.yaml, *.toml or *.json"]),
    ("default.yaml", "num_machines: 1\nnum_procesess: 4", ["'num_procesess'", "num_processes?"]),
    ("fsdp.yaml", "distributed_type: FSDP", ["distributed_type: FSDP", "shards no model"]),
    ("sage.yaml", "compute_environment: AMAZON_SAGEMAKER", ["AMAZON_SAGEMAKER"]),
    ("dynamo.yaml", "distributed_type: 'NO'\ndynamo_config: {dynamo_backend: INDUCTOR}",
     ["dynamo_config has no equivalent here", "torch.compile"]),
    ("fp8.yaml", "distributed_type: 'NO'\nmixed_precision: fp8", ["'fp8' is not one of"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "words"), BAD_FILES, ids=[b[1] for b in BAD_FILES])
def test_bad_files_name_file_key_and_cure(
    tmp_path: Path, name: str, text: str, words: list[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        config.read(str(path))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("suffix", "text"), [("yaml", "ranks: 4\r\n"), ("toml", "ranks = 4\r\n"),
                                              ("json", '{"ranks": 4}\r\n')])  # fmt: skip
def test_files_of_windows_are_read(tmp_path: Path, suffix: str, text: str) -> None:
    path = tmp_path / f"run.{suffix}"
    path.write_text(text, encoding="utf-8-sig", newline="")
    assert config.read(str(path)) == {"ranks": 4}


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be read: .*No such file.*syncprims conf"):
        config.read(str(tmp_path / "run.yaml"))
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        config.read(str(tmp_path / "run.toml"))


def test_without_the_package_yaml_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "run.yaml").write_text("ranks: 4")
    with pytest.raises(ConfigurationError, match=r"pip install '\.\[config\]'"):
        config.read(str(tmp_path / "run.yaml"))
    (tmp_path / "run.toml").write_text("ranks = 4")
    assert config.read(str(tmp_path / "run.toml")) == {"ranks": 4}


#: As `accelerate config` writes it for two machines with four GPUs each.
ACCELERATES = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
dynamo_config: {}
enable_cpu_affinity: false
fsdp_config: {}
gpu_ids: 0,1,2,3
machine_rank: 1
main_process_ip: node0
main_process_port: 29501
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def test_wanting_no_compiler_is_no_contradiction(tmp_path: Path) -> None:
    said = "distributed_type: 'NO'\nnum_processes: 3\ndynamo_config: {dynamo_backend: 'NO'}\n"
    (tmp_path / "old.yaml").write_text(said)
    assert config.read(str(tmp_path / "old.yaml")) == {"num_processes": 3}
    for line in (["--dynamo_backend", "no"], ["--dynamo_backend=NO"]):
        assert plan(*line, "-n", "2", "x.py", "no") == plan("-n", "2", "x.py", "no")


def test_accelerates_own_file_is_read_as_far_as_it_maps(tmp_path: Path) -> None:
    path = tmp_path / "default_config.yaml"
    path.write_text(ACCELERATES)
    values = config.read(str(path))
    made = plan("train.py", file=values)
    assert made == plan("-n", "4", "--gpus", "0,1,2,3", "--mixed-precision", "bf16", "--nodes", "2",
                        "--node-rank", "1", "--rendezvous", "node0:29501", "train.py")  # fmt: skip
    notes = accelerate_config.notes(values)
    assert [note.split(":")[0] for note in notes] == [
        "--main-training-function changes nothing", "--same-network changes nothing",
    ]  # fmt: skip
    path.write_text(
        "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 4\nmixed_precision: no\n"
        "gpu_ids: all\nnum_machines: 1\n"
    )
    alone = plan("train.py", file=config.read(str(path)))
    assert (alone.ranks, alone.variables["CUDA_VISIBLE_DEVICES"]) == (4, "")
    path.write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    made = plan("train.py", file=config.read(str(path)))
    assert made.variables["SYNCPRIMS_BACKEND"] == "nccl"


@pytest.mark.parametrize(
    "words", [["--gpus", "all"], ["-n", "2", "--gpus", "all"], ["--multi-gpu"]]
)
def test_a_machine_without_devices_is_told_once(words: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="no CUDA device is visible on this machine"):
        plan(*words, "x", gpus=0)
