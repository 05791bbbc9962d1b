"""The default group of torch.distributed, as a world opens and ends it."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from harness import Kind, Ranks, Signs

import syncprims as sp

if TYPE_CHECKING:
    from pathlib import Path


def test_a_world_says_whether_there_is_one(world: Ranks, kind: Kind) -> None:
    def program() -> tuple[bool, str]:
        opened = sp.current().open_process_group()
        return opened, sp.broadcast("goes on")

    there = kind.backend == "torch" and kind.ranks > 1
    assert world.run(program) == [(there, "goes on")] * kind.ranks


@pytest.mark.parametrize("hosts", [1, 2])
def test_it_is_opened_once_and_ends_with_its_world(hosts: int, meeting_place: Path) -> None:
    def program() -> list[Any]:
        import torch
        import torch.distributed as dist

        seen: list[Any] = []
        for _ in range(2):
            with sp.init() as world:
                seen.append((world.open_process_group(), world.open_process_group()))
                total = torch.full((2,), float(sp.get_rank()))
                dist.all_reduce(total)
                seen.append(total.tolist())
            seen.append(dist.is_initialized())
        return seen

    world = Ranks(Kind("torch", 4, hosts=hosts), meeting_place)
    assert world.run_alone(program) == [[(True, True), [6.0, 6.0], False] * 2] * 4
    world.check_nothing_left()


@pytest.mark.parametrize(("engine", "sees", "chosen"), [
    ("torch", 0, "gloo"), ("torch", 1, "gloo"), ("torch", 2, "cpu:gloo,cuda:nccl"),
    ("gloo", 2, "gloo"), ("nccl", 2, "cpu:gloo,cuda:nccl"),
    ("nccl", 1, "cpu:gloo,cuda:nccl"),  # perhaps each its own; NCCL refuses two on the same
])  # fmt: skip
def test_its_engine_is_the_one_asked_for_or_the_one_that_the_devices_allow(
    engine: str, sees: int, chosen: str, meeting_place: Path
) -> None:
    def program() -> Any:
        import torch
        import torch.distributed as dist

        torch.cuda.device_count = lambda: sees
        torch.cuda.is_available = lambda: sees > 0
        torch.cuda.current_device = lambda: 0
        group: Any = dist
        begin = group.init_process_group
        options: dict[str, Any] = {}

        def note(**given: Any) -> None:
            options.update(given)
            begin("gloo", **{k: v for k, v in given.items() if k not in ("backend", "device_id")})

        group.init_process_group = note
        with sp.init() as world:
            world.open_process_group()
        return options["backend"], options.get("device_id", torch.device("cpu")).index

    found = Ranks(Kind(engine, 2), meeting_place).run_alone(program)
    device = (lambda rank: rank if sees == 2 else 0) if "nccl" in chosen else (lambda _: None)
    assert found == [(chosen, device(rank)) for rank in range(2)]


@pytest.mark.parametrize("hosts", [1, 2])
def test_nobody_has_it_before_all_have_it(hosts: int, meeting_place: Path, signs: Signs) -> None:
    """One that had, and left, would break what the others still connect to."""

    def program() -> bool:
        import torch.distributed as dist

        if not sp.is_main():
            sp.current().open_process_group()
            signs.give("another has it")
            return True
        begin: Any = dist.init_process_group
        early: list[bool] = []

        def begin_slowly(*args: Any, **options: Any) -> None:
            begin(*args, **options)
            time.sleep(0.3)  # long enough for the other to go on, if it may
            early.append(signs.given("another has it"))

        dist.init_process_group = begin_slowly
        sp.current().open_process_group()
        return early == [False]

    assert Ranks(Kind("torch", 2, hosts=hosts), meeting_place).run(program) == [True, True]


def test_a_rank_that_dies_before_is_named(meeting_place: Path) -> None:
    def program() -> Any:
        sp.barrier()
        if sp.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(sp.PeerLost) as caught:
            sp.current().open_process_group()
        return caught.value.rank, "open_process_group" in str(caught.value)

    world = Ranks(Kind("torch", 2), meeting_place)
    assert world.outcomes(program)[0] == (1, True)
