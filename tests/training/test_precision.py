"""Half precision: autocast, loss scaling, clipping, and steps that overflow."""

from __future__ import annotations

import copy
import pickle
from itertools import product
from typing import Any

import pytest
import torch
from conftest import on_every_rank
from support.rank_worlds import Ranks
from support.training_models import alone, everywhere, gradient, new_job, numbers, ones, unit_model
from torch import nn

import syncprims
from syncprims.training import Accumulator, Precision, prepare, unwrap_model


@alone
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
@on_every_rank
def test_a_prepared_model_computes_in_half_and_returns_single(mode: str) -> None:
    inside: list[torch.dtype] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.layer(x)
            inside.append(y.dtype)
            return {"y": y}

    accelerator = new_job(mixed_precision=mode)
    plain = Model()
    model = accelerator.prepare(plain)
    assert model(torch.ones(1, 2))["y"].dtype == torch.float32
    assert copy.deepcopy(model)(torch.ones(1, 2))["y"].dtype == torch.float32
    half = torch.float16 if mode == "fp16" else torch.bfloat16
    assert inside == [half, half]
    with accelerator.autocast():
        assert plain.layer(torch.ones(1, 2)).dtype == half
    copied = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert copied(torch.ones(1, 2))["y"].dtype == torch.float32
    assert inside[-1] == torch.float32
    layer = accelerator.prepare(nn.Linear(2, 2))
    again: nn.Module = pickle.loads(pickle.dumps(layer))
    assert again(torch.ones(1, 2)).dtype == torch.float32
    assert numbers(unwrap_model(again)) == numbers(layer)


@alone
@on_every_rank
def test_nothing_falls_back_to_full_precision_in_silence() -> None:
    with pytest.raises(syncprims.ConfigurationError, match="int8"):
        Precision("int8")
    with pytest.raises(syncprims.ConfigurationError, match="autocast"):
        Precision("bf16", "meta")
    with pytest.raises(syncprims.ConfigurationError, match="scaler"):
        Precision("fp16", scaler={"enabled": False})
    fp16 = Precision("fp16").state_dict()
    with pytest.raises(syncprims.ConfigurationError, match="scaler"):
        Precision("bf16").load_state_dict(fp16)


@alone
def test_the_environment_names_the_precision(world: Ranks) -> None:
    def program() -> str:
        return new_job().mixed_precision + new_job(mixed_precision="no").mixed_precision

    assert world.run(program, SYNCPRIMS_MIXED_PRECISION="bf16") == ["bf16no"]
    assert world.run(program) == ["nono"]

    (outcome,) = world.outcomes(program, SYNCPRIMS_MIXED_PRECISION="half")
    assert isinstance(outcome, syncprims.ConfigurationError)
    assert "SYNCPRIMS_MIXED_PRECISION='half'" in str(outcome)


def scaled(steps: int = 1, *models: nn.Module) -> tuple[Accumulator, list[Any]]:
    """Return an fp16 accumulator with an optimizer for each model."""
    precision = Precision("fp16", scaler={"init_scale": 1024.0, "growth_interval": 3})
    accumulator = Accumulator(steps, precision=precision)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    return accumulator, [prepare(optimizer, accumulator=accumulator) for optimizer in optimizers]


@everywhere
@pytest.mark.parametrize("clip", [False, True])
@on_every_rank
def test_an_overflow_on_one_rank_skips_the_step_on_all(clip: bool) -> None:
    model: Any = unit_model()
    accumulator, (optimizer,) = scaled(2, model)
    model = prepare(model, accumulator=accumulator)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.5)
    schedule = prepare(schedule, accumulator=accumulator)
    seen = []
    for step in range(6):
        bad = step == 1 and syncprims.get_rank() == syncprims.get_world_size() - 1
        with accumulator.accumulate(model):
            loss = model(ones()).sum()
            accumulator.backward(loss * float("inf") if bad else loss)
            if clip:
                accumulator.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accumulator.sync_gradients:
            scale = accumulator.precision.state_dict()["scale"]
            skipped = optimizer.step_was_skipped
            seen.append([skipped, scale, schedule.get_last_lr()[0], numbers(model)[0]])
    wanted = [[True, 512.0, 1.0, 0.0], [False, 512.0, 0.5, -1.0], [False, 512.0, 0.25, -1.5]]
    assert seen == wanted


