"""Torch's default group on backends without an engine of torch's: DDP works in every world."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import syncprims as sp
from syncprims.testing import Kill, run_world


def train() -> Any:
    world = sp.current()
    opened = world.open_process_group(), world.open_process_group()
    torch.manual_seed(sp.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 2), float(sp.get_rank() + step))).sum().backward()
        optimizer.step()
    sp.assert_same([p.detach() for p in model.parameters()], "weights")
    return opened


@pytest.mark.parametrize(
    "options",
    [{"torch": True}, {"torch": True, "nodes": 3}, {"kind": "processes"}],
    ids=["threads", "three nodes", "processes"],
)
def test_ddp_trains_one_model_in_every_world(options: Any) -> None:
    for ranks in (options.get("nodes", 1), 3):
        assert run_world(train, ranks, **options) == [(True, True)] * ranks
        assert not dist.is_initialized()


def test_a_group_of_the_program_stays_its_own() -> None:
    def program() -> Any:
        dist.init_process_group("gloo")
        sp.current().open_process_group()
        sp.shutdown()
        return dist.is_initialized()

    assert run_world(program, 2, kind="processes", torch=True) == [True] * 2


def test_ranks_that_share_torchs_groups_are_refused() -> None:
    with pytest.raises(sp.ConfigurationError, match="torch=True"):
        run_world(lambda: sp.current().open_process_group(), 2)


@pytest.mark.parametrize("options", [{"torch": True}, {"kind": "processes"}], ids=str)
def test_ddp_goes_on_after_a_loss(options: Any) -> None:
    """The process group is made again, and the model wrapped again."""

    def program() -> Any:
        world, losses = sp.current(), list[float]()
        world.open_process_group()
        torch.manual_seed(0)
        model: Any = DistributedDataParallel(torch.nn.Linear(2, 2))
        while len(losses) < 4:
            try:
                model.zero_grad()
                loss = model(torch.ones(1, 2) * (1 + sp.get_rank())).sum()
                loss.backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.grad
                losses.append(float(sp.all_reduce(loss.detach())))
                sp.barrier(f"step {len(losses)}")
            except (sp.PeerLost, sp.PeerFailed, RuntimeError):
                change = sp.reform()
                world.open_process_group()
                model = DistributedDataParallel(model.module)
                losses = sp.hand_over(losses, change)
        assert dist.get_world_size() == world.world_size
        sp.assert_same([p.detach() for p in model.parameters()], "weights")
        return world.world_size, losses

    results = run_world(program, 3, **options, faults=[Kill(rank=0, at="step 2")])
    assert results[0] is None
    assert results[1] == results[2]
    assert results[1][0] == 2
