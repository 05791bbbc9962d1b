"""Training goes on after a loss: saves, loaders and optimizers follow `reform`."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import seeds
from support.training_models import Stream
from torch.utils.data import DataLoader, Sampler, TensorDataset

import syncprims as sp
from syncprims.testing import Fault, FaultMissed, Join, Kill, Point, every_point, run_world
from syncprims.training import Checkpoints, prepare_data_loader, set_seed

LOST = (sp.PeerLost, sp.PeerFailed)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_save_under_way_counts_as_not_made(victim: int, tmp_path: Path) -> None:
    """Neither the wait of a survivor nor the next save hangs, and that one is whole."""

    def program() -> Any:
        checkpoints = Checkpoints(tmp_path / "steps")
        state = {"w": torch.nn.Linear(4, 4)}
        checkpoints.save(1, state)
        saving = None
        try:
            saving = checkpoints.save(2, state, block=False)
            sp.barrier("last")
            saving.wait()
        except LOST:
            sp.reform()
        if saving is not None:
            with pytest.raises(sp.CheckpointError, match="was not finished when a rank was lost"):
                saving.wait()
            saving.wait()  # once
        checkpoints.save(3, state)
        assert checkpoints.latest() == 3
        checkpoints.load(state)
        return sp.get_world_size()

    results = run_world(program, 3, kind="processes", faults=[Kill(rank=victim, at="last")])
    assert [size for size in results if size is not None] == [2, 2]


def test_no_process_draws_the_random_numbers_of_another_one() -> None:
    def program() -> set[float]:
        drawn: set[float] = set()
        for _ in range(2):
            set_seed(3, device_specific=True)
            drawn.add(torch.rand(()).item())
            if sp.current().change is None:
                with pytest.raises(sp.PeerLost):
                    sp.barrier("drawn")
                while not sp.reform().joined:
                    pass  # in some orders the survivors decide before it waits
        return drawn

    results = run_world(program, 3, faults=[Kill(rank=1, at="drawn"), Join(0, at=1)])
    assert results.pop(1) is None
    assert [len(drawn) for drawn in results] == [1, 1, 1]
    assert len(set.union(*results)) == 3


class Step(NamedTuple):
    """A step of a training, and the state before it."""

    epoch: int  #: of the world
    size: int  #: of the world
    order: dict[str, Any]  #: the state of the loader
    weight: float
    samples: list[list[int]]  #: by rank
    result: float  #: the weight after it


COUNT, BATCH = 96, 2


def train(begin: Step | None = None, most: int = COUNT) -> list[Step]:
    """Return the steps of an epoch, from one on, as ranks make them that go on after losses."""
    data = DataLoader(TensorDataset(torch.arange(COUNT)), BATCH, shuffle=True)
    loader: Any = prepare_data_loader(data, seed=5)  # without one, ranks agree on one: a round
    if begin is not None:
        loader.load_state_dict(begin.order)
    weight, steps, stop = begin.weight if begin else 1.0, list[Step](), sp.Trigger()
    batches, change = iter(loader), sp.current().change
    while len(steps) < most:
        try:
            if change is not None:
                steps, weight = sp.hand_over((steps, weight), change)
                loader.reshard(change)
                change = None
            order = loader.state_dict()
            batch = next(batches, None)
            if batch is None:
                break
            stop.check()
            if stop.joiners:
                change = sp.reform()
                continue
            samples = sp.all_gather(batch[0].tolist())
            result = sp.all_reduce(weight * 0.9 + math.sin(sum(batch[0].tolist())), "mean")
            world = sp.current()
            steps = [*steps, Step(world.epoch, world.world_size, order, weight, samples, result)]
            weight = result
        except LOST:
            change = sp.reform()
    return steps


def run_with_losses(seed: int, last: int = 40) -> list[list[Step]]:
    """Return the steps of the ranks that are left."""
    dice = random.Random(seed)
    victims = dice.sample(range(4), dice.randint(1, 3))
    faults: list[Fault] = [Kill(rank, at=dice.randint(2, last)) for rank in victims]
    faults += [Join(dice.randrange(4), at=dice.randint(2, last)) for _ in range(seed % 3)]
    try:
        results = run_world(train, 4, faults=faults, seed=seed)
    except FaultMissed:  # the training was over before: let them all come earlier
        return run_with_losses(seed, last - 5)
    return [steps for steps in results if steps is not None]


@seeds([range(10)], range(1_000, 3_000, 100))
def test_a_training_with_losses_computes_as_a_fresh_one(seeds: range) -> None:
    """Each sample is taken once; those of an unfinished step again, by the ranks left."""
    for seed in seeds:
        steps, *others = run_with_losses(seed)
        assert others == [steps] * len(others)
        taken = [sample for step in steps for own in step.samples for sample in own]
        assert {*taken} == {*range(COUNT)}
        # Loaders pad the last step, so that all ranks take the same number of batches.
        assert len(taken) - COUNT < BATCH * steps[-1].size
        for _, same in itertools.groupby(steps, lambda step: step.epoch):
            first, *more = same
            count = 1 + len(more)
            fresh = run_world(functools.partial(train, first, count), first.size)
            assert [step[1:] for step in fresh[0]] == [step[1:] for step in (first, *more)]


class Reversed(Sampler[int]):
    """A sampler of the user's, whose order the ranks compare when an epoch begins."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(23, -1, -1))

    def __len__(self) -> int:
        return 24