@alone
@on_every_rank
def test_a_loaded_state_is_scaled_as_it_was_whatever_was_given_up() -> None:
    """A step that is not counted yet, and gradients that are unscaled already."""

    def micro(*, clip: bool = True, step: bool = True) -> None:
        with job.accumulate(model):
            optimizer.zero_grad()
            job.backward(model(ones()).sum())
            if clip:
                job.clip_grad_norm_(model.parameters(), 100.0)
            if step:
                optimizer.step()

    def state() -> list[Any]:
        return copy.deepcopy([part.state_dict() for part in parts])

    def load(states: list[Any]) -> None:
        for part, one in zip(parts, states, strict=True):
            part.load_state_dict(one)
        job.accumulator.restart()

    job = new_job(mixed_precision="fp16", scaler={"growth_interval": 3})
    model = unit_model()
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    parts: list[Any] = [model, optimizer, job.accumulator.precision]
    micro()
    begin = state()
    micro()
    wanted = state()
    options: list[dict[str, bool]] = [{}, {"step": False}, {"clip": False}]
    for given_up in options:
        load(copy.deepcopy(begin))
        micro(**given_up)
        load(copy.deepcopy(begin))
        micro()
        assert state() == wanted


@alone
@on_every_rank
def test_a_restart_forgets_that_gradients_are_unscaled() -> None:
    model = unit_model()
    accumulator, (optimizer,) = scaled(1, model)
    with accumulator.accumulate(model):
        accumulator.backward(model(ones()).sum())
        accumulator.clip_grad_norm_(model.parameters(), 10.0)
    accumulator.restart()
    with accumulator.accumulate(model):
        accumulator.backward(model(ones()).sum())
        optimizer.step()
    assert numbers(model) == [-1.0]


@alone
@on_every_rank
def test_after_an_overflow_outside_of_blocks_the_next_step_has_a_lower_scale() -> None:
    model = unit_model()
    accumulator, (optimizer,) = scaled(1, model)
    skipped = []
    for _ in range(2):
        accumulator.backward(model(5e35 * ones()).sum())  # it overflows with 1024, not with 512
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
    assert skipped == [True, False]


@alone
@pytest.mark.parametrize(
    ("order", "kept", "wanted"),
    [((0, 1) * 4, 4, [[-1.0], [-2.0]]), ((0, 1, 0, 0, 1, 0), 5, [[-1.0], [-1.0]])],
    ids=["in step", "out of step"],
)
@on_every_rank
def test_two_windows_share_one_scale(
    order: tuple[int, ...], kept: int, wanted: list[list[float]]
) -> None:
    """An overflow in the first of them changes the scale when the other one is closed, too."""
    job = new_job(2, "fp16", scaler={"init_scale": 1024.0})
    models: Any = job.prepare(unit_model(), unit_model())
    steps: Any = job.prepare(*(torch.optim.SGD(model.parameters(), lr=1.0) for model in models))
    scales = []
    for at, number in enumerate(order):
        model, optimizer = models[number], steps[number]
        with job.accumulate(model):
            loss = model(ones()).sum()
            job.backward(loss * float("inf") if at == 2 else loss)
            optimizer.step()
            optimizer.zero_grad()
        assert job.scaler is not None
        scales.append(job.scaler.get_scale())
    assert scales == [1024.0] * kept + [512.0] * (len(order) - kept)
    assert [numbers(model) for model in models] == wanted


