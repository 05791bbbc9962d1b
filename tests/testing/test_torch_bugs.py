"""Bugs of one rank in programs that call ``torch.distributed``: each is named, with rank and line.

Rank 2 of 4 has the bug, or rank 0 where only one rank makes a call.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from syncprims import CollectiveMismatch, PeerLost, UnequalCallSites
from syncprims.testing import (
    DeadlockError,
    Kill,
    RankDied,
    UnfinishedWork,
    every_point,
    explore,
    run_world,
)

RANKS = 4


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape or (4,))


def skipped(rank: int) -> None:
    if rank != 2:
        dist.all_reduce(ones())  # named


def wrong_call(rank: int) -> None:
    if rank == 2:
        dist.broadcast(ones(), 0)  # named
    else:
        dist.all_reduce(ones())  # named


def shape(rank: int) -> None:
    dist.all_reduce(ones(5 if rank == 2 else 4))  # named


def order_of_groups(rank: int) -> None:
    groups = [dist.new_group(), dist.new_group()]
    for group in reversed(groups) if rank == 2 else groups:
        dist.all_reduce(ones(), group=group)  # named


def group_not_made(rank: int) -> None:
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    dist.new_group()
    if rank != 2:
        dist.new_group([0, 1])  # named


def skipped_barrier(rank: int) -> None:
    if rank != 2:
        dist.barrier()  # named


def wrong_root(rank: int) -> None:
    dist.broadcast_object_list([rank], src=1 if rank == 2 else 0)  # named


def wrong_source(rank: int) -> None:
    if rank == 0:
        dist.send(ones(), dst=1)
    if rank == 1:
        dist.recv(ones(), src=2)  # named


def wrong_source_in_batch(rank: int) -> None:
    if rank < 2:
        peer = 2 if rank == 1 else 1
        ops = [dist.P2POp(dist.isend, ones(), 1 - rank), dist.P2POp(dist.irecv, ones(), peer)]
        for work in dist.batch_isend_irecv(ops):  # named
            work.wait()


def too_few_to_scatter(rank: int) -> None:
    dist.scatter(ones(), [ones()] * 3 if rank == 0 else None)  # named


def own_group_only(rank: int) -> None:
    dist.new_group([0, 1] if rank < 2 else [2, 3])  # named


def never_waited_for(rank: int) -> None:
    dist.all_reduce(ones(), async_op=True)  # named


def crossed_receives(rank: int) -> None:
    if rank < 2:
        dist.recv(ones(), src=1 - rank)  # named
        dist.send(ones(), dst=1 - rank)


def split_sizes(rank: int) -> None:
    sizes = [1, 1, 1, 2] if rank == 2 else [1] * 4
    dist.all_to_all_single(ones(), ones(sum(sizes)), [1] * 4, sizes)  # named


def wait_in_store(rank: int) -> None:
    if rank == 2:
        dist.distributed_c10d._get_default_store().get("never")  # named
    dist.all_reduce(ones())  # named


def skipped_step(rank: int) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    for step in range(3):
        if rank == 2 and step == 2:
            continue
        loss = model(ones(2, 4)).sum()
        loss.backward()  # named


def other_shape_in_backward(rank: int) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    loss = model(ones(2, 4)).sum()
    if rank == 2:
        dist.all_reduce(ones())  # named
    loss.backward()  # named


def saved_on_one_rank(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(nn.Linear(4, 4))
    if rank == 0:
        parameters: list[Any] = list(model.parameters())
        parameters[0].full_tensor()  # named


class Expected(NamedTuple):
    bug: Callable[[int], None]
    error: type[BaseException]
    says: str = ""


BUGS = [
    Expected(skipped, CollectiveMismatch, "rank 2: barrier"),
    Expected(wrong_call, CollectiveMismatch, "rank 2: broadcast 'float32[4]' from rank 0"),
    Expected(shape, CollectiveMismatch, "rank 2: all_reduce 'float32[5]'"),
    Expected(order_of_groups, DeadlockError, "rank 2: waits in its round"),
    Expected(group_not_made, DeadlockError, "rank 2: waits in its round"),
    Expected(skipped_barrier, DeadlockError, "first difference of lines: round 2"),
    Expected(wrong_root, CollectiveMismatch, "from rank 1"),
    Expected(wrong_source, DeadlockError, "rank 1: waits in its round"),
    Expected(wrong_source_in_batch, DeadlockError, "rank 1: waits in its round"),
    Expected(too_few_to_scatter, ValueError, "rank 0 of 4"),
    Expected(own_group_only, CollectiveMismatch, "of ranks [2, 3]"),
    Expected(never_waited_for, UnfinishedWork, "rank 0 of 4"),
    Expected(crossed_receives, DeadlockError, "rank 1: waits in its round"),
    Expected(split_sizes, ValueError, "rank 2 sends 8 bytes to rank 3"),
    Expected(wait_in_store, DeadlockError, "rank 2: waits in store.get 'default_pg/0//never'"),
    Expected(skipped_step, CollectiveMismatch, "rank 2: barrier"),
    Expected(other_shape_in_backward, CollectiveMismatch, "rank 2: all_reduce 'float32[4]'"),
    Expected(saved_on_one_rank, CollectiveMismatch, "rank 1: barrier"),
]
several_bugs = pytest.mark.parametrize("expected", BUGS, ids=lambda one: one.bug.__name__)


def in_program(bug: Callable[[int], None]) -> Callable[[], None]:
    """Return a program with this bug, which goes on after it."""

    def program() -> None:
        # A deadlock is one also where a time limit would end it.
        dist.init_process_group("gloo", timeout=timedelta(seconds=100))
        dist.barrier()
        bug(dist.get_rank())
        dist.barrier()
        dist.destroy_process_group()

    return program


def sound() -> float:
    """A program without a bug."""
    dist.init_process_group()
    total = ones()
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.sum().item()


def check(error: BaseException, expected: Expected) -> None:
    """Fail unless the error says which rank did what, and where."""
    assert isinstance(error, expected.error), repr(error)
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    assert expected.says in text, text
    lines, begin = inspect.getsourcelines(expected.bug)
    places = [f"{__name__}.py:{begin + i}" for i, line in enumerate(lines) if "# named" in line]
    assert places
    for place in places:
        assert place in text, f"{place} is not in: {text}"


@several_bugs
@pytest.mark.filterwarnings("default::syncprims.UnequalCallSites")
@pytest.mark.parametrize("schedules", [4, pytest.param(1000, marks=pytest.mark.soak)])
def test_a_bug_is_named_under_every_schedule(expected: Expected, schedules: int) -> None:
    for seed in range(schedules):
        with pytest.raises(expected.error) as caught:
            run_world(in_program(expected.bug), RANKS, torch=True, seed=seed)
        check(caught.value, expected)
    assert run_world(sound, RANKS, torch=True) == [16.0] * RANKS


@several_bugs
@pytest.mark.filterwarnings("default::syncprims.UnequalCallSites")
def test_a_bug_is_named_in_processes(expected: Expected) -> None:
    with pytest.raises(expected.error) as caught:
        run_world(in_program(expected.bug), RANKS, torch=True, kind="processes")
    check(caught.value, expected)


def test_a_call_of_torch_that_meets_one_of_another_line_is_a_warning() -> None:
    def program() -> None:
        dist.init_process_group()
        if dist.get_rank() == 0:
            dist.barrier()  # of a save
        dist.barrier()  # of an epoch
        if dist.get_rank() != 0:
            dist.barrier()  # the next save
        if dist.get_rank() == 0:  # the root in a branch is common
            dist.broadcast(ones(), 0)
        else:
            dist.broadcast(torch.zeros(4), 0)
        dist.destroy_process_group()

    with pytest.warns(UnequalCallSites) as caught:
        run_world(program, 3, torch=True)
    first = program.__code__.co_firstlineno
    assert len(caught) == 2
    assert f"  rank 0: barrier (tests/testing/{__name__}.py:{first + 3})\n" in str(
        caught[0].message
    )
    assert f"  ranks [1, 2]: barrier (tests/testing/{__name__}.py:{first + 4})\n" in str(
        caught[0].message
    )


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_tensor_changes_when_the_program_waits(kind: Any) -> None:
    def program() -> list[float]:
        dist.init_process_group("gloo")
        summed, parts = ones(1), [torch.zeros(1), torch.zeros(1)]
        work: Any = dist.all_reduce(summed, async_op=True)
        gathered: Any = dist.all_gather(parts, ones(1), async_op=True)
        seen = [summed.item(), *map(float, parts)]
        work.wait()
        seen += [summed.item(), gathered.get_future().value() is not None, *map(float, parts)]
        dist.destroy_process_group()
        return seen

    assert run_world(program, 2, torch=True, kind=kind) == [[1, 0, 0, 2, True, 1, 1]] * 2


def test_a_refused_call_is_shown_at_the_line_of_the_test() -> None:
    with pytest.raises(ValueError, match="give one for each") as caught:
        run_world(in_program(too_few_to_scatter), RANKS, torch=True)
    assert [str(caught.traceback[-1].path), caught.traceback[-1].name] == [
        str(Path(__file__)),
        too_few_to_scatter.__name__,
    ]


def train() -> float:
    """Train with DDP."""
    dist.init_process_group()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), bucket_cap_mb=0.00001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(ones(2, 4)).sum().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    return sum(parameter.sum().item() for parameter in model.parameters())


def test_a_kill_at_every_round_of_a_training_is_named() -> None:
    points = every_point(train, Kill(rank=1), 3, torch=True)
    assert len(points) > 6  # broadcasts of the start, two buckets in each step, and the barrier
    for point in points[:-1]:
        assert isinstance(point.error, PeerLost), point
        assert point.error.rank == 1


def test_a_kill_in_a_backward_pass_is_named_in_processes() -> None:
    with pytest.raises((PeerLost, RankDied), match="rank 1"):
        run_world(train, 3, torch=True, kind="processes", faults=[Kill(rank=1, at="all_reduce")])


@pytest.mark.parametrize("schedules", [10, pytest.param(10_000, marks=pytest.mark.soak)])
def test_a_correct_training_has_no_report(schedules: int) -> None:
    assert explore(train, 3, schedules=schedules, torch=True).distinct > 1


def sent_and_cleared(one: torch.Tensor) -> None:
    if dist.get_rank():
        dist.recv(one, 0)
    else:
        work: Any = dist.isend(one, 1)
        one.zero_()
        work.wait()


def filled_before_received(one: torch.Tensor) -> None:
    if dist.get_rank():
        work: Any = dist.irecv(one, 0)
        one.fill_(float("nan"))
        work.wait()
    else:
        dist.send(one, 1)


def divided_before_wait(one: torch.Tensor) -> None:
    work = dist.all_reduce(one, async_op=True)
    one.div_(2)
    work.wait()


def source_changed_before_wait(one: torch.Tensor) -> None:
    work = dist.broadcast(one, 0, async_op=True)
    if dist.get_rank() == 0:
        one.add_(1)
    work.wait()


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize(
    "bug",
    [sent_and_cleared, filled_before_received, divided_before_wait, source_changed_before_wait],
)
def test_a_buffer_that_changes_before_wait_is_named(
    bug: Callable[[torch.Tensor], None], kind: Any
) -> None:
    def body() -> None:
        dist.init_process_group("gloo")
        bug(torch.ones(4))

    with pytest.raises(UnfinishedWork) as caught:
        run_world(body, 2, kind=kind, torch=True)
    assert str(caught.value).count("test_torch_bugs.py:") == 2


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_buffer_that_stays_as_it_is_until_wait_is_no_bug(kind: Any) -> None:
    def body() -> list[float]:
        dist.init_process_group("gloo")
        peer = 1 - dist.get_rank()
        one, other = torch.tensor([float("nan"), 1.0]), torch.zeros(2)  # NaN equals nothing
        works: Any = [dist.irecv(other, peer), dist.isend(one, peer)]
        assert other.tolist() == [0, 0]  # whoever reads it too early sees that
        for work in works:
            work.wait()
        summed: Any = dist.all_reduce(one, async_op=True)
        summed.wait()
        return [other[1].item(), one[1].item()]

    assert run_world(body, 2, kind=kind, torch=True) == [[1, 2]] * 2
