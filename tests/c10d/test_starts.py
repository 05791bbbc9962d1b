"""How process groups start in real runs: launchers, stores, entry point, and served scripts."""

from __future__ import annotations

import multiprocessing
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from conftest import soak
from support.process_groups import dist
from support.rank_environment import run_python

PROGRAM = """
import sys
import torch
import torch.distributed as dist

for number in range(3):
    dist.init_process_group(sys.argv[1])
    ones = torch.ones(2)
    dist.all_reduce(ones)
    assert ones.tolist() == [2.0, 2.0]
    served = type(dist.group.WORLD).__name__
    dist.destroy_process_group()
print(dist.get_backend if number < 2 else served, sys.argv[1])
"""

needs_entry_point = pytest.mark.skipif(
    not entry_points(group="torch.backends", name="syncprims"),
    reason="the installed package is older than its entry point",
)


def test_a_switch_that_is_neither_on_nor_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from _syncprims_c10d import register

    monkeypatch.setenv("SYNCPRIMS_SERVE_TORCH", "true")
    with pytest.raises(ValueError, match="SYNCPRIMS_SERVE_TORCH='true': it takes 0 or 1"):
        register()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def run(*command: str | Path) -> list[str]:
    """Return the lines that a command printed."""
    done = run_python(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_entry_point
@pytest.mark.parametrize(("flags", "backend"), [soak([], "syncprims"), (["--serve-torch"], "gloo")])
def test_under_syncprims_run(flags: list[str], backend: str, program: Path) -> None:
    lines = run("-m", "syncprims", "run", "-n", "2", *flags, program, backend)
    assert sorted(lines) == [f"[rank {r}] SyncProcessGroup {backend}" for r in range(2)]


@needs_entry_point
def test_under_torchrun(program: Path) -> None:
    lines = run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program, "syncprims"
    )
    assert "".join(lines).count("SyncProcessGroup") == 2  # the lines of the ranks may mix


@needs_entry_point
def test_a_served_script_may_import_this_library_before_torch() -> None:
    done = run_python("-c", "import syncprims.c10d", SYNCPRIMS_SERVE_TORCH="1")
    assert done.returncode == 0, done.stderr


@needs_entry_point
def test_torch_imports_nothing_of_the_library() -> None:
    source = """
import sys, time
import torch
assert hasattr(torch.distributed.Backend, "SYNCPRIMS")
print([name for name in sys.modules if name.startswith("syncprims")])
"""
    assert run("-c", source) == ["[]"]


def _train(rank: int, path: str) -> None:
    import torch

    import syncprims as sp
    import syncprims.c10d

    assert syncprims.c10d.NAME == "syncprims"
    for number in range(2):
        dist.init_process_group(
            "syncprims", init_method=f"file://{path}{number}", rank=rank, world_size=2
        )
        one = torch.tensor([rank + number])
        dist.all_reduce(one)
        assert one.item() == 1 + 2 * number
        assert sp.all_reduce(rank) == 1  # the library's own calls are in the same world
        dist.destroy_process_group()


def test_without_a_launcher(tmp_path: Path) -> None:
    """The ranks meet where their store says, as with ``mp.spawn``."""
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_train, args=(rank, str(tmp_path / "store"))) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    for process in processes:
        process.close()
