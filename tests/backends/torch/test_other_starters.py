"""Ranks that hydra, and Lightning's own starter, have started."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from support.rank_environment import free_port, is_installed, run_ranks

_TOLD = """
import json, sys
from pathlib import Path

def tell():
    import syncprims as sp
    place = sp.current().topology
    told = [sp.all_gather(sp.get_rank()), *place[:6], place.launcher]
    Path(sys.argv[1], f"end-{place.rank}").write_text(json.dumps(told))
    sp.barrier()
"""


def told(line: list[str], source: str, ranks: int, folder: Path, place: Path, **more: str) -> Any:
    script = folder / "script.py"
    script.write_text(_TOLD + source)
    command = [*line, sys.executable, str(script), str(folder)]
    run_ranks(place, command, {"SYNCPRIMS_JOIN_TIMEOUT": "30", **more})
    return [json.loads((folder / f"end-{rank}").read_text()) for rank in range(ranks)]


def _hydra() -> str | None:
    """Return the starter of the mpich wheel."""
    beside = Path(sys.executable).with_name("mpiexec.hydra")
    return str(beside) if beside.exists() else shutil.which("mpiexec.hydra")


@pytest.mark.skipif(_hydra() is None, reason="needs hydra: pip install mpich")
@pytest.mark.parametrize("backend", ["file", pytest.param("torch", marks=pytest.mark.soak)])
def test_hydra(backend: str, tmp_path: Path, meeting_place: Path) -> None:
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    # The store alone is enough: hydra gives the run no name.
    nowhere = {"SYNCPRIMS_DIR": "", "XDG_RUNTIME_DIR": str(meeting_place)}
    own = {"SYNCPRIMS_RUN_ID": "hydra"} if backend == "file" else store | nowhere
    line = [str(_hydra()), "-n", "3"]
    said = told(line, "tell()", 3, tmp_path, meeting_place, SYNCPRIMS_BACKEND=backend, **own)
    assert said == [[[0, 1, 2], rank, 3, rank, 3, 0, 1, "MPICH"] for rank in range(3)]


#: Hydra calls it as it calls ssh. A directory of its own makes each name a node.
_REMOTE_SHELL = """#!/bin/sh
[ "$1" != -x ] || shift
export SYNCPRIMS_DIR="$SYNCPRIMS_DIR/$1"
mkdir -m 700 "$SYNCPRIMS_DIR"
shift
exec sh -c "$*"
"""


@pytest.mark.soak
@pytest.mark.skipif(_hydra() is None, reason="needs hydra: pip install mpich")
def test_hydra_with_nodes_of_different_sizes(tmp_path: Path, meeting_place: Path) -> None:
    shell = tmp_path / "shell"
    shell.write_text(_REMOTE_SHELL)
    shell.chmod(0o700)
    line = [str(_hydra()), "-launcher", "ssh", "-launcher-exec", str(shell), "-n", "3"]
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    line += ["-hosts", "one:2,other:1", "-genvlist", "PATH"]  # the shell sets SYNCPRIMS_DIR
    said = told(line, "tell()", 3, tmp_path, meeting_place, **store)
    places = [[0, 3, 0, 2, 0, 2], [1, 3, 1, 2, 0, 2], [2, 3, 0, 1, 1, 2]]
    assert said == [[[0, 1, 2], *place, "MPICH"] for place in places]


_LIGHTNING = """
from lightning_fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
tell()
"""


@pytest.mark.skipif(not is_installed("lightning-fabric"), reason="needs lightning-fabric")
def test_lightnings_own_starter(tmp_path: Path, meeting_place: Path) -> None:
    said = told([], _LIGHTNING, 2, tmp_path, meeting_place)
    assert said == [[[0, 1], rank, 2, rank, 2, 0, 1, "torch.distributed"] for rank in range(2)]


_ACCELERATE = """
from accelerate import Accelerator, debug_launcher

def train():
    Accelerator(cpu=True)
    tell()

debug_launcher(train, num_processes=2)
"""


@pytest.mark.skipif(not is_installed("accelerate"), reason="needs accelerate")
def test_accelerates_debug_launcher(tmp_path: Path, meeting_place: Path) -> None:
    said = told([], _ACCELERATE, 2, tmp_path, meeting_place)
    assert [place[:7] for place in said] == [[[0, 1], rank, 2, rank, 2, 0, 1] for rank in range(2)]