#: Loaders whose iterations make rounds.
IN_ROUNDS: dict[str, Any] = {
    "stream": lambda: prepare_data_loader(DataLoader(Stream(24), 2), seed=5),
    "sent": lambda: prepare_data_loader(
        DataLoader(range(24), 2, shuffle=True), seed=5, dispatch_batches=True  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ),
    "own sampler": lambda: prepare_data_loader(
        DataLoader(range(24), 2, sampler=Reversed()), seed=5  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", IN_ROUNDS)
def test_an_iteration_in_rounds_survives_a_loss_in_any_of_them(way: str) -> None:
    """The loop holds one iterator, and asks for its batches where it catches the loss."""

    def program() -> list[list[int]]:
        loader, taken, change = IN_ROUNDS[way](), list[list[int]](), sp.current().change
        batches = iter(loader)
        while True:
            try:
                if change is not None:
                    taken = sp.hand_over(taken, change)
                    loader.reshard(change)
                    change = None
                batch = next(batches, None)
                if batch is None:
                    assert next(batches, None) is None, "the epoch is over"
                    assert loader.state_dict()["epoch"] == 1
                    return taken
                sp.barrier("ready")
                taken = [*taken, *sp.all_gather(batch.tolist())]
            except LOST:
                change = sp.reform()

    def check(point: Point) -> None:
        assert point.error is None
        assert point.results is not None
        left = [taken for taken in point.results if taken is not None]
        assert left == left[:1] * len(left)
        count = [sum(own.count(item) for own in left[0]) for item in range(24)]
        assert min(count) == 1, f"lost: {[i for i, n in enumerate(count) if not n]}"
        assert sum(count) - 24 < 2 * 3, "no more than the padding of the last round"

    for victim in range(3):
        assert len(every_point(program, Kill(victim), 3, check=check)) > 8


def test_model_optimizer_and_schedule_are_handed_over() -> None:
    def program() -> Any:
        torch.manual_seed(sp.get_rank())
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + sp.get_rank()))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(1 + sp.get_rank()):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            schedule.step()
        with pytest.raises(sp.PeerLost):
            sp.barrier("last")
        change = sp.reform()
        behind = change._replace(furthest=1, rounds=(2, 3))
        tree = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": sp.get_rank()}
        taken = sp.hand_over(tree, behind)
        assert taken["model"] is model
        sp.assert_same([p.detach() for p in model.parameters()], "weights")
        sp.assert_same([optimizer.param_groups[0]["lr"], schedule.last_epoch], "schedule")
        states = [s["exp_avg"] for s in optimizer.state_dict()["state"].values()]
        sp.assert_same(states, "momentum")
        return taken["step"]

    results = run_world(program, 3, torch=True, faults=[Kill(rank=2, at="last")])
    assert results == [1, 1, None]
