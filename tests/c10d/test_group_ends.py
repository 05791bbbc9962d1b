"""What destroyed groups leave behind: nothing, once all their members have left."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from conftest import both_kinds, in_processes, several
from support.process_groups import dist, process_group
from support.rank_worlds import Ranks

import syncprims as sp
from syncprims.testing import run_world

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def use_and_destroy(rank: int, others: list[int]) -> None:
    """Use all that a group holds: board, small and large memory, notes that spill, transfers."""
    group = dist.new_group(others)
    dist.all_reduce(torch.ones(3), group=group)
    dist.all_reduce(torch.ones(5_000), group=group)
    found: list[Any] = [None] * len(others)
    dist.all_gather_object(found, "x" * 20_000, group=group)
    if rank == others[0]:
        dist.send(torch.ones(5_000), others[1], group=group)
    else:
        dist.recv(torch.ones(5_000), others[0], group=group)
    dist.destroy_process_group(group)


def resident() -> int:
    """Return the bytes of memory that this process uses."""
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@in_processes
@several(2)
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux")  # noqa: PTH112
@pytest.mark.parametrize("count", [5, pytest.param(200, marks=pytest.mark.soak)])
def test_groups_made_and_destroyed_hold_nothing(world: Ranks, count: int) -> None:
    if world.kind.backend == "mine":
        pytest.skip("it cannot close a board")

    def descriptors() -> list[str]:
        # One of these is that of the listing itself, which has ended.
        return [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]  # noqa: PTH208

    def held() -> tuple[int, int, int]:
        """Return the numbers of descriptors, of maps and files of the world, and their bytes."""
        gc.collect()
        with open("/proc/self/maps") as maps:  # noqa: PTH123
            mapped = sum("board-" in line for line in maps)
        size = files = 0
        for folder, _, names in os.walk(world.directory):
            for name in names:
                files += 1
                size += os.stat(os.path.join(folder, name)).st_size  # noqa: PTH116, PTH118
        return sum(map(os.path.exists, descriptors())), mapped + files, size

    def program() -> tuple[Any, Any, int]:
        rank = sp.get_rank()
        with process_group():
            for _ in range(10):
                use_and_destroy(rank, [0, 1])
            sp.barrier()
            before, memory = held(), resident()
            sp.barrier()
            for _ in range(count):
                use_and_destroy(rank, [0, 1])
            sp.barrier()
            after = held()
            sp.barrier()
            return before, after, resident() - memory

    for before, after, grown in world.run(program):
        assert after[1:] == before[1:]
        assert after[0] <= before[0] + 1  # the pipe that wakes the other rank is opened when needed
        assert grown < 8 << 20


def test_a_world_of_threads_holds_no_board_of_a_destroyed_group() -> None:
    def program() -> int:
        dist.init_process_group()
        world: Any = sp.current()
        for _ in range(20):
            use_and_destroy(dist.get_rank(), [0, 1])
        dist.barrier()
        held = len(world.backend._world.boards) + len(world._named)
        dist.barrier()
        dist.destroy_process_group()
        return held

    assert run_world(program, 2, torch=True) == [3, 3]  # two boards, and the default group's rounds


@both_kinds
def test_a_late_rank_finds_what_was_sent_before_the_group_was_destroyed(kind: Any) -> None:
    def program() -> None:
        dist.init_process_group()
        group = dist.new_group()
        if dist.get_rank() == 0:
            dist.isend(torch.ones(2), 1, group=group)
            dist.destroy_process_group(group)
            with pytest.raises(sp.WorldClosed, match=r"is destroyed: make its calls before"):
                dist.distributed_c10d.ProcessGroup.barrier(group)
        dist.barrier()
        if dist.get_rank() == 1:
            room = torch.zeros(2)
            dist.recv(room, 0, group=group)
            assert room.tolist() == [1, 1]
            dist.destroy_process_group(group)

    run_world(program, 2, torch=True, kind=kind)


@both_kinds
def test_a_transfer_that_ends_with_its_group_is_named(kind: Any) -> None:
    def program() -> None:
        dist.init_process_group()
        group = dist.new_group()
        if dist.get_rank() == 0:
            for _ in range(20):
                dist.isend(torch.ones(2), 1, group=group)
            dist.destroy_process_group(group)
        dist.barrier()
        if dist.get_rank() == 1:
            with pytest.raises(sp.PeerLost, match=r"rank 0 has destroyed .* before send/recv"):
                dist.recv(torch.ones(2), 0, group=group)

    run_world(program, 2, torch=True, kind=kind)
