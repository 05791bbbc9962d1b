"""The default group of torch.distributed: a world opens and closes it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import soak
from support.rank_environment import free_port
from support.rank_worlds import Died, Kind, Ranks, Scripts, Signs, served_store

import syncprims as sp


def test_every_world_has_one_also_of_one_rank(world: Ranks, kind: Kind) -> None:
    def program() -> tuple[bool, int, str]:
        import torch.distributed as dist

        opened = sp.current().open_process_group()
        return opened, dist.get_world_size(), sp.broadcast("goes on")

    if kind.backend == "threads":
        pytest.skip("its ranks share torch's groups, unless torch=True")
    assert world.run(program) == [(True, kind.ranks, "goes on")] * kind.ranks


@pytest.mark.parametrize("kind", [Kind("torch", 4), Kind("torch", 4, 2), Kind("file", 4)], ids=str)
def test_it_is_opened_once_and_ends_with_its_world(kind: Kind, meeting_place: Path) -> None:
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

    world = Ranks(kind, meeting_place)
    assert world.run_alone(program) == [[(True, True), [6.0, 6.0], False] * 2] * 4
    world.check_nothing_left()


@pytest.mark.parametrize(("hosts", "victim"), [(1, 4), (2, 0), soak(1, 0), soak(2, 4)])
def test_ddp_goes_on_in_a_new_group(hosts: int, victim: int, meeting_place: Path) -> None:
    """Ranks that wait in Gloo's own calls for one that has left raise, and come, too."""

    def program() -> Any:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        sp.current().open_process_group()
        torch.manual_seed(0)
        model: Any = DistributedDataParallel(torch.nn.Linear(4, 4))
        steps = 0
        while steps < 6:
            try:
                if sp.current().epoch == 0 and (sp.get_rank(), steps) == (victim, 3):
                    os.kill(os.getpid(), signal.SIGKILL)
                model.zero_grad()
                model(torch.ones(1, 4) * sp.get_rank()).sum().backward()
                steps += 1
            except (sp.PeerLost, sp.PeerFailed, RuntimeError):
                change = sp.reform()
                sp.current().open_process_group()
                steps = sp.hand_over([steps], change)[0]
                model = DistributedDataParallel(model.module)
        return sp.all_gather([steps, *next(model.parameters()).grad.ravel().tolist()])

    with served_store() as store:  # that outlives rank 0
        variables = store.variables if hosts > 1 else {}
        results = Ranks(Kind("torch", 6, hosts), meeting_place).outcomes(
            program, start=True, **variables
        )
    assert isinstance(results.pop(victim), Died)
    assert results == [[[6, *[2.0] * 16]] * 5] * 5  # the mean of what ranks 0 to 4 have