@everywhere
@pytest.mark.parametrize("together", [True, False])
def test_two_optimizers_unscale_once_each(world: Ranks, together: bool) -> None:
    def program() -> list[float]:
        one, two = unit_model(), unit_model()
        accumulator, (first, second) = scaled(2, one, two)
        norms = []
        for _ in range(4):
            with accumulator.accumulate(one, two):
                accumulator.backward(3 * one(ones()).sum())
                if not together:
                    norms.append(float(accumulator.clip_grad_norm_(one.parameters(), 1.0)))
                    first.step()
                accumulator.backward(4 * two(ones()).sum())
                parameters = (
                    [*one.parameters(), *two.parameters()] if together else two.parameters()
                )
                norms.append(float(accumulator.clip_grad_norm_(parameters, 1.0)))
                if together:
                    first.step()
                second.step()
                first.zero_grad()
                second.zero_grad()
        return [round(x, 4) for x in [*norms, *numbers(one), *numbers(two)]]

    for seen in world.run(program):
        if together:
            assert seen == [0.0, 5.0, 5.0, 5.0, -1.2, -1.6]
        else:  # between windows the norm is that of the last window
            assert (seen[2:4], seen[-2:]) == ([3.0, 4.0], [-2.0, -2.0])


@everywhere
def test_the_norm_is_that_of_synchronized_unscaled_gradients(world: Ranks) -> None:
    cases = list(product([1.0, 2.0, float("inf")], ["no", "fp16"]))

    def norms(norm_type: float, mode: str) -> tuple[float, float]:
        model = nn.ModuleList([unit_model(), unit_model()])
        accumulator = Accumulator(1, precision=Precision(mode))
        prepare(torch.optim.SGD(model.parameters()), accumulator=accumulator)
        with accumulator.accumulate(model):
            rank = syncprims.get_rank()
            loss = model[0](ones()).sum() * (2 + rank) - 3 * model[1](ones()).sum()
            accumulator.backward(loss)
            norm = accumulator.clip_grad_norm_(model.parameters(), 0.5, norm_type)
        whole = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type)  # type: ignore[misc]
        return float(norm), float(whole)

    mean = sum(2 + rank for rank in range(world.ranks)) / world.ranks
    for found in world.run(lambda: [norms(*case) for case in cases]):
        for (norm_type, mode), (seen, after) in zip(cases, found, strict=True):
            norm = float(torch.tensor([mean, -3.0]).norm(norm_type))
            assert seen == pytest.approx(norm), (norm_type, mode)
            assert after == pytest.approx(0.5, rel=1e-4), (norm_type, mode)


@everywhere
@on_every_rank
def test_without_a_scaler_nothing_is_skipped() -> None:
    model, accumulator = unit_model(), Accumulator()
    plain: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = prepare(plain, accumulator=accumulator)
    with accumulator.accumulate(model):
        accumulator.backward(model(ones() * float("nan")).sum())
        norm = accumulator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    skipped, is_nan, weight = optimizer.step_was_skipped, bool(norm != norm), numbers(model)[0]
    assert not skipped
    assert is_nan
    assert weight != weight


@alone
@on_every_rank
def test_between_windows_clipping_does_nothing() -> None:
    model = unit_model()
    accumulator, _ = scaled(2, model)
    with accumulator.accumulate(model):
        accumulator.backward(model(ones()).sum())
        accumulator.clip_grad_norm_(model.parameters(), 0.1)
        accumulator.clip_grad_value_(model.parameters(), 0.1)
        assert gradient(model) == 1024.0
    with accumulator.accumulate(model):
        accumulator.backward(model(ones()).sum())
        accumulator.clip_grad_value_(model.parameters(), 10.0)
        assert gradient(model) == 1.0  # it is unscaled before it is compared
        accumulator.clip_grad_value_(model.parameters(), 0.1)
        assert gradient(model) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="prepared optimizer"):
        scaled(1)[0].clip_grad_norm_(model.parameters(), 1.0)
