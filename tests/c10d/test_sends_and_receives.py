"""Sends and receives: order, tags, sizes, and ranks that run ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import in_processes, on_every_rank, several
from support.process_groups import dist, process_group

import syncprims as sp

pytestmark = [in_processes, pytest.mark.filterwarnings("ignore::FutureWarning")]


@several(2)
@on_every_rank
def test_tensors_of_all_sizes_arrive_in_their_order() -> None:
    rank = sp.get_rank()
    with process_group():
        for size in (0, 1, 300, 5_000, 200_000, 1_500_000):
            for dtype in (torch.float32, torch.bfloat16, torch.bool):
                sent = (torch.arange(size) % 7).to(dtype)
                if rank == 0:
                    dist.send(sent, 1)
                    dist.send(sent.flip(0), 1)
                else:
                    first, second = torch.empty_like(sent), torch.empty_like(sent)
                    assert dist.recv(first, 0) == 0
                    dist.recv(second, 0)
                    assert torch.equal(first, sent)
                    assert torch.equal(second, sent.flip(0))


@several(2)
@on_every_rank
def test_tags_are_streams_of_their_own() -> None:
    with process_group():
        if sp.get_rank() == 0:
            for tag in (1, 2, 3):
                dist.send(torch.tensor([tag]), 1, tag=tag)
        else:
            for tag in (3, 1, 2):
                got = torch.empty(1, dtype=torch.int64)
                dist.recv(got, 0, tag=tag)
                assert got.item() == tag
            with pytest.raises(ValueError, match="name the rank that sends, as src="):
                dist.recv(got)


@several(2)
@on_every_rank
def test_ranks_may_all_send_first() -> None:
    """More than a board holds, and more than a window: waits of one go on with the others."""
    rank = sp.get_rank()
    other = 1 - rank
    with process_group():
        for size, count in ((10, 40), (2_500_000, 3)):
            sends = [dist.isend(torch.full((size,), n + rank), other) for n in range(count)]
            rooms = [torch.empty(size, dtype=torch.int64) for _ in range(count)]
            receives = [dist.irecv(room, other) for room in rooms]
            for work in (*sends, *receives):
                work.wait()
            assert [int(room[-1]) for room in rooms] == [n + other for n in range(count)]
        room = torch.empty(2)
        work = dist.irecv(room, other)
        dist.isend(torch.full((2,), float(rank)), other).wait()
        while not work.is_completed():
            pass
        assert room.tolist() == [other] * 2


@several(4)
@on_every_rank
def test_batches_and_rings() -> None:
    rank, n = sp.get_rank(), sp.get_world_size()
    with process_group():
        for size in (4, 300_000):
            room = torch.empty(size)
            mine = torch.full((size,), float(rank))
            ops = [
                dist.P2POp(dist.isend, mine, (rank + 1) % n),
                dist.P2POp(dist.irecv, room, (rank - 1) % n),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            assert (room == (rank - 1) % n).all()
        box: list[Any] = [None]
        if rank == 0:
            dist.send_object_list([{"to": 3}], 3)
        elif rank == 3:
            dist.recv_object_list(box, 0)
            assert box == [{"to": 3}]
