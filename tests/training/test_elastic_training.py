"""Training goes on after a loss: saves, loaders and optimizers follow `reform`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import syncprims as sp
from syncprims.testing import Join, Kill, run_world
from syncprims.training import Accumulator, Checkpoints, prepare, set_seed

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


@pytest.mark.parametrize("lose", [{1: 3}, {0: 2}, {3: 1, 2: 5}], ids=str)
def test_each_sample_is_taken_once_in_an_epoch(lose: dict[int, int]) -> None:
    """Those of a step that was not finished are taken again by the ranks that are left."""
    count, batch = 96, 4

    def program() -> Any:
        data = TensorDataset(torch.arange(count))
        loader: Any = prepare(DataLoader(data, batch, shuffle=True), accumulator=Accumulator(1))
        taken: dict[int, int] = {}
        change: sp.Change | None = None
        batches = iter(loader)
        steps = 0
        while True:
            try:
                if change is not None:
                    steps = sp.hand_over(steps, change)
                    loader.reshard(change)
                    change = None
                chosen = next(batches, None)
                if chosen is None:
                    break
                steps += 1
                of_all = sp.all_gather(chosen[0].tolist(), name=f"step {steps}")
                for index in itertools.chain(*of_all):
                    taken[index] = taken.get(index, 0) + 1
            except LOST:
                steps -= 1
                change = sp.reform()
        return taken

    faults = [Kill(rank=rank, at=f"step {step}") for rank, step in lose.items()]
    results = [taken for taken in run_world(program, 4, faults=faults) if taken is not None]
    assert len(results) == 4 - len(lose)
    assert results == [results[0]] * len(results)
    # Loaders pad the last step, so that all ranks take the same number of batches.
    padding = sum(results[0].values()) - count
    assert set(results[0]) == set(range(count))
    assert 0 <= padding < batch * 4


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
