"""For type checkers, `prepare` returns the types of its arguments; mypy checks this file."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type

import torch
from support.training_models import alone, rows
from torch.utils.data import DataLoader

from syncprims.training import Accelerator, Accumulator, prepare, unwrap_model

if TYPE_CHECKING:
    from support.rank_worlds import Ranks


class Net(torch.nn.Linear):
    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.forward(x)


@alone
def test_types_survive_prepare(world: Ranks) -> None:
    def program() -> None:
        accelerator, net = Accelerator(), Net(3, 1)
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
