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


class Optimizer(torch.optim.SGD):
    """It has modes, as schedule-free ones do, and a way of its own to clear gradients."""

    mode, cleared = "", 0

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none)


@alone
def test_a_prepared_optimizer_is_the_optimizer(world: Ranks) -> None:
    def program() -> None:
        net, accumulator = Net(3, 1), Accumulator(2)
        inner = torch.optim.AdamW(net.parameters(), lr=0.5)
        steps = torch.optim.lr_scheduler.StepLR(inner, 1)
        model, optimizer, schedule = prepare(net, inner, steps, accumulator=accumulator)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.param_groups is inner.param_groups
        assert prepare(optimizer, accumulator=accumulator) is optimizer
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # accepts it as its own
        called: list[int] = []
        optimizer.register_step_post_hook(lambda *_: called.append(1))
        for _ in range(4):
            with accumulator.accumulate(model):
                accumulator.backward(model(torch.ones(1, 3)).sum())
                optimizer.step()
                optimizer.zero_grad()
        assert len(called) == optimizer.state_dict()["state"][0]["step"] == 2
        assert optimizer.state is inner.state
        optimizer.state = defaultdict(dict)
        optimizer.param_groups = [{**group, "lr": 0.1} for group in inner.param_groups]
        optimizer.defaults = {**inner.defaults, "lr": 0.2}
        assert not inner.state
        assert (inner.param_groups[0]["lr"], inner.defaults["lr"]) == (0.1, 0.2)
        schedule.gamma = 0.5
        assert schedule.gamma == steps.gamma == 0.5

    world.run(program)


@alone
def test_what_an_optimizer_does_in_its_own_way_is_left_to_it(world: Ranks) -> None:
    def program() -> None:
        net, accumulator = Net(3, 1), Accumulator()
        own = Optimizer(net.parameters())
        prepared: Any = prepare(own, accumulator=accumulator)
        other: Any = prepare(torch.optim.SGD(net.parameters()), accumulator=accumulator)
        for mode in ("train", "eval"):
            getattr(prepared, mode)()
            getattr(other, mode)()
            assert own.mode == mode
        for optimizer in (prepared, other):
            for to_none in (True, False):
                with accumulator.accumulate(net):
                    accumulator.backward(net(torch.ones(1, 3)).sum())
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=to_none)
                assert (net.bias.grad is None) == to_none
        assert own.cleared == 2

    world.run(program)
