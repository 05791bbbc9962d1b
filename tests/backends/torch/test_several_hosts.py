"""Several hosts, each with its own network, memory and torchrun agent."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path

import pytest
from conftest import soak
from support.network_hosts import Network, network, why_not

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
started = pytest.mark.parametrize("agents", [False, soak(True)], ids=["forked", "torchrun"])

#: A little of everything; each rank tells what it saw.
_TOUR = """
import torch
# `local=True` uses this group, and no public call returns it.

seen = {}
barrier("begin")
seen["objects"] = all_gather({"rank": rank})
seen["flag"] = any_rank(rank == get_world_size() - 1), all_ranks(rank == 0)
seen["large"] = len(broadcast("x" * 300_000 if rank == 1 else None, src=1))
total = all_reduce(torch.arange(100_000, dtype=torch.float64) + rank)
seen["sum"] = total[:3].tolist(), total.sum().item()
seen["array"] = broadcast(torch.full((50_000,), float(rank)), src=2).unique().tolist()
with main_first():
    if rank == 0:
        report("prepared")
    seen["prepared"] = (folder / "prepared-0").exists()
if get_node_rank() > 0:  # what is local waits for no other host
    while not (folder / "local-0").exists() or not (folder / "local-1").exists():
        time.sleep(0.01)
with main_first(local=True):
    report(f"node-{get_node_rank()}")
    seen["local"] = (folder / f"node-{get_node_rank()}-{rank - get_local_rank()}").exists()
current().node_group().barrier()
report("local")
for place in folder, Path("/dev/shm"):  # all hosts have the first, and each its own of the second
    with main_first(at=place), main_first(local=True):
        seen[f"at {place}"] = (place / "prepared").exists()
        (place / "prepared").touch()
trigger = Trigger("stop")
if rank == 2:
    trigger.set("enough")
seen["trigger"] = trigger.check(), trigger.ranks, trigger.reason
seen["board"] = type(current().rounds.board).__name__
report("end", json.dumps(seen))
"""


@pytest.mark.parametrize("hosts", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_the_contract_holds_across_hosts(hosts: int, tmp_path: Path) -> None:
    ranks = range(2 * hosts)
    with network(hosts, 2, tmp_path) as net:
        net.run(_TOUR)
        ended = net.wait()
        assert [end.code for end in ended] == [0] * hosts, ended
        for rank in ranks:
            seen = json.loads(net.report_of(rank))
            assert seen == {
                "objects": [{"rank": r} for r in ranks],
                "flag": [True, False],
                "large": 300_000,
                "sum": [[sum(ranks) + k * len(ranks) for k in range(3)], seen["sum"][1]],
                "array": [2.0],
                "prepared": True,
                "local": True,
                f"at {tmp_path}": rank > 0,
                "at /dev/shm": rank % 2 > 0,
                "trigger": [True, [2], "enough"],
                "board": "TwoLevelBoard",
            }
        assert not [*tmp_path.glob(".syncprims*")]


_PROCESS_GROUPS = """
import torch
import torch.distributed as dist
import syncprims.c10d

seen = []
for turn in range(2):
    dist.init_process_group("syncprims")
    total = torch.full((100_000,), float(rank))
    dist.all_reduce(total)
    room = torch.zeros(70_000)
    sent = dist.isend(torch.full((70_000,), float(rank)), (rank + 2) % 4)
    dist.recv(room, (rank + 2) % 4)
    sent.wait()
    objects = [None] * 4
    dist.all_gather_object(objects, {"rank": rank})
    board = type(current().rounds.board).__name__
    seen.append([total.unique().tolist(), room.unique().tolist(), objects, board])
    dist.destroy_process_group()
report("end", json.dumps(seen))
"""


@started
def test_process_groups_find_other_hosts_through_their_store(agents: bool, tmp_path: Path) -> None:
    with network(2, 2, tmp_path) as net:
        net.run(_PROCESS_GROUPS, agents=agents)
        ended = net.wait()
        assert [end.code for end in ended] == [0, 0], ended
        objects = [{"rank": rank} for rank in range(4)]
        for rank in range(4):
            turn = [[6.0], [(rank + 2) % 4], objects, "TwoLevelBoard"]
            assert json.loads(net.report_of(rank)) == [turn, turn]


_WAIT = """
barrier("begin")
report("waiting")
if rank == 3 and os.environ.get("LATE"):
    time.sleep(3600)
outcome(lambda: barrier("load"))
os._exit(0)
"""


def said(net: Network, rank: int) -> tuple[float, str, str]:
    """Return after how many seconds a rank got which error about whom, and the error's text."""
    first, _, text = net.report_of(rank).partition("\n")
    seconds, _, kind = first.partition(" ")
    return float(seconds), kind, text


def await_ends(net: Network, *ranks: int) -> None:
    net.await_reports(*(f"end-{rank}" for rank in ranks))


@started
def test_a_killed_rank_is_told_on_every_host(agents: bool, tmp_path: Path) -> None:
    with network(2, 2, tmp_path) as net:
        net.run(
            agents=agents,
            source="""
            barrier("begin")
            if rank == 3:
                net = [folder / f"waiting-{r}" for r in range(3)]
                while not all(path.exists() for path in net):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_IGN); report("waiting")  # an agent ends them
            outcome(lambda: barrier("load"))
            time.sleep(0.5)
            """,
        )
        await_ends(net, 0, 1, 2)
        texts = {said(net, rank)[1:] for rank in range(3)}
        assert len(texts) == 1, "one verdict for all"
        ((kind, text),) = texts
        assert kind == "PeerLost 3"
        assert "rank 3 was lost: killed by SIGKILL, while others wait in barrier 'load'" in text
        assert "rank 3 was last seen at barrier 'begin' (script.py:" in text


