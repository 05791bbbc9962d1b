"""Training in a program with its own `torch.distributed` group: models in DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint_worlds import Alone
from support.process_groups import with_gloo
from support.rank_worlds import Kind, Ranks
from support.training_models import close, new_job, numbers, rows, small_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import syncprims

Program = Callable[[], Any]


@pytest.fixture
def grouped(meeting_place: Path) -> Callable[[Program], list[Any]]:
    """Run a program on two ranks whose models DDP keeps together."""

    def run(program: Program) -> list[Any]:
        def in_a_world() -> Any:
            with syncprims.init():
                return program()

        ranks = Ranks(Kind("torch", 2), meeting_place)
        return ranks.run_alone(with_gloo(in_a_world, meeting_place.parent))

    return run


class _Parts(nn.Module):
    """A part is frozen, and a part may be used by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.late = small_model(1)[0], small_model(2)[0].requires_grad_(False)
        self.head, self.added = small_model(3)[2], nn.Module()

    def encode(self, x: torch.Tensor) -> Any:
        return self.encoder(x).tanh()

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.encode(x) + self.late(x))


def _grow(inner: Any) -> None:
    inner.added = small_model(4)


#: What comes before the training, and the loss: of the prepared model, the model inside and data.
_PASSES: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any, Any], Any]]] = {
    "as usual": (id, lambda model, _, x: model(x)),
    "unfrozen": (lambda inner: inner.requires_grad_(True), lambda model, _, x: model(x)),
    "past the wrapper": (id, lambda _, inner, x: inner(x)),
    "a part": (id, lambda _, inner, x: inner.head(inner.encode(x))),
    "also a part": (id, lambda model, inner, x: model(x) + inner.encode(x).mean(1, keepdim=True)),
    "grown": (_grow, lambda model, inner, x: model(x) + inner.added(x)),
    "two passes forward": (id, lambda model, _, x: model(x) + model(2 * x).detach()),
}


@pytest.mark.parametrize("wrapped", ["no", "with options", "by hand"])
def test_gradients_are_averaged_wherever_they_come_from(
    grouped: Callable[[Program], list[Any]], alone: Alone, wrapped: str
) -> None:
    """Also those that DDP's reducer does not see."""

    def trained(case: str, plain: bool) -> list[float]:
        ranks, rank = syncprims.get_world_size(), syncprims.get_rank()
        job = new_job(2, ddp={"bucket_cap_mb": 1} if wrapped == "with options" else None)
        given: Any = _Parts()
        if wrapped == "by hand" and ranks > 1:
            given = DistributedDataParallel(given)
        model: Any = job.prepare(given)
        inner: Any = job.unwrap_model(model)
        begin, compute = _PASSES[case]
        begin(inner)
        if wrapped == "with options":
            assert model.encode(torch.ones(1, 3).double()).shape == (1, 5)
        optimizer = job.prepare(torch.optim.Adam(inner.parameters(), 0.1))
        for step in range(4):
            x = rows(8 * step + 8).tensors[0][8 * step :].chunk(ranks)[rank]
            with job.accumulate(model):
                loss = compute(model, inner, x).square().mean()
                for twice in (True, False):  # the second pass has no forward pass of its own
                    if plain:
                        loss.backward(retain_graph=twice)
                    else:
                        job.backward(loss, retain_graph=twice)
                optimizer.step()
                optimizer.zero_grad()
        return numbers(inner)

    cases = [(case, plain) for case in _PASSES for plain in (False, True)]
    wanted = alone(lambda: [trained(*case) for case in cases])
    results = grouped(lambda: [trained(*case) for case in cases])
    assert results[0] == results[1]
    for case, mine, whole in zip(cases, results[0], wanted, strict=True):
        assert close(mine, whole, within=1e-9), case


@pytest.mark.parametrize("of", ["prepared model", "job"])
def test_ranks_may_differ_in_passes_without_an_average(
    grouped: Callable[[Program], list[Any]], of: str
) -> None:
    def program() -> list[float]:
        job, rank = new_job(ddp={"bucket_cap_mb": 1}), syncprims.get_rank()
        model: Any = job.prepare(nn.Linear(1, 1, bias=False))
        with model.no_sync() if of == "prepared model" else job.no_sync(model):
            for _ in range(1 + rank):
                model(torch.ones(1, 1)).sum().backward()
        model(torch.ones(1, 1)).sum().backward()
        return model.weight.grad.tolist()  # type: ignore[no-any-return]

    assert grouped(program) == [[[2.5]]] * 2


