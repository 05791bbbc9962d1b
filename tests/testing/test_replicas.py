"""``replicas=True``: models and optimizers are compared between ranks at each step."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import both_kinds
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import syncprims as sp
from syncprims.testing import UnequalRounds, run_world
from syncprims.training import Accumulator, prepare

pytestmark = pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")


def make(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), **options)


def train(run: Callable[[Any], Any], model: Any, steps: int = 3) -> None:
    """Step `steps` times, with other data on each rank."""
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(sp.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        run(model)(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()


def in_group(program: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        dist.init_process_group("gloo")
        program()
        dist.destroy_process_group()

    return run


def through(model: Any) -> Any:
    return model


def past_ddp_on_rank_1(model: Any) -> Any:
    return model.module if dist.get_rank() == 1 else model


@both_kinds
def test_a_pass_beside_ddp_is_named_at_its_step(kind: Any) -> None:
    def program() -> None:
        train(lambda model: model.module, make())  # no rank averages

    with pytest.raises(sp.RankMismatch) as caught:
        run_world(in_group(program), 3, kind=kind, replicas=True)
    said = str(caught.value)
    assert "after step 1, first here:\n  parameter '0.weight', parameter '0.bias'" in said
    assert re.search(r"\n  .* and \d+ more: no two ranks agree\n", said)  # five are named
    assert said.count("agree") == 1


def test_the_ranks_that_agree_are_named() -> None:
    def program() -> None:
        model = nn.Linear(4, 4)
        with torch.no_grad():
            model.weight.fill_(sp.get_rank() == 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            for p in model.parameters():
                p.grad = sp.all_reduce(p.grad, "mean", name="gradient")
            optimizer.step()

    with pytest.raises(sp.RankMismatch) as caught:
        run_world(program, 4, replicas=True)
    assert "  parameter 'weight': ranks [0, 1, 3] agree, rank 2 differs\n" in str(caught.value)
    assert "bias" not in str(caught.value)
    assert caught.value.rank == 2


def test_a_parameter_of_no_model_has_its_number_in_the_optimizer() -> None:
    def program() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        own = nn.Parameter(torch.ones(1) + sp.get_rank())
        optimizer = torch.optim.SGD([*model.parameters(), own], lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    with pytest.raises(sp.RankMismatch, match="\n  parameter 2 of the optimizer: no two"):
        run_world(program, 2, replicas=True)


def test_buffers_that_nobody_makes_equal_are_named() -> None:
    program = in_group(lambda: train(through, make(broadcast_buffers=False)))
    both = r"after step 1.*\n  buffer '1.running_mean', buffer '1.running_var': no two"
    with pytest.raises(sp.RankMismatch, match=both):
        run_world(program, 2, replicas=True)


@both_kinds
def test_what_differs_by_design_is_no_difference(kind: Any) -> None:
    def program() -> None:
        train(through, make())  # DDP copies the buffers before the next pass
        own: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        ddp: Any = DDP
        torch.manual_seed(0)
        nn.init.normal_(own[0].weight)
        nn.init.zeros_(own[0].bias)
        ddp._set_params_and_buffers_to_ignore_for_model(own, ["1.weight", "1.bias"])
        train(through, DDP(own))

    run_world(in_group(program), 2, kind=kind, replicas=True)


def test_sharded_parameters_are_no_difference() -> None:
    from torch.distributed.fsdp import fully_shard

    def program() -> None:
        torch.manual_seed(0)
        train(through, fully_shard(nn.Linear(4, 4)))

    run_world(in_group(program), 2, replicas=True)


def test_prepared_models_have_equal_buffers_after_their_block() -> None:
    def program() -> None:
        torch.manual_seed(0)
        accumulator = Accumulator()
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = prepare(model, optimizer, accumulator=accumulator)
        torch.manual_seed(sp.get_rank())
        for _ in range(3):
            with accumulator(model):
                accumulator.backward(model(torch.randn(8, 4)).square().sum())
                optimizer.step()
                optimizer.zero_grad()

    run_world(program, 2, replicas=True)


def test_rounds_keep_their_numbers() -> None:
    def program() -> None:
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(5):
            optimizer.step()
        if sp.is_main():
            sp.Trigger(lag=1).check()  # posts a note, and waits for none

    with pytest.raises(UnequalRounds, match="rank 0: finished after its round 1,"):
        run_world(program, 2, replicas=True)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # ZeRO uses it
@both_kinds
def test_an_optimizer_for_several_ranks_is_compared_at_its_end(kind: Any) -> None:
    """Inside, each rank steps other parameters, and keeps the state of those."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def program() -> None:
        model = make()
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
        for _ in range(2):
            model(torch.randn(8, 4)).square().sum().backward()
            optimizer.step()

    run_world(in_group(program), 2, kind=kind, replicas=True)
