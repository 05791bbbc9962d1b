"""Several agents of torchrun: restarted runs meet again, and who shares a host is known."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
from support.rank_environment import clean_environment
from support.rank_worlds import PATIENCE, free_port

if TYPE_CHECKING:
    from pathlib import Path

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


def run_agents(
    source: str, tmp_path: Path, place: Path, *options: str, ranks: int = 1, **more: str
) -> list[Any]:
    """Run `source` under two agents with so many ranks each; return what each rank tells."""
    script = tmp_path / "script.py"
    script.write_text(_HEAD + textwrap.dedent(source))
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
    command += [f"--nproc-per-node={ranks}", "--rdzv-backend=c10d", "--rdzv-id=test"]
    command += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--monitor-interval=0.05", *options]
    variables = {"SYNCPRIMS_JOIN_TIMEOUT": "40", "PYTHONUNBUFFERED": "1", **more}
    agents = [
        subprocess.Popen(
            [*command, str(script), str(tmp_path)],
            env=clean_environment(place, **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        said = [agent.communicate(timeout=PATIENCE)[0] for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()  # it stops its ranks
                agent.communicate(timeout=PATIENCE)
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    return [json.loads((tmp_path / f"end-{rank}").read_text()) for rank in range(2 * ranks)]


@pytest.mark.parametrize("own_store", [False, True])
def test_a_restarted_run_meets_though_each_agent_counts_its_own_restarts(
    own_store: bool, tmp_path: Path, meeting_place: Path
) -> None:
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
def test_a_rank_that_is_killed_before_it_joined_or_while_it_joins_is_not_met(
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
