"""Sends and receives that are under way while their rank waits in another call.

What finds no room at once needs its rank again: a tensor of many pieces, or many tensors. Gloo goes
on with it in threads of its own, so that these programs are correct.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from conftest import both_kinds

import syncprims as sp
from syncprims.testing import DeadlockError, explore, run_world

dist: Any = torch.distributed
#: Each rank meets the other in a branch of its own.
pytestmark = pytest.mark.filterwarnings("ignore::syncprims.UnequalCallSites")

LARGE = 40_000_000  # items: more pieces than a board has room for
MANY = 50  # messages, likewise


def one() -> torch.Tensor:
    return torch.ones(1)


def barrier() -> None:
    dist.barrier()


def all_reduce() -> None:
    dist.all_reduce(one())


def own_barrier() -> None:
    sp.barrier()


def barrier_of_other_group() -> None:
    dist.barrier(group=groups()[0])


def receive_of_other_tag() -> None:
    sent = dist.isend(one(), 1 - dist.get_rank(), tag=7)
    dist.recv(one(), 1 - dist.get_rank(), tag=7)
    sent.wait()


def store_wait() -> None:
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    number = store.add(f"calls of {rank}", 1)
    store.set(f"{rank} came to {number}", "yes")
    store.get(f"{1 - rank} came to {number}")


def groups() -> list[Any]:
    world: Any = sp.current()
    found: list[Any] = world.extras.setdefault("test groups", [])
    return found


MEETINGS = [
    barrier,
    all_reduce,
    own_barrier,
    barrier_of_other_group,
    receive_of_other_tag,
    store_wait,
]


def start() -> int:
    dist.init_process_group()
    groups().append(dist.new_group())
    return int(dist.get_rank())


def messages(size: int, count: int) -> list[torch.Tensor]:
    return [torch.full((size,), number, dtype=torch.uint8) for number in range(count)]


def sends_of_one_rank(meet: Callable[[], None], size: int, count: int) -> None:
    """Rank 0 waits for its sends after two meetings, between which rank 1 receives them."""
    sent = messages(size, count)
    if start() == 0:
        works = [dist.isend(tensor, 1) for tensor in sent]
        meet()
        meet()
        for work in works:
            work.wait()
    else:
        meet()
        room = torch.empty(size, dtype=torch.uint8)
        for tensor in sent:
            dist.recv(room, 0)
            assert torch.equal(room, tensor)
        meet()


def receives_of_one_rank(meet: Callable[[], None], size: int, count: int) -> None:
    """Rank 0 waits for its receives after the meeting, before which rank 1 sends to it."""
    sent = messages(size, count)
    if start() == 0:
        rooms = [torch.empty_like(tensor) for tensor in sent]
        works = [dist.irecv(room, 1) for room in rooms]
        meet()
        for work in works:
            work.wait()
        assert all(map(torch.equal, rooms, sent))
    else:
        for tensor in sent:
            dist.send(tensor, 0)
        meet()


@both_kinds
@pytest.mark.parametrize("program", [sends_of_one_rank, receives_of_one_rank])
def test_who_waits_goes_on_with_its_transfers(program: Callable[..., None], kind: Any) -> None:
    for meet in MEETINGS if kind == "threads" else (barrier_of_other_group, store_wait):
        run_world(functools.partial(program, meet, 1, MANY), 2, torch=True, kind=kind)


@pytest.mark.parametrize("program", [sends_of_one_rank, receives_of_one_rank])
def test_a_tensor_of_many_pieces_goes_on_likewise(program: Callable[..., None]) -> None:
    run_world(lambda: program(barrier, LARGE, 1), 2, torch=True, kind="processes")


@pytest.mark.parametrize("program", [sends_of_one_rank, receives_of_one_rank])
@pytest.mark.parametrize("meet", MEETINGS)
def test_no_order_is_a_false_report(program: Callable[..., None], meet: Callable[[], None]) -> None:
    explore(lambda: program(meet, 1, 20), 2, schedules=10, torch=True)


@both_kinds
@pytest.mark.parametrize("size", [1, LARGE])
def test_a_send_is_over_when_its_receive_has_begun(size: int, kind: Any) -> None:
    """As with Gloo, where a rank that waits for a send can make no receive."""

    def begin_first() -> None:
        other, room = 1 - start(), torch.zeros(size, dtype=torch.uint8)
        work = dist.irecv(room, other)
        dist.send(torch.ones(size, dtype=torch.uint8), other)
        work.wait()
        assert room.all()

    def send_first() -> None:
        other = 1 - start()
        dist.isend(torch.ones(size, dtype=torch.uint8), other).wait()
        dist.recv(torch.empty(size, dtype=torch.uint8), other)

    run_world(begin_first, 2, torch=True, kind=kind)
    with pytest.raises(DeadlockError, match=r"(?s)rank 0: waits .*send at .*rank 1: waits .*send"):
        run_world(send_first, 2, torch=True, kind=kind)


@both_kinds
def test_a_send_that_no_rank_receives_is_no_progress(kind: Any) -> None:
    """The rest of the program is a deadlock, and is reported as one."""

    def body() -> None:
        if start() == 0:
            for tensor in messages(1, MANY):
                dist.isend(tensor, 1)
            dist.barrier()
        else:
            dist.recv(one(), 0, tag=3)

    with pytest.raises(DeadlockError, match=r"(?s)barrier.*tag 3"):
        run_world(body, 2, torch=True, kind=kind)