class _Two(nn.Module):
    """Two nets, which a loss may use alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x).sum(), self.other(x).sum()


@pytest.mark.parametrize("plain", [False, True])
def test_no_step_uses_gradients_that_ddp_has_not_averaged(
    grouped: Callable[[Program], list[Any]], plain: bool
) -> None:
    """DDP averages once it has all of them, perhaps of several backward passes."""

    def program() -> None:
        for several in (True, False):
            job = new_job(ddp={"bucket_cap_mb": 1})
            net = _Two()
            model, optimizer = job.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
            x = torch.full((1, 1), 1.0 + 2 * syncprims.get_rank())
            losses = model(x)
            with job.accumulate(model):
                for loss in losses if several else losses[:1]:
                    loss.backward() if plain else job.backward(loss)
                if several:
                    optimizer.step()
                    assert [net.one.weight.grad, net.other.weight.grad] == [2, 2]
                else:
                    with pytest.raises(RuntimeError, match="find_unused_parameters"):
                        optimizer.step()

    grouped(program)


def test_a_program_may_compress_what_ddp_sends(grouped: Callable[[Program], list[Any]]) -> None:
    def program() -> list[float]:
        seen: list[float] = []

        def to_one(factor: float, bucket: Any) -> Any:
            seen.append(factor)
            future: Any = torch.futures.Future()
            future.set_result(torch.full_like(bucket.buffer(), factor))
            return future

        job = new_job(ddp={"bucket_cap_mb": 1})
        model: Any = job.prepare(nn.Linear(1, 1, bias=False))
        model.register_comm_hook(3.0, lambda factor, bucket: to_one(factor, bucket))
        job.backward(model(torch.ones(1, 1)).sum())
        return [*seen, float(model.weight.grad)]

    assert grouped(program) == [[3.0, 3.0]] * 2


def test_who_wrapped_by_hand_keeps_the_wrapper(grouped: Callable[[Program], list[Any]]) -> None:
    def program() -> list[bool]:
        job = new_job()
        compiled: Any = torch.compile(small_model(), backend="eager")
        mine = DistributedDataParallel(compiled)
        model = job.prepare(mine)
        return [
            model is mine,
            job.unwrap_model(model, keep_torch_compile=False) is compiled._orig_mod,
            job.unwrap_model(model) is compiled,
        ]

    assert grouped(program) == [[True] * 3] * 2


def test_a_rank_without_a_batch_joins_two_models(grouped: Callable[[Program], list[Any]]) -> None:
    def program() -> list[float]:
        job, rank = new_job(), syncprims.get_rank()
        models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
        for model in models:
            nn.init.zeros_(model.weight)
        optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
        given: list[Any] = [*models, *optimizers]
        one, other, *prepared = job.prepare(*given)
        with job.join_uneven_inputs():
            for _ in range(2 * rank):  # the second model comes first
                for model, optimizer in zip((other, one), reversed(prepared), strict=True):
                    with job.accumulate(model):
                        job.backward(model(torch.ones(1, 1)).sum(), weight=1)
                        optimizer.step()
                        optimizer.zero_grad()
        return [*numbers(one), *numbers(other)]

    assert grouped(program) == [[-2.0, -2.0]] * 2


def test_a_pass_of_all_ranks_cannot_be_joined(grouped: Callable[[Program], list[Any]]) -> None:
    def program() -> list[str]:
        said = []
        for together in (True, False):
            job = new_job()
            plain = DistributedDataParallel(nn.BatchNorm1d(1))
            plain.broadcast_buffers = together  # its option has another name in a new torch
            model = job.prepare(plain)
            with job.join_uneven_inputs():
                try:
                    with job.accumulate(model):
                        said.append("")
                except ValueError as error:
                    said.append(str(error))
        return said

    for refused, taken in grouped(program):
        assert "broadcast_buffers=False" in refused
        assert not taken