@started
@pytest.mark.parametrize(
    ("gone", "killed", "left"),
    [(0, True, [2]), soak(1, True, [0, 1]), (1, False, [0, 1, 2])],
    ids=["killed, with the store", "killed", "cut off"],
)
def test_a_host_that_is_gone_is_named(
    agents: bool, gone: int, killed: bool, left: list[int], tmp_path: Path
) -> None:
    """And where its link is cut, it names the other one."""
    with network(2, 2, tmp_path) as net:
        net.run(_WAIT, agents=agents, LATE="1", SYNCPRIMS_HEARTBEAT="2")
        net.await_reports(*(f"waiting-{rank}" for rank in range(4)))
        net.hosts[gone].kill() if killed else net.cut(net.hosts[gone])
        await_ends(net, *left)
        for rank in left:
            seconds, kind, text = said(net, rank)
            other = 1 - rank // 2
            assert kind == f"PeerLost {2 * other}"
            assert f"host host{other}" in text
            assert "barrier 'load' (script.py:" in text
            assert seconds < 20, "bounded by the heartbeat, and by nothing else"
            assert rank == 2 or text == said(net, 0)[2]


@pytest.mark.soak
@pytest.mark.parametrize("used", [False, True], ids=["before the first transfer", "after it"])
def test_a_link_between_two_of_three_hosts_is_named(used: bool, tmp_path: Path) -> None:
    with network(3, 1, tmp_path) as net:
        net.run(
            """
            import torch
            if os.environ["USED"]:
                all_reduce(torch.ones(100_000))
            barrier("begin")
            report("waiting")
            while not (folder / "cut").exists():
                time.sleep(0.01)
            outcome(lambda: all_reduce(torch.ones(100_000)))
            """,
            USED="yes" if used else "",
            SYNCPRIMS_HEARTBEAT="2",
        )
        net.await_reports(*(f"waiting-{rank}" for rank in range(3)))
        net.cut_between(*net.hosts[1:])
        (tmp_path / "cut").touch()
        await_ends(net, 0, 1, 2)
        (verdict,) = {said(net, rank)[1:] for rank in range(3)}
        kind, text = verdict
        assert kind == "PeerLost None"
        assert re.match("hosts host[12] and host[12] do not reach each other, in all_reduce", text)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(24))
def test_a_link_that_is_cut_at_any_moment_has_one_verdict(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    alone = dice.choice((None, 1, 2))  # the host that nobody reaches
    items = 100_000 if alone is None else dice.choice((1, 100_000))
    with network(3, 1, tmp_path) as net:
        net.run(
            """
            import torch
            barrier("begin")
            report("begun")
            number = 0
            try:
                while True:
                    total = all_reduce(torch.full((int(os.environ["ITEMS"]),), number + rank))
                    assert (total == 3 * number + 3).all()
                    number += 1
            except SyncError as error:
                report("end", f"{number} {type(error).__name__} {error}")
            os._exit(0)
            """,
            ITEMS=str(items),
            SYNCPRIMS_HEARTBEAT="2",
        )
        net.await_reports(*(f"begun-{rank}" for rank in range(3)))
        time.sleep(dice.uniform(0, 0.5))  # this is the moment of the seed
        if alone is None:
            net.cut_between(*net.hosts[1:])
        else:
            net.cut(net.hosts[alone])
        await_ends(net, 0, 1, 2)
        ends = {rank: net.report_of(rank) for rank in range(3)}
    own = ends.pop(alone) if alone else ""
    (verdict,) = set(ends.values())
    names = "host[12] and host[12]" if alone is None else f".*host{alone}.*"
    assert re.search(f"PeerLost hosts {names} do not reach each other|host host{alone}", verdict)
    if alone:
        number = int(own.split()[0])
        assert own.split()[1] == "PeerLost"
        assert abs(number - int(verdict.split()[0])) <= 1


@started
def test_the_others_go_on_without_a_host_that_is_cut_off(agents: bool, tmp_path: Path) -> None:
    with network(2, 2, tmp_path) as net:
        net.run(
            """
            import torch
            barrier("begin")
            report("begun")
            try:
                while True:
                    all_reduce(torch.ones(100_000))
            except PeerLost:
                pass
            while True:
                try:
                    change = reform()
                    total = all_reduce(torch.ones(100_000))[0].item()
                    report("end", json.dumps([change.members, change.lost, total]))
                    while not (folder / "over").exists():
                        time.sleep(0.01)
                    break
                except BackendUnavailable as error:
                    report("alone", error)
                except Evicted as error:
                    report("end", error)
                    os._exit(0)
            """,
            agents=agents,
            SYNCPRIMS_HEARTBEAT="2",
        )
        net.await_reports(*(f"begun-{rank}" for rank in range(4)))
        net.cut(net.hosts[1])
        net.await_reports("end-0", "end-1", "alone-2", "alone-3")
        for rank in (0, 1):
            assert json.loads(net.report_of(rank)) == [[0, 1], [2, 3], 2.0]
        assert "cannot ask the store" in (tmp_path / "alone-2").read_text()
        net.mend(net.hosts[1])
        net.await_reports("end-2", "end-3")
        assert "without this host, whose heartbeat they missed" in net.report_of(2)
        (tmp_path / "over").touch()
        assert net.wait()[0].code == 0
