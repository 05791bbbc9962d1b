"""The choice of the backend, and the errors for impossible choices."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from conftest import in_processes, on_every_rank, several
from support.rank_environment import run_python
from support.rank_worlds import Ranks

import syncprims as sp


def say(code: str, **variables: str) -> tuple[int, str]:
    """Run code in a fresh interpreter with only these of our and the launchers' variables."""
    done = run_python("-c", f"from syncprims import *\n{code}", **variables)
    return done.returncode, done.stdout + done.stderr


def test_alone_it_just_works() -> None:
    assert say("barrier(); print(current().backend_name, all_gather(1))") == (0, "single [1]\n")


def test_a_misspelt_variable_is_warned_of_once() -> None:
    twice = "barrier(); shutdown(); init(); barrier()"
    code, text = say(twice, SYNCPRIMS_TIMOUT="5", SYNCPRIMS_COLOUR="1", SYNCPRIMS_TIMEOUT="60")
    assert (code, text) == (0, (
        "SYNCPRIMS_COLOUR is set, and nothing reads it. `syncprims env` lists the variables that "
        "are read\n"
        "SYNCPRIMS_TIMOUT is set, and nothing reads it: did you mean SYNCPRIMS_TIMEOUT? "
        "`syncprims env` lists the variables that are read\n"
    ))  # fmt: skip


def test_only_one_rank_of_a_node_warns_of_a_misspelt_variable(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("import syncprims\nsyncprims.barrier()\n")
    run = f"from syncprims.cli import main; raise SystemExit(main(['run', '-n3', {str(script)!r}]))"
    code, text = say(run, SYNCPRIMS_TIMOUT="5")
    assert code == 0, text
    assert text.count("SYNCPRIMS_TIMOUT is set, and nothing reads it") == 1


def test_a_world_of_one_in_a_larger_job_says_so_once() -> None:
    _, said = say("barrier(); shutdown(); init(); barrier()", SLURM_NTASKS="4")
    assert said.count("this is a world of one: SLURM_NTASKS=4 is set") == 1
    assert "srun" in said
    assert "SYNCPRIMS_LAUNCHER=none" in said
    assert say("barrier()", SLURM_NTASKS="4", SYNCPRIMS_LAUNCHER="none") == (0, "")


WRONG = [
    ("world size against single", {"WORLD_SIZE": "2", "SYNCPRIMS_BACKEND": "single"}, "barrier()",
     ["ConfigurationError", "WORLD_SIZE=2", "SYNCPRIMS_BACKEND=single"]),
    ("the whole set against single", {"RANK": "0", "WORLD_SIZE": "2"}, "init('single')",
     ["WORLD_SIZE=2", "init('single')"]),
    ("an unknown name", {"SYNCPRIMS_BACKEND": "flie"}, "barrier()",
     ["no backend named 'flie'", "file, gloo, nccl, single, ", "SYNCPRIMS_BACKEND=flie"]),
    ("half a set", {"RANK": "0", "SYNCPRIMS_BACKEND": "file"}, "barrier()",
     ["RANK=0 without WORLD_SIZE"]),
    ("argument against variable", {"SYNCPRIMS_BACKEND": "file"}, "init('single')",
     ["init('single') contradicts SYNCPRIMS_BACKEND=file", "change one"]),
    ("argument against launcher", {"SYNCPRIMS_BACKEND": "file", "SYNCPRIMS_RESTART": "0"},
     "init('torch')", ["`syncprims run` has set that", "--backend torch"]),
    ("timeout against variable", {"SYNCPRIMS_TIMEOUT": "5"}, "init(timeout=6)",
     ["init(timeout=6) contradicts SYNCPRIMS_TIMEOUT=5"]),
    ("two nodes on files", {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
                            "LOCAL_WORLD_SIZE": "1", "SYNCPRIMS_BACKEND": "file"}, "barrier()",
     ["'file'", "one host", "2 nodes"]),
    ("two pods on files", {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0",
                           "KUBERNETES_SERVICE_HOST": "10.0.0.1", "SYNCPRIMS_BACKEND": "file",
                           "SYNCPRIMS_RUN_ID": "a"}, "get_local_rank()",
     ["'file'", "one host", "MASTER_ADDR=job-master-0"]),
    ("no name for the run", {"RANK": "0", "WORLD_SIZE": "2", "SYNCPRIMS_BACKEND": "file"},
     "barrier()", ["SYNCPRIMS_RUN_ID"]),
    ("auto under torchrun", {"RANK": "0", "WORLD_SIZE": "2"}, "barrier()",
     ["MASTER_ADDR", "MASTER_PORT", "torchrun"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "code", "words"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG]
)
def test_contradictions_name_both(variables: dict[str, str], code: str, words: list[str]) -> None:
    status, said = say(code, **variables)
    assert status == 1
    for word in words:
        assert word in said


def test_queries_answer_without_joining(meeting_place: Path) -> None:
    code = "print(get_rank(), get_world_size(), get_local_rank(), is_last(), split([1, 2]))"
    variables = {"RANK": "1", "WORLD_SIZE": "2", "SYNCPRIMS_BACKEND": "file"}
    assert say(code, SYNCPRIMS_DIR=str(meeting_place), **variables) == (0, "1 2 1 True [2]\n")
    assert not any(meeting_place.iterdir())


def test_a_failed_start_can_be_tried_again() -> None:
    code = """
import os
try:
    init()
except ConfigurationError:
    del os.environ["SYNCPRIMS_BACKEND"]
with init() as world:
    print(world.backend_name)
"""
    assert say(code, SYNCPRIMS_BACKEND="flie") == (0, "single\n")


@in_processes
@on_every_rank
def test_init_twice_is_one_world_or_an_error() -> None:
    running = sp.current()
    assert sp.init() is running
    assert sp.init(running.backend_name) is running
    with pytest.raises(sp.ConfigurationError, match="runs already"):
        sp.init("another")
    with pytest.raises(sp.ConfigurationError, match="runs already"):
        sp.init(timeout=3)


def test_timeouts_may_be_timedeltas(world: Ranks) -> None:
    def program() -> float | None:
        with sp.init(timeout=timedelta(minutes=1)) as running:
            sp.barrier(timeout=timedelta(seconds=30))
            return running.timeout

    assert world.run_alone(program) == [60] * world.ranks


@several(2)
def test_a_plug_in_is_found_by_its_entry_point(world: Ranks) -> None:
    assert world.run(lambda: sp.current().backend_name) == [world.kind.backend] * 2


def test_a_module_that_is_no_backend_is_refused(tmp_path: Path) -> None:
    info = tmp_path / "odd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[syncprims.backends]\nodd = json:dumps\ngone = nowhere:X\n"
    )
    for name, word in (("odd", "is not a syncprims Backend class"), ("gone", "nowhere")):
        status, said = say("barrier()", SYNCPRIMS_BACKEND=name, PYTHONPATH=str(tmp_path))
        assert status == 1
        assert "BackendUnavailable" in said
        assert word in said