@pytest.mark.parametrize(("engine", "sees", "chosen"), [
    ("torch", 0, "gloo"), ("torch", 1, "gloo"), ("torch", 2, "cpu:gloo,cuda:nccl"),
    ("gloo", 2, "gloo"), ("nccl", 2, "cpu:gloo,cuda:nccl"),
    ("nccl", 1, "cpu:gloo,cuda:nccl"),  # perhaps each its own; NCCL refuses two on the same
])  # fmt: skip
def test_its_engine_is_the_one_asked_for_or_possible(
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


def test_a_rank_that_raises_ends_as_any_program(meeting_place: Path, tmp_path: Path) -> None:
    scripts = Scripts(Kind("torch", 2), meeting_place, tmp_path)
    raised, told = scripts.run("""
        import select, torch, torch.distributed as dist
        world = init()
        world.open_process_group()
        pids = all_gather(os.getpid())
        if rank == 0:
            pending = dist.all_reduce(torch.ones(4), async_op=True)
            raise ValueError("in the middle of it")
        eye = os.pidfd_open(pids[0])
        try:
            barrier()
        except PeerFailed as error:
            print("told of", error.rank)
        print("it ended", bool(select.select([eye], [], [], 30)[0]))
    """)
    assert raised.code == 1, raised.err  # and not SIGABRT's
    assert raised.err.rstrip().endswith("ValueError: in the middle of it")
    assert (told.code, told.out) == (0, "told of 0\nit ended True\n"), told.err


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("way", ["an error", "a timeout, caught", "an interrupt"])
def test_an_end_after_a_failure_waits_for_nobody(
    way: str, hosts: int, meeting_place: Path, signs: Signs
) -> None:
    def first(dist: Any, torch: Any) -> None:
        with sp.init() as world:
            world.open_process_group()
            for group in (dist.group.WORLD, dist.new_group()):
                if sp.is_last():
                    dist.all_reduce(torch.ones(2), async_op=True, group=group)
            if sp.is_main():  # who serves the store, where there are several hosts, leaves last
                signs.wait("the other has left")
                return
            if way == "a timeout, caught":
                with pytest.raises(sp.SyncTimeout):
                    sp.barrier(timeout=0.2)
            else:
                raise (ValueError if way == "an error" else KeyboardInterrupt)

    def program() -> list[Any]:
        import torch
        import torch.distributed as dist

        with contextlib.suppress(ValueError, KeyboardInterrupt):
            first(dist, torch)
        left = not dist.is_initialized()
        if sp.is_last():
            signs.give("the other has left")
        with sp.init() as world:
            world.open_process_group()
            total = torch.full((2,), 1.0 + sp.get_rank())
            dist.all_reduce(total)
        return [left, total.tolist(), dist.is_initialized()]

    world = Ranks(Kind("torch", 2, hosts=hosts), meeting_place)
    assert world.run_alone(program) == [[True, [3.0, 3.0], False]] * 2


def test_a_rank_that_ends_in_peace_tells_so_before_it_waits(meeting_place: Path) -> None:
    def program() -> Any:
        import torch
        import torch.distributed as dist

        sp.current().open_process_group()
        if not sp.is_main():
            dist.all_reduce(torch.ones(2), async_op=True)  # for which the other never comes
            return None
        with pytest.raises(sp.PeerLost) as caught:
            sp.barrier()
        return caught.value.rank, "finished" in str(caught.value)

    world = Ranks(Kind("torch", 2), meeting_place)
    assert world.outcomes(program) == [(1, True), None]


def test_what_is_pending_at_a_peaceful_end_is_finished(meeting_place: Path, signs: Signs) -> None:
    def program() -> list[float] | None:
        import torch
        import torch.distributed as dist

        value = torch.full((2,), 1.0 + sp.get_rank())
        sp.current().open_process_group()
        sp.barrier()
        if not sp.is_main():
            dist.all_reduce(value, async_op=True)
            signs.give("on its way out")
            return None
        signs.wait("on its way out")
        dist.all_reduce(value)
        return [float(x) for x in value]

    assert Ranks(Kind("torch", 2), meeting_place).run(program) == [[3.0, 3.0], None]


def test_a_group_that_is_not_gloos_is_left_to_torch_after_a_failure(meeting_place: Path) -> None:
    """As NCCL's: to end it might wait, or end what is pending on a device under its users."""

    def program() -> list[bool]:
        import torch.distributed as dist
        from torch.testing._internal.distributed import fake_pg  # noqa: F401 - is registered

        asked: list[int] = []
        group: Any = dist
        group.destroy_process_group = lambda: asked.append(1)
        with pytest.raises(ValueError, match="own"), sp.init() as world:  # noqa: PT012
            world.open_process_group()
            dist.new_group(backend="fake")
            raise ValueError("its own")
        return [dist.is_initialized(), bool(asked)]

    assert Ranks(Kind("torch", 2), meeting_place).run_alone(program) == [[True, False]] * 2


@pytest.mark.parametrize("hosts", [soak(1), 2])
def test_a_forked_child_ends_as_it_likes(hosts: int, meeting_place: Path, tmp_path: Path) -> None:
    scripts = Scripts(Kind("torch", 2, hosts=hosts), meeting_place, tmp_path)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    source = """
        import numpy, select, torch, torch.distributed as dist
        init().open_process_group()
        total = torch.ones(2)
        dist.all_reduce(total)
        broadcast(numpy.ones(200_000))  # which connects the hosts
        child = os.fork()
        if child == 0:
            sys.exit(3)  # by Python's own way out
        if not select.select([os.pidfd_open(child)], [], [], 30)[0]:
            os.kill(child, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        dist.all_reduce(total)
        print(total.tolist(), broadcast(numpy.ones(200_000)).sum())
    """
    for end in scripts.run(source, **place if hosts > 1 else {}):
        assert (end.code, end.out) == (0, "3\n[4.0, 4.0] 200000.0\n"), end.err
