"""What ranks raise whose calls of c10d differ, or that do not come: type, ranks, and line."""

from __future__ import annotations

import functools
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import in_processes, several
from support.process_groups import dist, process_group, seconds
from support.rank_worlds import Ranks
from torch.nn.parallel import DistributedDataParallel

import syncprims as sp

pytestmark = [in_processes, pytest.mark.filterwarnings("ignore::FutureWarning")]


def dtype(rank: int) -> None:
    dist.all_reduce(torch.ones(3, dtype=torch.float64 if rank else torch.float32))


def op(rank: int) -> None:
    dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)


def root(rank: int) -> None:
    dist.broadcast(torch.ones(3), rank)


MISMATCHES: dict[Callable[[int], None], tuple[str, str]] = {
    dtype: ("all_reduce 'float32[3]'", "all_reduce 'float64[3]'"),
    op: ("all_reduce 'float32[3]'", "all_reduce 'float32[3]' with op 'max'"),
    root: ("broadcast 'float32[3]' from rank 0", "broadcast 'float32[3]' from rank 1"),
}


@several(2)
@pytest.mark.parametrize("program", MISMATCHES, ids=lambda program: program.__name__)
def test_calls_that_differ(world: Ranks, program: Callable[[int], None]) -> None:
    def run() -> None:
        with process_group():
            program(sp.get_rank())

    for error in world.outcomes(run):
        assert isinstance(error, sp.CollectiveMismatch), error
        for rank, shown in enumerate(MISMATCHES[program]):
            (line,) = [one for one in str(error).splitlines() if one.startswith(f"  rank {rank}: ")]
            assert shown in line
            assert f"{Path(__file__).name}:" in line


def reversed_order() -> None:
    loss, accuracy = torch.ones(1), torch.ones(1)
    if sp.is_main():
        dist.all_reduce(loss)
        dist.all_reduce(accuracy)
    else:
        dist.all_reduce(accuracy)
        dist.all_reduce(loss)


def root_in_a_branch() -> None:
    if sp.is_main():
        dist.broadcast(torch.ones(1), 0)

    else:
        dist.broadcast(torch.ones(1), 0)


