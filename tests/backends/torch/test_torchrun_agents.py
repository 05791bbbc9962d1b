"""Several agents of torchrun: restarted runs meet again, and who shares a host is known."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.rank_environment import environ_of_ranks, free_port
from support.rank_worlds import PATIENCE

pytestmark = pytest.mark.soak  # an agent imports torch as a rank does

_HEAD = """
import json, os, signal, sys, time
from pathlib import Path
from syncprims import *
folder = Path(sys.argv[1])
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]

def await_file(name):
    while not (folder / name).exists():
        time.sleep(0.01)

def first_time(name):
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def tell(*said):
    (folder / f"end-{get_rank()}").write_text(json.dumps([*said, attempt]))
"""


def run_agents(source: str, tmp_path: Path, place: Path, *options: str, **more: str) -> list[Any]:
    """Run `source` under two agents with a rank each; return what each rank tells."""
    script = tmp_path / "script.py"
    script.write_text(_HEAD + textwrap.dedent(source))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *("--rdzv-backend=c10d", "--rdzv-id=test", f"--rdzv-endpoint=127.0.0.1:{free_port()}"),
        *("--monitor-interval=0.05", *options, str(script), str(tmp_path)),
    ]
    variables = {"SYNCPRIMS_JOIN_TIMEOUT": "40", "PYTHONUNBUFFERED": "1", **more}
    environ = environ_of_ranks(place, **variables)
    agents: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as ends, (tmp_path / "log").open("w+") as log:
        for _ in range(2):
            agents.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
            ends.callback(agents[-1].wait)
            ends.callback(agents[-1].terminate)  # if it still runs; so its rank ends, too
        codes = [agent.wait(timeout=PATIENCE) for agent in agents]
        assert codes == [0, 0], (tmp_path / "log").read_text()
    return [json.loads((tmp_path / f"end-{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("own_store", [False, True])
def test_agents_that_restart_meet(own_store: bool, tmp_path: Path, meeting_place: Path) -> None:
    said = run_agents(
        """
        barrier("begin")
        if get_rank() == 1 and first_time("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == "0" and first_time(f"computed-{get_rank()}") and get_rank() == 0:
            time.sleep(3600)  # computes, until its agent restarts it
        barrier("after the restart")
        tell(all_gather(get_rank()))
        """,
        tmp_path,
        meeting_place,
        "--max-restarts=1",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE=str(int(own_store)),
    )
    assert [ranks for ranks, _ in said] == [[0, 1], [0, 1]]
    assert {attempt for _, attempt in said} == {"0", "1"}, "each agent counts its own"


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_killed_before_or_while_it_joins_is_not_met(
    first: int, tmp_path: Path, meeting_place: Path
) -> None:
    """What it has left at the store is of an earlier process of its rank."""
    said = run_agents(
        f"""
        if get_rank() == {first} and first_time("waits"):
            (folder / "waiting").touch()
            barrier("begin")
        if get_rank() != {first} and first_time("killed"):
            await_file("waiting")
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        if get_rank() == {first}:
            await_file("met the other")  # which would meet the earlier process
            time.sleep(0.5)
        else:
            (folder / "met the other").touch()
        tell(all_gather(get_rank()))
        """,
        tmp_path,
        meeting_place,
        "--max-restarts=1",
    )
    assert [ranks for ranks, _ in said] == [[0, 1], [0, 1]]


def test_agents_on_one_host_are_one_node(tmp_path: Path, meeting_place: Path) -> None:
    said = run_agents(
        """
        barrier()
        numbers = get_local_rank(), get_local_world_size(), get_node_rank(), get_num_nodes()
        tell(all_gather(list(numbers)), is_local_main())
        """,
        tmp_path,
        meeting_place,
    )
    numbers = [[0, 2, 0, 1], [1, 2, 0, 1]]
    assert said == [[numbers, True, "0"], [numbers, False, "0"]]
