"""For type checkers, `prepare` returns the types of its arguments; mypy checks this file."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, assert_type

import torch
from support.training_models import alone, new_job, rows
from torch.utils.data import DataLoader

from syncprims.training import Accumulator, prepare, unwrap_model

if TYPE_CHECKING:
    from support.rank_worlds import Ranks


class Net(torch.nn.Linear):
    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.forward(x)


@alone
def test_types_survive_prepare(world: Ranks) -> None:
    def program() -> None:
        accelerator, net = new_job(), Net(3, 1)
        model, optimizer, loader = accelerator.prepare(
            net, torch.optim.AdamW(net.parameters()), DataLoader(rows(4), batch_size=2)
        )
        assert_type(model, Net)
        assert_type(optimizer, torch.optim.AdamW)
        assert_type(loader, DataLoader[tuple[torch.Tensor, ...]])
        assert_type(accelerator.unwrap_model(model), Net)
        assert_type(unwrap_model(model), Net)
        single = prepare(Net(1, 1), accumulator=Accumulator())
        assert_type(single, Net)
        one, two = prepare(Net(1, 1), 3, accumulator=Accumulator())
        assert_type((one, two), tuple[Net, int])
        assert isinstance(model, Net)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert isinstance(loader, DataLoader)
        with torch.no_grad():
            assert model.twice(torch.zeros(1, 3)).item() == 2 * net.bias.item()

    assert world.run(program) == [None]


class ScheduleFree(torch.optim.SGD):
    mode = ""

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"


@alone
def test_what_a_script_sets_is_the_optimizers_own(world: Ranks) -> None:
    def program() -> None:
        net = Net(3, 1)
        inner = torch.optim.AdamW(net.parameters(), lr=0.5)
        steps = torch.optim.lr_scheduler.StepLR(inner, 1)
        accelerator = new_job()
        model, optimizer, schedule = accelerator.prepare(net, inner, steps)
        accelerator.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        assert len(inner.state) == 2
        optimizer.state = defaultdict(dict)
        optimizer.param_groups = [{**group, "lr": 0.1} for group in inner.param_groups]
        optimizer.defaults = {**inner.defaults, "lr": 0.2}
        assert not inner.state
        assert (inner.param_groups[0]["lr"], inner.defaults["lr"]) == (0.1, 0.2)
        optimizer.step()
        assert len(inner.state) == 2
        schedule.gamma = 0.5
        schedule.step()
        assert schedule.gamma == steps.gamma == 0.5
        assert inner.param_groups[0]["lr"] == 0.05

    world.run(program)


@alone
def test_optimizers_have_modes_or_need_none(world: Ranks) -> None:
    def program() -> None:
        net = Net(3, 1)
        kinds = ScheduleFree(net.parameters()), torch.optim.SGD(net.parameters())
        free, plain = new_job().prepare(*kinds)
        optimizers: list[Any] = [free, plain]
        for one in optimizers:
            one.train()
        assert kinds[0].mode == "train"
        for one in optimizers:
            one.eval()
        assert kinds[0].mode == "eval"

    world.run(program)