def transfer() -> None:
    if sp.is_main():
        dist.send(torch.ones(1), 1)
        dist.recv(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
        dist.send(torch.ones(1), 0)


@several(2)
def test_strict_ranks_make_a_call_from_one_line(world: Ranks) -> None:
    def run(program: Callable[[], None]) -> str:
        with process_group():
            for _ in range(2):
                transfer()  # has two lines
            with pytest.raises(sp.CollectiveMismatch) as caught:
                program()
            with pytest.raises(sp.CollectiveMismatch):
                dist.barrier()  # the group is torn
        return str(caught.value)

    for program in reversed_order, root_in_a_branch:
        first = program.__code__.co_firstlineno + (program is reversed_order)
        for said in world.run(functools.partial(run, program), SYNCPRIMS_STRICT="1"):
            place = rf"{Path(__file__).name}:"
            assert re.search(rf"rank 0: \w+ 'float32\[1\]' .*{place}{first + 2}\)", said)
            assert re.search(rf"rank 1: \w+ 'float32\[1\]' .*{place}{first + 5}\)", said)
            assert "SYNCPRIMS_STRICT=1 refuses" in said

    def not_strict() -> None:
        with process_group():
            reversed_order()
            root_in_a_branch()

    world.run(not_strict)


@several(2)
def test_code_that_torch_has_made_is_on_no_line(world: Ranks) -> None:
    """Its names differ between ranks, and say nothing to the user."""

    def call(path: str, reduced: Callable[..., None]) -> None:
        made = {"__name__": "torch._inductor.runtime.compile_tasks.c", "reduced": reduced}
        exec(compile("reduced()", path, "exec"), made)

    def run() -> str:
        rank = sp.get_rank()
        paths = f"/cache/{rank}.py", f"<eval_with_key>.{rank}"
        with process_group():
            for path in paths:
                call(path, functools.partial(dist.all_reduce, torch.ones(1)))
            with pytest.raises(sp.CollectiveMismatch) as caught:
                call(paths[rank], functools.partial(dist.all_reduce, torch.ones(1 + rank)))
        return str(caught.value)

    for said in world.run(run, SYNCPRIMS_STRICT="1"):
        assert said.count(f"{Path(__file__).name}:") == 2, said


UNPICKLABLE = threading.Lock()
OBJECTS: list[Callable[[Any], object]] = [
    lambda own: dist.all_gather_object([None] * 2, own),
    lambda own: dist.gather_object(own, None if sp.get_rank() else [None] * 2, dst=0),
    lambda own: dist.broadcast_object_list([1, own], src=1),
    lambda own: dist.scatter_object_list([None], [own] * 2, src=1),
    lambda own: dist.all_gather_object([None] * 2, own, group=dist.new_group([0, 1])),
]


@several(2)
def test_an_object_that_one_rank_cannot_pickle(world: Ranks) -> None:
    def run() -> None:
        with process_group():
            for call in OBJECTS:
                if sp.get_rank():
                    with pytest.raises(TypeError, match="cannot pickle"):
                        call(UNPICKLABLE)
                else:
                    text = rf"rank 1 failed in .*{Path(__file__).name}:\d+\): TypeError: cannot"
                    with pytest.raises(sp.PeerFailed, match=text):
                        call("an object")
                dist.barrier()  # all have raised it, and are in step
            with pytest.raises(TypeError, match="cannot pickle"):
                dist.all_gather_object([None] * 2, UNPICKLABLE)
            if sp.get_rank():  # this one meets nobody
                with pytest.raises(TypeError, match="cannot pickle"):
                    dist.send_object_list([UNPICKLABLE], 0)
            dist.barrier()

    world.run(run)


@several(2)
def test_sends_and_receives_that_differ(world: Ranks) -> None:
    """A send may be over before the other rank receives; then it fails in its next call."""

    def run() -> None:
        with process_group():
            if sp.get_rank():
                dist.send(torch.ones(3), 0)
                dist.barrier()
            else:
                dist.recv(torch.ones(2), 1)

    error, told = world.outcomes(run)
    assert isinstance(error, sp.CollectiveMismatch), error
    assert "'2 x float32 to rank 0' from rank 1 (recv at" in str(error)
    assert "'3 x float32 to rank 0' from rank 1 (send at" in str(error)
    assert isinstance(told, sp.SyncError), told


@several(2)
def test_split_sizes_that_differ(world: Ranks) -> None:
    def run() -> None:
        with process_group():
            with pytest.raises(sp.RankMismatch, match=r"rank 0 sends 8 bytes to rank 0, .* for 4"):
                dist.all_to_all_single(torch.empty(4), torch.ones(4), [1, 3], [2, 2])
            dist.barrier()  # all have raised it, and go on

    world.run(run)


@several(2)
def test_a_rank_that_is_refused_tells_the_others(world: Ranks) -> None:
    def run() -> None:
        with process_group():
            if sp.get_rank():
                dist.all_gather([torch.empty(2)] * 2, torch.ones(2))
            else:
                dist.group.WORLD.allgather([[torch.empty(2)]], [torch.ones(2)])

    refused, told = world.outcomes(run)
    assert isinstance(refused, ValueError)
    assert isinstance(told, sp.PeerFailed)
    assert "the number of tensors given is 1, and the group has 2 ranks" in str(told)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


DOUBLE = torch.float64
IMPOSSIBLE: list[tuple[Callable[[], object], str]] = [
    (lambda: dist.all_gather([ones(3), ones(4)], ones(4)), r"for rank 0 is float32\[3\]"),
    (lambda: dist.all_gather([ones(4)] * 3, ones(4)), "given is 3, and the group has 2"),
    (lambda: dist.all_gather_coalesced([[ones(2)] * 2, [ones(2)]], [ones(2)] * 2), "given is 1"),
    (lambda: dist.all_gather_into_tensor(ones(5), ones(4)), "give one of 8 items"),
    (lambda: dist.all_gather_into_tensor(ones(8, dtype=DOUBLE), ones(4)), r"is float64\[8\]"),
    (lambda: dist.reduce_scatter(ones(3), [ones(3)]), "given is 1, and the group has 2"),
    (lambda: dist.reduce_scatter_tensor(ones(3), ones(7)), "give one of 6 items"),
    (lambda: dist.reduce_scatter_tensor(ones(3), ones(6, dtype=DOUBLE)), r"is float64\[6\]"),
    (lambda: dist.all_to_all([ones(4)] * 2, [ones(4)]), "given is 1, and the group has 2"),
    (lambda: dist.all_to_all_single(ones(5), ones(4)), "of 5 rows cannot be split evenly"),
    (lambda: dist.broadcast(ones(4), 7), "root 7 is not a rank of a group of 2 ranks"),
    (lambda: dist.all_reduce(ones(4), dist.ReduceOp.BAND), "bits of integers and bools"),
    (lambda: dist.reduce_scatter_tensor(ones(2), ones(4), dist.ReduceOp.BXOR), "bits of integers"),
]


@several(2)
def test_calls_that_are_impossible(world: Ranks) -> None:
    def run() -> None:
        with process_group():
            for call, why in IMPOSSIBLE:
                with pytest.raises(ValueError, match=rf"{Path(__file__).name}:\d+\).*{why}"):
                    call()
                dist.barrier()  # all have raised it, and are in step

    world.run(run)


@several(2)
def test_transfers_with_no_other_rank(world: Ranks) -> None:
    def run() -> None:
        with process_group():
            for what, call in ("dst", dist.isend), ("src", dist.irecv):
                for rank in 7, -1:
                    with pytest.raises(
                        ValueError, match=f"{what}={rank} is not a rank of a group of"
                    ):
                        call(ones(1), rank)
                with pytest.raises(ValueError, match="sends to itself: copy the tensor"):
                    call(ones(1), sp.get_rank())

    world.run(run)


@several(2)
def test_a_rank_that_ends_or_does_not_come(world: Ranks) -> None:
    def ends_early() -> None:
        with process_group():
            dist.barrier()
            if sp.get_rank() == 0:
                dist.all_reduce(torch.ones(1))

    def caught_as_of_gloo() -> str | None:
        try:
            ends_early()
        except (dist.DistError, RuntimeError) as error:
            again = pickle.loads(pickle.dumps(error))
            assert isinstance(again, sp.PeerLost)
            assert isinstance(again, dist.DistBackendError)
            return str(again.rank)
        return None

    assert world.run(caught_as_of_gloo) == ["1", None]
    error, result = world.outcomes(ends_early)
    assert isinstance(error, sp.PeerLost)
    assert error.rank == 1
    assert "all_reduce 'float32[1]' (" in str(error)
    assert f"{Path(__file__).name}:" in str(error)
    assert result is None

    def comes_late() -> str | None:
        text = None
        with process_group(timeout=seconds(0.3)):
            if sp.get_rank() == 0:
                with pytest.raises(sp.SyncTimeout) as raised:
                    dist.barrier()
                text = str(raised.value)
            sp.barrier("until then, the other rank lives")
        return text

    def comes_late_by_the_setting() -> str | None:
        text = None
        with process_group():
            if sp.get_rank() == 0:
                with pytest.raises(sp.SyncTimeout) as raised:
                    dist.barrier()
                text = str(raised.value)
            sp.barrier("until then, the other rank lives", timeout=100)
        return text

    texts = world.run(comes_late), world.run(comes_late_by_the_setting, SYNCPRIMS_TIMEOUT="0.3")
    for text in (of_ranks[0] for of_ranks in texts):
        assert "barrier" in text
        assert "ranks [1] did not come" in text


@several(2)
def test_a_killed_rank_in_a_training_step(world: Ranks) -> None:
    if world.kind.backend == "mine":
        pytest.skip("it looks for ends less often than such a step takes")

    def run() -> None:
        with process_group():
            model = DistributedDataParallel(torch.nn.Linear(4, 4))
            for step in range(3):
                loss = model(torch.ones(1, 4)).sum()
                if step == 1 and sp.get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()

    error, _ = world.outcomes(run)
    assert isinstance(error, sp.PeerLost), error
    assert error.rank == 1
    assert "SIGKILL" in str(error)
    assert "all_reduce 'float32[20]'" in str(error)


@several(2)
def test_receives_that_wait_for_each_other(world: Ranks) -> None:
    if world.kind.backend == "mine":
        pytest.skip("it publishes no words: such a deadlock ends in a timeout")

    def run() -> None:
        with process_group():
            dist.recv(torch.ones(2), 1 - sp.get_rank())

    for error in world.outcomes(run):
        assert isinstance(error, sp.CollectiveMismatch), error
        assert "wait for each other" in str(error)
        assert str(error).count("recv at") == 2


def test_a_group_beside_a_default_group_of_another_backend() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        with pytest.raises(sp.WorldClosed, match="open the default group with init_process_group"):
            dist.new_group([0], backend="syncprims")
    finally:
        dist.destroy_process_group()
